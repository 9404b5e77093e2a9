"""PaliGemma's tensor names in openpi's PyTorch model, and the sizes that the shapes show.

lerobot wraps the same model under `model.`. π0, π0.5 and π0-FAST share these names.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

from vla_accel.checkpoints.stacks import Names, ShapeOf, Shapes, depth_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig

Dialect = Literal["vla_accel", "openpi", "lerobot"]

ROOT = "paligemma_with_expert."
_TOWER = ROOT + "paligemma.model.vision_tower.vision_model."
_PROJECTOR = ROOT + "paligemma.model.multi_modal_projector.linear."
STACKS = {"prefix": ROOT + "paligemma.model.language_model.", "expert": ROOT + "gemma_expert.model."}
EMBEDDINGS = (STACKS["prefix"] + "embed_tokens.weight", ROOT + "paligemma.lm_head.weight")
"""The token table. Files have one of these names or both; the first one present is read."""
NAMES = Names(_TOWER, _PROJECTOR, STACKS, EMBEDDINGS[0])
DEAD = (ROOT + "gemma_expert.lm_head.weight", STACKS["prefix"] + "norm.weight")
"""Tensors that the model never reads: the expert's head, and the prefix's final norm (only K and V leave the prefix).
The MLP and output projection of the last prefix layer are unused, too, but they are part of the network."""
_SIGLIP_HEAD_DIM = 72  # of every SigLIP So400m; no shape shows the number of heads

# Sizes by the names in openpi's and lerobot's configs: width, depth, mlp_dim, heads, kv_heads, head_dim.
VARIANTS: dict[str, GemmaConfig] = {
    "gemma_2b": GemmaConfig(2048, 18, 16_384, 8, 1, 256),
    "gemma_300m": GemmaConfig(1024, 18, 4096, 8, 1, 256),
    "dummy": GemmaConfig(64, 4, 128, 8, 1, 16),
}


def dialect_of(names: Collection[str]) -> tuple[Dialect, str]:
    """Return the project whose tensor names these are, and the prefix of each name."""
    if any(n.startswith(ROOT) for n in names):
        return "openpi", ""
    if any(n.startswith("model." + ROOT) for n in names):
        return "lerobot", "model."
    return "vla_accel", ""


def tower_sizes(shapes: Shapes, prefix: str, shape: ShapeOf) -> SiglipConfig:
    """Return the sizes of the vision tower. Raises ConfigError if it is not a So400m tower."""
    width, _, _, patch = shape(_TOWER + "embeddings.patch_embedding.weight", 4)
    if width % _SIGLIP_HEAD_DIM:
        raise ConfigError(f"vision.width: expected a multiple of {_SIGLIP_HEAD_DIM}, So400m's head width, got {width}")
    tokens, _ = shape(_TOWER + "embeddings.position_embedding.weight", 2)
    return SiglipConfig(
        width=width,
        depth=depth_of(shapes, prefix + _TOWER + "encoder.layers."),
        mlp_dim=shape(_TOWER + "encoder.layers.0.mlp.fc1.weight", 2)[0],
        heads=max(1, width // _SIGLIP_HEAD_DIM),
        image_size=patch * math.isqrt(tokens),
        patch_size=patch,
    )


def stack_sizes(stack: Literal["prefix", "expert"], shapes: Shapes, prefix: str, shape: ShapeOf) -> GemmaConfig:
    """Return the sizes of one of the two Gemma stacks."""
    start = STACKS[stack]
    queries, width = shape(start + "layers.0.self_attn.q_proj.weight", 2)
    # Every PaliGemma variant has one key/value head.
    head_dim, _ = shape(start + "layers.0.self_attn.k_proj.weight", 2)
    return GemmaConfig(
        width=width,
        depth=depth_of(shapes, prefix + start + "layers."),
        mlp_dim=shape(start + "layers.0.mlp.gate_proj.weight", 2)[0],
        heads=max(1, queries // head_dim),
        kv_heads=1,
        head_dim=head_dim,
    )


def compared_variant(name: str, variant: str | None, found: GemmaConfig, where: str) -> tuple[str, object, object]:
    """Return a row for `compare_sizes`: the sizes that a variant's name implies, and those found in the weights."""
    if variant is None:
        return name, None, found
    known = VARIANTS.get(str(variant).removesuffix("_lora"))
    if known is None:
        raise CheckpointError(f"checkpoint {where}: expected {name} one of {', '.join(VARIANTS)}, got {variant!r}")
    return f"{name} {variant}", known, found
