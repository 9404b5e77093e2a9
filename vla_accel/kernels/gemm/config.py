"""The tile configs of products of a suffix's rows: which ones a GPU can run, and in which order to measure them.

Every config that `why_not` accepts is correct. The configs of the Hopper GEMM are in `hopper.config`, those of INT8
products in `int8`; the common form is in `vla_accel.kernels.config`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.config import (
    MOST_MEASURED,
    NO_LIMIT,
    cheapest,
    deepest,
    imbalance,
    measured,
    shared_limit,
    too_large,
)
from vla_accel.kernels.gemm import hopper
from vla_accel.kernels.gemm.epilogue import Heads
from vla_accel.kernels.gemm.hopper.config import HopperTile, few_rows
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.reference import MOMENTS_OF
from vla_accel.numeric import power_of_two
from vla_accel.runtime import current

LIBRARY_ROWS = 17
"""Rows from which on cuBLAS and the Hopper GEMM are candidates, too."""
_BARRIERS = 256
"""Bytes of shared memory, at most, of the barriers of tiles that come by TMA."""


@dataclass(frozen=True)
class GemmSizes:
    """(rows, k) times `groups` * `sides` * `columns` weight rows: the heads of q/k/v in halves, gate and up, or plain
    columns. `weight_bytes`, `row_bytes`: of an element. `integers`: the weights are INT8, which other instructions
    widen than FP8. `layer_norm`: plain columns of rows that the kernel norms.
    """

    rows: int
    k: int
    columns: int
    groups: int = 1
    sides: int = 1
    weight_bytes: int = 2
    row_bytes: int = 2
    integers: bool = False
    layer_norm: bool = False

    @property
    def n(self) -> int:
        """Weight rows."""
        return self.groups * self.sides * self.columns

    @property
    def pairs(self) -> bool:
        """Whether two columns of the product meet in one output."""
        return self.sides > 1


def gemm_sizes(
    x: Tensor, weights: Linear, heads: Heads | None = None, *, gated: bool = False, layer_norm: bool = False
) -> GemmSizes:
    """Return the sizes of a product. `heads`: its output, if that is q, k and v; `gated`: its activation is."""
    n, (rows, k) = len(weights.weight), x.shape
    columns, groups = (n // 2, 1) if gated else (n, 1)
    if heads is not None:
        columns, groups = heads.q.shape[3] // 2, heads.q.shape[2] + 2 * heads.k.shape[2]
    sides, kinds = 1 + (gated or heads is not None), (weights.weight.element_size(), x.element_size(), weights.integers)
    return GemmSizes(rows, k, columns, groups, sides, *kinds, layer_norm)


@dataclass(frozen=True)
class Skinny:
    """Up to 16 rows: weights go to registers before the wait for the previous kernel (`triton_skinny`).

    `columns` and `rows` of a program, `parts` of K (one for each warp), K of a chunk, chunks of weights that are loaded
    before the wait. `ready`: these are also widened and in the tensor cores' layout before it; `releases`: the next
    kernel may start before the wait, and load its weights.
    """

    columns: int
    parts: int
    block_k: int
    rows: int
    early: int
    ready: bool = False
    releases: bool = False

    def __str__(self) -> str:
        more = (", ready" if self.ready else "") + (", releases" if self.releases else "")
        return f"skinny {self.rows}x{self.columns}x{self.block_k}/{self.parts}, {self.early} early{more}"

    def shared(self, sizes: GemmSizes) -> int:
        """Return the bytes of shared memory, at most. Of two sides a chunk's weights are next to the following
        chunk's, and the warps' sums of squares are there, too."""
        weights = max(self.early, sizes.sides) * sizes.sides * self.columns * sizes.weight_bytes
        return self.block_k * (weights + 2 * self.rows * sizes.row_bytes) + 4 * self.parts * self.rows

    def why_not(self, gpu: Gpu | None, sizes: GemmSizes) -> str | None:
        if why := too_large(self, self.shared(sizes), gpu):
            return why
        return None if sizes.rows <= self.rows else f"{self} is for {self.rows} rows, not {sizes.rows}"

    def cost(self, gpu: Gpu | None, sizes: GemmSizes) -> tuple[float, ...]:
        return (0.0,)


def skinny(sizes: GemmSizes, gpu: Gpu | None) -> Skinny:
    """Return the fastest config on an H200. With less shared memory it loads fewer weights early, and then less of K in
    a chunk."""
    columns = min(32 if sizes.pairs and sizes.groups == 1 else 16, power_of_two(sizes.columns))
    whole = power_of_two(sizes.k)
    parts = 16 if whole > 2048 else 8
    block_k = min(max(whole // 4, min(whole, parts * 32)), 1024)
    # Beyond 4096 the early weights would not fit in shared memory.
    early = -(-sizes.k // block_k) if whole <= 4096 else 1
    config = Skinny(columns, max(1, min(parts, block_k // 16)), block_k, 16, early)
    while config.early > 1 and config.shared(sizes) > shared_limit(gpu):
        if config.early > sizes.sides:
            config = replace(config, early=config.early - 1)
        else:
            config = replace(config, block_k=config.block_k // 2, parts=min(config.parts, config.block_k // 32))
    return config


@dataclass(frozen=True)
class OneRow:
    """One row, without tensor cores (`triton_row`): output columns of a tile, and tiles of a program."""

    columns: int
    tiles: int

    rows: ClassVar[int] = 1
    warps: ClassVar[int] = 8

    def __str__(self) -> str:
        return f"one row by {self.tiles} x {self.columns}"

    def shared(self, sizes: GemmSizes) -> int:
        """Return the bytes of shared memory, at most: those of the row, and of each warp's sums."""
        return power_of_two(sizes.k) * 4 + 64 * self.warps * self.columns * sizes.sides

    def why_not(self, gpu: Gpu | None, sizes: GemmSizes) -> str | None:
        if sizes.rows > 1 or sizes.layer_norm:
            return f"{self} needs a single row, and applies a LayerNorm only to paired rows"
        if sizes.k * sizes.weight_bytes % 4:
            return f"{self} needs weight rows of a multiple of 4 bytes"
        return too_large(self, self.shared(sizes), gpu)

    def cost(self, gpu: Gpu | None, sizes: GemmSizes) -> tuple[float, ...]:
        return (0.0,)


