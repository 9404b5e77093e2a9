"""The epilogues that all Triton products share: rotated heads, gated activations, residuals with their moments.

Sums are (BLOCK_M, BLOCK_N) float32 of rows from `row0` and columns from `n0`; elements outside the tensors are not
stored. A pair is two columns of the product that meet in one output: the halves of a head, or gate and up. Its weight
rows are HALF rows apart, within groups of 2 HALF rows: a group is a head, or all of a gated product.

SHAPE is a `ProductShape`, TILE has `rows` and `columns`, BLOCK_M and BLOCK_N. `at`: a program's group or column tile,
its first column within the group or the tensor, and its first row.

Constants of the loop are loaded apart from the sums, so that a kernel fetches them before it waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.errors import EngineError
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
from vla_accel.kernels.gemm.triton_moments import store_moments
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import activated


class NormArguments(NamedTuple):
    """`Norm` in a kernel: pointers, None where there is no tensor."""

    eps: float | None
    scale: Any
    weight_sums: Any
    sums: Any
    squares: Any


class EpilogueArguments(NamedTuple):
    """`Epilogue` in a kernel, and its outputs: q, k and v or a single tensor. `rows`: of the product; `tokens`: rows of
    a sequence, None where nothing depends on them; `shift` is float32 or the bias.
    """

    out: tuple[Any, ...]
    rows: int
    tokens: int | None
    cos: Any = None
    sin: Any = None
    starts: Any = None
    shift: Any = None
    pinned: Any = None
    gate: Any = None
    sums: Any = None
    squares: Any = None
    next_scale: Any = None
    scaled: Any = None


class ProductShape(NamedTuple):
    """Constants of a product in a kernel: n weight rows of k columns, tiles of the norm's moments (0 without moments),
    the code of the activation or of the gate's, and whether it adds to the output. Of pairs also HALF, and the heads.
    """

    n: int
    k: int
    tiles: int
    activation: int
    residual: bool
    half: int = 0
    heads: int = 0
    kv_heads: int = 0

    @property
    def groups(self) -> int:
        """Heads, or one group for a gated product."""
        return self.n // (2 * self.half)


def norm_arguments(norm: Norm | None) -> NormArguments:
    """Return a norm for a kernel; without a norm all fields are None, because Triton cannot compare a tuple to None."""
    if norm is None:
        return NormArguments(None, None, None, None, None)
    m = norm.moments
    return NormArguments(norm.eps, norm.scale, norm.sums, m and m.sums, m and m.squares)


def epilogue_arguments(weights: Linear, epilogue: Epilogue, out: Tensor | Heads, rows: int) -> EpilogueArguments:
    """Return an epilogue for a kernel."""
    e, m = epilogue, epilogue.moments
    if isinstance(out, Heads):
        assert e.rope is not None
        placed = ((out.q, out.k, out.v), rows, out.q.shape[1], e.rope.cos, e.rope.sin, e.rope.starts)
    else:
        placed = ((out,), rows, e.skip_every or None, None, None, None)
    shift, scaled = weights.bias if e.shift is None else e.shift, (None, None)
    if m is not None and m.scaled is not None and e.next_scale is not None:
        scaled = (e.next_scale, m.scaled)
    return EpilogueArguments(*placed, shift, e.pinned, e.gate, m and m.sums, m and m.squares, *scaled)


def moment_tiles(norm: Norm | None) -> int:
    """Return the tiles of the norm's moments, 0 without moments."""
    return 0 if norm is None or norm.moments is None else len(norm.moments.sums)


