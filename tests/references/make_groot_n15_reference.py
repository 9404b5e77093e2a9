"""Write a small GR00T N1.5 as lerobot 0.4 and 0.5 save it, and lerobot's own answers.

Run it with an interpreter that has lerobot 0.4.4 or 0.5.1 installed (CONTRIBUTING names the packages)::

    python tests/references/make_groot_n15_reference.py --out DIR

With random weights at a small size it writes:

- ``DIR/lerobot/``: the policy's and both processors' ``save_pretrained``, nothing edited, and ``vocab.json``,
  ``merges.txt`` and ``added_tokens.json`` of a small tokenizer in place of Eagle's.
- ``DIR/isaac/``: the same weights in Isaac-GR00T's layout.
- ``DIR/model.safetensors``: ``{case}.{pixels,tokens,state,noise}`` as lerobot's model got them (text tokens alone) and
  ``{case}.steps{n}`` as it answered, float32 (B, 16, 32), normalised.
- ``DIR/robot.npz``: whole observations and what lerobot's processors made of them; ``tasks.json``: the instructions.
- ``DIR/kept.json``: names and shapes of lerobot's tensors and some numbers of its answers, which
  tests/nn/groot_n15_reference.json holds.

All is float32 on the CPU. This file imports nothing of vla_accel on purpose. lerobot's policy needs peft for LoRA and
dm-tree for one function, which is written here; the chat template is written from Eagle's published form.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import io
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from groot_weights import draw, weight
from safetensors.torch import save_file


def _replace(name: str, **members: Any) -> None:
    """Make a module that is not installed, unless it is."""
    try:
        __import__(name)
    except ImportError:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(members)
        sys.modules[name] = module


def _map_structure(function: Any, tree: Any) -> Any:
    return type(tree)({key: function(value) for key, value in tree.items()})


_replace("peft", LoraConfig=None, get_peft_model=None)
_replace("tree", map_structure=_map_structure)

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.groot import groot_n1, processor_groot  # noqa: E402
from lerobot.policies.groot.configuration_groot import GrootConfig  # noqa: E402
from lerobot.policies.groot.eagle2_hg_model.configuration_eagle2_5_vl import Eagle25VLConfig  # noqa: E402
from lerobot.policies.groot.eagle2_hg_model.image_processing_eagle2_5_vl_fast import (  # noqa: E402
    Eagle25VLImageProcessorFast,
)
from lerobot.policies.groot.eagle2_hg_model.modeling_eagle2_5_vl import (  # noqa: E402
    Eagle25VLForConditionalGeneration,
)
from lerobot.policies.groot.eagle2_hg_model.processing_eagle2_5_vl import Eagle25VLProcessor  # noqa: E402
from lerobot.policies.groot.modeling_groot import GrootPolicy  # noqa: E402

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
TASKS = ("Pick up the black bowl!", "put the wine_bottle on the robot's rack", "open it")
WORDS = ("system", "user", "assistant", "You", "Ġare", "Ġa", "Ġhelpful", "Ġassistant", "image", "Ġthe", "Ġup", "pick",
         "Perform", "Ġtask", "Ġbowl", "Ġblack")  # fmt: skip
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% set seen = namespace(images=0) %}{% for m in "
    "messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}{% set seen.images = "
    "seen.images + 1 %}<image-{{ seen.images }}>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS = (4, 2)
STATE, ACTION, ROWS = 8, 7, 16


def write_tokenizer(folder: Path) -> Any:
    """Qwen's form with the words of the prompts, and the tokenizer of transformers."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges, vocabulary = [], sorted(ByteLevel.alphabet())
    for word in WORDS:
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if pair not in merges:
                merges.append(pair)
                vocabulary += [] if word[: end + 1] in vocabulary else [word[: end + 1]]
    added = {token: len(vocabulary) + i for i, token in enumerate(SPECIAL)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")
    (folder / "added_tokens.json").write_text(json.dumps(added))
    decoder = {str(i): {"content": t, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                        "single_word": False} for t, i in added.items()}  # fmt: skip
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder, "eos_token": SPECIAL[2],
              "pad_token": SPECIAL[0], "unk_token": None, "bos_token": None, "add_prefix_space": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), use_fast=True)
    (folder / "tokenizer_config.json").unlink()
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL} == added
    return tokenizer


