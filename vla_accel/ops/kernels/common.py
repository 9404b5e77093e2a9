"""Pieces that several kernels share: FP8 and INT8 rounding and programmatic dependent launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.fp8 import E4M3, INT8
from vla_accel.ops.activation import Activation

FP8_MAX, INT8_MAX = tl.constexpr(E4M3.largest), tl.constexpr(INT8.largest)


@triton.jit
def quantised(x, inverse_scale, DTYPE: tl.constexpr):
    """float32 to E4M3 or INT8, as `fp8.Format.saturated`: an FP8 conversion alone would turn what is too large into
    NaN, an integer one would cut off."""
    if DTYPE == tl.int8:  # noqa: SIM300 - a constant of the kernel only in this order
        return tl.clamp(tl.floor(x * inverse_scale + 0.5), -INT8_MAX, INT8_MAX).to(tl.int8)
    else:
        return tl.clamp(x * inverse_scale, -FP8_MAX, FP8_MAX).to(tl.float8e4nv)


@triton.jit
def scale_of_sums(w_ptr, wscale, n):
    """What sums of a weight's rows n, (BLOCK_N,), are multiplied by: of INT8 each row's own, (1, BLOCK_N), else the one
    of all. Constant: it may be read before the wait."""
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


GELU, SILU, RELU = (tl.constexpr(a.code) for a in (Activation.GELU, Activation.SILU, Activation.RELU))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """x with the activation of this code, none that is gated."""
    if ACTIVATION == GELU:
        return gelu_tanh(x)
    elif ACTIVATION == SILU:
        return silu(x)
    elif ACTIVATION == RELU:
        return tl.maximum(x, 0.0)
    else:
        return x


@triton.jit
def softmax_step(s, best, total, EMPTY: tl.constexpr):
    """One block of the softmax over all blocks: of scores s, (M, N) float32 for exp2, after blocks whose largest score
    was `best`, (M,), and whose weights' sum was `total`, (M,). EMPTY: a row may have no key so far, all of whose scores
    are -inf; otherwise the first block must hold one of every row.

    Returns the block's weights, what to multiply earlier sums with, and `best` and `total` with this block."""
    new_best = tl.maximum(best, tl.max(s, 1))
    base = tl.where(new_best == -float("inf"), 0.0, new_best) if EMPTY else new_best
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(best - base)
    return p, shrink, new_best, total * shrink + tl.sum(p, 1)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """What the previous kernel wrote is visible after this. Before it, only constants may be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        # From here the next kernel may start and fetch its weights while this one computes.
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(rows_ptr, elements, AHEAD: tl.constexpr, PDL: tl.constexpr):
    """Prefetch rows of a weight into the L2 cache before the wait, while the previous kernel still computes.

    `rows_ptr`: (N,) pointers, aligned to 16 bytes; `elements`: int32, of each row, a multiple of 16 bytes. Only a
    dependent launch has time to prefetch; like those, bulk prefetch needs Hopper or newer."""
    if AHEAD and PDL:
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
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start; it waits by itself for what this one writes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def can_fetch_ahead(weight: Tensor) -> bool:
    """Whether `fetch_ahead` takes the rows of a contiguous (N, K) weight: they begin at multiples of 16 bytes."""
    return weight.shape[1] * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
