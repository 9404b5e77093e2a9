"""How a suffix's products are cut into programs, which cuts a GPU has room for, and in which order to try them. Its
attention's cuts are in `vla_accel.kernels.attention.config`.

Plain arithmetic: it asks no device and imports no triton. Every cut that `why_not` accepts is right; which is fast is
measured where a program is built (`vla_accel.kernels.autotune`), and before that the first of `candidates` is taken.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from vla_accel.kernels.gemm.hopper.few import few
from vla_accel.kernels.gemm.hopper.tiling import Tiling as GemmTiling
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.reference import MOMENTS_OF
from vla_accel.numeric import power_of_two

MANY = 33
"""Rows from which on a product may also be the library's or the own GEMM's."""
MOST_TRIED = 6
"""Cuts that are measured of one product before the best one's variants: each is a kernel to compile at the first
start."""
_BARRIERS = 256
"""Bytes of shared memory, at most, of what tiles that come by TMA are waited for with."""


@dataclass(frozen=True)
class Product:
    """(rows, k) times `groups` * `sides` * `columns` weight rows: the heads of q/k/v in halves, gate and up, or a plain
    product. `weight`, `activation`: bytes of an element. `integers`: the weights are INT8, which other instructions
    widen than FP8: what is measured of the one says nothing about the other."""

    rows: int
    k: int
    columns: int
    groups: int = 1
    sides: int = 1
    weight: int = 2
    activation: int = 2
    integers: bool = False


@dataclass(frozen=True)
class Skinny:
    """Up to 16 rows: weights go to registers before the wait for the previous kernel (`kernels/skinny.py`). Columns and
    rows a program, K pieces (one a warp), K a chunk, chunks of weights fetched ahead of the wait."""

    columns: int
    parts: int
    block_k: int
    rows: int
    ahead: int

    def __str__(self) -> str:
        return f"skinny {self.rows}x{self.columns}x{self.block_k}/{self.parts}, {self.ahead} ahead"

    def blocks(self, product: Product) -> int:
        """Programs."""
        return product.groups * -(-product.columns // self.columns) * -(-product.rows // self.rows)

    def shared(self, product: Product) -> int:
        """Bytes of shared memory, at most. Of two sides a chunk's weights lie beside the next's, however few are ahead;
        the warps' sums of squares meet there, too."""
        weights = max(self.ahead, product.sides) * product.sides * self.columns * product.weight
        return self.block_k * (weights + 2 * self.rows * product.activation) + 4 * self.parts * self.rows

    @classmethod
    def of(cls, product: Product, gpu: Gpu | None) -> Skinny:
        """The cut that was the fastest on an H200; where the GPU has less shared memory, with fewer weights ahead, and
        then with less of K a chunk."""
        columns = min(32 if product.sides == 2 and product.groups == 1 else 16, power_of_two(product.columns))
        whole = power_of_two(product.k)
        parts = 16 if whole > 2048 else 8
        block_k = min(max(whole // 4, min(whole, parts * 32)), 1024)
        # Beyond 4096 the weights ahead would not fit in shared memory.
        ahead = -(-product.k // block_k) if whole <= 4096 else 1
        cut = cls(columns, max(1, min(parts, block_k // 16)), block_k, 16, ahead)
        while gpu is not None and cut.ahead > 1 and cut.shared(product) > gpu.shared_per_block:
            if cut.ahead > product.sides:
                cut = replace(cut, ahead=cut.ahead - 1)
            else:
                cut = replace(cut, block_k=cut.block_k // 2, parts=min(cut.parts, cut.block_k // 32))
        return cut


@dataclass(frozen=True)
class Pipelined:
    """K passes through shared memory in `stages` (`kernels/pipelined.py`): rows, columns and K of a tile, programs that
    share K (`split`), warps. `ahead`: weights are sent for, into the L2 cache, before the previous kernel has ended;
    `tma`: tiles come by the tensor memory accelerator instead of every thread's loads; `weights_first`: weights are the
    product's first operand, which on Hopper may come from registers."""

    rows: int
    columns: int
    block_k: int
    split: int = 1
    stages: int = 4
    warps: int = 4
    ahead: bool = False
    tma: bool = False
    weights_first: bool = False

    def __str__(self) -> str:
        more = f", K in {self.split}" if self.split > 1 else ""
        more += ", weights first" if self.weights_first else ""
        more += (", ahead" if self.ahead else "") + (", TMA" if self.tma else "")
        return f"pipelined {self.rows}x{self.columns}x{self.block_k}, {self.stages} stages, {self.warps} warps{more}"

    def blocks(self, product: Product) -> int:
        """Programs."""
        return product.groups * -(-product.columns // self.columns) * -(-product.rows // self.rows) * self.split

    def shared(self, product: Product) -> int:
        """Bytes of shared memory, at most."""
        rows = self.rows * product.activation
        stage = rows + product.sides * self.columns * product.weight
        # Rows whose norm is taken on the way go back to memory: only the first operand may come from registers.
        normed = rows if self.weights_first and product.sides > 1 else 0
        return self.block_k * (self.stages * stage + normed) + (_BARRIERS if self.tma else 0)

    def workspace(self, product: Product) -> tuple[int, int]:
        """Elements of the float32 parts and of the int32 counters that programs sharing K need."""
        if self.split == 1:
            return 0, 0
        blocks = self.blocks(product)
        return blocks * self.rows * self.columns, blocks // self.split


@dataclass(frozen=True)
class Library:
    """The library's product, its sums in memory in the rows' dtype, and a kernel behind it (`kernels/around.py`)."""

    def __str__(self) -> str:
        return "cuBLAS"


@dataclass(frozen=True)
class Own:
    """Hopper's own GEMM with a suffix's epilogues (`cuda/gemm/suffix.cu`)."""

    tiling: GemmTiling

    def __str__(self) -> str:
        t = self.tiling
        more = (f", K in {t.split}" if t.split > 1 else "") + (", room for two" if t.resident == 2 else "")
        return f"own GEMM {t.weight_rows}x{t.tokens}, {t.stages} stages{more}"


TritonTiling = Skinny | Pipelined
Tiling = TritonTiling | Library | Own


def beside(gpu: Gpu | None, product: Product) -> list[Library | Own]:
    """Ways without Triton that are worth measuring beside its best: for many rows and weights that are as the rows are.
    They take and write moments of the rows, and no pinned ones."""
    if product.rows < MANY or product.weight != product.activation:
        return []
    n = product.groups * product.sides * product.columns
    own = few(gpu, product.rows, n, product.k, product.sides * product.columns if product.sides > 1 else 0)
    return [Library(), *(Own(tiling) for tiling in (own if product.activation == 2 else ()))]


def moments_columns(product: Product, cut: Pipelined | Library | Own) -> int:
    """Columns of the tiles in which a product writes moments of its rows."""
    if isinstance(cut, Pipelined):
        return cut.columns
    return product.columns if isinstance(cut, Library) else MOMENTS_OF


def why_not(gpu: Gpu | None, product: Product, tiling: TritonTiling) -> str | None:
    """Why a GPU cannot run a product with this tiling; None where it can. Without a GPU there are no limits."""
    if tiling.shared(product) > (1 << 30 if gpu is None else gpu.shared_per_block):
        return f"{tiling} needs {tiling.shared(product)} bytes of shared memory a block"
    if isinstance(tiling, Skinny):
        return None if product.rows <= tiling.rows else f"{tiling} is for {tiling.rows} rows, not {product.rows}"
    if tiling.split > 1 and product.sides * product.groups > 1:
        return "programs share K of plain products alone"
    if tiling.rows * tiling.columns * product.sides > 128 * 32 * tiling.warps:
        return f"{tiling} has more sums than registers"
    return None


def candidates(gpu: Gpu | None, product: Product) -> list[TritonTiling]:
    """The cuts worth measuring on a GPU, all of which it can run; the one to take unmeasured comes first."""
    return [*_skinny(gpu, product), *_pipelined(gpu, product, (1, 2, 4, 8))[:MOST_TRIED]]


def variants(gpu: Gpu | None, product: Product, cut: TritonTiling) -> list[TritonTiling]:
    """The cut, and others of its tile: with so few stages that the next kernel's programs find room beside its own,
    with less of K a stage, with weights sent for ahead where kernels can start early, with tiles that come by TMA where
    there is one, and with weights as the first operand where it is multiplied by 64 rows at a time."""
    if isinstance(cut, Skinny):
        return [cut]
    found = [cut]
    half = 1 << 30 if gpu is None else gpu.shared_per_multiprocessor // 2 - 1024
    if cut.shared(product) > half:
        fewer = (replace(cut, stages=stages) for stages in range(cut.stages - 1, 1, -1))
        found += [other for other in fewer if other.shared(product) <= half][:1]
    if cut.block_k > 64:
        less = _deepest(gpu, product, cut.rows, cut.columns, 64, cut.split)
        found += [] if less is None else [less]
    if gpu is not None and gpu.dependent_launch:
        early = [replace(other, ahead=True) for other in found[:2]]
        first = gpu.wgmma and _fills_wgmma(cut.columns) and not cut.weights_first
        turned = [replace(early[-1], weights_first=True)] if first else []
        tma = gpu.tma and all(product.k * size % 16 == 0 for size in (product.weight, product.activation))
        by_tma = [replace(other, tma=True) for other in (cut, *early, *turned)] if tma else []
        found += [other for other in (*early, *turned, *by_tma) if why_not(gpu, product, other) is None]
    return [*found]


def unshared(gpu: Gpu | None, product: Product) -> list[Pipelined]:
    """As `candidates`, for kernels that know no other way than `Pipelined` and whose programs share no K."""
    return _pipelined(gpu, product, (1,))[:MOST_TRIED]


def default(gpu: Gpu | None, product: Product) -> TritonTiling:
    """The cut for one product alone: measured by nobody, and without a workspace."""
    return [*_skinny(gpu, product), *_pipelined(gpu, product, (1,))][0]


def _skinny(gpu: Gpu | None, product: Product) -> list[Skinny]:
    cut = Skinny.of(product, gpu)
    return [] if why_not(gpu, product, cut) else [cut]


def _pipelined(gpu: Gpu | None, product: Product, splits: tuple[int, ...]) -> list[Pipelined]:
    chips = 128 if gpu is None else gpu.multiprocessors
    tall = (16,) if product.rows <= 16 else (32, 16) if product.rows <= 32 else (64, 32) if product.rows <= 64 else ()
    sizes = itertools.product(tall or (64, 128), (16, 32, 64, 128), (128, 64), splits)
    found: dict[tuple[int, int, int], Pipelined] = {}
    for rows, columns, block_k, split in sizes:
        cut = _deepest(gpu, product, rows, columns, block_k, split)
        if cut is not None:
            found.setdefault((rows, columns, split), cut)
    # Weights are read once, by as many programs as the GPU runs at a time; then the larger tile.
    return sorted(
        found.values(), key=lambda cut: (abs(math.log2(cut.blocks(product) / chips)), -cut.rows, -cut.columns)
    )


def _deepest(gpu: Gpu | None, product: Product, rows: int, columns: int, block_k: int, split: int) -> Pipelined | None:
    """With as many stages as there is room for; None where the tile is larger than the product, or has no room."""
    if columns > max(16, power_of_two(product.columns)) or split * block_k > max(64, power_of_two(product.k)):
        return None
    warps = 4 if rows * columns * product.sides <= 64 * 64 else 8
    # Weights of one byte are widened in registers, from where only a first operand may come.
    first = gpu is not None and gpu.wgmma and product.weight < product.activation and _fills_wgmma(columns)
    for stages in (5, 4, 3, 2):
        cut = Pipelined(rows, columns, block_k, split, stages, warps, weights_first=first)
        if why_not(gpu, product, cut) is None:
            return cut
    return None


def _fills_wgmma(columns: int) -> bool:
    """Whether so many weight rows, as the first operand, are whole tiles of Hopper's products."""
    return columns % 64 == 0