def build(vocabulary: int, slot: int) -> Any:
    """lerobot's model, float32, random, no weight zero or one."""
    vision = {"model_type": "siglip_vision_model", "hidden_size": 144, "intermediate_size": 160, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 224, "patch_size": 14}  # fmt: skip
    text = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 112,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1e6,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    if transformers.__version__.startswith("5"):
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    eagle = Eagle25VLConfig(
        vision_config=vision, text_config=text, select_layer=-1, use_pixel_shuffle=False, mlp_connector_layers=1,
        image_token_index=slot, force_image_size=224, _attn_implementation="sdpa",
    )  # fmt: skip
    for part in (eagle.vision_config, eagle.text_config):
        part._attn_implementation = "sdpa"

    def made(config: Any, **_: Any) -> Any:
        return Eagle25VLForConditionalGeneration(
            config,
            vision_model=transformers.SiglipVisionModel(config.vision_config),
            language_model=transformers.Qwen3ForCausalLM(config.text_config),
        )

    transformer = {
        "attention_head_dim": 48, "num_attention_heads": 2, "num_layers": 4, "output_dim": 56,
        "cross_attention_dim": 128, "dropout": 0.2, "final_dropout": True, "interleave_self_attention": True,
        "norm_type": "ada_norm", "positional_embeddings": None,
    }  # fmt: skip
    attention = {"attention_head_dim": 64, "num_attention_heads": 2, "num_layers": 2, "dropout": 0.2,
                 "final_dropout": True, "positional_embeddings": None}  # fmt: skip
    head = {
        "action_dim": 32, "action_horizon": 16, "add_pos_embed": True, "backbone_embedding_dim": 128,
        "diffusion_model_cfg": transformer, "hidden_size": 56, "input_embedding_dim": 96, "max_action_dim": 32,
        "max_state_dim": 64, "model_dtype": "float32", "noise_beta_alpha": 1.5, "noise_beta_beta": 1.0,
        "noise_s": 0.999, "num_inference_timesteps": 4, "num_target_vision_tokens": 5, "num_timestep_buckets": 1000,
        "use_vlln": True, "tune_projector": True, "tune_diffusion_model": True, "max_seq_len": 24,
        "vl_self_attention_cfg": attention,
    }  # fmt: skip
    backbone = {"project_to_dim": None, "select_layer": 3, "tune_llm": False, "tune_visual": True,
                "reproject_vision": False, "load_bf16": False, "use_flash_attention": False}  # fmt: skip
    config = groot_n1.GR00TN15Config(
        backbone_cfg=backbone, action_head_cfg=head, action_horizon=16, action_dim=32, compute_dtype="float32"
    )
    loading = types.SimpleNamespace(from_pretrained=lambda *_, **__: eagle)
    with (
        mock.patch.object(groot_n1, "ensure_eagle_cache_ready", lambda *_, **__: None),
        mock.patch.object(groot_n1, "AutoConfig", loading),
        mock.patch.object(groot_n1, "AutoModel", types.SimpleNamespace(from_config=made)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        model = groot_n1.GR00TN15(config, local_model_path="").float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))).bfloat16())
    return model


@torch.no_grad()
def answer(model: Any, case: dict[str, torch.Tensor], row: int, steps: int) -> torch.Tensor:
    """One row: pixels (V, 3, 224, 224); tokens of the text, with the images' slots left out."""
    pixels, text = case["pixels"][row], case["tokens"][row, : int(case["lengths"][row])]
    slot, edge, parts = model.backbone.eagle_model.image_token_index, 0, []
    for start in (20 + 7 * view for view in range(len(pixels))):
        parts += [text[edge:start], torch.full((256,), slot)]
        edge = start
    ids = torch.cat([*parts, text[edge:]])[None]
    model.action_head.num_inference_timesteps = steps
    given = {
        "eagle_input_ids": ids, "eagle_attention_mask": torch.ones_like(ids), "eagle_pixel_values": pixels,
        "eagle_image_sizes": torch.tensor([[224, 224]] * len(pixels)), "state": case["state"][row : row + 1, None],
        "embodiment_id": torch.full((1,), 31),
    }  # fmt: skip
    with mock.patch.object(torch, "randn", lambda *a, **k: case["noise"][row : row + 1].clone()):
        return model.get_action(given)["action_pred"]


