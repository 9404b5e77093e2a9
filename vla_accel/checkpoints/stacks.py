"""transformers' tensor names for a SigLIP tower, a projector and stacks of decoder layers (π0, π0.5, π0-FAST, SmolVLA).

Here q, k, v are one matrix, and so are gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from vla_accel.checkpoints.weights import Piece
from vla_accel.errors import CheckpointError
from vla_accel.nn.siglip import SiglipConfig

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


class Stack(Protocol):
    """Sizes of a stack of decoder layers."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...


class Sizes(Protocol):
    """Sizes of a model of a tower and stacks. It may have an `expert`, which is a `Stack`, too."""

    @property
    def vision(self) -> SiglipConfig: ...
    @property
    def prefix(self) -> Stack: ...


def depth_of(shapes: Shapes, start: str) -> int:
    """Return the number of layers of the stack whose names begin with `start`."""
    found = {int(m[1]) for n in shapes if (m := re.match(re.escape(start) + r"layers\.(\d+)\.", n))}
    # A gap then shows as missing keys of a deeper model.
    return max(found, default=-1) + 1


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

    def pieces(self, name: str, sizes: Sizes) -> tuple[Piece, ...]:
        """Return the stored tensors that make up the canonical tensor `name`, in order along its first axis."""
        rows: tuple[int, ...] | None = None
        if match := re.fullmatch(r"(prefix|expert)\.layers\.(\d+)\.(\w+)\.(.+)", name):
            which, index, module, leaf = match.groups()
            stack: Stack = getattr(sizes, which)
            whole = tuple(f"{self.stacks[which]}layers.{index}.{part}.{leaf}" for part in _LAYER.get(module, (module,)))
            if module == "qkv_proj":
                rows = (stack.heads * stack.head_dim, *(stack.kv_heads * stack.head_dim,) * 2)
            elif module == "gate_up_proj":
                rows = (stack.mlp_dim, stack.mlp_dim)
        elif match := re.fullmatch(r"vision\.layers\.(\d+)\.(\w+)\.(.+)", name):
            index, module, leaf = match.groups()
            parts = _SIGLIP.get(module, (module,))
            whole = tuple(f"{self.tower}encoder.layers.{index}.{part}.{leaf}" for part in parts)
            rows = (sizes.vision.width,) * 3 if module == "qkv_proj" else None
        elif name == "vision.position_embedding":
            whole = (self.tower + "embeddings.position_embedding.weight",)
        elif name.startswith("vision.patch_embedding."):
            whole = (self.tower + "embeddings." + name.removeprefix("vision."),)
        elif name.startswith("vision."):
            whole = (self.tower + name.removeprefix("vision."),)
        elif name.startswith("projector."):
            whole = (self.projector + name.removeprefix("projector."),)
        elif name.startswith("expert."):
            whole = (self.stacks["expert"] + name.removeprefix("expert."),)
        elif name == "embed.weight":
            whole = (self.embedding,)
        else:
            whole = (self.rest + name,)
        return tuple(Piece(n, r) for n, r in zip(whole, rows or (None,) * len(whole), strict=True))
