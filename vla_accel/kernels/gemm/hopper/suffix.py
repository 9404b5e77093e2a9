"""Launches of the GEMM for the rows of a suffix (`suffix.cu`): a gated residual with the moments for the next norm, and
gate and up, or heads, of rows that come with their moments.

Conventions as in `gemm/suffix.py`; operands have 16 bits. Weights keep their order in memory: a tensor map brings
the two rows of a pair together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch_cuda
from vla_accel.kernels.gemm.hopper import launch
from vla_accel.kernels.gemm.hopper.arguments import Suffix, SuffixCall
from vla_accel.kernels.gemm.hopper.launch import ARCHITECTURE, _address, rows_map
from vla_accel.kernels.gemm.hopper.tiling import Tiling
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_types import Heads, Rotation
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.reference import MOMENTS_OF
from vla_accel.kernels.tensor_map import TensorMap, tensor_map

ONTO, GATED, HEADS = 1, 2, 3
"""The macro SUFFIX."""
EIGHT = 8
"""Rows of a side that lie together in a tile."""


def onto(
    a: Tensor, weight: Tensor, gate: Tensor | None, x: Tensor, moments: Moments | None, next_scale: Tensor | None, *,
    gpu: Gpu, tiling: Tiling,
) -> None:  # fmt: skip
    """x (R, N) += gate ∘ (a Wᵀ), rounded before the addition, and the moments of the new x in tiles of 64 columns."""
    fields: dict[str, int | None] = {"gate": _address(gate)}
    if moments is not None:
        if moments.columns != MOMENTS_OF:
            raise EngineError(f"gemm: moments are of {MOMENTS_OF} columns, got {moments.columns}")
        fields |= {"sums_out": _address(moments.sums), "squares_out": _address(moments.squares)}
        if moments.scaled is not None and next_scale is not None:
            fields |= {"scaled": _address(moments.scaled), "next_scale": _address(next_scale)}
    _launch(ONTO, a, weight, x, Activation.NONE, fields, gpu, tiling, x.shape[1], eps=0.0)


def gated(
    x: Tensor, weight: Tensor, squares: Tensor, shift: Tensor | None, out: Tensor, *, gpu: Gpu, tiling: Tiling,
    eps: float, activation: Activation,
) -> None:  # fmt: skip
    """out (R, H) = GEGLU or SWIGLU of rstd x Wᵀ + shift. `shift` (2 H,) float32 or None; `squares` (T, R) of x."""
    fields = {"shift": _address(shift), **_norm(x, squares), "half": len(weight) // 2}
    _launch(GATED, x, weight, out, activation, fields, gpu, tiling, out.shape[1], eps)


def heads(
    x: Tensor, weight: Tensor, squares: Tensor, shift: Tensor | None, rotation: Rotation, out: Heads, *,
    gpu: Gpu, tiling: Tiling, eps: float,
) -> None:  # fmt: skip
    """Heads as `vla_accel.kernels.gemm.suffix.qkv_rope` makes them, of x Wᵀ as in `gated`."""
    _, tokens, of_q, head_dim = out.q.shape
    fields = {
        "shift": _address(shift), **_norm(x, squares), "half": head_dim // 2, "cos": _address(rotation.cos),
        "sin": _address(rotation.sin), "lengths": _address(rotation.starts), "k": _address(out.k), "v": _address(out.v),
        "tokens": tokens,
        "heads": of_q, "kv_heads": out.k.shape[2],
    }  # fmt: skip
    _launch(HEADS, x, weight, out.q, Activation.NONE, fields, gpu, tiling, len(weight), eps)


def source(dtype: torch.dtype, suffix: int, activation: Activation, tiling: Tiling) -> str:
    """The CUDA C++ of one kernel."""
    norm = "none" if suffix == ONTO else "squares"
    return launch.source(dtype, False, activation, tiling, residual=suffix == ONTO, norm=norm, suffix=suffix)


def _norm(x: Tensor, squares: Tensor) -> dict[str, int | None]:
    return {"squares": _address(squares), "tiles": len(squares), "width": x.shape[1]}


def _launch(
    suffix: int,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    activation: Activation,
    fields: dict[str, int | None],
    gpu: Gpu,
    tiling: Tiling,
    columns: int,
    eps: float,
) -> None:
    """`columns`: the row length of `out`, or of the tensor that it is a part of."""
    from vla_accel.kernels.nvrtc import load_module

    (rows, k), n, half = x.shape, len(weight), fields.get("half") or 0
    chunks = -(-k * x.element_size() // 128)
    reason = why_not(gpu, x, weight, tiling, half)
    if reason is not None:
        raise EngineError(f"gemm of a suffix: {reason}")
    shared = tiling.memory(activation, suffix != ONTO).size
    module = load_module(source(x.dtype, suffix, activation, tiling), {"gemm": shared}, ARCHITECTURE, x.device)
    of_weight = rows_map(weight, tiling.weight_rows) if suffix == ONTO else paired_map(weight, half, tiling.weight_rows)
    token_tiles = -(-rows // tiling.tokens)
    tiles = token_tiles * (n // tiling.weight_rows)
    call = SuffixCall(
        out=out.data_ptr(), scale=1.0, inverse=1.0, rows=rows, columns=columns, chunks=chunks, token_tiles=token_tiles,
        tiles=tiles, eps=eps, suffix=Suffix(**fields),
    )  # fmt: skip
    maps = (of_weight, rows_map(x, tiling.tokens))
    launch_cuda(module, "gemm", tiles * tiling.cluster, tiling.threads, (*maps, call), cluster=tiling.cluster)


def why_not(gpu: Gpu, x: Tensor, weight: Tensor, tiling: Tiling, half: int) -> str | None:
    """Explain why the kernel does not take these operands with a tiling; None if it does.

    `half`: distance of the two rows of a pair, or 0 without pairs.
    """
    (rows, k), (n, k_weight) = x.shape, weight.shape
    if gpu.architecture != ARCHITECTURE:
        return f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return f"x is {x.dtype}, the weight {weight.dtype}; it takes two of BF16 or FP16"
    if k != k_weight or k % 8 or not rows or not (x.is_contiguous() and weight.is_contiguous()):
        return f"x is {tuple(x.shape)}, the weight {tuple(weight.shape)}; both are contiguous, of rows of 16 bytes"
    if tiling.across * tiling.along > 1 or tiling.persistent or tiling.parts * tiling.blocks > 1:
        return f"{tiling} shares what it fetches, or takes several tiles"
    if n % tiling.weight_rows or (half and (half % EIGHT or 2 * half % tiling.weight_rows)):
        return f"tiles of {tiling.weight_rows} weight rows do not fill {n}, by pairs {half} apart"
    chunks = -(-k * 2 // 128)
    if -(-chunks // tiling.split) * (tiling.split - 1) >= chunks:
        return f"{chunks} chunks of K leave a part of {tiling.split} empty"
    return tiling.why_not(Activation.GEGLU if half else Activation.NONE, residual=not half, normed=bool(half))


def paired_map(weight: Tensor, half: int, rows: int) -> TensorMap:
    """The tensor map of a weight (N, K) of groups of two sides of `half` rows: boxes of `rows` rows by 128 bytes, eight
    of the first side, eight of the second, by turns."""
    n, k = weight.shape
    pairs = weight.view(n // (2 * half), 2, half // EIGHT, EIGHT, k).transpose(1, 2)
    return tensor_map(pairs, (1, rows // (2 * EIGHT), 2, EIGHT, 128 // weight.element_size()))
