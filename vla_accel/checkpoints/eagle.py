"""transformers' tensor names and shapes of Eagle's vision towers, and of what lies between tower and language model."""

from __future__ import annotations

import re

from vla_accel.checkpoints.qwen import Depth
from vla_accel.checkpoints.stacks import ShapeOf
from vla_accel.checkpoints.weights import Piece
from vla_accel.errors import ConfigError
from vla_accel.nn.eagle_vision import EagleVisionConfig

VISION_HEAD = 72
"""Width of the tower's heads, which no shape shows."""
_SIGLIP = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "out_proj": ("self_attn.out_proj",),
    "fc1": ("mlp.fc1",), "fc2": ("mlp.fc2",),
}  # fmt: skip
_CONNECTORS = {True: {"norm": "0", "fc1": "1", "fc2": "3"}, False: {"fc1": "0"}}
"""Modules between tower and language model, by whether patches are joined."""


def eagle_pieces(name: str, start: str, connector: str, config: EagleVisionConfig) -> tuple[Piece, ...]:
    """Return the stored tensors of a canonical tensor of `EagleVision`.

    Args:
        name: Of the canonical tensor.
        start: The prefix of the tower's stored names.
        connector: That of the modules between tower and language model.
        config: Sizes.
    """
    if match := re.fullmatch(r"layers\.(\d+)\.(\w+)\.(.+)", name):
        index, module, leaf = match.groups()
        stored = _SIGLIP.get(module, (module,))
        rows = config.width if len(stored) > 1 else None
        return tuple(Piece(f"{start}encoder.layers.{index}.{part}.{leaf}", rows) for part in stored)
    if name.startswith("merger."):
        _, module, leaf = name.split(".")
        return (Piece(f"{connector}{_CONNECTORS[config.joined][module]}.{leaf}"),)
    name = name.replace("position_embedding", "position_embedding.weight")
    return (Piece(start + ("" if name.startswith("post_") else "embeddings.") + name),)


def eagle_config(shape: ShapeOf, depth: Depth, start: str, connector: str, joined: bool) -> EagleVisionConfig:
    """Return the tower's sizes from shapes. `joined`: as of the config; the others as of `eagle_pieces`."""
    layers = start + "encoder.layers."
    positions, width = shape(start + "embeddings.position_embedding.weight", 2)
    patch = shape(start + "embeddings.patch_embedding.weight", 2 if joined else 4)
    out_width, columns = shape(f"{connector}{_CONNECTORS[joined]['fc1']}.weight", 2)
    if width % VISION_HEAD:
        raise ConfigError(f"vision.width: expected a multiple of {VISION_HEAD}, Eagle's head width, got {width}")
    return EagleVisionConfig(
        width=width, depth=depth(layers), mlp_dim=shape(layers + "0.mlp.fc1.weight", 2)[0],
        heads=width // VISION_HEAD, patch_size=round((patch[1] / 3) ** 0.5) if joined else patch[2],
        merge=round((columns / width) ** 0.5), positions=positions, out_width=out_width, joined=joined,
    )  # fmt: skip
