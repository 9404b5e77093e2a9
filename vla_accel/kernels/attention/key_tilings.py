"""How a suffix's attention, to its own keys and a prefix's or to a prefix's alone, is cut into programs, which cuts a
GPU has room for, and in which order to try them. As `vla_accel.kernels.gemm.config`, which has the products."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from vla_accel.kernels.config import MOST_MEASURED as MOST_TRIED
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import power_of_two


@dataclass(frozen=True)
class SuffixAttention:
    """Sizes of a suffix's attention. `bytes`: of an element."""

    batch: int
    tokens: int
    prefix_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes: int = 2

    @property
    def rows(self) -> int:
        """Queries that share a head of keys."""
        return self.tokens * (self.heads // self.kv_heads)

    @property
    def block_d(self) -> int:
        """Columns of a head's row in a tile."""
        return max(16, power_of_two(self.head_dim))


@dataclass(frozen=True)
class KeySplit:
    """How a suffix's attention is cut (`kernels/attention.py`): rows and keys of a tile, tiles of the prefix's keys a
    program, stages of keys on their way, warps. With one tile its keys are fetched before the wait. `joined`: the last
    of the prefix's programs takes the suffix's keys too, and one that has all stores what it computes."""

    rows: int
    keys: int
    tiles: int
    stages: int
    warps: int
    joined: bool = False

    def __str__(self) -> str:
        more = ", joined" if self.joined else ""
        return f"{self.rows}x{self.keys}, {self.tiles} tiles, {self.stages} stages, {self.warps} warps{more}"

    def prefix_splits(self, sizes: SuffixAttention) -> int:
        """Programs that share the prefix's keys."""
        return -(-sizes.prefix_tokens // (self.keys * self.tiles))

    def splits(self, sizes: SuffixAttention) -> int:
        """Programs that share all keys."""
        return self.prefix_splits(sizes) + (0 if self.joined else -(-sizes.tokens // self.keys))

    def row_tiles(self, sizes: SuffixAttention) -> int:
        """Tiles of queries of a head of keys."""
        return -(-sizes.rows // self.rows)

    def blocks(self, sizes: SuffixAttention) -> int:
        """Programs."""
        return sizes.batch * sizes.kv_heads * self.row_tiles(sizes) * self.splits(sizes)

    def shared(self, sizes: SuffixAttention) -> int:
        """Bytes of shared memory, at most."""
        row = sizes.block_d * sizes.bytes
        return self.rows * (row + 4 * self.keys) + self.stages * 2 * self.keys * row

    def workspace(self, sizes: SuffixAttention) -> tuple[int, int, int]:
        """Elements of the float32 parts, the float32 statistics and the int32 counters."""
        rows = self.blocks(sizes) * self.rows
        return rows * sizes.block_d, 2 * rows, self.blocks(sizes) // self.splits(sizes)


def key_splits(gpu: Gpu | None, sizes: SuffixAttention) -> list[KeySplit]:
    """The cuts worth measuring on a GPU, all of which it has room for; the one to take unmeasured comes first."""
    chips, limit = (128, 1 << 30) if gpu is None else (gpu.multiprocessors, gpu.shared_per_block)
    first = KeySplit(16, 64, 1, 1, 4) if sizes.rows <= 128 else KeySplit(64, 64, 1, 1, 8)
    found = []
    for rows, keys, tiles in itertools.product((16, 32, 64, 128), (32, 64), (2, 4, 8, 16, 32)):
        stages = [n for n in (3, 2, 1) if KeySplit(rows, keys, tiles, n, 4).shared(sizes) <= limit]
        if stages and rows <= max(16, power_of_two(sizes.rows)) and keys * tiles < 2 * max(sizes.prefix_tokens, keys):
            found.append(KeySplit(rows, keys, tiles, stages[0], 4 if rows <= 32 else 8))
    found.sort(key=lambda cut: (abs(math.log2(cut.blocks(sizes) / chips)), cut.splits(sizes), -cut.keys))
    fits = [first] if first.shared(sizes) <= limit else []
    # The sums of taller tiles fill the registers: programs that share keys would spill what they hand over.
    parts = [cut for cut in found if cut.rows <= 64][:MOST_TRIED]
    kept = [*fits, *parts] if sizes.rows <= 128 else [*parts, *fits]
    return kept if sizes.batch == 1 else [*kept, *_joined(sizes, chips, found)]


def _joined(sizes: SuffixAttention, chips: int, cuts: list[KeySplit]) -> list[KeySplit]:
    """Where sequences are several, those of `cuts` with the suffix's keys beside the prefix's: by themselves, and
    shared by as many programs as keep the chip busy."""
    found = [replace(cut, joined=True) for cut in cuts]
    whole = [cut for cut in found if cut.splits(sizes) == 1]
    whole = list({cut.rows: cut for cut in sorted(whole, key=lambda cut: (cut.keys, -cut.tiles))}.values())
    shared = [cut for cut in found if cut.splits(sizes) > 1 and cut.rows <= 64]
    shared.sort(key=lambda cut: (abs(math.log2(cut.blocks(sizes) / chips)), cut.splits(sizes), -cut.keys))
    return [*whole, *shared[: MOST_TRIED // 2]]


@dataclass(frozen=True)
class Crossing:
    """Sizes of queries and their attention to a prefix alone: (batch * tokens, k) rows, `heads` * `head_dim` weight
    rows. `weight`, `activation`, `integers`: as of a `Product`."""

    batch: int
    tokens: int
    k: int
    prefix_tokens: int
    heads: int
    head_dim: int
    weight: int = 2
    activation: int = 2
    integers: bool = False


@dataclass(frozen=True)
class CrossTile:
    """How such queries are cut (`kernels/cross.py`), a head a program: rows, K of a tile and tiles of it on their way,
    keys of a tile."""

    rows: int
    block_k: int
    stages: int
    keys: int

    def __str__(self) -> str:
        return f"{self.rows} rows, K by {self.block_k}, {self.stages} stages, {self.keys} keys"

    def shared(self, sizes: Crossing) -> int:
        """Bytes of shared memory, at most."""
        head = max(32, power_of_two(sizes.head_dim))
        stage = self.block_k * (self.rows * sizes.activation + head * sizes.weight)
        return self.stages * stage + 2 * self.keys * head * sizes.activation


def crossings(gpu: Gpu | None, sizes: Crossing) -> list[CrossTile]:
    """The cuts worth measuring on a GPU, all of which it has room for; the one to take unmeasured comes first."""
    limit = 1 << 30 if gpu is None else gpu.shared_per_block
    whole = max(16, power_of_two(sizes.prefix_tokens))
    # Up to 256 keys are all fetched before the wait, and then are one tile.
    keys = (whole, 64) if 64 < whole <= 256 else (min(whole, 64),)
    deep = (64, 128) if sizes.k > 64 else (max(16, power_of_two(sizes.k)),)
    found = []
    for of_keys, block_k, rows in itertools.product(keys, deep, (32, 16) if sizes.tokens > 16 else (16,)):
        made = (CrossTile(rows, block_k, stages, of_keys) for stages in (4, 3, 2))
        found += [cut for cut in made if cut.shared(sizes) <= limit][:1]
    return found[:MOST_TRIED]
