"""Kernels of a multimodal prompt (`vla_accel.kernels.rows.sequence`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.attention.triton_attention import LOG2E
from vla_accel.kernels.chain import launch
from vla_accel.kernels.triton_common import let_next_start, softmax_step, wait_for_previous
from vla_accel.numeric import power_of_two


@triton.jit
def _patchify_blocks(image_ptr, out_ptr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                     MERGE: tl.constexpr, PATCH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    PATCHES: tl.constexpr = ROWS * COLUMNS * MERGE * MERGE
    image, place = row // PATCHES, row % PATCHES
    block, inner = place // (MERGE * MERGE), place % (MERGE * MERGE)
    top = (block // COLUMNS * MERGE + inner // MERGE) * PATCH
    left = (block % COLUMNS * MERGE + inner % MERGE) * PATCH
    k = tl.arange(0, BLOCK)
    # A row is in the order of the convolution's weight: channel, row, column.
    channel, inside = k // (PATCH * PATCH), k % (PATCH * PATCH)
    y, x = top + inside // PATCH, left + inside % PATCH
    base = image_ptr + image.to(tl.int64) * (ROWS * MERGE * PATCH) * WIDTH * 3
    pixel = tl.load(base + (y * WIDTH + x) * 3 + channel, mask=k < 3 * PATCH * PATCH, other=0).to(tl.float32)
    out = out_ptr + row.to(tl.int64) * (2 * STRIDE) + k
    tl.store(out, pixel.to(out_ptr.dtype.element_ty), mask=k < STRIDE)
    tl.store(out + STRIDE, pixel.to(out_ptr.dtype.element_ty), mask=k < STRIDE)


def patchify_blocks(images: Tensor, out: Tensor, patch: int, merge: int) -> None:
    """See `vla_accel.kernels.rows.sequence.patchify_blocks`."""
    height, width, stride = images.shape[1], images.shape[2], out.shape[1] // 2
    side = patch * merge
    _patchify_blocks[(out.shape[0],)](
        images, out, width, height // side, width // side, merge, patch, stride, power_of_two(stride), num_warps=4
    )


@triton.jit
def _place_tokens(image_ptr, token_ptr, table_ptr, order_ptr, x_ptr, IMAGES: tl.constexpr, LENGTH: tl.constexpr,
                  WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    batch, source = row // (IMAGES + LENGTH), tl.load(order_ptr + row % (IMAGES + LENGTH))
    column = tl.arange(0, BLOCK)
    keep = column < WIDTH
    if source < IMAGES:
        x = tl.load(image_ptr + (batch * IMAGES + source) * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    else:
        token = tl.load(token_ptr + batch * LENGTH + source - IMAGES)
        x = tl.load(table_ptr + token * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    tl.store(x_ptr + row.to(tl.int64) * WIDTH + column, x.to(x_ptr.dtype.element_ty), mask=keep)


def place_tokens(image_tokens: Tensor, tokens: Tensor, table: Tensor, order: Tensor, x: Tensor) -> None:
    """See `vla_accel.kernels.rows.sequence.place_tokens`."""
    rows, width = x.shape
    launch(
        _place_tokens, (rows,),
        image_tokens, tokens, table, order, x, image_tokens.shape[1], tokens.shape[1], width, power_of_two(width),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _add_at(y_ptr, place_ptr, x_ptr, TOKENS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
            BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    place = (row // COUNT) * TOKENS + tl.load(place_ptr + row % COUNT)
    column = tl.arange(0, BLOCK)
    keep = column < WIDTH
    target = x_ptr + place * WIDTH + column
    y = tl.load(y_ptr + row.to(tl.int64) * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    x = tl.load(target, mask=keep, other=0.0).to(tl.float32) + y
    tl.store(target, x.to(x_ptr.dtype.element_ty), mask=keep)


def add_at(y: Tensor, places: Tensor, x: Tensor) -> None:
    """See `vla_accel.kernels.rows.sequence.add_at`."""
    batch, count, width = y.shape
    launch(_add_at, (batch * count,), y, places, x, x.shape[0] // batch, count, width, power_of_two(width), num_warps=4)


@triton.jit
def _norm_rope(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, eps, TOKENS: tl.constexpr, HEADS: tl.constexpr,
               KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
               NORM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    keep = (i < HALF) & (head < HEADS + KV_HEADS)
    place = qkv_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head * (2 * HALF) + i
    a = tl.load(place, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=keep, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        is_q, in_half = head < HEADS, i < HALF
        low = tl.where(
            is_q, tl.load(q_norm_ptr + i, mask=in_half, other=0.0), tl.load(k_norm_ptr + i, mask=in_half, other=0.0)
        )
        high = tl.where(is_q, tl.load(q_norm_ptr + HALF + i, mask=in_half, other=0.0),
                        tl.load(k_norm_ptr + HALF + i, mask=in_half, other=0.0))  # fmt: skip
        a, b = a * rstd * low, b * rstd * high
    angle = (row % TOKENS) * HALF + i
    cos = tl.load(cos_ptr + angle, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=i < HALF, other=0.0)
    kind = qkv_ptr.dtype.element_ty
    tl.store(place, (a * cos - b * sin).to(kind), mask=keep)
    tl.store(place + HALF, (b * cos + a * sin).to(kind), mask=keep)


def norm_rope(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *,
    eps: float,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.rows.sequence.norm_rope`."""
    tokens, half = cos.shape
    launch(
        _norm_rope, (qkv.shape[0],),
        qkv, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, cos, sin, eps, tokens, heads,
        kv_heads, half, power_of_two(heads + kv_heads), power_of_two(half), q_norm is not None, num_warps=4,
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
    """See `vla_accel.kernels.rows.sequence.causal_attention`."""
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
def _exact_gelu(x_ptr, total, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = offset < total
    x = tl.load(x_ptr + offset, mask=keep, other=0.0).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(x_ptr + offset, y.to(x_ptr.dtype.element_ty), mask=keep)


def exact_gelu(x: Tensor) -> None:
    """See `vla_accel.kernels.rows.sequence.exact_gelu`."""
    total = x.numel()
    launch(_exact_gelu, (triton.cdiv(total, 2048),), x, total, 2048, num_warps=8)
