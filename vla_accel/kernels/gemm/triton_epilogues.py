"""What the products of a suffix do with their sums, however these were formed: rotate heads, GeGLU, add to a residual.

Sums are (BLOCK_M, BLOCK_N) float32, of rows from `row0` and columns from `n0`; what lies beyond the tensors is not
stored. What is constant over a loop is read apart from the sums, so that a kernel fetches it before it waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vla_accel.kernels.triton_common import activated


@triton.jit
def own_row(pinned_ptr, row, rows, COLUMNS: tl.constexpr):
    """Where a row's own begins in a table of two rows of COLUMNS, the second for pinned actions."""
    return tl.load(pinned_ptr + row, mask=row < rows, other=0) * COLUMNS


@triton.jit
def for_heads(shift_ptr, pinned_ptr, cos_ptr, sin_ptr, length_ptr, head, i0, row0, rows, tokens, HEADS: tl.constexpr,
              KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              HAS_SHIFT: tl.constexpr, PINNED: tl.constexpr):  # fmt: skip
    """The constants of `store_heads`: shifts of a head's both halves, cosines and sines of q and k."""
    i = i0 + tl.arange(0, BLOCK_N)[None, :]
    in_head = i < HALF
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    low, high = tl.zeros((1, BLOCK_N), tl.float32), tl.zeros((1, BLOCK_N), tl.float32)
    if HAS_SHIFT:
        at = head * (2 * HALF) + i
        if PINNED:
            at = at + own_row(pinned_ptr, row, rows, (HEADS + 2 * KV_HEADS) * 2 * HALF)
        low = tl.load(shift_ptr + at, mask=in_head, other=0.0)
        high = tl.load(shift_ptr + HALF + at, mask=in_head, other=0.0)
    turned = (row < rows) & in_head & (head < HEADS + KV_HEADS)
    place = tl.load(length_ptr + row // tokens, mask=row < rows, other=0) + row % tokens
    cos = tl.load(cos_ptr + place * HALF + i, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + place * HALF + i, mask=turned, other=0.0)
    return low, high, cos, sin


@triton.jit
def store_heads(a, b, low, high, cos, sin, q_ptr, k_ptr, v_ptr, head, i0, row0, rows, HEADS: tl.constexpr,
                KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):  # fmt: skip
    """Columns i0 … of a head's first half (a) and of its second (b) to q, k or v, with the constants of `for_heads`."""
    i = i0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    keep = (row < rows) & (i < HALF)
    kind = q_ptr.dtype.element_ty
    a += low
    b += high
    # Values have no position: their heads come with cos = 1 and sin = 0.
    turned = a * cos - b * sin
    b = b * cos + a * sin
    if head < HEADS:
        out = q_ptr + (row * HEADS + head) * (2 * HALF) + i
        tl.store(out, turned.to(kind), mask=keep)
        tl.store(out + HALF, b.to(kind), mask=keep)
    elif head < HEADS + KV_HEADS:
        out = k_ptr + (row * KV_HEADS + head - HEADS) * (2 * HALF) + i
        tl.store(out, turned.to(kind), mask=keep)
        tl.store(out + HALF, b.to(kind), mask=keep)
    else:
        out = v_ptr + (row * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + i
        tl.store(out, turned.to(kind), mask=keep)
        tl.store(out + HALF, b.to(kind), mask=keep)


@triton.jit
def for_geglu(shift_ptr, pinned_ptr, n0, row0, rows, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, HAS_SHIFT: tl.constexpr, PINNED: tl.constexpr):  # fmt: skip
    """The constants of `store_geglu`: shifts of gate and up."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    gate, up = tl.zeros((1, BLOCK_N), tl.float32), tl.zeros((1, BLOCK_N), tl.float32)
    if HAS_SHIFT:
        at = n
        if PINNED:
            at = n + own_row(pinned_ptr, row0 + tl.arange(0, BLOCK_M)[:, None], rows, 2 * HIDDEN)
        gate = tl.load(shift_ptr + at, mask=n < HIDDEN, other=0.0)
        up = tl.load(shift_ptr + HIDDEN + at, mask=n < HIDDEN, other=0.0)
    return gate, up


@triton.jit
def store_geglu(g, u, gate, up, out_ptr, n0, row0, rows, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """The activation GATE of g, times u, to out (rows, HIDDEN), with the constants of `for_geglu`."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    g += gate
    u += up
    y = activated(g, GATE) * u
    tl.store(out_ptr + row * HIDDEN + n, y.to(out_ptr.dtype.element_ty), mask=(row < rows) & (n < HIDDEN))


@triton.jit
def for_residual(bias_ptr, gate_ptr, pinned_ptr, n0, row0, rows, N: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
                 PINNED: tl.constexpr):  # fmt: skip
    """The constants of `store_residual`: bias and gate."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    bias, gate = tl.zeros((1, BLOCK_N), tl.float32), tl.full((1, BLOCK_N), 1.0, tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if HAS_GATE:
        at = n
        if PINNED:
            at = n + own_row(pinned_ptr, row0 + tl.arange(0, BLOCK_M)[:, None], rows, N)
        gate = tl.load(gate_ptr + at, mask=n < N, other=0.0)
    return bias, gate


@triton.jit
def residual(x_ptr, n0, row0, rows, tokens, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             RESIDUAL: tl.constexpr, SKIP_FIRST: tl.constexpr):  # fmt: skip
    """What `store_residual` adds to, 0 without RESIDUAL, and which of it is stored: a product fetches it before its own
    operands."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    keep = (row < rows) & (n < N)
    if SKIP_FIRST:
        # The first token of π0's suffix is the state's, and stays.
        keep = keep & (row % tokens > 0)
    before = tl.zeros((BLOCK_M, BLOCK_N), x_ptr.dtype.element_ty)
    if RESIDUAL:
        before = tl.load(x_ptr + row * N + n, mask=keep, other=0.0)
    return before, keep


@triton.jit
def store_residual(
    y, bias, gate, before, keep, x_ptr, n0, row0, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """x (rows, N) = what was before + gate ∘ (y + bias), with what `for_residual` and `residual` fetched. Returns what
    was stored."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    y = (y + bias) * gate + before.to(tl.float32)
    stored = y.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * N + n, stored, mask=keep)
    return stored.to(tl.float32)
