"""Launches of Hopper's GEMM for many rows (`gemm.cu`, `epilogue.cu`): source, tensor maps and checks.

Knows matrices and epilogues, not layers or models. `table.py` holds the fast tilings; every tiling that
`Tiling.why_not` accepts is correct for every shape that `why_not` accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.kernels.activation import MACROS, Activation
from vla_accel.kernels.chain import launch_cuda
from vla_accel.kernels.gemm.hopper.arguments import Call, Suffix, SuffixCall
from vla_accel.kernels.gemm.hopper.tiling import Tiling
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.nvrtc import source_of
from vla_accel.kernels.reference import MOMENTS_OF
from vla_accel.kernels.tensor_map import TensorMap, tensor_map
from vla_accel.kernels.wgmma import wgmma

ARCHITECTURE = "sm_90a"
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
_WGMMA = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True)
class Norm:
    """A norm without weights of the rows x (M, K): LayerNorm with `weight_sums`, otherwise RMSNorm.

    `moments` (K / 64, M, 2) float32: mean and sum of squared deviations of every 64 columns of x, as a product that
    adds to x writes them. `weight_sums` (N,) float32: the sum of each row of the weight.
    """

    moments: Tensor
    weight_sums: Tensor | None
    eps: float


def source(
    kind: torch.dtype,
    fp8_out: bool,
    activation: Activation,
    tiling: Tiling,
    *,
    residual: bool = False,
    norm: str = "none",
    k: int = 0,
    suffix: int = 0,
) -> str:
    """Return the CUDA C++ source of one kernel.

    Args:
        kind: dtype of both operands.
        fp8_out: whether the output is FP8.
        residual: whether the product is added to `out`.
        norm: of the rows of x: "none", "rms", "layer", or "squares" for the moments of a suffix.
        k: columns of x, for a norm.
        suffix: the macro SUFFIX (`suffix.cu`).
    """
    memory = tiling.memory(activation, norm != "none")
    sizes = {
        "KIND": _KINDS[kind], "NARROW": int(fp8_out), "ACTIVATION": activation.code, "GROUPS": tiling.groups,
        "BLOCKS": tiling.blocks, "PARTS": tiling.parts, "WIDTH": tiling.width, "STAGES": tiling.stages,
        "ACROSS": tiling.across, "ALONG": tiling.along, "SPLIT": tiling.split,
        **dict(zip(("LIMIT", "FETCHING", "MULTIPLYING"), tiling.registers, strict=True)),
        "RESIDUAL": int(residual), "NORM": ("none", "rms", "layer", "squares").index(norm), "MOMENTS": k // MOMENTS_OF,
        "STAGING": memory.staging, "EXCHANGE": memory.exchange, "BARRIERS": memory.barriers,
        "SUFFIX": suffix, **MACROS,
    }  # fmt: skip
    files = ("gemm/hopper/suffix", "gemm/hopper/epilogue", "gemm/hopper/gemm")
    blocks = Suffix.cpp + SuffixCall.cpp if suffix else Call.cpp
    return source_of(sizes, *files, generated=blocks + wgmma(f"wgmma_{_WGMMA[kind]}", tiling.width, _WGMMA[kind]))


def rows_map(matrix: Tensor, rows: int) -> TensorMap:
    """The tensor map of a row-major matrix for boxes of `rows` rows by 128 bytes."""
    return tensor_map(matrix, (rows, 128 // matrix.element_size()))


def why_not_on(gpu: Gpu) -> str | None:
    """Explain why the kernel does not run on a GPU; None if it does."""
    if gpu.architecture != ARCHITECTURE:
        return f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
    return None


def why_not(gpu: Gpu, x: Tensor, weight: Tensor, out: Tensor, activation: Activation) -> str | None:
    """Explain why the kernel does not take these matrices on a GPU; None if it does. Arguments as `gemm`."""
    if reason := why_not_on(gpu):
        return reason
    if x.dtype not in _KINDS or weight.dtype != x.dtype:
        return f"x is {x.dtype}, the weight {weight.dtype}; it takes two of BF16, FP16 or FP8"
    wide = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
    if out.dtype not in (wide, torch.float8_e4m3fn):
        return f"out is {out.dtype}; for {x.dtype} it is {wide} or FP8"
    (rows, k), (n, k_weight) = x.shape, weight.shape
    columns = n // 2 if activation.gated else n
    if k != k_weight or out.shape != (rows, columns) or (activation.gated and n % 16):
        return f"x is {tuple(x.shape)}, the weight {tuple(weight.shape)}, out {tuple(out.shape)}"
    if k * x.element_size() % 16 or columns * out.element_size() % 16 or not rows:
        return "rows of x and of out are whole pieces of 16 bytes"
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        return "its matrices are contiguous"
    if any(matrix.data_ptr() % 16 for matrix in (x, weight, out)):
        return "its matrices begin at multiples of 16 bytes"
    return None


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gpu: Gpu,
    tiling: Tiling,
    activation: Activation = Activation.NONE,
    scale: float = 1.0,
    inverse_scale: float | None = None,
    moments: Tensor | None = None,
    norm: Norm | None = None,
) -> None:
    """out = activation(scale * x weightᵀ + bias), times `inverse_scale` and saturated if out is float8_e4m3fn.

    Args:
        x: (M, K).
        weight: (N, K). For GEGLU and SWIGLU its rows alternate: eight of gate, eight of up.
        bias: (N,) or None.
        out: (M, N), or (M, N / 2) for GEGLU and SWIGLU.
        moments: (N / 64, M, 2) float32: the product is added to `out`, and the moments of the new rows are written.
        norm: x is normed first, without rounding.

    Raises:
        EngineError: the kernel does not take these arguments.
    """
    from vla_accel.kernels.nvrtc import load_module

    chunks = -(-x.shape[1] * x.element_size() // 128)
    options = {"residual": moments is not None, "normed": norm is not None}
    reason = why_not(gpu, x, weight, out, activation) or tiling.why_not(activation, **options)
    reason = reason or _why_no_norms(x, weight, out, activation, moments, norm)
    if activation.gated and bias is not None:
        reason = reason or "a gated product has no bias"
    if -(-chunks // tiling.split) * (tiling.split - 1) >= chunks:
        reason = reason or f"{chunks} chunks of K leave a part of {tiling.split} empty"
    if reason:
        raise EngineError(f"gemm: {reason}")
    fp8_out = out.dtype == torch.float8_e4m3fn
    kind = "none" if norm is None else "rms" if norm.weight_sums is None else "layer"
    width = 0 if norm is None else x.shape[1]
    text = source(x.dtype, fp8_out, activation, tiling, residual=moments is not None, norm=kind, k=width)
    shared = tiling.memory(activation, norm is not None).size
    module = load_module(text, {"gemm": shared}, ARCHITECTURE, x.device)
    rows, n = x.shape[0], weight.shape[0]
    boxes = [share // 2 if share > 256 else share for share in tiling.shares]
    maps = (rows_map(weight, boxes[0]), rows_map(x, boxes[1]))
    token_tiles = -(-rows // (tiling.tokens * tiling.along))
    tiles = token_tiles * -(-n // (tiling.weight_rows * tiling.across))
    call = Call(
        _address(bias), out.data_ptr(), scale, inverse_scale or 1.0, rows, out.shape[1], chunks, token_tiles, tiles,
        _address(moments), None if norm is None else _address(norm.moments),
        None if norm is None else _address(norm.weight_sums), 0.0 if norm is None else norm.eps,
    )  # fmt: skip
    clusters = tiles
    if tiling.persistent:
        clusters = min(tiles, gpu.multiprocessors * tiling.resident // tiling.cluster)
    launch_cuda(module, "gemm", clusters * tiling.cluster, tiling.threads, (*maps, call), cluster=tiling.cluster)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _why_no_norms(
    x: Tensor, weight: Tensor, out: Tensor, activation: Activation, moments: Tensor | None, norm: Norm | None
) -> str | None:
    """Explain why the kernel cannot add to `out` or norm x with these; None if it can."""

    def wrong(given: Tensor, columns: int, rows: int) -> str | None:
        expected, got = (columns // MOMENTS_OF, rows, 2), tuple(given.shape)
        whole = given.is_contiguous() and columns % MOMENTS_OF == 0
        if whole and got == expected and given.dtype == torch.float32:
            return None
        return f"moments of {columns} columns are a whole float32 {expected}, got {given.dtype} {got}"

    reason = None
    if moments is not None:
        if activation is not Activation.NONE or out.dtype == torch.float8_e4m3fn:
            reason = f"only a plain product is added to a residual, got {activation} into {out.dtype}"
        reason = reason or wrong(moments, out.shape[1], len(out))
    if norm is not None:
        sums = norm.weight_sums
        if x.dtype == torch.float8_e4m3fn:
            reason = reason or f"only BF16 and FP16 rows are normed, got {x.dtype}"
        if sums is not None and activation.gated:
            reason = reason or f"only an RMSNorm comes before a gated product, got a LayerNorm before {activation}"
        reason = reason or wrong(norm.moments, x.shape[1], len(x))
        if sums is not None and (sums.shape != (len(weight),) or sums.dtype != torch.float32):
            reason = reason or f"sums of {len(weight)} weight rows, got {sums.dtype} {tuple(sums.shape)}"
    return reason
