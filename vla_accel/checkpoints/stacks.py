"""transformers' tensor names for a SigLIP tower, a projector and stacks of decoder layers (π0, π0.5, π0-FAST, SmolVLA).

Here q, k, v are one matrix, and so are gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vla_accel.checkpoints.weights import Piece
from vla_accel.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
ShapeOf = Callable[[str, int], tuple[int, ...]]

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER = {
    "qkv_proj": _QKV,
    "q_proj": _QKV[:1],
    "key_proj": _QKV[1:2],
    "value_proj": _QKV[2:],
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
_SIGLIP = {"qkv_proj": _QKV, "out_proj": ("self_attn.out_proj",), "fc1": ("mlp.fc1",), "fc2": ("mlp.fc2",)}


def layer_of(name: str, start: str) -> int:
    """Return the number of the layer in a name that begins with `start`, such as "layers."; -1 for other names."""
    match = re.match(re.escape(start) + r"(\d+)\.", name)
    return -1 if match is None else int(match[1])


def depth_of(shapes: Shapes, start: str) -> int:
    """Return the number of layers whose names begin with `start`, such as "layers."."""
    # A gap then shows as missing keys of a deeper model.
    return 1 + max((layer_of(name, start) for name in shapes), default=-1)


def shapes_by_name(shapes: Shapes, prefix: str, where: str) -> ShapeOf:
    """Return a function that finds a tensor's shape by name and number of axes, or raises CheckpointError."""

    def shape(name: str, axes: int) -> tuple[int, ...]:
        found = shapes.get(prefix + name)
        if found is None or len(found) != axes:
            raise CheckpointError(f"checkpoint {where}: 1 missing: {prefix}{name} ({axes} axes), got {found}")
        return found

    return shape


@dataclass(frozen=True)
class Names:
    """Prefixes of the tensor names of each part.

    Attributes:
        tower: Of the vision tower.
        projector: Of the projector.
        stacks: Of the prefix and, if there is one, the expert.
        embedding: Full name of the token table.
        rest: Of all other tensors.
    """

    tower: str
    projector: str
    stacks: Mapping[str, str]
    embedding: str
    rest: str = ""

    def pieces(self, name: str, sizes: Any) -> tuple[Piece, ...]:
        """Return the stored tensors that make up the canonical tensor `name`, in order along its first axis.

        `sizes` has the stacks `vision`, `prefix` and, if there is one, `expert`.
        """
        if match := re.fullmatch(r"(prefix|expert|vision)\.layers\.(\d+)\.(\w+)\.(.+)", name):
            which, index, module, leaf = match.groups()
            stack = getattr(sizes, which)
            vision = which == "vision"
            start = f"{self.tower}encoder." if vision else self.stacks[which]
            stored = (_SIGLIP if vision else _LAYER).get(module, (module,))
            rows: tuple[int | None, ...] = (None,)
            if module == "qkv_proj":
                kv_heads = stack.heads if vision else stack.kv_heads
                rows = (stack.heads * stack.head_dim, *(kv_heads * stack.head_dim,) * 2)
            elif module == "gate_up_proj":
                rows = (stack.mlp_dim, stack.mlp_dim)
            names = (f"{start}layers.{index}.{part}.{leaf}" for part in stored)
            return tuple(Piece(n, r) for n, r in zip(names, rows, strict=True))
        for ours, theirs in (
            ("vision.position_embedding", self.tower + "embeddings.position_embedding.weight"),
            ("vision.patch_embedding.", self.tower + "embeddings.patch_embedding."),
            ("vision.", self.tower),
            ("projector.", self.projector),
            ("expert.", self.stacks.get("expert", "")),
            ("embed.weight", self.embedding),
        ):
            if name.startswith(ours):
                return (Piece(theirs + name.removeprefix(ours)),)
        return (Piece(self.rest + name),)
