"""The epilogues that all Triton products share: rotated heads, gated activations, residuals with their moments.

Sums are (BLOCK_M, BLOCK_N) float32 of rows from `row0` and columns from `n0`; elements outside the tensors are not
stored. A pair is two columns of the product that meet in one output: the halves of a head, or gate and up. Its weight
rows are HALF rows apart, within groups of 2 HALF rows: a group is a head, or all of a gated product (HEADS = 0).

Constants of the loop are loaded apart from the sums, so that a kernel fetches them before it waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
from vla_accel.kernels.gemm.triton_moments import store_moments
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import activated
from vla_accel.numeric import power_of_two


class NormArguments(NamedTuple):
    """`Norm` in a kernel: pointers, None where there is no tensor."""

    eps: float | None
    scale: Any
    weight_sums: Any
    sums: Any
    squares: Any


class EpilogueArguments(NamedTuple):
    """`Epilogue` in a kernel. `shift` is float32 or the bias; `tokens`: rows of a sequence."""

    shift: Any
    pinned: Any
    cos: Any
    sin: Any
    starts: Any
    gate: Any
    next_scale: Any
    sums: Any
    squares: Any
    scaled: Any
    tokens: int


def norm_arguments(norm: Norm | None) -> NormArguments:
    """Return a norm for a kernel; without a norm all fields are None, because Triton cannot compare a tuple to None."""
    if norm is None:
        return NormArguments(None, None, None, None, None)
    m = norm.moments
    return NormArguments(norm.eps, norm.scale, norm.sums, m and m.sums, m and m.squares)


def epilogue_arguments(weights: Linear, epilogue: Epilogue, tokens: int = 1) -> EpilogueArguments:
    """Return an epilogue for a kernel."""
    e, m, rope = epilogue, epilogue.moments, epilogue.rope
    scaled = m.scaled if m is not None and e.next_scale is not None else None
    return EpilogueArguments(
        weights.bias if e.shift is None else e.shift, e.pinned, rope and rope.cos, rope and rope.sin,
        rope and rope.starts, e.gate, e.next_scale if scaled is not None else None, m and m.sums, m and m.squares,
        scaled, tokens,
    )  # fmt: skip


class PairShape(NamedTuple):
    """The constants of a product of pairs: heads, HALF, and the code of the gate's activation."""

    heads: int
    kv_heads: int
    half: int
    gate: int

    @property
    def groups(self) -> int:
        """Heads, or one group for a gated product."""
        return self.heads + 2 * self.kv_heads if self.heads else 1


