"""Products of many rows on Hopper in CUDA C++ (`product.cu`, `epilogue.cu`): tiles, their shared memory, tensor maps
and launches.

Knows matrices and epilogues, not layers or models. Which tiling is fast for which shape is `plan`'s table, measured on
an H200; every tiling that `Tiling.check` accepts is right for every shape that `fits` accepts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.ops.cuda.runtime import source_of
from vla_accel.ops.gpu import Gpu
from vla_accel.ops.reference import MOMENTS_OF

CAPABILITY = (9, 0)
ARCHITECTURE = "sm_90a"
SHARED_LIMIT, SHARED_MULTIPROCESSOR = 232_448, 233_472
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
_MAP_TYPES = {torch.bfloat16: 9, torch.float16: 6, torch.float8_e4m3fn: 0}  # CUtensorMapDataType; bytes for FP8
_SWIZZLE_128, _PROMOTE_256 = 3, 3
ACTIVATIONS = {"none": 0, "gelu": 1, "geglu": 2}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Memory(NamedTuple):
    """A block's shared memory, in bytes: where the output is staged, where the sums of others arrive, where the
    barriers are (and the norms behind them), and all of it."""

    staging: int
    exchange: int
    barriers: int
    size: int


@dataclass(frozen=True)
class Tiling:
    """How a product is cut; the names are `product.cu`'s.

    A block takes 64 * groups * blocks weight rows and parts * width tokens; a cluster is across * along * split blocks.
    `resident`: blocks a multiprocessor; `persistent`: as many blocks as fit at once take all tiles, one after another.
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
        """Rows of weights and of tokens that a block fetches for itself and those that share them: whole eights."""
        return _round_up(-(-self.weight_rows // self.along), 8), _round_up(-(-self.tokens // self.across), 8)

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

    def memory(self, activation: str, normed: bool = False) -> Memory:
        """How a block uses its shared memory."""
        ring = self.stages * (self.weight_rows + self.tokens) * 128
        pitch = (32 if activation == "geglu" else 64) * 2 + 16
        share = 8 * -(-self.tokens // (8 * self.split)) if self.split > 1 else self.width
        staged = self.groups * share * pitch
        sums = self.weight_rows * share * (self.split - 1) * 4
        rest = 16 * self.stages + (8 * self.tokens if normed else 0) + 1024
        staging = exchange = 0
        end = max(ring, staged)
        if self.persistent:
            staging, end = ring, ring + staged
        elif sums and _round_up(max(ring, staged) + sums, 16) + rest <= self._limit:
            # Stages and sums side by side: nobody waits before it sends.
            exchange = max(ring, staged)
            end = exchange + sums
        elif sums:
            staging, end = sums, max(ring, sums + staged)
        barriers = _round_up(end, 16)
        return Memory(staging, exchange, barriers, barriers + rest)

    @property
    def _limit(self) -> int:
        return min(SHARED_LIMIT, SHARED_MULTIPROCESSOR // self.resident - 1024)

    def check(self, activation: str = "none", *, residual: bool = False, normed: bool = False) -> str:
        """Empty for a tiling that the kernel can run; otherwise the reason."""
        if self.width % 8 or not 8 <= self.width <= 256:
            return f"a width of {self.width} is no multiple of 8 up to 256"
        if self.split > 1 and self.persistent:
            return "a split tile cannot be persistent"
        if max(self.shares) > 512 or self.cluster > 16 or any(share > 256 and share % 16 for share in self.shares):
            return "it fetches too many rows, or its cluster is too large"
        if normed and self.persistent:
            return "a block that takes several tiles has the norms of one"
        if self.memory(activation, normed).size > self._limit:
            return "it needs too much shared memory"
        accumulators = self.blocks * self.tokens // 2
        if residual:
            accumulators += self.blocks * 4 * -(-self.tokens // (16 * self.split))
        # One wgmma's must fit among those of the start, too.
        if accumulators + 32 > self.registers[2] or self.width // 2 + 24 > self.registers[0]:
            return "it needs too many registers"
        return ""


@dataclass(frozen=True)
class Norm:
    """A norm without weights of a product's rows x (M, K): LayerNorm with `weight_sums`, otherwise RMSNorm.

    `moments` (K / 64, M, 2) float32: mean and sum of squared deviations of every 64 columns of x, as a product that
    adds to x writes them. `weight_sums` (N,) float32: of each row of the weight.
    """

    moments: Tensor
    weight_sums: Tensor | None
    eps: float


def source(
    kind: torch.dtype, narrow: bool, activation: str, tiling: Tiling, *, residual: bool = False, norm: str = "none",
    k: int = 0,
) -> str:  # fmt: skip
    """The CUDA C++ of one kernel. `kind`: dtype of both operands; `narrow`: FP8 output; `residual`: the product is
    added to what `out` holds; `norm` of the rows of x: none, rms or layer; `k`: their width, for a norm."""
    memory = tiling.memory(activation, norm != "none")
    count = tiling.width // 2
    sizes = {
        "KIND": _KINDS[kind], "NARROW": int(narrow), "ACTIVATION": ACTIVATIONS[activation], "GROUPS": tiling.groups,
        "BLOCKS": tiling.blocks, "PARTS": tiling.parts, "WIDTH": tiling.width, "STAGES": tiling.stages,
        "ACROSS": tiling.across, "ALONG": tiling.along, "SPLIT": tiling.split,
        **dict(zip(("LIMIT", "FETCHING", "MULTIPLYING"), tiling.registers, strict=True)),
        "RESIDUAL": int(residual), "NORM": ("none", "rms", "layer").index(norm), "MOMENTS": k // MOMENTS_OF,
        "STAGING": memory.staging, "EXCHANGE": memory.exchange, "BARRIERS": memory.barriers,
        "REGISTERS": '"' + ", ".join(f"%{i}" for i in range(count)) + '"',
        "A": f'"%{count}"', "B": f'"%{count + 1}"', "ADD": f'"%{count + 2}"',
        "OPERANDS(d)": ", ".join(f'"+f"(d[{i}])' for i in range(count)),
    }  # fmt: skip
    return source_of("".join(f"#define {name} {value}\n" for name, value in sizes.items()), "epilogue", "product")


class _Map(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class _Call(ctypes.Structure):
    _fields_ = [
        ("bias", ctypes.c_void_p), ("out", ctypes.c_void_p), ("scale", ctypes.c_float), ("inverse", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rows", "columns", "chunks", "token_tiles", "tiles")),
        *((name, ctypes.c_void_p) for name in ("moments_out", "moments", "weight_sums")), ("eps", ctypes.c_float),
    ]  # fmt: skip


def _map(matrix: Tensor, box: int) -> _Map:
    """The tensor map of a row-major matrix: boxes of `box` rows by 128 bytes, swizzled; what is outside reads zero."""
    from vla_accel.ops.cuda.runtime import _check_driver, _driver

    rows, columns = matrix.shape
    size = matrix.element_size()
    memory = ctypes.create_string_buffer(192)
    aligned = _round_up(ctypes.addressof(memory), 64)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), _MAP_TYPES[matrix.dtype], u32(2), ctypes.c_void_p(matrix.data_ptr()),
        (u64 * 2)(columns, rows), (u64 * 1)(columns * size), (u32 * 2)(128 // size, box), (u32 * 2)(1, 1), 0,
        _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    _check_driver(status, f"tensor map of {tuple(matrix.shape)} {matrix.dtype}")
    return _Map.from_buffer_copy(ctypes.string_at(aligned, 128))


_GATE_UP = Tiling(2, 1, 2, 136, 4, persistent=True)
# By dtype, activation and (N, K): from how many rows to how many, and the tiling, for Gemma 2B and SigLIP. The fastest
# of many on an H200: SigLIP's inside the chain of two and of three views; Gemma's of two views and a prompt (544 rows),
# alone and together; Gemma's of three views (800 rows) follow from those by counting waves, and were timed together.
# SigLIP's BF16 products of two views are no faster than cuBLAS's alone: they win by the norms they take in. cuBLAS does
# the last FP8 one of two views at least as fast.
_TABLE: dict[tuple[str, str, int, int], tuple[tuple[int, int, Tiling], ...]] = {
    ("fp8", "geglu", 32_768, 2048): ((504, 544, _GATE_UP), (756, 816, _GATE_UP)),
    ("fp8", "none", 2048, 16_384): ((504, 544, Tiling(2, 1, 1, 136, 6, split=2)),
                                    (756, 800, Tiling(2, 1, 1, 200, 5, split=2))),
    ("fp8", "none", 2048, 2048): ((504, 544, Tiling(1, 1, 1, 136, 8)), (756, 800, Tiling(1, 1, 1, 200, 6))),
    ("half", "geglu", 32_768, 2048): ((504, 544, _GATE_UP), (756, 816, _GATE_UP)),
    ("half", "none", 2048, 16_384): ((504, 544, Tiling(2, 1, 1, 136, 6, split=2)),
                                     (756, 800, Tiling(2, 1, 1, 200, 5, split=2))),
    ("half", "none", 2048, 2048): ((504, 544, Tiling(1, 1, 1, 136, 8)), (756, 800, Tiling(1, 1, 1, 200, 6))),
    ("half", "none", 2560, 2048): ((504, 552, Tiling(1, 1, 1, 184, 6)), (756, 800, Tiling(2, 1, 1, 160, 5))),
    ("half", "none", 3456, 1152): ((473, 512, Tiling(2, 1, 1, 128, 4)), (705, 784, Tiling(3, 1, 1, 112, 4))),
    ("half", "none", 1152, 1152): ((473, 512, Tiling(1, 1, 1, 80, 8)), (705, 768, Tiling(1, 1, 1, 112, 8))),
    ("half", "gelu", 4352, 1152): ((473, 512, Tiling(3, 1, 1, 104, 4)), (705, 768, Tiling(3, 1, 1, 160, 4))),
    ("half", "none", 1152, 4352): ((473, 512, Tiling(2, 1, 1, 128, 4, split=3)),
                                   (705, 768, Tiling(2, 1, 1, 128, 5, split=2))),
    ("fp8", "none", 3456, 1152): ((449, 512, Tiling(2, 1, 1, 128, 4)), (705, 784, Tiling(3, 1, 1, 112, 5))),
    ("fp8", "none", 1152, 1152): ((449, 512, Tiling(1, 1, 1, 128, 8)), (705, 768, Tiling(1, 1, 1, 128, 8))),
    ("fp8", "gelu", 4352, 1152): ((449, 528, Tiling(2, 1, 1, 176, 4)), (705, 768, Tiling(2, 1, 1, 256, 4))),
    ("fp8", "none", 1152, 4352): ((705, 768, Tiling(1, 1, 1, 128, 8)),),
}  # fmt: skip


def plan(x: Tensor, weight: Tensor, out: Tensor, activation: str) -> Tiling | None:
    """The tiling for a product that this kernel does faster than cuBLAS; None for others."""
    if unfit(x, weight, out, activation):
        return None
    return planned(x.device, x.dtype, activation, x.shape[0], *weight.shape)


def planned(device: torch.device, kind: torch.dtype, activation: str, rows: int, n: int, k: int) -> Tiling | None:
    """What `plan` takes for these sizes; `kind` is the dtype of both operands."""
    gpu = Gpu.of(device)
    if gpu is None or gpu.capability != CAPABILITY:
        return None
    name = "fp8" if kind == torch.float8_e4m3fn else "half"
    for least, most, tiling in _TABLE.get((name, activation, n, k), ()):
        if least <= rows <= most:
            return tiling
    return None


def unfit(x: Tensor, weight: Tensor, out: Tensor, activation: str) -> str:
    """Empty when the kernel can take these matrices; otherwise the reason."""
    if x.dtype not in _KINDS or weight.dtype != x.dtype:
        return f"x is {x.dtype}, the weight {weight.dtype}; it takes two of BF16, FP16 or FP8"
    wide = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
    if out.dtype not in (wide, torch.float8_e4m3fn):
        return f"out is {out.dtype}; for {x.dtype} it is {wide} or FP8"
    (rows, k), (n, k_weight) = x.shape, weight.shape
    columns = n // 2 if activation == "geglu" else n
    if k != k_weight or out.shape != (rows, columns) or (activation == "geglu" and n % 16):
        return f"x is {tuple(x.shape)}, the weight {tuple(weight.shape)}, out {tuple(out.shape)}"
    if k * x.element_size() % 16 or columns * out.element_size() % 16 or not rows:
        return "rows of x and of out are whole pieces of 16 bytes"
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        return "its matrices are contiguous"
    if any(matrix.data_ptr() % 16 for matrix in (x, weight, out)):
        return "its matrices begin at multiples of 16 bytes"
    return ""


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gpu: Gpu, tiling: Tiling, activation: str = "none",
    scale: float = 1.0, inverse_scale: float | None = None, moments: Tensor | None = None, norm: Norm | None = None,
    dependent: bool = True,
) -> None:  # fmt: skip
    """out = activation(scale * x weightᵀ + bias), times `inverse_scale` and saturated where out is float8_e4m3fn.

    x (M, K), weight (N, K), bias (N,), out (M, N), or (M, N / 2) for "geglu", whose weight rows alternate: eight of
    gate, eight of up. `moments` (N / 64, M, 2) float32: the product is added to `out`, and the new rows' moments are
    written (see `Norm`). `norm`: x is normed first, unrounded. `dependent`: may start before its predecessor on the
    stream has finished. Raises EngineError for what the kernel cannot take.
    """
    from vla_accel.ops.cuda.runtime import load_module

    chunks = -(-x.shape[1] * x.element_size() // 128)
    options = {"residual": moments is not None, "normed": norm is not None}
    reason = unfit(x, weight, out, activation) or tiling.check(activation, **options)
    reason = reason or _unfit_norms(x, weight, out, activation, moments, norm)
    if activation == "geglu" and bias is not None:
        reason = reason or "a GeGLU has no bias"
    if -(-chunks // tiling.split) * (tiling.split - 1) >= chunks:
        reason = reason or f"{chunks} chunks of K leave a part of {tiling.split} empty"
    if reason:
        raise EngineError(f"product: {reason}")
    narrow = out.dtype == torch.float8_e4m3fn
    kind = "none" if norm is None else "rms" if norm.weight_sums is None else "layer"
    width = 0 if norm is None else x.shape[1]
    text = source(x.dtype, narrow, activation, tiling, residual=moments is not None, norm=kind, k=width)
    shared = tiling.memory(activation, norm is not None).size
    module = load_module(text, {"product": shared}, ARCHITECTURE, x.device)
    rows, n = x.shape[0], weight.shape[0]
    boxes = [share // 2 if share > 256 else share for share in tiling.shares]
    maps = (_map(weight, boxes[0]), _map(x, boxes[1]))
    token_tiles = -(-rows // (tiling.tokens * tiling.along))
    tiles = token_tiles * -(-n // (tiling.weight_rows * tiling.across))
    call = _Call(
        _address(bias), out.data_ptr(), scale, inverse_scale or 1.0, rows, out.shape[1], chunks, token_tiles, tiles,
        _address(moments), None if norm is None else _address(norm.moments),
        None if norm is None else _address(norm.weight_sums), 0.0 if norm is None else norm.eps,
    )  # fmt: skip
    clusters = tiles
    if tiling.persistent:
        clusters = min(tiles, gpu.multiprocessors * tiling.resident // tiling.cluster)
    module.launch(
        "product", clusters * tiling.cluster, tiling.threads, (*maps, call), cluster=tiling.cluster, dependent=dependent
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _unfit_norms(
    x: Tensor, weight: Tensor, out: Tensor, activation: str, moments: Tensor | None, norm: Norm | None
) -> str:
    """Empty when the kernel can add to `out`, and norm x, with these; otherwise the reason."""

    def wrong(given: Tensor, columns: int, rows: int) -> str:
        expected, got = (columns // MOMENTS_OF, rows, 2), tuple(given.shape)
        whole = given.is_contiguous() and columns % MOMENTS_OF == 0
        if whole and got == expected and given.dtype == torch.float32:
            return ""
        return f"moments of {columns} columns are a whole float32 {expected}, got {given.dtype} {got}"

    reason = ""
    if moments is not None:
        if activation != "none" or out.dtype == torch.float8_e4m3fn:
            reason = f"only a plain product is added to a residual, got {activation} into {out.dtype}"
        reason = reason or wrong(moments, out.shape[1], len(out))
    if norm is not None:
        if x.dtype == torch.float8_e4m3fn or activation == "geglu":
            reason = (
                reason or f"only BF16 and FP16 rows are normed, and not for a GeGLU, got {x.dtype} for {activation}"
            )
        reason = reason or wrong(norm.moments, x.shape[1], len(x))
        sums = norm.weight_sums
        if sums is not None and (sums.shape != (len(weight),) or sums.dtype != torch.float32):
            reason = reason or f"sums of {len(weight)} weight rows, got {sums.dtype} {tuple(sums.shape)}"
    return reason