def product_shape(weights: Linear, epilogue: Epilogue, out: Tensor | Heads, norm: Norm | None) -> ProductShape:
    """Return the constants of a product."""
    sizes, kind = (*weights.weight.shape, moment_tiles(norm)), epilogue.activation
    if isinstance(out, Heads):
        _, _, heads, head_dim = out.q.shape
        return ProductShape(*sizes, 0, False, head_dim // 2, heads, out.k.shape[2])
    if kind.gated:
        return ProductShape(*sizes, kind.gate.code, False, out.shape[1])
    return ProductShape(*sizes, kind.code, epilogue.residual)


def check_pairs(shape: ProductShape, norm: Norm | None) -> None:
    """Raise EngineError for pairs of columns without a norm, which the kernels of pairs always divide by."""
    if shape.half and norm is None:
        raise EngineError("gemm: expected a norm for rotated heads or a gated product in Triton, got none")


@triton.jit
def own_row(e, row, COLUMNS: constexpr):
    """Where a row's constants begin in a table of two rows of COLUMNS, the second for pinned actions."""
    return tl.load(e.pinned + row, mask=row < e.rows, other=0) * COLUMNS


@triton.jit
def _constants(ptr, own, n, real, EMPTY: constexpr):
    """Float32 constants of columns n, (1, BLOCK_N) or, with `own_row`, (BLOCK_M, BLOCK_N); EMPTY without a table."""
    if ptr is None:
        return tl.full((1, n.shape[1]), EMPTY, tl.float32)
    else:
        at = n if own is None else n + own
        return tl.load(ptr + at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def load_pair(e, at, SHAPE: constexpr, TILE: constexpr):
    """The constants of `store_pair`: shifts of both columns of a pair, and the cosines and sines of q and k."""
    group, i0, row0 = at
    HALF: constexpr = SHAPE.half
    i = i0 + tl.arange(0, TILE.columns)[None, :]
    row = row0 + tl.arange(0, TILE.rows)[:, None]
    own = None
    if e.pinned is not None:
        own = own_row(e, row, SHAPE.n)
    n = group * (2 * HALF) + i
    low, high = _constants(e.shift, own, n, i < HALF, 0.0), _constants(e.shift, own, HALF + n, i < HALF, 0.0)
    if SHAPE.heads > 0:
        rotated = (row < e.rows) & (i < HALF) & (group < SHAPE.heads + SHAPE.kv_heads)
        position = tl.load(e.starts + row // e.tokens, mask=row < e.rows, other=0) + row % e.tokens
        # Values have no position: their heads get cos = 1 and sin = 0.
        cos = tl.load(e.cos + position * HALF + i, mask=rotated, other=1.0)
        sin = tl.load(e.sin + position * HALF + i, mask=rotated, other=0.0)
        return low, high, cos, sin
    else:
        return low, high, low, high


@triton.jit
def store_pair(a, b, constants, e, at, SHAPE: constexpr, TILE: constexpr):
    """Store the sums a and b of pairs, rotated to q, k or v, or as gate(a) * b, with the constants of `load_pair`."""
    low, high, cos, sin = constants
    group, i0, row0 = at
    HALF: constexpr = SHAPE.half
    HEADS: constexpr = SHAPE.heads
    KV_HEADS: constexpr = SHAPE.kv_heads
    i = i0 + tl.arange(0, TILE.columns)[None, :]
    row = row0 + tl.arange(0, TILE.rows)[:, None]
    keep = (row < e.rows) & (i < HALF)
    kind = e.out[0].dtype.element_ty
    a += low
    b += high
    if HEADS > 0:
        first = (a * cos - b * sin).to(kind)
        second = (b * cos + a * sin).to(kind)
        if group < HEADS:
            to = e.out[0] + (row * HEADS + group) * (2 * HALF) + i
            tl.store(to, first, mask=keep)
            tl.store(to + HALF, second, mask=keep)
        elif group < HEADS + KV_HEADS:
            to = e.out[1] + (row * KV_HEADS + group - HEADS) * (2 * HALF) + i
            tl.store(to, first, mask=keep)
            tl.store(to + HALF, second, mask=keep)
        else:
            to = e.out[2] + (row * KV_HEADS + group - HEADS - KV_HEADS) * (2 * HALF) + i
            tl.store(to, first, mask=keep)
            tl.store(to + HALF, second, mask=keep)
    else:
        tl.store(e.out[0] + row * HALF + i, (activated(a, SHAPE.activation) * b).to(kind), mask=keep)


@triton.jit
def load_columns(e, at, SHAPE: constexpr, TILE: constexpr):
    """The constants of `store_columns`: shift or bias, and gate."""
    _, n0, row0 = at
    n = n0 + tl.arange(0, TILE.columns)[None, :]
    own = None
    if e.pinned is not None:
        own = own_row(e, row0 + tl.arange(0, TILE.rows)[:, None], SHAPE.n)
    # Only the gate has a row for pinned actions: a bias is the same in every step.
    return _constants(e.shift, None, n, n < SHAPE.n, 0.0), _constants(e.gate, own, n, n < SHAPE.n, 1.0)


@triton.jit
def load_residual(e, at, SHAPE: constexpr, TILE: constexpr):
    """The rows that `store_columns` adds to, 0 if there are none, and which elements it stores."""
    _, n0, row0 = at
    n = n0 + tl.arange(0, TILE.columns)[None, :]
    row = row0 + tl.arange(0, TILE.rows)[:, None]
    keep = (row < e.rows) & (n < SHAPE.n)
    if e.tokens is not None:
        # The first token of π0's suffix is the state's, and stays.
        keep = keep & (row % e.tokens > 0)
    before = tl.full((TILE.rows, TILE.columns), 0.0, e.out[0].dtype.element_ty)
    if SHAPE.residual:
        before = tl.load(e.out[0] + row * SHAPE.n + n, mask=keep, other=0.0)
    return before, keep


@triton.jit
def store_columns(y, constants, residual, e, at, SHAPE: constexpr, TILE: constexpr):
    """out = before + gate ∘ activation(y + shift), with `load_columns` and `load_residual`, and the moments of the
    stored rows.
    """
    shift, gate = constants
    before, keep = residual
    tile, n0, row0 = at
    n = n0 + tl.arange(0, TILE.columns)
    row = row0 + tl.arange(0, TILE.rows)
    y = activated(y + shift, SHAPE.activation) * gate + before.to(tl.float32)
    stored = y.to(e.out[0].dtype.element_ty)
    tl.store(e.out[0] + row[:, None] * SHAPE.n + n[None, :], stored, mask=keep)
    if e.sums is not None:
        moments = (e.next_scale, e.sums, e.squares, e.scaled)
        store_moments(stored.to(tl.float32), keep, row, n, moments, tile, e.rows, SHAPE.n)