@dataclass(frozen=True)
class Pipelined:
    """K passes through shared memory in `stages` (`triton_pipelined`).

    Rows, columns and K of a tile, programs that share K (`split`), warps. `prefetch`: weights are fetched into the L2
    cache before the wait; `tma`: tiles come by the tensor memory accelerator; `weights_first`: weights are the
    product's first operand, which on Hopper may come from registers.
    """

    rows: int
    columns: int
    block_k: int
    split: int = 1
    stages: int = 4
    warps: int = 4
    prefetch: bool = False
    tma: bool = False
    weights_first: bool = False

    def __str__(self) -> str:
        more = f", K in {self.split}" if self.split > 1 else ""
        more += ", weights first" if self.weights_first else ""
        more += (", prefetch" if self.prefetch else "") + (", TMA" if self.tma else "")
        return f"pipelined {self.rows}x{self.columns}x{self.block_k}, {self.stages} stages, {self.warps} warps{more}"

    def blocks(self, sizes: GemmSizes) -> int:
        """Return the number of programs."""
        return sizes.groups * -(-sizes.columns // self.columns) * -(-sizes.rows // self.rows) * self.split

    def shared(self, sizes: GemmSizes) -> int:
        """Return the bytes of shared memory, at most."""
        rows = self.rows * sizes.row_bytes
        stage = rows + sizes.sides * self.columns * sizes.weight_bytes
        # Rows that the kernel norms go back to memory: only the first operand may come from registers.
        normed = rows if self.weights_first and sizes.pairs else 0
        return self.block_k * (self.stages * stage + normed) + (_BARRIERS if self.tma else 0)

    def workspace(self, sizes: GemmSizes) -> tuple[int, int]:
        """Return the elements of the float32 parts and of the int32 counters that programs sharing K need."""
        if self.split == 1:
            return 0, 0
        blocks = self.blocks(sizes)
        return blocks * self.rows * self.columns, blocks // self.split

    def why_not(self, gpu: Gpu | None, sizes: GemmSizes) -> str | None:
        if why := too_large(self, self.shared(sizes), gpu):
            return why
        if self.split > 1 and (sizes.pairs or sizes.layer_norm):
            return "only plain products can be split along K"
        if self.rows * self.columns * sizes.sides > 128 * 32 * self.warps:
            return f"{self} has more sums than registers"
        return None

    def cost(self, gpu: Gpu | None, sizes: GemmSizes) -> tuple[float, ...]:
        """Weights are read once, by as many programs as the GPU runs at a time; then the larger tile is better."""
        return imbalance(gpu, self.blocks(sizes)), -self.rows, -self.columns


@dataclass(frozen=True)
class Library:
    """A product of cuBLAS, its sums in memory in the dtype of the rows, and a kernel after it (`triton_library`)."""

    def __str__(self) -> str:
        return "cuBLAS"


TritonConfig = Skinny | OneRow | Pipelined
GemmConfig = TritonConfig | Library | HopperTile


def candidates(gpu: Gpu | None, sizes: GemmSizes) -> list[TritonConfig]:
    """Return the Triton configs worth measuring, the one to use unmeasured first."""
    return [*_skinny(gpu, sizes), *_one_row(gpu, sizes), *_pipelined(gpu, sizes, (1, 2, 4, 8))[:MOST_MEASURED]]


def default(gpu: Gpu | None, sizes: GemmSizes) -> TritonConfig:
    """Return the config of a product that nobody measures and that has no workspace."""
    return [*_skinny(gpu, sizes), *_pipelined(gpu, sizes, (1,))][0]


def variants(gpu: Gpu | None, sizes: GemmSizes, config: TritonConfig) -> list[TritonConfig]:
    """Return the config, and others of its tile.

    With so few stages that the next kernel's programs fit on a multiprocessor next to its own, with less of K in a
    stage, with prefetched weights where kernels can start early, with tiles by TMA, and with weights as the first
    operand where that is multiplied by 64 rows at a time. Of `Skinny` the one that lets the next kernel start early.
    """
    if isinstance(config, Skinny) and gpu is not None and gpu.dependent_launch:
        return [config, replace(config, releases=True)]
    if isinstance(config, (Skinny, OneRow)):
        return [config]
    found = [config]
    half = NO_LIMIT if gpu is None else gpu.shared_per_multiprocessor // 2 - 1024
    if config.shared(sizes) > half:
        fewer = (replace(config, stages=stages) for stages in range(config.stages - 1, 1, -1))
        found += [other for other in fewer if other.shared(sizes) <= half][:1]
    if config.block_k > 64:
        less = _deepest(gpu, sizes, config.rows, config.columns, 64, config.split)
        found += [] if less is None else [less]
    if gpu is not None and gpu.dependent_launch:
        early = [replace(other, prefetch=True) for other in found[:2]]
        first = gpu.wgmma and _fills_wgmma(config.columns) and not config.weights_first
        turned = [replace(early[-1], weights_first=True)] if first else []
        tma = gpu.tma and all(sizes.k * size % 16 == 0 for size in (sizes.weight_bytes, sizes.row_bytes))
        by_tma = [replace(other, tma=True) for other in (config, *early, *turned)] if tma else []
        found += [other for other in (*early, *turned, *by_tma) if other.why_not(gpu, sizes) is None]
    return [*found]


def without_triton(gpu: Gpu | None, sizes: GemmSizes) -> list[Library | HopperTile]:
    """Return cuBLAS and the Hopper GEMM's configs, to be measured against the best of Triton's.

    For many rows; cuBLAS only for weights of the rows' dtype, the Hopper GEMM also for weights of one byte. They read
    and write moments of the rows, and support no pinned rows.
    """
    if sizes.rows < LIBRARY_ROWS:
        return []
    widened, paired = sizes.weight_bytes < sizes.row_bytes, 2 * sizes.columns if sizes.pairs else 0
    own = few_rows(gpu, sizes.rows, sizes.n, sizes.k, paired, widened=widened) if sizes.row_bytes == 2 else []
    # The kernel after cuBLAS norms pairs alone.
    return [*([] if widened or sizes.layer_norm else [Library()]), *own]


def moments_columns(sizes: GemmSizes, config: Pipelined | Skinny | Library | HopperTile) -> int:
    """Return the columns of the tiles in which a product writes moments of its output."""
    if isinstance(config, (Pipelined, Skinny)):
        return config.columns
    return sizes.columns if isinstance(config, Library) else MOMENTS_OF


def _skinny(gpu: Gpu | None, sizes: GemmSizes) -> list[Skinny]:
    """Return the fastest config on an H200, and where kernels can start early the one whose weights are ready."""
    config = skinny(sizes, gpu)
    if config.why_not(gpu, sizes):
        return []
    early = gpu is not None and gpu.dependent_launch
    return [config, *([replace(config, ready=True)] if early else [])]


def _one_row(gpu: Gpu | None, sizes: GemmSizes) -> list[OneRow]:
    """Return configs with tiles of 8, 16 and 32 KB, and as many programs as run at once."""
    if sizes.rows > 1:
        return []
    at_once = (128 if gpu is None else gpu.multiprocessors) * (32 // OneRow.warps)
    column, found = power_of_two(sizes.k) * sizes.weight_bytes * sizes.sides, []
    for kilobytes in (8, 16, 32):
        columns = min(power_of_two(sizes.columns), max(1, kilobytes * 1024 // column))
        found.append(OneRow(columns, -(-sizes.groups * -(-sizes.columns // columns) // at_once)))
    return [config for config in dict.fromkeys(found) if config.why_not(gpu, sizes) is None]


def _pipelined(gpu: Gpu | None, sizes: GemmSizes, splits: tuple[int, ...]) -> list[Pipelined]:
    rows = sizes.rows
    tall = (16,) if rows <= 16 else (32, 16) if rows <= 32 else (64, 32) if rows <= 64 else (64, 128)
    found: dict[tuple[int, int, int], Pipelined] = {}
    for height, columns, block_k, split in itertools.product(tall, (16, 32, 64, 128), (128, 64), splits):
        config = _deepest(gpu, sizes, height, columns, block_k, split)
        if config is not None:
            found.setdefault((height, columns, split), config)
    return cheapest(found.values(), gpu, sizes)


def _deepest(gpu: Gpu | None, sizes: GemmSizes, rows: int, columns: int, block_k: int, split: int) -> Pipelined | None:
    """Return the config with the most stages; None if the tile is larger than the product or does not fit."""
    if columns > max(16, power_of_two(sizes.columns)) or split * block_k > max(64, power_of_two(sizes.k)):
        return None
    warps = 4 if rows * columns * sizes.sides <= 64 * 64 else 8
    # Weights of one byte are widened in registers, from where only a first operand may come.
    first = gpu is not None and gpu.wgmma and sizes.weight_bytes < sizes.row_bytes and _fills_wgmma(columns)
    return deepest(Pipelined(rows, columns, block_k, split, warps=warps, weights_first=first), (5, 4, 3, 2), gpu, sizes)


def _fills_wgmma(columns: int) -> bool:
    """Return whether this many weight rows, as the first operand, are whole tiles of Hopper's products."""
    return columns % 64 == 0


def known(
    device: torch.device, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int, *, inside: bool = False
) -> HopperTile | None:
    """Return the config that is faster than cuBLAS, as measured or else by the table; None if none is known.

    Arguments as `hopper.planned`. `inside`: the product norms its input or adds to the residual, so the table comes
    first.
    """
    runtime = current(device)
    table = hopper.planned(runtime.gpu, kind, activation, rows, n, k)
    found = measured(measurement(kind, activation, rows, n, k, inside=inside), device)
    if found is None or (inside and table is not None):
        return table
    return None if isinstance(found, Library) else found


def measurement(
    kind: torch.dtype, activation: Activation, rows: int, n: int, k: int, *, inside: bool = False
) -> str:  # fmt: skip
    """Return the name under which a product of many rows is measured (`choice.tune`)."""
    return f"GEMM {kind} {activation} {rows}x{n}x{k}" + (", norm inside" if inside else "")
