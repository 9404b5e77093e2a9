"""transformers' tensor names and shapes of Qwen3-VL, and diffusers' names of the diffusion transformer's layers.

Here q, k, v are one matrix, and so are gate and up, and the keys and values of a crossing layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vla_accel.checkpoints.stacks import ShapeOf
from vla_accel.checkpoints.weights import Piece
from vla_accel.errors import ConfigError
from vla_accel.nn.qwen_language import QwenConfig
from vla_accel.nn.qwen_vision import QwenVisionConfig

Depth = Callable[[str], int]
"""The number of layers whose names begin with a prefix."""
_TOWERS: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
    (1024, 24): (64, (5, 11, 17)),  # Qwen3-VL-2B and 4B
    (1152, 27): (72, (8, 16, 24)),  # Qwen3-VL-8B and 32B
    (128, 4): (64, (0, 1, 2)),  # a small one, for tests
}
"""What no shape of a vision tower shows, by its width and depth: the width of its heads, and the blocks with a
deepstack output."""
_MERGER = {"fc1": "linear_fc1", "fc2": "linear_fc2"}
_PRE_NORM = {
    "layer_norm1": ("norm1",), "qkv_proj": ("attn.qkv",), "out_proj": ("attn.proj",), "layer_norm2": ("norm2",),
    "fc1": ("mlp.linear_fc1",), "fc2": ("mlp.linear_fc2",),
}  # fmt: skip
_QWEN = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",), "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "down_proj": ("mlp.down_proj",),
}  # fmt: skip
_DIFFUSERS = {
    "layer_norm1": ("norm1",), "layer_norm2": ("norm3",), "modulation": ("norm1.linear",), "q_proj": ("attn1.to_q",),
    "kv_proj": ("attn1.to_k", "attn1.to_v"), "qkv_proj": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "out_proj": ("attn1.to_out.0",), "fc1": ("ff.net.0.proj",), "fc2": ("ff.net.2",),
}  # fmt: skip
TRANSFORMER = {
    "time_in": "timestep_encoder.timestep_embedder.linear_1",
    "time_out": "timestep_encoder.timestep_embedder.linear_2",
    "final_modulation": "proj_out_1",
    "out_proj": "proj_out_2",
}
"""Modules of a `DitHead` that belong to the transformer itself."""


def vision_pieces(name: str, start: str) -> tuple[Piece, ...]:
    """Return the stored tensors of a canonical tensor of `QwenVision`, whose stored names begin with `start`."""
    if match := re.fullmatch(r"layers\.(\d+)\.(\w+)\.(.+)", name):
        index, module, leaf = match.groups()
        return _joined(f"{start}blocks.{index}", _PRE_NORM, module, leaf, (None,))
    name = name.replace("patch_embedding", "patch_embed.proj").replace("position_embedding", "pos_embed.weight")
    name = name.replace("deepstack.", "deepstack_merger_list.")
    for ours, theirs in _MERGER.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return (Piece(start + name),)


def language_pieces(name: str, start: str, config: Any) -> tuple[Piece, ...]:
    """As `vision_pieces`, of `QwenLanguage`, or another stack of blocks with its names; `config`: its sizes."""
    _, index, module, leaf = name.split(".")
    own = config.kv_heads * config.head_dim
    rows = {"qkv_proj": (config.heads * config.head_dim, own, own), "gate_up_proj": (config.mlp_dim,) * 2}
    return _joined(f"{start}layers.{index}", _QWEN, module, leaf, rows.get(module, (None,)))


def transformer_pieces(name: str, start: str, width: int) -> tuple[Piece, ...]:
    """As `vision_pieces`, of a layer of a transformer of diffusers, as wide as `width`."""
    _, index, module, leaf = name.split(".")
    count = len(_DIFFUSERS[module])
    return _joined(
        f"{start}transformer_blocks.{index}", _DIFFUSERS, module, leaf, (width if count > 1 else None,) * count
    )


def _joined(
    layer: str, names: Mapping[str, tuple[str, ...]], module: str, leaf: str, rows: tuple[int | None, ...]
) -> tuple[Piece, ...]:
    stored = names.get(module, (module,))
    return tuple(Piece(f"{layer}.{part}.{leaf}", count) for part, count in zip(stored, rows, strict=True))


def vision_config(shape: ShapeOf, depth: Depth, start: str) -> QwenVisionConfig:
    """Return the tower's sizes, from the shapes of tensors whose names begin with `start`."""
    width, _, frames, patch, _ = shape(start + "patch_embed.proj.weight", 5)
    positions, _ = shape(start + "pos_embed.weight", 2)
    blocks, levels = depth(start + "blocks."), depth(start + "deepstack_merger_list.")
    out_width, joined = shape(start + "merger.linear_fc2.weight", 2)
    head_dim, deepstack = _TOWERS.get((width, blocks), (0, ()))
    if levels != len(deepstack) or not head_dim:
        known = " or ".join(f"{depth} blocks of width {width}" for width, depth in _TOWERS)
        raise ConfigError(
            f"vision: expected {known} with 3 deepstack outputs, as Qwen3-VL's, got {blocks} of {width} with {levels}"
        )
    return QwenVisionConfig(
        width=width, depth=blocks, mlp_dim=shape(start + "blocks.0.mlp.linear_fc1.weight", 2)[0],
        heads=width // head_dim, patch_size=patch, frames=frames, merge=round((joined / width) ** 0.5),
        positions=positions, deepstack=deepstack, out_width=out_width,
    )  # fmt: skip


def language_config(shape: ShapeOf, start: str, table: str, **sizes: Any) -> QwenConfig:
    """Return the language model's sizes, with `sizes` that no shape shows. `table`: the name of the token table."""
    first = start + "layers.0."
    (head_dim,) = shape(first + "self_attn.q_norm.weight", 1)
    queries, width = shape(first + "self_attn.q_proj.weight", 2)
    half = head_dim // 2
    return QwenConfig(
        width=width, mlp_dim=shape(first + "mlp.gate_proj.weight", 2)[0], heads=queries // head_dim,
        kv_heads=shape(first + "self_attn.k_proj.weight", 2)[0] // head_dim, head_dim=head_dim,
        vocab_size=shape(table, 2)[0],
        # Row and column each have 5/16 of the frequencies: 20 of 64.
        sections=(half - 2 * (5 * half // 16), 5 * half // 16, 5 * half // 16),
        **sizes,
    )  # fmt: skip