def model_cases(model: Any, vocabulary: int) -> dict[str, torch.Tensor]:
    """Batch 1 and 3, one view and two. Rows are called alone: lerobot lets the padding of a batch leak between them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, views, lengths in (
        ("batch1", 2, (35,)), ("batch3", 2, (34, 34, 34)), ("missing camera", 1, (31,)), ("padded", 2, (35, 31, 33)),
    ):  # fmt: skip
        batch = len(lengths)

        def drawn(what: str, *shape: int, name: str = name) -> torch.Tensor:
            return torch.from_numpy(draw(f"n15.{name}.{what}", *shape))

        case = {
            "pixels": drawn("pixels", batch, views, 3, 224, 224).clamp(-1, 1),
            "tokens": (drawn("tokens", batch, max(lengths)).abs() * 1e4).long() % (vocabulary - len(SPECIAL)),
            "state": drawn("state", batch, 64), "noise": drawn("noise", batch, 16, 32),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
        }  # fmt: skip
        for steps in STEPS:
            case[f"steps{steps}"] = torch.cat([answer(model, case, row, steps) for row in range(batch)])
        tensors |= {f"{name}.{k}": v.contiguous() for k, v in case.items()}
    return tensors


def statistics(rng: np.random.Generator) -> dict[str, dict[str, torch.Tensor]]:
    """Unequal for every number; one state has no range."""
    table = {}
    for name, count in (("observation.state", STATE), ("action", ACTION)):
        low, high = rng.uniform(-1.5, -0.5, count), rng.uniform(0.5, 1.5, count)
        if count == STATE:
            high[3] = low[3]
        table[name] = {"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / 4 + 0.1}
    return {name: {k: torch.from_numpy(v).float() for k, v in entry.items()} for name, entry in table.items()}


def policy_of(model: Any, tokenizer: Any) -> tuple[Any, Any, Any]:
    """lerobot's policy with this model, and both its processors."""
    images = Eagle25VLImageProcessorFast(size={"height": 224, "width": 224})
    images.return_tensors = "pt"  # which transformers 5 does not pass on
    tokenizer.padding_side = "left"
    processor = Eagle25VLProcessor(images, tokenizer, chat_template=TEMPLATE)
    features = {f"observation.images.{n}": PolicyFeature(FeatureType.VISUAL, (3, 240, 320)) for n in ("wrist", "front")}
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE,))
    config = GrootConfig(
        input_features=features, output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        device="cpu", use_bf16=False,
    )  # fmt: skip
    with (
        mock.patch.object(groot_n1.GR00TN15, "from_pretrained", lambda *_, **__: model),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        policy = GrootPolicy(config).eval()
    # Until the end: the steps build the processor in their first call.
    mock.patch.object(processor_groot, "_build_eagle_processor", lambda *_: processor).start()
    rng = np.random.default_rng(2)
    preprocess, postprocess = processor_groot.make_groot_pre_post_processors(config, statistics(rng))
    model.action_head.num_inference_timesteps = 4
    return policy, preprocess, postprocess


def robot_cases(model: Any, tokenizer: Any, out: Path) -> dict[str, Any]:
    """Whole observations through lerobot's own pipelines, which are saved with the policy."""
    policy, preprocess, postprocess = policy_of(model, tokenizer)
    for saved in (policy, preprocess, postprocess):
        saved.save_pretrained(out)
    rng = np.random.default_rng(3)
    small = rng.integers(0, 256, (len(TASKS) + 1, 2, 30, 40, 3), dtype=np.uint8)
    pictures = np.repeat(np.repeat(small, 8, 2), 8, 3)
    state = rng.uniform(-1.6, 1.6, (len(TASKS) + 1, STATE)).astype(np.float32)
    noise = rng.standard_normal((len(TASKS) + 1, 16, 32)).astype(np.float32)
    found: dict[str, Any] = {"images": pictures, "state": state, "noise": noise}
    actions = []
    for i, task in enumerate((*TASKS, "")):
        batch = {
            f"observation.images.{n}": torch.from_numpy(p).permute(2, 0, 1)
            for n, p in zip(("front", "wrist"), pictures[i], strict=True)
        }
        batch = preprocess({**batch, "observation.state": torch.from_numpy(state[i]), "task": task})
        ids = batch["eagle_input_ids"][0]
        found[f"text{i}"] = ids[ids != model.backbone.eagle_model.image_token_index].numpy()
        found[f"pixels{i}"] = batch["eagle_pixel_values"].numpy()[:, :, ::3, ::3]
        found[f"state{i}"] = batch["state"].numpy()
        with mock.patch.object(torch, "randn", lambda *a, i=i, **k: torch.from_numpy(noise[i : i + 1])):
            chunk = policy.predict_action_chunk(batch)
        # Of a whole chunk, lerobot's postprocessor keeps the last action alone.
        actions.append(np.stack([postprocess(chunk[:, t])[0].numpy() for t in range(ROWS)]))
    found["actions"] = np.stack(actions)
    return found


def write_isaac(model: Any, folder: Path) -> None:
    """A model in BF16 with the statistics of two embodiments; no code of Isaac-GR00T's wrote it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": ["GR00T_N1_5"], "model_type": "gr00t_n1_5", "action_dim": 32, "action_horizon": 16,
        "backbone_cfg": model.config.backbone_cfg, "action_head_cfg": model.config.action_head_cfg,
        "compute_dtype": "bfloat16", "hidden_size": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content, indent=1))
    save_file({n: v.bfloat16().clone() for n, v in model.state_dict().items()}, str(folder / "model.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = write_tokenizer(args.out / "lerobot")
    slot = tokenizer.convert_tokens_to_ids(SPECIAL[-1])
    model = build(slot + 1, slot)
    cases = model_cases(model, slot + 1)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    save_file(cases, str(args.out / "model.safetensors"), versions)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    answers = {n: v[..., ::5, :4].numpy().round(7).tolist() for n, v in cases.items() if ".steps" in n}
    (args.out / "kept.json").write_text(json.dumps({"shapes": shapes, "answers": answers}) + "\n")
    write_isaac(model, args.out / "isaac")
    np.savez(args.out / "robot.npz", **robot_cases(model, tokenizer, args.out / "lerobot"))
    (args.out / "tasks.json").write_text(json.dumps(TASKS))


if __name__ == "__main__":
    main()
