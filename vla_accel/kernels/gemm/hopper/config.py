"""The tile configs of the Hopper GEMM (`gemm.cu`): what a block uses, the measured table, and the search beyond it.

Plain arithmetic for Hopper's multiprocessor, which must agree with the source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.config import cheapest, deepest
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import round_up

ARCHITECTURE = "sm_90a"
SHARED_LIMIT, SHARED_MULTIPROCESSOR = 232_448, 233_472
"""Bytes of shared memory of a block at most, and of a multiprocessor."""


class Use(NamedTuple):
    """The parts of an epilogue that a tile depends on."""

    gated: bool = False
    residual: bool = False
    normed: bool = False


@dataclass(frozen=True)
class HopperSizes:
    """(rows, k) with elements of `bytes` by a weight (n, k), and the epilogues that a tile must run.

    `few`: so few rows that a block may wait for its weights. `widened`: the weights have one byte, and become 16 bits
    in registers.
    """

    rows: int
    n: int
    k: int
    bytes: int = 2
    uses: tuple[Use, ...] = (Use(),)
    few: bool = False
    widened: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of 128 bytes of a row along K."""
        return -(-self.k * self.bytes // 128)


class Memory(NamedTuple):
    """Offsets in a block's shared memory: the staged output, the sums of other blocks, the barriers (with the norms
    behind them); and its size in bytes."""

    staging: int
    exchange: int
    barriers: int
    size: int


@dataclass(frozen=True)
class HopperTile:
    """A tile config; the names are `gemm.cu`'s.

    A block takes 64 * groups * blocks weight rows and parts * width tokens; a cluster is across * along * split blocks.
    `resident`: blocks on a multiprocessor; `persistent`: as many blocks as fit at once take all tiles, one after
    another.
    """

    groups: int
    blocks: int
    parts: int
    width: int
    stages: int
    across: int = 1
    along: int = 1
    split: int = 1
    resident: int = 1
    persistent: bool = False

    def __str__(self) -> str:
        more = f" in clusters of {self.across}x{self.along}" if self.across * self.along > 1 else ""
        more += (f", K in {self.split}" if self.split > 1 else "") + (", two resident" if self.resident == 2 else "")
        shape = f"{self.groups}x{self.blocks * 64}x{self.parts}x{self.width}"
        return f"Hopper GEMM {shape}{more}, {self.stages} stages{', persistent' if self.persistent else ''}"

    @property
    def weight_rows(self) -> int:
        """Weight rows of a block."""
        return 64 * self.blocks * self.groups

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.parts * self.width

    @property
    def shares(self) -> tuple[int, int]:
        """Rows of weights and of tokens that a block fetches for its cluster: whole eights."""
        return round_up(-(-self.weight_rows // self.along), 8), round_up(-(-self.tokens // self.across), 8)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.across * self.along * self.split

    @property
    def threads(self) -> int:
        """Threads of a block: the groups that multiply and the one that fetches."""
        return (self.groups + 1) * 128

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread: at the start, then of one that fetches, and of one that multiplies."""
        # Every quarter of a multiprocessor has a quarter of them and of a group's warps.
        start = min(65_536 // (self.resident * self.threads) // 8 * 8, 248)
        fetching = 40
        return start, fetching, min((start * (self.groups + 1) - fetching) // self.groups // 8 * 8, 248)

    def memory(self, gated: bool, normed: bool = False, widened: bool = False) -> Memory:
        """Return how a block uses its shared memory."""
        ring = self.stages * (self.weight_rows * (64 if widened else 128) + self.tokens * 128)
        pitch = (32 if gated else 64) * 2 + 16
        share = 8 * -(-self.tokens // (8 * self.split)) if self.split > 1 else self.width
        staged = self.groups * share * pitch
        sums = self.weight_rows * share * (self.split - 1) * 4
        rest = 16 * self.stages + (8 * self.tokens if normed else 0) + 1024
        staging = exchange = 0
        end = max(ring, staged)
        if self.persistent:
            staging, end = ring, ring + staged
        elif sums and round_up(max(ring, staged) + sums, 16) + rest <= self._limit:
            # Stages and sums next to each other: no block waits before it sends.
            exchange = max(ring, staged)
            end = exchange + sums
        elif sums:
            staging, end = sums, max(ring, sums + staged)
        barriers = round_up(end, 16)
        return Memory(staging, exchange, barriers, barriers + rest)

    @property
    def _limit(self) -> int:
        return min(SHARED_LIMIT, SHARED_MULTIPROCESSOR // self.resident - 1024)

    def why_not(self, gpu: Gpu | None, sizes: HopperSizes) -> str | None:
        """Explain why the kernel cannot run with this config; None if it can."""
        if self.width % 8 or not 8 <= self.width <= 256:
            return f"a width of {self.width} is no multiple of 8 up to 256"
        if self.split > 1 and self.persistent:
            return "a split tile cannot be persistent"
        if max(self.shares) > 512 or self.cluster > 16 or any(share > 256 and share % 16 for share in self.shares):
            return "it fetches too many rows, or its cluster is too large"
        if -(-sizes.chunks // self.split) * (self.split - 1) >= sizes.chunks:
            return f"{sizes.chunks} chunks of K leave a part of {self.split} empty"
        # A wgmma's sums must fit in the registers of the start, too, and for few rows its operands next to them.
        operands = (64 if sizes.widened else 32) if sizes.few or sizes.widened else 26
        if self.width // 2 + operands > self.registers[0]:
            return "it needs too many registers"
        return next(filter(None, (self._why_not_used(use, sizes.widened) for use in sizes.uses)), None)

    def _why_not_used(self, use: Use, widened: bool) -> str | None:
        if use.normed and self.persistent:
            return "a persistent block keeps the norms of one tile only"
        if self.memory(use.gated, use.normed, widened).size > self._limit:
            return "it needs too much shared memory"
        sums = self.blocks * self.tokens // 2
        if use.residual:
            sums += self.blocks * 4 * -(-self.tokens // (16 * self.split))
        operands = 32 + (40 * self.blocks if widened else 0)
        return "it needs too many registers" if sums + operands > self.registers[2] else None

    def cost(self, gpu: Gpu | None, sizes: HopperSizes) -> tuple[float, ...]:
        """Waves of blocks, times the products that each computes, in products of 64 x 8 x 64; for few rows in cycles,
        because there a block may wait for its weights."""
        weight_tiles, waves_of = -(-sizes.n // self.weight_rows), 1 if gpu is None else gpu.multiprocessors
        blocks = -(-sizes.rows // self.tokens) * round_up(weight_tiles, self.across) * self.split
        waves, chunks = -(-blocks // waves_of), -(-sizes.chunks // self.split)
        if sizes.few:
            area, row_bytes = self.weight_rows * self.tokens, 64 if sizes.widened else 128
            multiplied = max(area / 16, _WIDENING * self.weight_rows if sizes.widened else 0)
            fetched = (row_bytes * self.weight_rows + 128 * self.tokens) / 40
            exchanged = _EXCHANGE + area * 4 * (1 - 1 / self.split) / 8 if self.split > 1 else 0
            return waves * (_FIXED + chunks * max(multiplied, fetched)) + exchanged, self.split, self.resident
        products = self.weight_rows // 64 * self.tokens // 8 * chunks
        # A persistent block fetches its next tile while it ends this one.
        overhead = _OVERHEAD * (1 if self.persistent else waves) + _OVERHEAD * (self.split - 1)
        return waves * products + overhead, -self.stages


_OVERHEAD = 192
"""A block's start, first stage and epilogue, in products of 64 x 8 x 64."""
_FIXED, _EXCHANGE, _WIDENING = 2500, 600, 2.5
"""Cycles of a block besides its products, of exchanging parts of K, and of widening 64 bytes of a weight row, by
estimate."""

# -- the table ---------------------------------------------------------------------------------------------------------

Table = dict[tuple[str, Activation, int, int], tuple[tuple[int, int, HopperTile], ...]]
NONE, GELU, GEGLU, _T = Activation.NONE, Activation.GELU, Activation.GEGLU, HopperTile
_GATE_UP = _T(2, 1, 2, 136, 4, persistent=True)
# By architecture, then by dtype, activation and (N, K): from how many rows to how many, and the config, for Gemma 2B
# and SigLIP. The fastest of many on an H200: SigLIP's inside the chain of two and of three views; Gemma's of two views
# and a prompt (544 rows), alone and together; Gemma's of three views (800 rows) follow from those by counting waves,
# and were timed together. SigLIP's BF16 products of two views are no faster than cuBLAS's alone: they win by the norms
# inside. cuBLAS runs the last FP8 product of two views at least as fast.
TABLES: dict[str, Table] = {ARCHITECTURE: {
    ("fp8", GEGLU, 32_768, 2048): ((504, 544, _GATE_UP), (756, 816, _GATE_UP)),
    ("fp8", NONE, 2048, 16_384): ((504, 544, _T(2, 1, 1, 136, 6, split=2)), (756, 800, _T(2, 1, 1, 200, 5, split=2))),
    ("fp8", NONE, 2048, 2048): ((504, 544, _T(1, 1, 1, 136, 8)), (756, 800, _T(1, 1, 1, 200, 6))),
    ("half", GEGLU, 32_768, 2048): ((504, 544, _GATE_UP), (756, 816, _GATE_UP)),
    ("half", NONE, 2048, 16_384): ((504, 544, _T(2, 1, 1, 136, 6, split=2)), (756, 800, _T(2, 1, 1, 200, 5, split=2))),
    ("half", NONE, 2048, 2048): ((504, 544, _T(1, 1, 1, 136, 8)), (756, 800, _T(1, 1, 1, 200, 6))),
    ("half", NONE, 2560, 2048): ((504, 552, _T(1, 1, 1, 184, 6)), (756, 800, _T(2, 1, 1, 160, 5))),
    ("half", NONE, 3456, 1152): ((473, 512, _T(2, 1, 1, 128, 4)), (705, 784, _T(3, 1, 1, 112, 4))),
    ("half", NONE, 1152, 1152): ((473, 512, _T(1, 1, 1, 80, 8)), (705, 768, _T(1, 1, 1, 112, 8))),
    ("half", GELU, 4352, 1152): ((473, 512, _T(3, 1, 1, 104, 4)), (705, 768, _T(3, 1, 1, 160, 4))),
    ("half", NONE, 1152, 4352): ((473, 512, _T(2, 1, 1, 128, 4, split=3)), (705, 768, _T(2, 1, 1, 128, 5, split=2))),
    ("fp8", NONE, 3456, 1152): ((449, 512, _T(2, 1, 1, 128, 4)), (705, 784, _T(3, 1, 1, 112, 5))),
    ("fp8", NONE, 1152, 1152): ((449, 512, _T(1, 1, 1, 128, 8)), (705, 768, _T(1, 1, 1, 128, 8))),
    ("fp8", GELU, 4352, 1152): ((449, 528, _T(2, 1, 1, 176, 4)), (705, 768, _T(2, 1, 1, 256, 4))),
    ("fp8", NONE, 1152, 4352): ((705, 768, _T(1, 1, 1, 128, 8)),),
}}  # fmt: skip


def planned(gpu: Gpu | None, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int) -> HopperTile | None:
    """Return the config that made this GEMM faster than cuBLAS on a GPU of this architecture; None if none did.

    `kind`: dtype of both operands. `rows` (M) by a weight (n, k).
    """
    if gpu is None:
        return None
    name = "fp8" if kind == torch.float8_e4m3fn else "half"
    for least, most, tile in TABLES.get(gpu.architecture, {}).get((name, activation, n, k), ()):
        if least <= rows <= most:
            return tile
    return None


# -- the search --------------------------------------------------------------------------------------------------------

LEAST, MOST = 33, 32_768
"""Rows that are searched for: fewer are better served by Triton's kernels, more by the library."""
LEAST_WORK = 1 << 26
"""Multiplications of a product that is worth compiling kernels for: smaller ones take a launch's time in any case."""
_KINDS = (
    _T(1, 1, 1, 8, 3), _T(2, 1, 1, 8, 3), _T(3, 1, 1, 8, 3), _T(2, 1, 1, 8, 3, split=2), _T(2, 1, 1, 8, 3, split=3),
    _T(2, 1, 2, 8, 3, persistent=True),
)  # fmt: skip
"""The table's, of any width and at least 3 stages; the best 3 are measured. Others may be right, but were run less."""
_MANY = 1024
"""Beyond so many rows tiles are large, and the caches' bandwidth is used up; two blocks may share their tokens."""
_KINDS_OF_MANY = (
    _T(2, 1, 1, 8, 4), _T(2, 1, 1, 8, 4, across=2), _T(2, 1, 2, 8, 4, persistent=True),
    _T(2, 1, 2, 8, 4, across=2, persistent=True),
)  # fmt: skip
"""The best 2 of each are measured."""
_NARROWEST, _MORE = 16, 3
"""Tokens of a tile at least, where tiles are as many as multiprocessors; tiles of tokens beyond the fewest."""
FEW_LEAST, FEW_MOST = 17, 1024
"""Rows of `few_rows`."""
_SPLITS, _SHAPES, _ALIKE = (1, 2, 3, 4, 6, 8), 4, 2
"""Parts of K; shapes that are measured with one and with two resident blocks; shapes of equal split at most."""
_SEARCHED = 4
"""Shapes of `few_rows` that the search adds for either number of resident blocks."""
_STAGES, _STAGES_WIDENED = 8, 12
"""Stages of `few_rows` at most: one of weights of one byte holds half as many bytes."""


def why_not_on(gpu: Gpu) -> str | None:
    """Explain why the kernel does not run on a GPU; None if it does."""
    if gpu.architecture != ARCHITECTURE:
        return f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
    return None


def why_not_searched(gpu: Gpu, rows: int, n: int, k: int) -> str | None:
    """Explain why no config is searched for a product of these sizes on a GPU; None if one is."""
    if reason := why_not_on(gpu):
        return reason
    if not LEAST <= rows <= MOST:
        return f"it is tried from {LEAST} to {MOST} rows, got {rows}"
    if n % 32 or k % 16:
        return f"it needs a weight of multiples of 32 by 16, got {n} by {k}"
    if rows * n * k < LEAST_WORK:
        return f"{rows} by {n} by {k} is too small to benefit"
    return None


def searched(gpu: Gpu | None, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int) -> list[HopperTile]:
    """Return configs for a GEMM beyond the table, the most promising first. Arguments as `planned`.

    Configs of a product without a gate also run a norm or a residual.
    """
    if gpu is None or why_not_searched(gpu, rows, n, k) is not None:
        return []
    uses = (Use(gated=True),) if activation.gated else (Use(), Use(normed=True), Use(residual=True))
    sizes = HopperSizes(rows, n, k, 1 if kind == torch.float8_e4m3fn else 2, uses)
    kinds, wider, of_each, of_all = (_KINDS_OF_MANY, 2, 2, None) if rows > _MANY else (_KINDS, 1, 3, 3)
    found: list[HopperTile] = []
    for kind_of in kinds:
        # Token tiles of equal width, so that none is mostly padding: few, or up to one for each multiprocessor.
        least = -(-rows // (kind_of.parts * 256))
        whole = gpu.multiprocessors // (-(-n // kind_of.weight_rows) * kind_of.split)
        most = max(least * wider + _MORE, min(whole, rows // (kind_of.parts * _NARROWEST)))
        widths = (round_up(-(-rows // (tiles * kind_of.parts)), 8) for tiles in range(least, most + 1))
        deep = (deepest(replace(kind_of, width=w), range(8, kind_of.stages - 1, -1), gpu, sizes) for w in widths)
        found += cheapest(filter(None, deep), gpu, sizes, of_each)
    found = cheapest(found, gpu, sizes, of_all)
    if rows > FEW_MOST:
        return found
    return list(dict.fromkeys([*found, *_few_rows(gpu, replace(sizes, few=True), shapes=_SEARCHED)]))


def few_rows(
    gpu: Gpu | None, rows: int, n: int, k: int, paired: int = 0, *, widened: bool = False
) -> list[HopperTile]:  # fmt: skip
    """Return configs for some tens to some hundreds of rows of 16 bits, the most promising first.

    There a product reads its weights in the time that it multiplies: all multiprocessors must fetch, and the next
    product's blocks should have space to begin.

    Args:
        paired: weight rows that are taken by pairs come in groups of this many, of which a tile has no two.
        widened: the weights have one byte.
    """
    on_hopper = gpu is not None and gpu.architecture == ARCHITECTURE
    if not on_hopper or not FEW_LEAST <= rows <= FEW_MOST or n % 64 or k % (16 if widened else 8) or paired % 16:
        return []
    uses = (Use(residual=True), Use(normed=True), Use(gated=True, normed=True))
    sizes = HopperSizes(rows, n, k, 2, uses, few=True, widened=widened)
    return _few_rows(gpu, sizes, paired)


def _few_rows(gpu: Gpu | None, sizes: HopperSizes, paired: int = 0, shapes: int = _SHAPES) -> list[HopperTile]:
    """Return so many shapes of `few_rows` with two resident blocks, and with one."""
    found: list[HopperTile] = []
    most = _STAGES_WIDENED if sizes.widened else _STAGES
    tiles_of = range(-(-sizes.rows // 256), max(2, sizes.rows // 24) + 1)
    for groups, tiles, split, resident in itertools.product((1, 2), tiles_of, _SPLITS, (1, 2)):
        if sizes.n % (64 * groups) or (paired and paired % (64 * groups)):
            continue
        tile = HopperTile(groups, 1, 1, round_up(-(-sizes.rows // tiles), 8), 3, split=split, resident=resident)
        stages = range(min(most, max(-(-sizes.chunks // split), 3)), 2, -1)
        found += filter(None, [deepest(tile, stages, gpu, sizes)])
    best = cheapest(found, gpu, sizes)
    return [tile for count in (2, 1) for tile in _different([t for t in best if t.resident == count], shapes)]


def _different(best: Iterable[HopperTile], most: int) -> list[HopperTile]:
    """Return the first of them that are not all alike, `most` at most."""
    kept: list[HopperTile] = []
    for tile in best:
        if sum(tile.split == other.split for other in kept) < _ALIKE and len(kept) < most:
            kept.append(tile)
    return kept
