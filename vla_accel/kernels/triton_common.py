"""Functions that several kernels share: activations, FP8 and INT8 rounding, programmatic dependent launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.fp8 import E4M3, INT8
from vla_accel.kernels.activation import Activation

FP8_MAX, INT8_MAX = constexpr(E4M3.largest), constexpr(INT8.largest)
LOG2E = constexpr(1.4426950408889634)


@triton.jit
def quantised(x, inverse_scale, DTYPE: constexpr):
    """float32 to E4M3 or INT8, as `fp8.Format.saturated`. A plain conversion to FP8 would turn large values into NaN,
    and one to integers would wrap them around.
    """
    if DTYPE == tl.int8:  # noqa: SIM300 - a constant of the kernel only in this order
        return tl.clamp(tl.floor(x * inverse_scale + 0.5), -INT8_MAX, INT8_MAX).to(tl.int8)
    else:
        return tl.clamp(x * inverse_scale, -FP8_MAX, FP8_MAX).to(tl.float8e4nv)


@triton.jit
def store_rounded(target, x, mask, inverse_scale):
    """Store float32 values in the dtype of the buffer, quantised with a scale that is not None."""
    if inverse_scale is not None:
        tl.store(target, quantised(x, inverse_scale, target.dtype.element_ty), mask=mask)
    else:
        tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def scale_of_sums(w_ptr, wscale, n):
    """The factor of the sums of a weight's rows n, (BLOCK_N,): each row's own for INT8, (1, BLOCK_N), otherwise one
    scalar. It is constant and may be read before the wait.
    """
    if w_ptr.dtype.element_ty == tl.int8:
        return tl.load(wscale + n)[None, :]
    else:
        return wscale


@triton.jit
def gelu_tanh(x):
    """tanh GELU, by exp2 alone: 0.5 x (1 + tanh u) = x sigmoid(2 u)."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp2(-2.8853900817779268 * u))


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def mish(x):
    """x tanh(log(1 + exp x)), by exp2 alone."""
    e = tl.exp2(1.4426950408889634 * tl.minimum(x, 20.0))
    n = e * (e + 2.0)
    return tl.where(x > 20.0, x, x * n / (n + 2.0))


GELU, SILU, RELU, MISH, GELU_ERF, QUICK_GELU = (
    constexpr(Activation(name).code) for name in ("gelu", "silu", "relu", "mish", "gelu_erf", "quick_gelu")
)


@triton.jit
def gelu_erf(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activated(x, ACTIVATION: constexpr):
    """Apply the activation with this code, which must not be gated."""
    if ACTIVATION == GELU:
        return gelu_tanh(x)
    elif ACTIVATION == SILU:
        return silu(x)
    elif ACTIVATION == RELU:
        return tl.maximum(x, 0.0)
    elif ACTIVATION == MISH:
        return mish(x)
    elif ACTIVATION == GELU_ERF:
        return gelu_erf(x)
    elif ACTIVATION == QUICK_GELU:
        return x / (1.0 + tl.exp2(-2.4554669595930156 * x))
    else:
        return x


@triton.jit
def softmax_step(s, best, total, EMPTY: constexpr):
    """One block of an online softmax.

    Scores s (M, N) float32 are for exp2. `best` (M,) is the largest score and `total` (M,) the sum of weights of the
    blocks so far. EMPTY: a row may have no key yet, so that all its scores are -inf; otherwise the first block has a
    key of every row.

    Returns the weights of the block, the factor of earlier sums, and the new `best` and `total`.
    """
    new_best = tl.maximum(best, tl.max(s, 1))
    base = tl.where(new_best == -float("inf"), 0.0, new_best) if EMPTY else new_best
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(best - base)
    return p, shrink, new_best, total * shrink + tl.sum(p, 1)


@triton.jit
def wait_for_previous(PDL: constexpr):
    """Wait until the writes of the previous kernel are visible. Before it, read only constants."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        # From here the next kernel may start and fetch its weights while this one computes.
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(rows_ptr, elements, PREFETCH: constexpr, PDL: constexpr):
    """Prefetch rows of a weight into the L2 cache before the wait, while the previous kernel still computes.

    `rows_ptr`: (N,) pointers, aligned to 16 bytes; `elements`: int32, of each row, a multiple of 16 bytes. Only a
    dependent launch has time to prefetch; like those, bulk prefetch needs Hopper or newer."""
    if PREFETCH and PDL:
        size = elements * (rows_ptr.dtype.element_ty.primitive_bitwidth // 8)
        at = rows_ptr.to(tl.int64)
        # Every thread runs this, and rows repeat where there are more threads: one for each row is enough.
        tl.inline_asm_elementwise(
            "{.reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, $3;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
            "=r,l,r,r", [at, tl.zeros_like(at).to(tl.int32) + size, tl.zeros_like(at).to(tl.int32) + rows_ptr.shape[0]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def let_next_start(PDL: constexpr):
    """Allow the next kernel to start. It waits itself for what this one writes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def can_prefetch(weight: Tensor) -> bool:
    """Return whether the rows of a contiguous weight start at multiples of 16 bytes, as `prefetch_rows` requires."""
    return weight.shape[1] * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
