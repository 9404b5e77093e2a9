"""What the products of a suffix do with their sums, however these were formed: rotate heads, GeGLU, add to a residual.

Sums are (BLOCK_M, BLOCK_N) float32, of rows from `row0` and columns from `n0`; what lies beyond the tensors is not
stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vla_accel.ops.kernels.common import gelu_tanh, silu


@triton.jit
def own_row(pinned_ptr, row, rows, COLUMNS: tl.constexpr):
    """Where a row's own begins in a table of two rows of COLUMNS, the second for pinned actions."""
    return tl.load(pinned_ptr + row, mask=row < rows, other=0) * COLUMNS


@triton.jit
def store_heads(a, b, shift_ptr, pinned_ptr, cos_ptr, sin_ptr, length_ptr, q_ptr, k_ptr, v_ptr, head, i0, row0, rows,
                tokens, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, HAS_SHIFT: tl.constexpr, PINNED: tl.constexpr):  # fmt: skip
    """Columns i0 … of a head's first half (a) and of its second (b) to q, k or v; those of q and k are rotated."""
    i = i0 + tl.arange(0, BLOCK_N)[None, :]
    in_head = i < HALF
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    if HAS_SHIFT:
        at = head * (2 * HALF) + i
        if PINNED:
            at = at + own_row(pinned_ptr, row, rows, (HEADS + 2 * KV_HEADS) * 2 * HALF)
        a += tl.load(shift_ptr + at, mask=in_head, other=0.0)
        b += tl.load(shift_ptr + HALF + at, mask=in_head, other=0.0)
    keep = (row < rows) & in_head
    kind = q_ptr.dtype.element_ty
    if head < HEADS + KV_HEADS:
        place = tl.load(length_ptr + row // tokens, mask=row < rows, other=0) + row % tokens
        cos = tl.load(cos_ptr + place * HALF + i, mask=keep, other=0.0)
        sin = tl.load(sin_ptr + place * HALF + i, mask=keep, other=0.0)
        rotated = a * cos - b * sin
        b = b * cos + a * sin
        a = rotated
    if head < HEADS:
        out = q_ptr + (row * HEADS + head) * (2 * HALF) + i
        tl.store(out, a.to(kind), mask=keep)
        tl.store(out + HALF, b.to(kind), mask=keep)
    elif head < HEADS + KV_HEADS:
        out = k_ptr + (row * KV_HEADS + head - HEADS) * (2 * HALF) + i
        tl.store(out, a.to(kind), mask=keep)
        tl.store(out + HALF, b.to(kind), mask=keep)
    else:
        out = v_ptr + (row * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + i
        tl.store(out, a.to(kind), mask=keep)
        tl.store(out + HALF, b.to(kind), mask=keep)


@triton.jit
def store_geglu(g, u, shift_ptr, pinned_ptr, out_ptr, n0, row0, rows, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, HAS_SHIFT: tl.constexpr, SILU: tl.constexpr, PINNED: tl.constexpr):  # fmt: skip
    """gelu_tanh(g) * u, or silu(g) * u, to out (rows, HIDDEN)."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    if HAS_SHIFT:
        at = n
        if PINNED:
            at = n + own_row(pinned_ptr, row, rows, 2 * HIDDEN)
        g += tl.load(shift_ptr + at, mask=n < HIDDEN, other=0.0)
        u += tl.load(shift_ptr + HIDDEN + at, mask=n < HIDDEN, other=0.0)
    y = (silu(g) if SILU else gelu_tanh(g)) * u
    tl.store(out_ptr + row * HIDDEN + n, y.to(out_ptr.dtype.element_ty), mask=(row < rows) & (n < HIDDEN))


@triton.jit
def store_residual(y, bias_ptr, gate_ptr, pinned_ptr, x_ptr, n0, row0, rows, tokens, N: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr,
                   HAS_BIAS: tl.constexpr, SKIP_FIRST: tl.constexpr, PINNED: tl.constexpr):  # fmt: skip
    """x (rows, N) += gate ∘ (y + bias), or = without RESIDUAL. Returns what was stored, and where."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    keep = (row < rows) & (n < N)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0)
    if HAS_GATE:
        at = n
        if PINNED:
            at = n + own_row(pinned_ptr, row, rows, N)
        y *= tl.load(gate_ptr + at, mask=n < N, other=0.0)
    if SKIP_FIRST:
        # The first token of π0's suffix is the state's, and stays.
        keep = keep & (row % tokens > 0)
    place = x_ptr + row * N + n
    if RESIDUAL:
        y += tl.load(place, mask=keep, other=0.0).to(tl.float32)
    stored = y.to(x_ptr.dtype.element_ty)
    tl.store(place, stored, mask=keep)
    return stored.to(tl.float32), keep
