"""Write small reference checkpoints and answers computed by openpi's own PyTorch code.

Run it with an interpreter that has openpi installed (CONTRIBUTING names the packages)::

    python tests/references/make_openpi_reference.py --out DIR

For pi0 and pi05 it builds openpi's ``PI0Pytorch`` at a small size with random weights, asks it for
actions, and writes ``DIR/{pi0,pi05}/``:

- ``model.safetensors``: the weights under openpi's own names, saved the way openpi saves them
  (``safetensors.torch.save_model``: of the tied pair only ``paligemma.lm_head.weight`` is stored).
- ``config.json``: the sizes, in the fields of ``Sizes`` below.
- ``inputs.safetensors``: per case ``{case}.{images,image_mask,tokens,token_mask,state,noise}`` with
  images float32 (B, V, 3, 224, 224) in [-1, 1]; masks bool; tokens int64; state (B, 32); noise
  (B, horizon, 32). ``{case}.images_uint8`` (B, V, 224, 224, 3) is what openpi was given.
- ``expected.safetensors``: ``{case}.vision`` (B, V, 256, prefix width), the projected image tokens;
  ``{case}.steps{n}.actions`` (B, horizon, 32), all float32.

Everything is float32 on the CPU. This file imports nothing of vla_accel on purpose: it knows only
openpi, so that an error of ours cannot be on both sides. It does not cover bfloat16, training, or
the transforms around the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

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

FAMILIES = ("pi0", "pi05")
STEPS = (1, 3, 10)
ACTION_DIM = 32  # a constant in openpi's action_in_proj


@dataclasses.dataclass(frozen=True)
class TowerSize:
    """One transformer; Gemma towers have ``num_kv_heads`` and ``head_dim``, the vision tower not."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """All that a loader must know to rebuild the model (patch 14 and image 224 are openpi's)."""

    vision: TowerSize
    prefix: TowerSize
    expert: TowerSize
    vocab_size: int = 320
    action_horizon: int = 6
    max_token_len: int = 32
    action_dim: int = ACTION_DIM
    image_size: int = 224
    patch_size: int = 14
    num_views: int = 3


SIZES = {
    # Unlike numbers everywhere, so that a mixed-up width cannot fit by chance.
    "small": Sizes(
        vision=TowerSize(width=144, depth=3, mlp_dim=272, num_heads=4),
        prefix=TowerSize(96, depth=3, mlp_dim=208, num_heads=8, num_kv_heads=1, head_dim=32),
        expert=TowerSize(64, depth=3, mlp_dim=176, num_heads=8, num_kv_heads=1, head_dim=32),
    ),
    # The published widths and heads at a depth of two.
    "wide": Sizes(
        vision=TowerSize(width=1152, depth=2, mlp_dim=4304, num_heads=16),
        prefix=TowerSize(2048, depth=2, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
        expert=TowerSize(1024, depth=2, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
        action_horizon=10,
    ),
}


def build(family: str, sizes: Sizes) -> PI0Pytorch:
    """openpi's model of this family at these sizes, float32, weights not yet set.

    openpi fixes the vocabulary and the vision tower in its constructor; they are edited in the
    Hugging Face config on its way into the constructor, which leaves openpi's code as it is.
    """
    original = (
        openpi_gemma.get_config,
        gemma_pytorch.PaliGemmaForConditionalGeneration,
        gemma_pytorch.GemmaForCausalLM,
    )

    def get_config(variant: str) -> Any:
        tower = sizes.prefix if variant == "gemma_2b" else sizes.expert
        return openpi_gemma.Config(**dataclasses.asdict(tower))

    def make_paligemma(config: Any) -> nn.Module:
        config.text_config.vocab_size = sizes.vocab_size
        config.vision_config.hidden_size = sizes.vision.width
        config.vision_config.num_hidden_layers = sizes.vision.depth
        config.vision_config.intermediate_size = sizes.vision.mlp_dim
        config.vision_config.num_attention_heads = sizes.vision.num_heads
        config.vision_config.projection_dim = sizes.prefix.width
        return original[1](config)

    def make_expert(config: Any) -> nn.Module:
        config.vocab_size = sizes.vocab_size
        return original[2](config)

    openpi_gemma.get_config = get_config
    gemma_pytorch.PaliGemmaForConditionalGeneration = make_paligemma
    gemma_pytorch.GemmaForCausalLM = make_expert
    try:
        model = PI0Pytorch(
            Pi0Config(
                dtype="float32",
                pi05=family == "pi05",
                action_horizon=sizes.action_horizon,
                max_token_len=sizes.max_token_len,
            )
        )
    finally:
        (
            openpi_gemma.get_config,
            gemma_pytorch.PaliGemmaForConditionalGeneration,
            gemma_pytorch.GemmaForCausalLM,
        ) = original
    torch.set_float32_matmul_precision("highest")  # the constructor asked for "high"
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
    views, side, length = sizes.num_views, sizes.image_size, sizes.max_token_len
    images = torch.randint(0, 256, (batch, views, side, side, 3), generator=generator, dtype=torch.uint8)
    image_mask = torch.ones(batch, views, dtype=torch.bool)
    for row, masked_view in enumerate((2, 1)):
        if row < batch:
            image_mask[row, masked_view] = False
    lengths = torch.tensor([length // 2, length, 5])[:batch]
    token_mask = torch.arange(length)[None] < lengths[:, None]
    tokens = torch.randint(1, sizes.vocab_size, (batch, length), generator=generator)
    return {
        "images_uint8": images,
        "image_mask": image_mask,
        "tokens": tokens * token_mask,  # openpi pads with token 0
        "token_mask": token_mask,
        "state": torch.randn(batch, sizes.action_dim, generator=generator),
        "noise": torch.randn(batch, sizes.action_horizon, sizes.action_dim, generator=generator),
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
def write_family(family: str, sizes: Sizes, out: Path, seed: int) -> None:
    """Build, ask and write one family into ``out`` (created)."""
    generator = torch.Generator().manual_seed(seed)
    model = build(family, sizes)
    randomise(model, generator)
    out.mkdir(parents=True, exist_ok=True)
    save_model(model, str(out / "model.safetensors"))
    config = {"family": family, "pi05": family == "pi05", **dataclasses.asdict(sizes)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    inputs: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for batch in (1, 3):
        case, drawn = f"batch{batch}", make_inputs(batch, sizes, generator)
        observation = observe(drawn)
        views = [observation.images[key] for key in IMAGE_KEYS]
        drawn["images"] = torch.stack(views, dim=1)
        embedded = [model.paligemma_with_expert.embed_image(view) for view in views]
        expected[f"{case}.vision"] = torch.stack(embedded, dim=1)
        for steps in STEPS:
            actions = model.sample_actions("cpu", observation, noise=drawn["noise"].clone(), num_steps=steps)
            if not bool(actions.isfinite().all()):
                raise SystemExit(f"{family} {case}: openpi's actions are not finite")
            expected[f"{case}.steps{steps}.actions"] = actions
            print(f"{family} {case} steps {steps}: actions' rms {actions.square().mean().sqrt():.3f}")
        inputs |= {f"{case}.{name}": tensor for name, tensor in drawn.items()}
    save_file({k: v.contiguous() for k, v in inputs.items()}, str(out / "inputs.safetensors"))
    save_file({k: v.contiguous() for k, v in expected.items()}, str(out / "expected.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--family", choices=(*FAMILIES, "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for family in FAMILIES if args.family == "both" else (args.family,):
        write_family(family, SIZES[args.size], args.out / family, args.seed)


if __name__ == "__main__":
    main()
