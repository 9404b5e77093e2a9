"""Write small reference checkpoints and answers computed by openpi's own PyTorch code.

Run it with an interpreter that has openpi installed (CONTRIBUTING names the packages)::

    python tests/references/make_openpi_reference.py --out DIR

For pi0 and pi05 it builds openpi's ``PI0Pytorch`` at a small size with random weights, asks it for
actions, and writes ``DIR/{pi0,pi05}/``:

- ``model.safetensors``: the weights under openpi's own names, saved the way openpi saves them
  (``safetensors.torch.save_model``: of the tied pair only ``paligemma.lm_head.weight`` is stored).
- ``cases.safetensors``: per case ``{case}.{images,image_mask,tokens,token_mask,state,noise}`` with images float32
  (B, V, 3, 224, 224) in [-1, 1]; masks bool; tokens int64; state (B, 32); noise (B, horizon, 32);
  ``{case}.vision`` (B, V, 256, prefix width), the projected image tokens; and ``{case}.steps{n}``, the actions
  (B, horizon, 32), all float32.

Everything is float32 on the CPU. This file imports nothing of vla_accel on purpose, so that an error of ours cannot be
on both sides. It does not cover bfloat16, training, or the transforms around the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

# openpi wraps sample_actions in torch.compile(max-autotune) and gives no argument against it;
# torch reads this switch while it is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import openpi.models.gemma as openpi_gemma
import torch
from openpi.models.model import IMAGE_KEYS, Observation
from openpi.models.pi0_config import Pi0Config
from openpi.models_pytorch import gemma_pytorch
from openpi.models_pytorch.pi0_pytorch import PI0Pytorch
from safetensors.torch import save_file, save_model
from torch import nn

STEPS = (1, 3, 10)
ACTION_DIM = 32  # a constant in openpi's action_in_proj


def tower(width: int, depth: int, mlp_dim: int, num_heads: int, head_dim: int = 0) -> dict[str, int]:
    """One transformer; Gemma towers have `head_dim` and one key head, the vision tower has not."""
    gemma = {"num_kv_heads": 1, "head_dim": head_dim} if head_dim else {}
    return {"width": width, "depth": depth, "mlp_dim": mlp_dim, "num_heads": num_heads, **gemma}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model; patches of 14, images of 224 pixels and three views are openpi's."""

    vision: dict[str, int]
    prefix: dict[str, int]
    expert: dict[str, int]
    vocab_size: int = 320
    action_horizon: int = 6
    max_token_len: int = 32


SIZES = {
    # Unlike numbers everywhere, so that a mixed-up width cannot fit by chance.
    "small": Sizes(tower(144, 3, 272, 2), tower(96, 3, 208, 8, 32), tower(64, 3, 176, 8, 32)),
    # The published widths and heads at a depth of two, the published depths at small widths, the published size.
    "wide": Sizes(
        tower(1152, 2, 4304, 16), tower(2048, 2, 4096, 8, 256), tower(1024, 2, 4096, 8, 256), action_horizon=10
    ),
    "deep": Sizes(tower(144, 27, 272, 2), tower(96, 18, 208, 8, 32), tower(64, 18, 176, 8, 32)),
    "full": Sizes(
        tower(1152, 27, 4304, 16), tower(2048, 18, 16_384, 8, 256), tower(1024, 18, 4096, 8, 256), 257_152, 10, 48
    ),
}


def build(family: str, sizes: Sizes) -> PI0Pytorch:
    """openpi's model of this family at these sizes, float32, weights not yet set.

    openpi fixes the vocabulary and the vision tower in its constructor; they are edited in the
    Hugging Face config on its way into the constructor, which leaves openpi's code as it is.
    """
    make_paligemma, make_gemma = gemma_pytorch.PaliGemmaForConditionalGeneration, gemma_pytorch.GemmaForCausalLM
    names = {
        "hidden_size": "width", "num_hidden_layers": "depth", "intermediate_size": "mlp_dim",
        "num_attention_heads": "num_heads",
    }  # fmt: skip

    def get_config(variant: str) -> Any:
        return openpi_gemma.Config(**(sizes.prefix if variant == "gemma_2b" else sizes.expert))

    def small_paligemma(config: Any) -> nn.Module:
        config.text_config.vocab_size = sizes.vocab_size
        for theirs, ours in names.items():
            setattr(config.vision_config, theirs, sizes.vision[ours])
        config.vision_config.projection_dim = sizes.prefix["width"]
        return make_paligemma(config)

    def small_gemma(config: Any) -> nn.Module:
        config.vocab_size = sizes.vocab_size
        return make_gemma(config)

    with (
        mock.patch.object(openpi_gemma, "get_config", get_config),
        mock.patch.object(gemma_pytorch, "PaliGemmaForConditionalGeneration", small_paligemma),
        mock.patch.object(gemma_pytorch, "GemmaForCausalLM", small_gemma),
    ):
        config = Pi0Config(
            dtype="float32", pi05=family == "pi05", action_horizon=sizes.action_horizon,
            max_token_len=sizes.max_token_len,
        )  # fmt: skip
        model = PI0Pytorch(config)
    torch.set_float32_matmul_precision("highest")  # the constructor sets "high"
    return model.eval()


