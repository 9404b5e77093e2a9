"""Write the answers of transformers' SigLIP2 and Qwen3 with lerobot's GR00T head, the parts of GR00T N1.6.

Run it with an interpreter that has lerobot 0.6.1 installed (CONTRIBUTING names the packages)::

    python tests/references/make_groot_n16_reference.py --out DIR [--full]

lerobot has no N1.6, and Isaac-GR00T is no package: this joins the parts as Isaac-GR00T's `Gr00tN1d6` does, with the
names of its tensors. With random weights at a small size it writes:

- ``DIR/model.safetensors``: ``{case}.{pixels,tokens,state,noise}`` (text tokens alone) and ``{case}.steps{n}``, the
  answers, float32 (B, 50, 128), normalised.
- ``DIR/isaac/``: config.json and the weights in BF16.
- ``DIR/kept.json``: names and shapes of the tensors and some numbers of the answers, which
  tests/nn/groot_n16_reference.json holds.

``--full`` writes the published size instead. All is float32 on the CPU. This file imports nothing of vla_accel on
purpose.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from groot_weights import draw, weight
from lerobot.policies.groot import groot_n1_7
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers.feature_extraction_utils import BatchFeature

STEPS = (4, 2)
SMALL: dict[str, Any] = {
    "vision": {"hidden_size": 144, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_patches": 16, "patch_size": 14},
    "language": {"vocab_size": 48, "hidden_size": 128, "intermediate_size": 112, "num_hidden_layers": 3,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "head": {"max_state_dim": 20, "max_action_dim": 12, "action_horizon": 8, "hidden_size": 56,
             "input_embedding_dim": 96, "backbone_embedding_dim": 128, "max_num_embodiments": 5, "max_seq_len": 24},
    "transformer": {"num_layers": 8, "num_attention_heads": 2, "attention_head_dim": 48, "output_dim": 56},
}  # fmt: skip
FULL: dict[str, Any] = {
    "vision": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
               "num_patches": 256, "patch_size": 14},
    "language": {"vocab_size": 151680, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
                 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "head": {"max_state_dim": 128, "max_action_dim": 128, "action_horizon": 50, "hidden_size": 1024,
             "input_embedding_dim": 1536, "backbone_embedding_dim": 2048, "max_num_embodiments": 32,
             "max_seq_len": 1024},
    "transformer": {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 48, "output_dim": 1024},
}  # fmt: skip


class Backbone(nn.Module):
    """Eagle 3 with Isaac-GR00T's names."""

    vision_model: Any
    language_model: Any

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        attention: dict[str, Any] = {"attn_implementation": "sdpa"}
        vision = transformers.Siglip2VisionConfig(**sizes["vision"], **attention)
        tower: Any = transformers.Siglip2VisionModel(vision)
        if not hasattr(tower, "vision_model"):  # as in later releases of transformers
            tower = nn.ModuleDict({"vision_model": tower})
        tower.vision_model.use_head = False
        del tower.vision_model.head
        language = transformers.Qwen3Config(
            **sizes["language"], rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
            **attention,
        )  # fmt: skip
        width, joined = sizes["language"]["hidden_size"], 4 * sizes["vision"]["hidden_size"]
        self.vision_model, self.language_model = tower, transformers.Qwen3ForCausalLM(language)
        self.mlp1 = nn.Sequential(nn.LayerNorm(joined), nn.Linear(joined, width), nn.GELU(), nn.Linear(width, width))

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) to (N, tokens, width)."""
        count, _, height, width = pixels.shape
        rows, columns = height // 14, width // 14
        patches = pixels.reshape(count, 3, rows, 14, columns, 14).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        mask, shapes = torch.ones(count, rows * columns, dtype=torch.long), torch.tensor([[rows, columns]] * count)
        seen = self.vision_model.vision_model(patches, mask, shapes).last_hidden_state
        grid = seen.transpose(1, 2).unflatten(2, (rows, columns))
        return self.mlp1(F.pixel_unshuffle(grid, 2).flatten(2).transpose(1, 2))


class Model(nn.Module):
    backbone: Any

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        transformer = {
            "positional_embeddings": None, "norm_type": "ada_norm", "dropout": 0.2, "final_dropout": True,
            "interleave_self_attention": True, **sizes["transformer"],
        }  # fmt: skip
        config = groot_n1_7.GR00TN17Config(
            **sizes["head"], vl_self_attention_cfg=None, use_vlln=True, use_alternate_vl_dit=True,
            attend_text_every_n_blocks=2, num_inference_timesteps=4, diffusion_model_cfg=transformer,
        )  # fmt: skip
        self.backbone, self.action_head = nn.Module(), groot_n1_7.GR00TN17ActionHead(config)
        self.backbone.model = Backbone(sizes)
        self.settings = {**sizes["head"], "diffusion_model_cfg": transformer}

    @torch.no_grad()
    def answer(self, case: dict[str, torch.Tensor], row: int, steps: int) -> torch.Tensor:
        """One row. The instruction comes before the images; seven tokens between two of them, three behind the last."""
        model, pixels, text = self.backbone.model, case["pixels"][row], case["tokens"][row, : int(case["lengths"][row])]
        seen, table = model.see(pixels), model.language_model.get_input_embeddings()
        parts, masks, edge = [], [], 0
        ends = [len(text) - 3 - 7 * view for view in reversed(range(len(pixels)))]
        for end, image in zip(ends, seen, strict=True):
            parts += [table(text[edge:end]), image]
            masks += [torch.zeros(end - edge, dtype=torch.bool), torch.ones(len(image), dtype=torch.bool)]
            edge = end
        x = torch.cat([*parts, table(text[edge:])])[None]
        is_image = torch.cat([*masks, torch.zeros(len(text) - edge, dtype=torch.bool)])[None]
        every = torch.ones_like(is_image)
        hidden = model.language_model(inputs_embeds=x, attention_mask=every.long(), output_hidden_states=True)
        features = {
            "backbone_features": hidden.hidden_states[-1], "backbone_attention_mask": every, "image_mask": is_image,
        }  # fmt: skip
        self.action_head.num_inference_timesteps = steps
        given: dict[str, Any] = {"state": case["state"][row : row + 1, None], "embodiment_id": torch.tensor([2])}
        with mock.patch.object(torch, "randn", lambda *a, **k: case["noise"][row : row + 1].clone()):
            return self.action_head.get_action(BatchFeature(features), BatchFeature(given))["action_pred"]


def build(sizes: dict[str, Any]) -> Model:
    model = Model(sizes).float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))).bfloat16())
    return model


def model_cases(model: Model, sizes: dict[str, Any], side: int, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Batch 1 and 3, one view and two; rows are called alone."""
    tensors: dict[str, torch.Tensor] = {}
    head, vocabulary = sizes["head"], sizes["language"]["vocab_size"]
    for name, views, lengths in (
        ("batch1", 2, (35,)), ("batch3", 2, (34, 34, 34)), ("missing camera", 1, (31,)), ("padded", 2, (35, 31, 33)),
    ):  # fmt: skip
        batch = len(lengths)

        def drawn(what: str, *shape: int, name: str = name) -> torch.Tensor:
            return torch.from_numpy(draw(f"n16.{name}.{what}", *shape))

        case = {
            "pixels": drawn("pixels", batch, views, 3, side, side).clamp(-1, 1),
            "tokens": (drawn("tokens", batch, max(lengths)).abs() * 1e4).long() % vocabulary,
            "state": drawn("state", batch, head["max_state_dim"]),
            "noise": drawn("noise", batch, head["action_horizon"], head["max_action_dim"]),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
        }  # fmt: skip
        for steps in counts:
            case[f"steps{steps}"] = torch.cat([model.answer(case, row, steps) for row in range(batch)])
        tensors |= {f"{name}.{k}": v.contiguous() for k, v in case.items()}
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--full", action="store_true", help="the published size")
    args = parser.parse_args()
    sizes = FULL if args.full else SMALL
    torch.set_num_threads(2 if args.full else 1)
    model = build(sizes)
    cases = model_cases(model, sizes, *((252, STEPS[:1]) if args.full else (84, STEPS)))
    folder = args.out / "isaac"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(cases, str(args.out / "model.safetensors"), {"transformers": transformers.__version__})
    content = {
        "architectures": ["Gr00tN1d6"], "model_type": "Gr00tN1d6", "model_name": "nvidia/Eagle-Block2A-2B-v2",
        "backbone_model_type": "eagle", "select_layer": sizes["language"]["num_hidden_layers"],
        "use_alternate_vl_dit": True, "attend_text_every_n_blocks": 2, "num_inference_timesteps": 4, **model.settings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content, indent=1))
    state = model.state_dict()
    save_file({n: v.bfloat16().clone() for n, v in state.items()}, str(folder / "model.safetensors"))
    if not args.full:
        shapes = {name: list(value.shape) for name, value in state.items()}
        answers = {n: v[..., ::3, :4].numpy().round(7).tolist() for n, v in cases.items() if ".steps" in n}
        (args.out / "kept.json").write_text(json.dumps({"shapes": shapes, "answers": answers}) + "\n")


if __name__ == "__main__":
    main()
