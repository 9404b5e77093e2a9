"""Attention kernels: one for many queries (vision, prefix), one that splits the keys for the few queries of a suffix.

Both take the number of real keys from device memory, so that one graph serves every prompt length of its bucket.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.attention.config import FlashTile, KeySplit, SuffixShape, causal_tiles
from vla_accel.kernels.attention.ops import Tensors
from vla_accel.kernels.attention.suffix import AttentionWorkspace, Prefix
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.epilogue import Heads
from vla_accel.kernels.triton_common import LOG2E, softmax_step, store_rounded, wait_for_previous
from vla_accel.numeric import power_of_two
from vla_accel.runtime import current


class HeadShape(NamedTuple):
    """Constants of a kernel: heads, queries that share a head of keys, columns of a head and of its tile, a power of
    two, and whether heads begin at multiples of 8 elements.
    """

    heads: int
    group: int
    dim: int
    block: int
    aligned: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> HeadShape:
        """Return the constants of queries (B, T, heads, d) and keys (B, S, kv_heads, d)."""
        heads, dim = q.shape[2:]
        aligned = q.stride(2) % 8 == k.stride(2) % 8 == 0
        return cls(heads, heads // k.shape[2], dim, max(16, power_of_two(dim)), aligned)


class Mask(NamedTuple):
    """Constants of a kernel: which of the `source` keys, or of the suffix's, a query sees. `last` as in
    `ops.attention`; `causal`: lengths are those of the padding, which comes first; `first`: the first token sees no
    other one of the suffix.
    """

    source: int
    last: bool = False
    causal: bool = False
    first: bool = False


class Splits(NamedTuple):
    """Constants of a kernel: the programs that share the prefix's keys and all keys, the tiles of rows, and how many of
    the suffix's keys a program has.
    """

    prefix: int
    all: int
    row_tiles: int
    own: int


@triton.jit
def _attention(
    tensors, bias_ptr, together_ptr, tokens, strides, scales, H: constexpr, TILE: constexpr, MASK: constexpr,
    PDL: constexpr,
):  # fmt: skip
    q_ptr, k_ptr, v_ptr, out_ptr, length_ptr = tensors
    SOURCE: constexpr = MASK.source
    WHOLE: constexpr = SOURCE % TILE.keys == 0 and length_ptr is None  # every tile of keys is full
    UNMASKED: constexpr = WHOLE and H.dim == H.block
    q_strides, k_strides = strides
    scale, inverse_scale = scales
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    wait_for_previous(PDL)
    m = tl.program_id(0) * TILE.queries + tl.arange(0, TILE.queries)
    n = tl.arange(0, TILE.keys)
    d = tl.arange(0, H.block)
    in_d = d < H.dim
    q_place, kv_place = head * q_strides[2], (head // H.group) * k_strides[2]
    if H.aligned:
        # Triton would not know that heads of 72 begin at sixteen bytes, and load values one by one.
        q_place, kv_place = tl.multiple_of(q_place, 8), tl.multiple_of(kv_place, 8)
    q = tl.load(
        q_ptr + batch * q_strides[0] + m[:, None] * q_strides[1] + q_place + d[None, :],
        mask=(m < tokens)[:, None] & in_d[None, :],
        other=0.0,
    )
    length, padding = SOURCE, 0
    if length_ptr is not None:
        if MASK.causal:
            padding = tl.load(length_ptr + batch)
        else:
            length = tl.load(length_ptr + batch)
    base = batch * k_strides[0] + kv_place
    best = tl.full((TILE.queries,), -float("inf"), tl.float32)
    total = tl.full((TILE.queries,), 0.0, tl.float32)
    acc = tl.full((TILE.queries, H.block), 0.0, tl.float32)
    end = SOURCE
    if MASK.causal:
        # Only rows that see each other see keys after themselves.
        end = tl.minimum((tl.program_id(0) + 1) * TILE.queries, SOURCE)
        if together_ptr is not None:
            end = tl.where(tl.max(tl.load(together_ptr + m, mask=m < tokens, other=0), 0) > 0, SOURCE, end)
    for start in range(0, end, TILE.keys):
        key = start + n
        real = key < length
        place = base + key * k_strides[1]
        if UNMASKED:
            k = tl.load(k_ptr + place[None, :] + d[:, None])
        else:
            k = tl.load(k_ptr + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
        s = tl.dot(q, k) * scale
        if MASK.causal:
            seen = key[None, :] <= m[:, None]
            if together_ptr is not None:
                mine = tl.load(together_ptr + m, mask=m < tokens, other=0) > 0
                seen = seen | (mine[:, None] & (tl.load(together_ptr + key, mask=real, other=0) > 0)[None, :])
            if length_ptr is not None:
                seen = seen & ((key[None, :] >= padding) | (key[None, :] == m[:, None]))
            s = tl.where(seen, s, -float("inf"))
        elif not WHOLE:
            seen = real[None, :]
            if MASK.last:
                seen = seen & ((key[None, :] < length - 1) | (m[:, None] >= length - 1))
            s = tl.where(seen, s, -float("inf"))
        if bias_ptr is not None:
            s += LOG2E * tl.load(bias_ptr + batch * SOURCE + key, mask=key < SOURCE, other=0.0)[None, :]
        # A row has at least one key; unless padding comes first, the first block holds it.
        p, shrink, best, total = softmax_step(s, best, total, MASK.causal and length_ptr is not None)
        if UNMASKED:
            v = tl.load(v_ptr + place[:, None] + d[None, :])
        else:
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    out = acc / total[:, None]
    target = out_ptr + ((batch * tokens + m[:, None]) * H.heads + head) * H.dim + d[None, :]
    keep = (m < tokens)[:, None] & in_d[None, :]
    store_rounded(target, out, keep, inverse_scale)


def attention(
    tensors: Tensors, bias: Tensor | None, inverse_scale: float | None, last: bool, tile: FlashTile | None
) -> None:
    """See `vla_accel.kernels.attention.ops.attention`."""
    q, k, *_ = tensors
    tile = tile or FlashTile.default(current(q).gpu, q.shape[1], k.shape[1], q.shape[3])
    _launch(tensors, (bias, None), inverse_scale, Mask(k.shape[1], last), tile)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor | None, together: Tensor | None,
    inverse_scale: float | None, tile: FlashTile | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.attention.ops.causal_attention`."""
    tile = tile or causal_tiles(current(q).gpu, q.shape[1], q.shape[3])[0]
    _launch((q, k, v, out, starts), (None, together), inverse_scale, Mask(k.shape[1], causal=True), tile)


