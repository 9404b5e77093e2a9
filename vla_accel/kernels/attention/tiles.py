"""How Triton's attention of many queries is cut into programs. Every cut is right; which is fast is measured on the GPU
at hand, where one that it has no room for is out (`vla_accel.kernels.attention.attending`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from vla_accel.kernels.gpu import Gpu


@dataclass(frozen=True)
class Tile:
    """`queries` and `keys` that meet at once, `warps` of a program, `stages` of keys and values under way."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}, {self.warps} warps, {self.stages} stages"

    @classmethod
    def of(cls, tokens: int, source: int, head_dim: int, gpu: Gpu | None) -> Tile:
        """The one to take unmeasured: the fastest on an H200 for π0.5's prefix (544 x 256) and a view (256 x 72)."""
        wide, queries = head_dim > 128, 64 if tokens > 32 else 16
        # Ada and small Ampere and Blackwell chips have 99 KB for keys and values of 128 (72 take as much) or more.
        tight = gpu is not None and gpu.shared_per_block < 128 << 10
        # Where sums lie in tensor memory, 128 keys of 72 leave a thread too few registers for their addresses.
        few = head_dim > 64 and (tight or (gpu is not None and gpu.capability[0] in (10, 11)))
        keys = 32 if wide or source <= 64 else 64 if few else 128
        return cls(queries, keys, 4 if wide or queries == 16 else 8, 2 if wide and tight else 3)


def tiles(tokens: int, source: int, head_dim: int, gpu: Gpu | None) -> list[Tile]:
    """The cuts worth measuring, the one to take unmeasured first."""
    first = Tile.of(tokens, source, head_dim, gpu)
    if tokens <= 32:
        return [first]
    sides = product((64, 128), (32, 64) if head_dim > 128 else (64, 128))
    others = [Tile(queries, keys, queries // 16, first.stages) for queries, keys in sides if keys <= source]
    return list(dict.fromkeys((first, *others)))
