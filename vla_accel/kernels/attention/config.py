"""The tile configs of attention kernels, in the common form of `vla_accel.kernels.config`.

Every config is correct; the fastest one is measured. `FlashTile`: many queries (`triton_attention`). `KeySplit`: the
few queries of a suffix, to a prefix's keys and their own (`triton_attention`). `CrossTile`: to a prefix's keys alone,
with the product that makes the queries (`triton_cross`). `NormedTile`: with norms over all heads (`triton_normed`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from vla_accel.fp8 import E4M3
from vla_accel.kernels.config import MOST_MEASURED, cheapest, deepest, imbalance, too_large
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import power_of_two

# -- many queries -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionShape:
    """The shape of a program's attention.

    Attributes:
        padded: rows may have fewer keys than `source`.
        quantised: the output has the dtype `stored`, FP8 or INT8.
        last: as in `ops.attention`.
    """

    batch: int
    tokens: int
    source: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    padded: bool
    quantised: bool
    stored: torch.dtype = E4M3.dtype
    last: bool = False


@dataclass(frozen=True)
class FlashTile:
    """`queries` and `keys` of a tile, `warps` of a program, `stages` of keys and values in flight."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}, {self.warps} warps, {self.stages} stages"

    @classmethod
    def default(cls, gpu: Gpu | None, tokens: int, source: int, head_dim: int) -> FlashTile:
        """Return the config to use unmeasured: the fastest on an H200 for π0.5's prefix (544 x 256) and a view (256 x
        72)."""
        wide, queries = head_dim > 128, 64 if tokens > 32 else 16
        # Ada and small Ampere and Blackwell chips have 99 KB for keys and values of 128 (72 take as much) or more.
        tight = gpu is not None and gpu.shared_per_block < 128 << 10
        # Where sums lie in tensor memory, 128 keys of 72 leave a thread too few registers for their addresses.
        few = head_dim > 64 and (tight or (gpu is not None and gpu.capability[0] in (10, 11)))
        keys = 32 if wide or source <= 64 else 64 if few else 128
        return cls(queries, keys, 4 if wide or queries == 16 else 8, 2 if wide and tight else 3)