def _launch(
    tensors: Tensors, extra: tuple[Tensor | None, Tensor | None], inverse_scale: float | None, mask: Mask,
    tile: FlashTile,
) -> None:  # fmt: skip
    """`extra`: the bias of `attention` and `together` of `causal_attention`."""
    q, k, *_ = tensors
    batch, tokens, heads, head_dim = q.shape
    grid, strides = (triton.cdiv(tokens, tile.queries), heads, batch), (q.stride()[:3], k.stride()[:3])
    scales, run = (head_dim**-0.5 * LOG2E.value, inverse_scale), {"num_warps": tile.warps, "num_stages": tile.stages}
    launch(_attention, grid, tensors, *extra, tokens, strides, scales, HeadShape.of(q, k), tile, mask, **run)


@triton.jit
def _attend_once(q, k, v, seen, real, scale):
    """Attention of queries (M, D) to one tile of keys (D, N) and values (N, D), of which they see `seen` (M, N).

    Returns the sums (M, D), the largest score and the sum of weights of each row. `real` (N,): keys whose values count:
    a padded prefix may hold anything, NaN included, and 0 × NaN is NaN.
    """
    s = tl.where(seen, tl.dot(q, k) * scale, -float("inf"))
    best = tl.max(s, 1)
    p = tl.exp2(s - tl.where(best == -float("inf"), 0.0, best)[:, None])
    return tl.dot(p.to(v.dtype), tl.where(real[:, None], v, 0.0)), best, tl.sum(p, 1)


UNROLLED = constexpr(4096)
"""Values of an output tile up to which the loads of all parts are unrolled; larger tiles would fill the registers."""