def pair_shape(out: Tensor | Heads, epilogue: Epilogue) -> tuple[PairShape, tuple[Tensor, ...], int]:
    """Return the constants of a product of pairs, its outputs, and the rows of a sequence."""
    if isinstance(out, Heads):
        _, tokens, heads, head_dim = out.q.shape
        return PairShape(heads, out.k.shape[2], head_dim // 2, 0), (out.q, out.k, out.v), tokens
    return PairShape(0, 0, out.shape[1], epilogue.activation.gate.code), (out,), 1


def tiles_of(norm: Norm | None) -> tuple[int, int]:
    """Return the tiles of the norm's moments, and the power of two that holds them; 0 and 1 without moments."""
    tiles = 0 if norm is None or norm.moments is None else len(norm.moments.sums)
    return tiles, power_of_two(max(tiles, 1))


@triton.jit
def own_row(pinned_ptr, row, rows, COLUMNS: tl.constexpr):
    """Where a row's constants begin in a table of two rows of COLUMNS, the second for pinned actions."""
    return tl.load(pinned_ptr + row, mask=row < rows, other=0) * COLUMNS


@triton.jit
def column_constants(ptr, pinned_ptr, n, limit, row0, rows, EMPTY: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Float32 constants of columns n, (1, BLOCK_N) or, with pinned rows, (BLOCK_M, BLOCK_N); EMPTY without a table."""
    if ptr is None:
        return tl.full((1, BLOCK_N), EMPTY, tl.float32)
    else:
        at = n
        if pinned_ptr is not None:
            at = n + own_row(pinned_ptr, row0 + tl.arange(0, BLOCK_M)[:, None], rows, COLUMNS)
        return tl.load(ptr + at, mask=limit, other=0.0).to(tl.float32)


@triton.jit
def load_pair(e, group, i0, row0, rows, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The constants of `store_pair`: shifts of both columns of a pair, and the cosines and sines of q and k."""
    i = i0 + tl.arange(0, BLOCK_N)[None, :]
    N: tl.constexpr = (HEADS + 2 * KV_HEADS if HEADS > 0 else 1) * 2 * HALF
    at = group * (2 * HALF) + i
    low = column_constants(e.shift, e.pinned, at, i < HALF, row0, rows, 0.0, BLOCK_M, BLOCK_N, N)
    high = column_constants(e.shift, e.pinned, HALF + at, i < HALF, row0, rows, 0.0, BLOCK_M, BLOCK_N, N)
    if HEADS > 0:
        row = row0 + tl.arange(0, BLOCK_M)[:, None]
        rotated = (row < rows) & (i < HALF) & (group < HEADS + KV_HEADS)
        position = tl.load(e.starts + row // e.tokens, mask=row < rows, other=0) + row % e.tokens
        # Values have no position: their heads get cos = 1 and sin = 0.
        cos = tl.load(e.cos + position * HALF + i, mask=rotated, other=1.0)
        sin = tl.load(e.sin + position * HALF + i, mask=rotated, other=0.0)
        return low, high, cos, sin
    else:
        return low, high, low, high


@triton.jit
def store_pair(a, b, low, high, cos, sin, out, group, i0, row0, rows, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
               HALF: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Store the sums a and b of pairs, rotated to q, k or v, or as GATE(a) * b, with the constants of `load_pair`."""
    i = i0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    keep = (row < rows) & (i < HALF)
    kind = out[0].dtype.element_ty
    a += low
    b += high
    if HEADS > 0:
        first = (a * cos - b * sin).to(kind)
        second = (b * cos + a * sin).to(kind)
        if group < HEADS:
            to = out[0] + (row * HEADS + group) * (2 * HALF) + i
            tl.store(to, first, mask=keep)
            tl.store(to + HALF, second, mask=keep)
        elif group < HEADS + KV_HEADS:
            to = out[1] + (row * KV_HEADS + group - HEADS) * (2 * HALF) + i
            tl.store(to, first, mask=keep)
            tl.store(to + HALF, second, mask=keep)
        else:
            to = out[2] + (row * KV_HEADS + group - HEADS - KV_HEADS) * (2 * HALF) + i
            tl.store(to, first, mask=keep)
            tl.store(to + HALF, second, mask=keep)
    else:
        tl.store(out[0] + row * HALF + i, (activated(a, GATE) * b).to(kind), mask=keep)


@triton.jit
def load_columns(e, n0, row0, rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The constants of `store_columns`: shift or bias, and gate."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    # Only the gate has a row for pinned actions: a bias is the same in every step.
    shift = column_constants(e.shift, None, n, n < N, row0, rows, 0.0, BLOCK_M, BLOCK_N, N)
    return shift, column_constants(e.gate, e.pinned, n, n < N, row0, rows, 1.0, BLOCK_M, BLOCK_N, N)


@triton.jit
def load_residual(out_ptr, e, n0, row0, rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  RESIDUAL: tl.constexpr, SKIP_FIRST: tl.constexpr):  # fmt: skip
    """The rows that `store_columns` adds to, 0 without RESIDUAL, and which elements it stores."""
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    row = row0 + tl.arange(0, BLOCK_M)[:, None]
    keep = (row < rows) & (n < N)
    if SKIP_FIRST:
        # The first token of π0's suffix is the state's, and stays.
        keep = keep & (row % e.tokens > 0)
    before = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
    if RESIDUAL:
        before = tl.load(out_ptr + row * N + n, mask=keep, other=0.0)
    return before, keep


@triton.jit
def store_columns(y, shift, gate, before, keep, out_ptr, e, tile, n0, row0, rows, N: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    """out = before + gate ∘ activation(y + shift), and the moments of the stored rows, of column tile `tile`."""
    n = n0 + tl.arange(0, BLOCK_N)
    row = row0 + tl.arange(0, BLOCK_M)
    y = activated(y + shift, ACTIVATION) * gate + before.to(tl.float32)
    stored = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * N + n[None, :], stored, mask=keep)
    if e.sums is not None:
        store_moments(stored.to(tl.float32), keep, row, n, e.next_scale, e.sums, e.squares, e.scaled, tile, rows, N)