@torch.no_grad()
def randomise(model: PI0Pytorch, generator: torch.Generator) -> None:
    """Set every weight so that activations stay sane and no term can be left out unseen.

    openpi starts adaRMS and RMSNorm weights at zero; a zero there would hide a wrong formula. What
    enters a residual stream is small, so that a wrong epsilon shows in the actions. Chosen by
    trial: each wrong formula that was tried moves the actions by 5e-4 or more, rounding (float32
    beside float64) by 5e-6 or less.
    """
    entrances = [
        "vision_model.embeddings",
        "multi_modal_projector",
        "embed_tokens",
        "action_in_proj" if model.pi05 else "action_time_mlp_out",
    ]
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("norm.weight", "layernorm.weight")) and "vision" not in name:
            value = 0.2 * drawn  # Gemma's RMSNorms: 1 + weight
        elif "layer_norm" in name or "post_layernorm" in name:  # SigLIP's LayerNorms
            value = 0.2 * drawn + (1.0 if name.endswith("weight") else 0.0)
        elif "norm.dense" in name:  # adaRMS: scale, shift, gate
            value = 0.5 * drawn / (1.0 if name.endswith("bias") else parameter.shape[1] ** 0.5)
        else:
            is_matrix = parameter.ndim > 1 and "position_embedding" not in name
            value = drawn / parameter[0].numel() ** 0.5 if is_matrix else 0.2 * drawn
            if any(entrance in name for entrance in entrances):
                value *= 0.1
        parameter.copy_(value)


def make_inputs(batch: int, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random inputs: a masked third view, then a masked second view, then none; padded prompts."""
    length = sizes.max_token_len
    token_mask = torch.arange(length)[None] < torch.tensor([length // 2, length, 5])[:batch, None]
    tokens = torch.randint(1, sizes.vocab_size, (batch, length), generator=generator)
    return {
        "images_uint8": torch.randint(0, 256, (batch, 3, 224, 224, 3), generator=generator, dtype=torch.uint8),
        "image_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)[:batch],
        "tokens": tokens * token_mask,  # openpi pads with token 0
        "token_mask": token_mask,
        "state": torch.randn(batch, ACTION_DIM, generator=generator),
        "noise": torch.randn(batch, sizes.action_horizon, ACTION_DIM, generator=generator),
    }


def observe(inputs: dict[str, torch.Tensor]) -> Observation:
    """openpi's Observation, through openpi's own conversion from uint8."""
    return Observation.from_dict(
        {
            "image": {key: inputs["images_uint8"][:, v] for v, key in enumerate(IMAGE_KEYS)},
            "image_mask": {key: inputs["image_mask"][:, v] for v, key in enumerate(IMAGE_KEYS)},
            "state": inputs["state"],
            "tokenized_prompt": inputs["tokens"],
            "tokenized_prompt_mask": inputs["token_mask"],
        }
    )


@torch.no_grad()
def write_family(family: str, sizes: Sizes, out: Path) -> None:
    """Build and run one family, and write into `out`."""
    generator = torch.Generator().manual_seed(0)
    model = build(family, sizes)
    randomise(model, generator)
    out.mkdir(parents=True, exist_ok=True)
    save_model(model, str(out / "model.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for batch in (1, 3):
        case = make_inputs(batch, sizes, generator)
        observation = observe(case)
        views = [observation.images[key] for key in IMAGE_KEYS]
        case["images"] = torch.stack(views, dim=1)
        case["vision"] = torch.stack([model.paligemma_with_expert.embed_image(view) for view in views], dim=1)
        for steps in STEPS:
            actions = model.sample_actions("cpu", observation, noise=case["noise"].clone(), num_steps=steps)
            case[f"steps{steps}"] = actions
            print(f"{family} batch {batch} steps {steps}: actions' rms {actions.square().mean().sqrt():.3f}")
        tensors |= {f"batch{batch}.{name}": tensor.contiguous() for name, tensor in case.items()}
    save_file(tensors, str(out / "cases.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for family in ("pi0", "pi05"):
        write_family(family, SIZES[args.size], args.out / family)


if __name__ == "__main__":
    main()