@triton.jit
def _store(part, best, total, workspace, target, mask, split, group, SPLITS: constexpr):
    """Store the output of a program's sums over its keys: at once if it has all keys. Otherwise it stores its sums, and
    the last program of a group combines all of them and stores the output.
    """
    # A row beyond the last token has no keys; it is not stored, but must not divide by zero.
    if SPLITS == 1:
        out = part / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(target, out.to(target.dtype.element_ty), mask=mask)
    else:
        ROWS: constexpr = part.shape[0]
        COLUMNS: constexpr = part.shape[1]
        part_ptr, stat_ptr, count_ptr = workspace
        local = tl.arange(0, ROWS)
        at = local[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        stats = stat_ptr + (group * SPLITS + split) * (2 * ROWS) + local
        tl.store(part_ptr + (group * SPLITS + split).to(tl.int64) * (ROWS * COLUMNS) + at, part)
        tl.store(stats, best)
        tl.store(stats + ROWS, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + group, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.debug_barrier()
            stats_of = stat_ptr + group * SPLITS * (2 * ROWS) + local
            parts_of = part_ptr + group.to(tl.int64) * SPLITS * (ROWS * COLUMNS) + at
            best = tl.full((ROWS,), -float("inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            if ROWS * COLUMNS <= UNROLLED:
                # The statistics of all parts first, so that all loads are under way together.
                bests, totals = (), ()
                for other in tl.static_range(SPLITS):
                    bests += (tl.load(stats_of + other * (2 * ROWS), cache_modifier=".cg"),)
                    totals += (tl.load(stats_of + other * (2 * ROWS) + ROWS, cache_modifier=".cg"),)
                for other in tl.static_range(SPLITS):
                    best = tl.maximum(best, bests[other])
                best = tl.where(best == -float("inf"), 0.0, best)
                for other in tl.static_range(SPLITS):
                    weight = tl.exp2(bests[other] - best)
                    total += weight * totals[other]
                    acc += weight[:, None] * tl.load(parts_of + other * (ROWS * COLUMNS), cache_modifier=".cg")
            else:
                for other in range(SPLITS):
                    best = tl.maximum(best, tl.load(stats_of + other * (2 * ROWS), cache_modifier=".cg"))
                best = tl.where(best == -float("inf"), 0.0, best)
                for other in range(SPLITS):
                    weight = tl.exp2(tl.load(stats_of + other * (2 * ROWS), cache_modifier=".cg") - best)
                    total += weight * tl.load(stats_of + other * (2 * ROWS) + ROWS, cache_modifier=".cg")
                    acc += weight[:, None] * tl.load(parts_of + other * (ROWS * COLUMNS), cache_modifier=".cg")
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(target, out.to(target.dtype.element_ty), mask=mask)
            tl.store(count_ptr + group, 0)


@triton.jit
def _seen(token, key, tokens, MASK: constexpr):
    """Which keys of the suffix its tokens see."""
    seen = (token < tokens)[:, None] & (key < tokens)[None, :]
    if MASK.first:
        # π0's state token attends to the prefix and itself, not to the actions.
        seen = seen & ((token[:, None] > 0) | (key[None, :] == 0))
    if MASK.causal:
        seen = seen & (key[None, :] <= token[:, None])
    return seen


@triton.jit
def _queries(at, kept, eps, H: constexpr):
    """A tile of queries, and their RMSNorm with an `eps` that is not None."""
    q = tl.load(at, mask=kept, other=0.0)
    if eps is not None:
        wide = q.to(tl.float32)
        q = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / H.dim + eps)[:, None]).to(q.dtype)
    return q


@triton.jit
def _suffix_attention(
    suffix, prefix, workspace, sizes, H: constexpr, TILE: constexpr, SPLITS: constexpr, MASK: constexpr, PDL: constexpr
):
    KV_HEADS: constexpr = H.heads // H.group
    AT_ONCE: constexpr = TILE.tiles == 1
    q_ptr, suffix_keys, suffix_values, out_ptr = suffix
    prefix_keys, prefix_values, length_ptr = prefix
    tokens, prefix_tokens, scale, eps = sizes
    tile, split, pair = tl.program_id(1 if AT_ONCE else 0), tl.program_id(0 if AT_ONCE else 1), tl.program_id(2)
    batch, kv_head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    row = tile * TILE.rows + tl.arange(0, TILE.rows)
    token, head = row // H.group, kv_head * H.group + row % H.group
    d = tl.arange(0, H.block)
    in_d = d < H.dim
    n = tl.arange(0, TILE.keys)
    query = ((batch * tokens + token[:, None]) * H.heads + head[:, None]) * H.dim + d[None, :]
    kept = (token < tokens)[:, None] & in_d[None, :]
    if AT_ONCE:
        if split < SPLITS.prefix:
            # The prefix was complete before the first kernel of the loop: its keys may be fetched before the wait.
            key = split * TILE.keys + n
            real_key = key < tl.load(length_ptr + batch)
            place = ((batch * prefix_tokens + key) * KV_HEADS + kv_head) * H.dim
            inside = key < prefix_tokens
            k = tl.load(prefix_keys + place[None, :] + d[:, None], mask=inside[None, :] & in_d[:, None], other=0.0)
            v = tl.load(prefix_values + place[:, None] + d[None, :], mask=inside[:, None] & in_d[None, :], other=0.0)
            wait_for_previous(PDL)
            seen = (token < tokens)[:, None] & real_key[None, :]
        else:
            wait_for_previous(PDL)
            key = (split - SPLITS.prefix) * TILE.keys + n
            real_key = key < tokens
            place = ((batch * tokens + key) * KV_HEADS + kv_head) * H.dim
            k = tl.load(suffix_keys + place[None, :] + d[:, None], mask=real_key[None, :] & in_d[:, None], other=0.0)
            v = tl.load(suffix_values + place[:, None] + d[None, :], mask=real_key[:, None] & in_d[None, :], other=0.0)
            seen = _seen(token, key, tokens, MASK)
        q = _queries(q_ptr + query, kept, eps, H)
        part, best, total = _attend_once(q, k, v, seen, real_key, scale)
    else:
        wait_for_previous(PDL)
        q = _queries(q_ptr + query, kept, eps, H)
        best = tl.full((TILE.rows,), -float("inf"), tl.float32)
        total = tl.full((TILE.rows,), 0.0, tl.float32)
        part = tl.full((TILE.rows, H.block), 0.0, tl.float32)
        if split < SPLITS.prefix:
            length = tl.load(length_ptr + batch)
            base = batch * prefix_tokens * (KV_HEADS * H.dim) + kv_head * H.dim
            for start in range(0, TILE.tiles * TILE.keys, TILE.keys):
                key = split * (TILE.tiles * TILE.keys) + start + n
                # Do not read the padding of a prefix: it may hold anything, NaN included.
                real = key < length
                place = base + key * (KV_HEADS * H.dim)
                k = tl.load(prefix_keys + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
                s = tl.where(real[None, :], tl.dot(q, k) * scale, -float("inf"))
                p, shrink, best, total = softmax_step(s, best, total, True)
                v = tl.load(prefix_values + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
                part = tl.dot(p.to(v.dtype), v, part * shrink[:, None])
        # The suffix's keys: a tile for each program after those of the prefix, or all for the last of these.
        if TILE.joined:
            mine, base = split == SPLITS.prefix - 1, 0
        else:
            mine, base = split >= SPLITS.prefix, (split - SPLITS.prefix) * TILE.keys
        if mine:
            for start in tl.range(0, SPLITS.own, TILE.keys, num_stages=1):
                key = base + start + n
                real = key < tokens
                place = ((batch * tokens + key) * KV_HEADS + kv_head) * H.dim
                k = tl.load(suffix_keys + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
                s = tl.where(_seen(token, key, tokens, MASK), tl.dot(q, k) * scale, -float("inf"))
                p, shrink, best, total = softmax_step(s, best, total, True)
                v = tl.load(suffix_values + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
                part = tl.dot(p.to(v.dtype), v, part * shrink[:, None])
    _store(part, best, total, workspace, out_ptr + query, kept, split, pair * SPLITS.row_tiles + tile, SPLITS.all)


def suffix_attention(
    suffix: Heads, prefix: Prefix, out: Tensor, workspace: AttentionWorkspace, sizes: SuffixShape, tile: KeySplit, *,
    state_first: bool, causal: bool, eps: float | None = None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.attention.suffix.suffix_attention` and, for a suffix without keys, `prefix_attention`."""
    own = 0 if not sizes.own else sizes.tokens if tile.joined else tile.keys
    splits = Splits(tile.prefix_splits(sizes), tile.splits(sizes), tile.row_tiles(sizes), own)
    shared = (splits.all, splits.row_tiles) if tile.tiles == 1 else (splits.row_tiles, splits.all)
    tensors = ((suffix.q, suffix.k, suffix.v, out), (prefix.keys, prefix.values, prefix.lengths), workspace)
    numbers = (sizes.tokens, sizes.prefix_tokens, sizes.head_dim**-0.5 * LOG2E.value, eps)
    constants = (HeadShape.of(suffix.q, prefix.keys), tile, splits, Mask(0, causal=causal, first=state_first))
    grid, run = (*shared, sizes.batch * sizes.kv_heads), {"num_warps": tile.warps, "num_stages": tile.stages}
    launch(_suffix_attention, grid, *tensors, numbers, *constants, **run)
