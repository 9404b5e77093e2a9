"""Attention kernels: one for many queries (vision, prefix), two that split the keys for the few queries of a suffix.

Both take the number of real keys from device memory, so that one graph serves every prompt length of its bucket.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.attention.config import FlashTile, KeySplit, SuffixShape
from vla_accel.kernels.chain import launch
from vla_accel.kernels.triton_common import softmax_step, store_rounded, wait_for_previous
from vla_accel.numeric import power_of_two
from vla_accel.runtime import current

LOG2E = 1.4426950408889634


@triton.jit
def _attention(q_ptr, k_ptr, v_ptr, out_ptr, length_ptr, tokens, q_batch, q_token, q_head, k_batch,
               k_token, k_head, scale, inverse_scale, SOURCE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               HAS_LENGTHS: tl.constexpr, LAST: tl.constexpr, EIGHTS: tl.constexpr, QUANT: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = SOURCE % BLOCK_N == 0 and not HAS_LENGTHS  # every tile of keys is full
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    wait_for_previous(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    q_place, kv_place = head * q_head, (head // GROUP) * k_head
    if EIGHTS:
        # Of heads of 72 Triton would not know that they begin at sixteen bytes, and load values one by one.
        q_place, kv_place = tl.multiple_of(q_place, 8), tl.multiple_of(kv_place, 8)
    q = tl.load(
        q_ptr + batch * q_batch + m[:, None] * q_token + q_place + d[None, :],
        mask=(m < tokens)[:, None] & in_d[None, :],
        other=0.0,
    )
    length = SOURCE
    if HAS_LENGTHS:
        length = tl.load(length_ptr + batch)
    base = batch * k_batch + kv_place
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, SOURCE, BLOCK_N):
        key = start + n
        real = key < length
        place = base + key * k_token
        if WHOLE and HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + place[None, :] + d[:, None])
        else:
            k = tl.load(k_ptr + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
        s = tl.dot(q, k) * scale
        if not WHOLE:
            seen = real[None, :]
            if LAST:
                seen = seen & ((key[None, :] < length - 1) | (m[:, None] >= length - 1))
            s = tl.where(seen, s, -float("inf"))
        # A row has at least one key, and the first block holds it.
        p, shrink, best, total = softmax_step(s, best, total, False)
        if WHOLE and HEAD_DIM == BLOCK_D:
            v = tl.load(v_ptr + place[:, None] + d[None, :])
        else:
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    out = acc / total[:, None]
    target = out_ptr + ((batch * tokens + m[:, None]) * HEADS + head) * HEAD_DIM + d[None, :]
    keep = (m < tokens)[:, None] & in_d[None, :]
    store_rounded(target, out, keep, inverse_scale, QUANT)


def attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, *, inverse_scale: float | None,
    last: bool = False, tile: FlashTile | None = None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.attention.ops.attention`."""
    batch, tokens, heads, head_dim = q.shape
    source, kv_heads = k.shape[1:3]
    tile = tile or FlashTile.default(current(q).gpu, tokens, source, head_dim)
    grid = (triton.cdiv(tokens, tile.queries), heads, batch)
    launch(
        _attention, grid,
        q, k, v, out, lengths if lengths is not None else out, tokens, q.stride(0), q.stride(1), q.stride(2),
        k.stride(0), k.stride(1), k.stride(2), head_dim**-0.5 * LOG2E, inverse_scale or 1.0, source, heads,
        heads // kv_heads, head_dim, max(16, power_of_two(head_dim)), tile.queries, tile.keys, lengths is not None,
        last, q.stride(2) % 8 == k.stride(2) % 8 == 0, inverse_scale is not None, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _causal_attention(q_ptr, k_ptr, v_ptr, out_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, scale,
                      TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                      BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    wait_for_previous(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    q = tl.load(
        q_ptr + batch * q_batch + m[:, None] * q_token + head * q_head + d[None, :],
        mask=(m < TOKENS)[:, None] & in_d[None, :],
        other=0.0,
    )
    base = batch * k_batch + (head // GROUP) * k_head
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, TOKENS, BLOCK_N):
        key = start + n
        real = key < TOKENS
        place = base + key * k_token
        k = tl.load(k_ptr + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
        s = tl.where(key[None, :] <= m[:, None], tl.dot(q, k) * scale, -float("inf"))
        # The first block has key 0, which every query sees.
        p, shrink, best, total = softmax_step(s, best, total, False)
        v = tl.load(v_ptr + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    target = out_ptr + ((batch * TOKENS + m[:, None]) * HEADS + head) * HEAD_DIM + d[None, :]
    kept = (m < TOKENS)[:, None] & in_d[None, :]
    tl.store(target, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """See `vla_accel.kernels.attention.ops.causal_attention`."""
    batch, tokens, heads, head_dim = q.shape
    block_m = 64 if tokens > 32 else 16
    block_d = max(16, power_of_two(head_dim))
    grid = (triton.cdiv(tokens, block_m), heads, batch)
    launch(
        _causal_attention, grid,
        q, k, v, out, *q.stride()[:3], *k.stride()[:3], head_dim**-0.5 * LOG2E, tokens, heads, heads // k.shape[2],
        head_dim, block_d, block_m, 64, num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _shared(part, best, total, part_ptr, stat_ptr, count_ptr, out_ptr, query, real_row, in_d, split, group,
            SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Stores a program's sums over its keys; the last program of a group combines all of them and stores the output."""
    d = tl.arange(0, BLOCK_D)
    local = tl.arange(0, BLOCK_M)
    parts = part_ptr + (group * SPLITS + split).to(tl.int64) * (BLOCK_M * BLOCK_D)
    stats = stat_ptr + (group * SPLITS + split) * (2 * BLOCK_M)
    tl.store(parts + local[:, None] * BLOCK_D + d[None, :], part)
    tl.store(stats + local, best)
    tl.store(stats + BLOCK_M + local, total)
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr + group, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        # The program that arrives last combines the parts.
        tl.debug_barrier()
        best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        for other in range(SPLITS):
            stats = stat_ptr + (group * SPLITS + other) * (2 * BLOCK_M)
            best = tl.maximum(best, tl.load(stats + local, cache_modifier=".cg"))
        best = tl.where(best == -float("inf"), 0.0, best)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for other in range(SPLITS):
            stats = stat_ptr + (group * SPLITS + other) * (2 * BLOCK_M)
            parts = part_ptr + (group * SPLITS + other).to(tl.int64) * (BLOCK_M * BLOCK_D)
            weight = tl.exp2(tl.load(stats + local, cache_modifier=".cg") - best)
            total += weight * tl.load(stats + BLOCK_M + local, cache_modifier=".cg")
            part = tl.load(parts + local[:, None] * BLOCK_D + d[None, :], cache_modifier=".cg")
            acc += weight[:, None] * part
        # A row beyond the last token has no keys; it is not stored, but must not divide by zero.
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + query, out.to(out_ptr.dtype.element_ty), mask=real_row[:, None] & in_d[None, :])
        tl.store(count_ptr + group, 0)


@triton.jit
def _combined(part, best, total, part_ptr, stat_ptr, count_ptr, out_ptr, query, real_row, in_d, split, group,
              SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Stores the output of a program's sums over its keys: at once of one that has all, else by `_shared`."""
    if SPLITS == 1:
        # A row beyond the last token has no keys; it is not stored, but must not divide by zero.
        out = part / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + query, out.to(out_ptr.dtype.element_ty), mask=real_row[:, None] & in_d[None, :])
    else:
        _shared(part, best, total, part_ptr, stat_ptr, count_ptr, out_ptr, query, real_row, in_d, split, group, SPLITS,
                BLOCK_M, BLOCK_D)  # fmt: skip


@triton.jit
def _suffix_attention(q_ptr, pk_ptr, pv_ptr, sk_ptr, sv_ptr, length_ptr, part_ptr, stat_ptr, count_ptr, out_ptr,
                      tokens, prefix_tokens, scale, SPLITS: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
                      ROW_TILES: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                      BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STATE_FIRST: tl.constexpr,
                      CAUSAL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    split, tile, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    real_row = token < tokens
    d = tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    n = tl.arange(0, BLOCK_N)
    query = ((batch * tokens + token[:, None]) * (KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + d[None, :]
    if split < PREFIX_SPLITS:
        # The prefix was complete before the first kernel of the loop: its keys may be fetched ahead of the wait.
        key = split * BLOCK_N + n
        real_key = key < tl.load(length_ptr + batch)
        place = ((batch * prefix_tokens + key) * KV_HEADS + kv_head) * HEAD_DIM
        inside = key < prefix_tokens
        k = tl.load(pk_ptr + place[None, :] + d[:, None], mask=inside[None, :] & in_d[:, None], other=0.0)
        v = tl.load(pv_ptr + place[:, None] + d[None, :], mask=inside[:, None] & in_d[None, :], other=0.0)
        wait_for_previous(PDL)
        allowed = real_row[:, None] & real_key[None, :]
    else:
        wait_for_previous(PDL)
        key = (split - PREFIX_SPLITS) * BLOCK_N + n
        real_key = key < tokens
        place = ((batch * tokens + key) * KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(sk_ptr + place[None, :] + d[:, None], mask=real_key[None, :] & in_d[:, None], other=0.0)
        v = tl.load(sv_ptr + place[:, None] + d[None, :], mask=real_key[:, None] & in_d[None, :], other=0.0)
        allowed = real_row[:, None] & real_key[None, :]
        if STATE_FIRST:
            # π0's state token attends to the prefix and itself, not to the actions.
            allowed = allowed & ((token[:, None] > 0) | (key[None, :] == 0))
        if CAUSAL:
            allowed = allowed & (key[None, :] <= token[:, None])
    q = tl.load(q_ptr + query, mask=real_row[:, None] & in_d[None, :], other=0.0)
    s = tl.where(allowed, tl.dot(q, k) * scale, -float("inf"))
    best = tl.max(s, 1)
    safe = tl.where(best == -float("inf"), 0.0, best)
    p = tl.exp2(s - safe[:, None])
    total = tl.sum(p, 1)
    # A padded prefix may hold anything, NaN included, and 0 × NaN is NaN.
    v = tl.where(real_key[:, None], v, 0.0)
    part = tl.dot(p.to(v.dtype), v)
    _combined(part, best, total, part_ptr, stat_ptr, count_ptr, out_ptr, query, real_row, in_d, split,
              pair * ROW_TILES + tile, SPLITS, BLOCK_M, BLOCK_D)  # fmt: skip


@triton.jit
def _suffix_attention_split(q_ptr, pk_ptr, pv_ptr, sk_ptr, sv_ptr, length_ptr, part_ptr, stat_ptr, count_ptr, out_ptr,
                            tokens, prefix_tokens, scale, SPLITS: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
                            TILES: tl.constexpr, SUFFIX: tl.constexpr, JOINED: tl.constexpr,
                            ROW_TILES: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                            HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                            STATE_FIRST: tl.constexpr, CAUSAL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    tile, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    real_row = token < tokens
    d = tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    n = tl.arange(0, BLOCK_N)
    query = ((batch * tokens + token[:, None]) * (KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + d[None, :]
    wait_for_previous(PDL)
    q = tl.load(q_ptr + query, mask=real_row[:, None] & in_d[None, :], other=0.0)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    part = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if split < PREFIX_SPLITS:
        length = tl.load(length_ptr + batch)
        base = batch * prefix_tokens * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        for start in range(0, TILES * BLOCK_N, BLOCK_N):
            key = split * (TILES * BLOCK_N) + start + n
            # A padded prefix may hold anything, NaN included: what is not real is not read.
            real = key < length
            place = base + key * (KV_HEADS * HEAD_DIM)
            k = tl.load(pk_ptr + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
            s = tl.where(real[None, :], tl.dot(q, k) * scale, -float("inf"))
            p, shrink, best, total = softmax_step(s, best, total, True)
            v = tl.load(pv_ptr + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
            part = tl.dot(p.to(v.dtype), v, part * shrink[:, None])
    # The suffix's keys: a tile for each program behind those of the prefix, or all for the last of these.
    if JOINED:
        mine, base = split == PREFIX_SPLITS - 1, 0
    else:
        mine, base = split >= PREFIX_SPLITS, (split - PREFIX_SPLITS) * BLOCK_N
    if mine:
        for start in tl.range(0, SUFFIX, BLOCK_N, num_stages=1):
            key = base + start + n
            real = key < tokens
            place = ((batch * tokens + key) * KV_HEADS + kv_head) * HEAD_DIM
            k = tl.load(sk_ptr + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
            allowed = real_row[:, None] & real[None, :]
            if STATE_FIRST:
                # π0's state token attends to the prefix and itself, not to the actions.
                allowed = allowed & ((token[:, None] > 0) | (key[None, :] == 0))
            if CAUSAL:
                allowed = allowed & (key[None, :] <= token[:, None])
            s = tl.where(allowed, tl.dot(q, k) * scale, -float("inf"))
            p, shrink, best, total = softmax_step(s, best, total, True)
            v = tl.load(sv_ptr + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
            part = tl.dot(p.to(v.dtype), v, part * shrink[:, None])
    _combined(part, best, total, part_ptr, stat_ptr, count_ptr, out_ptr, query, real_row, in_d, split,
              pair * ROW_TILES + tile, SPLITS, BLOCK_M, BLOCK_D)  # fmt: skip


def suffix_attention(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor,
    workspace: tuple[Tensor, Tensor, Tensor], *, state_first: bool, causal: bool,
    cut: KeySplit,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.attention.suffix.suffix_attention`."""
    batch, tokens, heads, head_dim = q.shape
    prefix_tokens, kv_heads = prefix_k.shape[1:3]
    sizes = SuffixShape(batch, tokens, prefix_tokens, heads, kv_heads, head_dim, q.element_size())
    prefix_splits, splits, row_tiles = cut.prefix_splits(sizes), cut.splits(sizes), cut.row_tiles(sizes)
    parts, stats, counters = workspace
    arguments = (
        q, prefix_k, prefix_v, k, v, lengths, parts, stats, counters, out, tokens, prefix_tokens,
        head_dim**-0.5 * LOG2E, splits, prefix_splits,
    )  # fmt: skip
    masks = (state_first, causal)
    shape = (row_tiles, kv_heads, heads // kv_heads, head_dim, sizes.block_d, cut.rows, cut.keys, *masks)
    options = {"num_warps": cut.warps, "num_stages": cut.stages}
    if cut.tiles == 1:
        launch(_suffix_attention, (splits, row_tiles, batch * kv_heads), *arguments, *shape, **options)
    else:
        launch(
            _suffix_attention_split, (row_tiles, splits, batch * kv_heads),
            *arguments, cut.tiles, tokens if cut.joined else cut.keys, cut.joined, *shape, **options
        )  # fmt: skip