def flash_tiles(gpu: Gpu | None, shape: AttentionShape) -> list[FlashTile]:
    """Return the configs worth measuring, the default first. One that does not fit a GPU fails when it is measured."""
    first = FlashTile.default(gpu, shape.tokens, shape.source, shape.head_dim)
    if shape.tokens <= 32:
        return [first]
    sides = itertools.product((64, 128), (32, 64) if shape.head_dim > 128 else (64, 128))
    others = [FlashTile(queries, keys, queries // 16, first.stages) for queries, keys in sides if keys <= shape.source]
    return list(dict.fromkeys((first, *others)))


def causal_tiles(gpu: Gpu | None, tokens: int, head_dim: int) -> list[FlashTile]:
    """Return the configs of causal attention worth measuring, the default first."""
    first = FlashTile(64 if tokens > 32 else 16, 64, 4, 2)
    if gpu is None or gpu.capability[0] != 9 or tokens <= 64 or head_dim > 128:
        return [first]
    return [
        first,
        FlashTile(64, 64, 4, 3),
        FlashTile(128, 64, 8, 2),
        FlashTile(128, 128, 8, 2),
        FlashTile(64, 128, 4, 2),
    ]


# -- a suffix ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuffixShape:
    """The shape of a suffix's attention. `bytes`: of an element; `own`: whether the suffix has keys of its own."""

    batch: int
    tokens: int
    prefix_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes: int = 2
    own: bool = True

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
    """Programs that share the keys of a suffix's queries.

    `rows` and `keys` of a tile, `tiles` of the prefix's keys a program, `stages` of keys in flight, `warps`. With one
    tile its keys are fetched before the wait. `joined`: the last of the prefix's programs takes the suffix's keys too,
    and a program that has all keys stores its result.
    """

    rows: int
    keys: int
    tiles: int
    stages: int
    warps: int
    joined: bool = False

    def __str__(self) -> str:
        more = ", joined" if self.joined else ""
        return f"{self.rows}x{self.keys}, {self.tiles} tiles, {self.stages} stages, {self.warps} warps{more}"

    def prefix_splits(self, shape: SuffixShape) -> int:
        """Return the number of programs that share the prefix's keys."""
        return -(-shape.prefix_tokens // (self.keys * self.tiles))

    def splits(self, shape: SuffixShape) -> int:
        """Return the number of programs that share all keys."""
        return self.prefix_splits(shape) + (-(-shape.tokens // self.keys) if shape.own and not self.joined else 0)

    def row_tiles(self, shape: SuffixShape) -> int:
        """Return the number of tiles of queries of a head of keys."""
        return -(-shape.rows // self.rows)

    def blocks(self, shape: SuffixShape) -> int:
        """Return the number of programs."""
        return shape.batch * shape.kv_heads * self.row_tiles(shape) * self.splits(shape)

    def shared(self, shape: SuffixShape) -> int:
        """Return the bytes of shared memory, at most."""
        row = shape.block_d * shape.bytes
        return self.rows * (row + 4 * self.keys) + self.stages * 2 * self.keys * row

    def workspace(self, shape: SuffixShape) -> tuple[int, int, int]:
        """Return the elements of the float32 parts, the float32 statistics and the int32 counters."""
        rows = self.blocks(shape) * self.rows
        return rows * shape.block_d, 2 * rows, self.blocks(shape) // self.splits(shape)

    def why_not(self, gpu: Gpu | None, sizes: SuffixShape) -> str | None:
        return too_large(self, self.shared(sizes), gpu)

    def cost(self, gpu: Gpu | None, sizes: SuffixShape) -> tuple[float, ...]:
        return imbalance(gpu, self.blocks(sizes)), self.splits(sizes), -self.keys


def key_splits(gpu: Gpu | None, shape: SuffixShape) -> list[KeySplit]:
    """Return the configs worth measuring, all of which the GPU can run, the one to use unmeasured first."""
    found: list[KeySplit] = []
    for rows, keys, tiles in itertools.product((16, 32, 64, 128), (32, 64), (2, 4, 8, 16, 32)):
        if rows <= max(16, power_of_two(shape.rows)) and keys * tiles < 2 * max(shape.prefix_tokens, keys):
            split = deepest(KeySplit(rows, keys, tiles, 3, 4 if rows <= 32 else 8), (3, 2, 1), gpu, shape)
            found += [] if split is None else [split]
    found = cheapest(found, gpu, shape)
    low, tall = KeySplit(16, 64, 1, 1, 4), KeySplit(64, 64, 1, 1, 8)
    whole = [tall] if shape.rows > 128 else [low, tall] if shape.rows > 32 else [low]
    whole = [split for split in whole if split.why_not(gpu, shape) is None]
    # The sums of taller tiles fill the registers: programs that share keys would spill the parts that they store.
    parts = [split for split in found if split.rows <= 64][:MOST_MEASURED]
    best = [*whole, *parts] if shape.rows <= 128 else [*parts, *whole]
    return best if shape.batch == 1 or not shape.own else [*best, *_joined(gpu, shape, found)]


def _joined(gpu: Gpu | None, shape: SuffixShape, splits: list[KeySplit]) -> list[KeySplit]:
    """Return configs for several sequences, whose programs take the suffix's keys with the prefix's: one program for
    all keys, or as many as keep the GPU busy.
    """
    found = [replace(split, joined=True) for split in splits]
    whole = sorted((s for s in found if s.splits(shape) == 1), key=lambda split: (split.keys, -split.tiles))
    shared = [split for split in found if split.splits(shape) > 1 and split.rows <= 64]
    one_a_height = {split.rows: split for split in whole}.values()
    return [*one_a_height, *cheapest(shared, gpu, shape, MOST_MEASURED // 2)]


@dataclass(frozen=True)
class CrossShape:
    """The shape of queries and their attention to a prefix alone: (batch * tokens, k) rows, `heads` * `head_dim` weight
    rows. `weight`, `activation`: bytes of an element; `integers`: the weights are INT8.
    """

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
    """A head a program: `rows`, K of a tile and `stages` of it in flight, `keys` of a tile."""

    rows: int
    block_k: int
    stages: int
    keys: int

    def __str__(self) -> str:
        return f"{self.rows} rows, K by {self.block_k}, {self.stages} stages, {self.keys} keys"

    def shared(self, shape: CrossShape) -> int:
        """Return the bytes of shared memory, at most."""
        head = max(32, power_of_two(shape.head_dim))
        stage = self.block_k * (self.rows * shape.activation + head * shape.weight)
        return self.stages * stage + 2 * self.keys * head * shape.activation

    def why_not(self, gpu: Gpu | None, sizes: CrossShape) -> str | None:
        return too_large(self, self.shared(sizes), gpu)

    def cost(self, gpu: Gpu | None, sizes: CrossShape) -> tuple[float, ...]:
        return (0.0,)


def cross_tiles(gpu: Gpu | None, shape: CrossShape) -> list[CrossTile]:
    """Return the configs worth measuring, all of which the GPU can run, the one to use unmeasured first."""
    whole = max(16, power_of_two(shape.prefix_tokens))
    # Up to 256 keys are one tile, and all fetched before the wait.
    keys = (whole, 64) if 64 < whole <= 256 else (min(whole, 64),)
    deep = (64, 128) if shape.k > 64 else (max(16, power_of_two(shape.k)),)
    found: list[CrossTile] = []
    for tile_keys, block_k, rows in itertools.product(keys, deep, (32, 16) if shape.tokens > 16 else (16,)):
        tile = deepest(CrossTile(rows, block_k, 4, tile_keys), (4, 3, 2), gpu, shape)
        found += [] if tile is None else [tile]
    return found[:MOST_MEASURED]


# -- heads that are normed together -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormedShape:
    """The shape of `normed_attention`. `bytes`: of an element; `own`: whether the rows have keys, too."""

    batch: int
    tokens: int
    prefix_tokens: int
    heads: int
    head_dim: int
    bytes: int = 2
    own: bool = True


@dataclass(frozen=True)
class NormedTile:
    """A head a program: `queries` of a tile, `keys` of a tile of the prefix and `own` ones, `warps`."""

    queries: int
    keys: int
    own: int
    warps: int

    def __str__(self) -> str:
        return f"{self.queries} queries, {self.keys} and {self.own} keys, {self.warps} warps"

    def shared(self, shape: NormedShape) -> int:
        """Return the bytes of shared memory, at most."""
        row = 2 * max(16, power_of_two(shape.head_dim // 2)) * shape.bytes
        keys = 2 * max(self.keys if shape.prefix_tokens else 0, self.own if shape.own else 0)
        return (self.queries + keys) * row + 4 * self.queries * max(self.keys, self.own)

    def why_not(self, gpu: Gpu | None, sizes: NormedShape) -> str | None:
        held = 2 * self.keys * sizes.head_dim * sizes.bytes if sizes.prefix_tokens else 0
        if held > 512 * 32 * self.warps:
            return f"{self} fetches more keys than registers before the wait"
        if sizes.own and self.queries > 4 * self.warps:
            return f"{self} has more queries than registers next to keys that it norms"
        return too_large(self, self.shared(sizes), gpu)

    def cost(self, gpu: Gpu | None, sizes: NormedShape) -> tuple[float, ...]:
        blocks = sizes.batch * sizes.heads * -(-sizes.tokens // self.queries)
        turns = -(-sizes.prefix_tokens // self.keys) + (-(-sizes.tokens // self.own) if sizes.own else 0)
        return imbalance(gpu, blocks), turns, self.warps


def normed_tiles(gpu: Gpu | None, shape: NormedShape) -> list[NormedTile]:
    """Return the configs worth measuring, all of which the GPU can run, the one to use unmeasured first."""
    most = max(16, power_of_two(shape.prefix_tokens))
    queries = [count for count in (16, 32, 64) if count < 2 * max(16, shape.tokens)]
    # A thread has no registers to norm and rotate more keys at a time.
    tiles = (
        NormedTile(count, keys, min(8 * warps, max(16, power_of_two(shape.tokens))), warps)
        for count, keys, warps in itertools.product(queries, dict.fromkeys((min(most, 128), min(most, 64))), (4, 8))
    )
    return cheapest((tile for tile in tiles if tile.why_not(gpu, shape) is None), gpu, shape, MOST_MEASURED)
