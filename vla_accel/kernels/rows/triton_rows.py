"""Kernels that work row by row. A public function runs the op of the same name in `vla_accel.kernels.rows.rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel import pictures
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.rows.rows import HeadNorms, NormedHeads
from vla_accel.kernels.triton_common import (
    activated,
    let_next_start,
    store_rounded,
    wait_for_previous,
)
from vla_accel.numeric import power_of_two

TOP, LEFT, BOTTOM, RIGHT = (constexpr(n) for n in (pictures.TOP, pictures.LEFT, pictures.BOTTOM, pictures.RIGHT))
OUTSIDE, LOWEST, HIGHEST = constexpr(pictures.OUTSIDE), constexpr(pictures.LOWEST), constexpr(pictures.HIGHEST)
OFFSET, SHIFT, SCALE = constexpr(pictures.OFFSET), constexpr(pictures.SHIFT), constexpr(pictures.SCALE)
MAP_WIDTH = constexpr(pictures.MAP_WIDTH)


@triton.jit
def _patchify(
    image_ptr,
    map_ptr,
    out_ptr,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    PATCH: constexpr,
    SQUARE: constexpr,
    STRIDE: constexpr,
):
    row = tl.program_id(0)
    COLUMNS: constexpr = WIDTH // (PATCH * SQUARE)
    PATCHES: constexpr = (HEIGHT // PATCH) * (WIDTH // PATCH)
    image, cell = row // PATCHES, row % PATCHES
    square, place = cell // (SQUARE * SQUARE), cell % (SQUARE * SQUARE)
    top = (square // COLUMNS * SQUARE + place // SQUARE) * PATCH
    left = (square % COLUMNS * SQUARE + place % SQUARE) * PATCH
    k = tl.arange(0, triton.next_power_of_2(STRIDE))
    # A row is in the order of the convolution's weight: channel, row, column.
    channel, inside = k // (PATCH * PATCH), k % (PATCH * PATCH)
    y, x = top + inside // PATCH, left + inside % PATCH
    real = k < 3 * PATCH * PATCH
    base = image_ptr + image.to(tl.int64) * HEIGHT * WIDTH * 3
    pixel = tl.load(base + (y * WIDTH + x) * 3 + channel, mask=real, other=0).to(tl.float32)
    if map_ptr is not None:
        its = map_ptr + image * MAP_WIDTH
        inside = (y >= tl.load(its + TOP)) & (y < tl.load(its + BOTTOM))
        inside = inside & (x >= tl.load(its + LEFT)) & (x < tl.load(its + RIGHT))
        shift = tl.load(its + SHIFT + channel, mask=real, other=0.0)
        scale = tl.load(its + SCALE + channel, mask=real, other=0.0)
        level = (pixel - shift) * scale + tl.load(its + OFFSET)
        level = tl.minimum(tl.maximum(level, tl.load(its + LOWEST)), tl.load(its + HIGHEST))
        pixel = tl.where(real, tl.where(inside, level, tl.load(its + OUTSIDE)), 0.0)
    out = out_ptr + row.to(tl.int64) * (2 * STRIDE) + k
    keep = k < STRIDE
    tl.store(out, pixel.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(out + STRIDE, pixel.to(out_ptr.dtype.element_ty), mask=keep)


def patchify(images: Tensor, out: Tensor, patch: int, square: int, pixel_maps: Tensor | None) -> None:
    sizes = (*images.shape[1:3], patch, square, out.shape[1] // 2)
    _patchify[(len(out),)](images, pixel_maps, out, *sizes, num_warps=4)


@triton.jit
def _normed_store(x, h_ptr, offset, keep, eps, inverse_scale, WIDTH: constexpr, LAYER: constexpr):
    if LAYER:
        centred = tl.where(keep, x - tl.sum(x, 0) / WIDTH, 0.0)
        h = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    else:
        h = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    store_rounded(h_ptr + offset, h, keep, inverse_scale)


@triton.jit
def _add_norm(tensors, y_rows, eps, inverse_scale, WIDTH: constexpr, LAYER: constexpr, PDL: constexpr):
    x_ptr, y_ptr, x_out_ptr, h_ptr = tensors
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    keep = column < WIDTH
    offset = row.to(tl.int64) * WIDTH + column
    x = tl.load(x_ptr + offset, mask=keep, other=0.0).to(tl.float32)
    if y_ptr is not None:
        x += tl.load(y_ptr + (row % y_rows) * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
        rounded = x.to(x_out_ptr.dtype.element_ty)
        tl.store(x_out_ptr + offset, rounded, mask=keep)
        # The norm takes the rounded sum, to which the next residual will be added.
        x = rounded.to(tl.float32)
    _normed_store(x, h_ptr, offset, keep, eps, inverse_scale, WIDTH, LAYER)


def add_norm(
    x: Tensor, y: Tensor | None, x_out: Tensor, h: Tensor, *, layer: bool, eps: float, inverse_scale: float | None
) -> None:
    rows, width = x.shape
    y_rows, warps = 1 if y is None else len(y), 4 if width <= 2048 else 8
    launch(_add_norm, (rows,), (x, y, x_out, h), y_rows, eps, inverse_scale, width, layer, num_warps=warps)


@triton.jit
def _post_norm(tensors, x_stride, out_stride, eps, WIDTH: constexpr, PDL: constexpr):
    x_ptr, y_ptr, weight_ptr, bias_ptr, out_ptr = tensors
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    keep = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=keep, other=0.0)
    bias = tl.load(bias_ptr + column, mask=keep, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=keep, other=0.0).to(tl.float32)
    x += tl.load(y_ptr + row * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    centred = tl.where(keep, x - tl.sum(x, 0) / WIDTH, 0.0)
    h = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps) * weight + bias
    tl.store(out_ptr + row * out_stride + column, h.to(out_ptr.dtype.element_ty), mask=keep)


def post_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, eps: float) -> None:
    rows, width = y.shape
    tensors = (x, y, weight, bias, out)
    launch(_post_norm, (rows,), tensors, x.stride(0), out.stride(0), eps, width, num_warps=4 if width <= 2048 else 8)


@triton.jit
def _project_normed(tensors, eps, WIDTH: constexpr, OUTS: constexpr, PDL: constexpr):
    x_ptr, weight_ptr, bias_ptr, out_ptr = tensors
    let_next_start(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(WIDTH))
    keep = column < WIDTH
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    centred = tl.where(keep, x - tl.sum(x, 0) / WIDTH, 0.0)
    h = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    for first in range(0, OUTS, 8):
        n = first + tl.arange(0, 8)
        weights = tl.load(weight_ptr + n[:, None] * WIDTH + column[None, :], mask=(n < OUTS)[:, None] & keep, other=0.0)
        sums = tl.sum(weights * h[None, :], 1) + tl.load(bias_ptr + n, mask=n < OUTS, other=0.0)
        tl.store(out_ptr + row * OUTS + n, sums, mask=n < OUTS)


def project_normed(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, eps: float) -> None:
    rows, width = x.shape
    launch(_project_normed, (rows,), (x, weight, bias, out), eps, width, len(weight), num_warps=4)


@triton.jit
def _embed_norm(sources, x_ptr, h_ptr, scales, IMAGES: constexpr, LENGTH: constexpr, WIDTH: constexpr):
    row = tl.program_id(0)
    image_ptr, token_ptr, table_ptr, state_ptr, length_ptr = sources
    multiplier, eps, inverse_scale = scales
    TOTAL: constexpr = IMAGES + LENGTH + (length_ptr is not None)  # lengths come with a state
    batch, place = row // TOTAL, row % TOTAL
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    keep = column < WIDTH
    is_state = False
    if length_ptr is not None:
        is_state = (place == tl.load(length_ptr + batch) - 1) | (place == TOTAL - 1)
    if is_state:
        x = tl.load(state_ptr + batch.to(tl.int64) * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    elif place < IMAGES:
        source = image_ptr + (batch * IMAGES + place).to(tl.int64) * WIDTH
        x = tl.load(source + column, mask=keep, other=0.0).to(tl.float32)
    else:
        token = tl.load(token_ptr + batch * LENGTH + place - IMAGES)
        embedded = tl.load(table_ptr + token.to(tl.int64) * WIDTH + column, mask=keep, other=0.0)
        x = (embedded.to(tl.float32) * multiplier).to(x_ptr.dtype.element_ty).to(tl.float32)
    offset = row.to(tl.int64) * WIDTH + column
    tl.store(x_ptr + offset, x.to(x_ptr.dtype.element_ty), mask=keep)
    _normed_store(x, h_ptr, offset, keep, eps, inverse_scale, WIDTH, False)


def embed_norm(
    image_tokens: Tensor, tokens: Tensor, table: Tensor, x: Tensor, h: Tensor, *, eps: float,
    inverse_scale: float | None, state: Tensor | None, lengths: Tensor | None,
) -> None:  # fmt: skip
    rows, width = x.shape
    sources = (image_tokens, tokens, table, x if state is None else state, lengths)
    scales, sizes = (width**0.5, eps, inverse_scale), (image_tokens.shape[1], tokens.shape[1], width)
    launch(_embed_norm, (rows,), sources, x, h, scales, *sizes, num_warps=4 if width <= 2048 else 8)


@triton.jit
def _geglu(x_ptr, out_ptr, inverse_scale, HIDDEN: constexpr, PAIRED: constexpr, GATE: constexpr, PDL: constexpr):
    BLOCK: constexpr = min(2048, triton.next_power_of_2(HIDDEN))
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = column < HIDDEN
    source = x_ptr + row * (2 * HIDDEN) + (column // 8 * 16 + column % 8 if PAIRED else column)
    gate = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(source + (8 if PAIRED else HIDDEN), mask=keep, other=0.0).to(tl.float32)
    y = activated(gate, GATE) * up
    store_rounded(out_ptr + row * HIDDEN + column, y, keep, inverse_scale)


def geglu(gate_up: Tensor, out: Tensor, *, inverse_scale: float | None, paired: bool, activation: Activation) -> None:
    rows, hidden = out.shape
    grid = (triton.cdiv(hidden, min(2048, power_of_two(hidden))), rows)
    launch(_geglu, grid, gate_up, out, inverse_scale, hidden, paired, activation.gate.code, num_warps=8)


@triton.jit
def _gelu(x_ptr, out_ptr, total, inverse_scale, BLOCK: constexpr, FORM: constexpr, PDL: constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = offset < total
    x = tl.load(x_ptr + offset, mask=keep, other=0.0).to(tl.float32)
    store_rounded(out_ptr + offset, activated(x, FORM), keep, inverse_scale)


def gelu(x: Tensor, out: Tensor, *, inverse_scale: float | None, form: Activation) -> None:
    total = x.numel()
    launch(_gelu, (triton.cdiv(total, 4096),), x, out, total, inverse_scale, 4096, form.code, num_warps=8)


@triton.jit
def _rotate(
    qkv_ptr,
    norms,
    rope,
    cache,
    TOKENS: constexpr,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    HALF: constexpr,
    PDL: constexpr,
):
    cos_ptr, sin_ptr = rope
    k_ptr, v_ptr = cache
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    # Without a cache k is rotated in place, and v stays unchanged.
    TAKEN: constexpr = HEADS + KV_HEADS + (KV_HEADS if k_ptr is not None else 0)
    head = tl.arange(0, triton.next_power_of_2(TAKEN))[:, None]
    i = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    real = (i < HALF) & (head < TAKEN)
    source = qkv_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head * (2 * HALF) + i
    a = tl.load(source, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
    kind = qkv_ptr.dtype.element_ty
    is_q = head < HEADS
    if v_ptr is not None:
        is_v = real & (head >= HEADS + KV_HEADS)
        v = v_ptr + (row.to(tl.int64) * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + i
        tl.store(v, a.to(kind), mask=is_v)
        tl.store(v + HALF, b.to(kind), mask=is_v)
    q_norm_ptr, k_norm_ptr, eps = norms
    if q_norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        at = tl.minimum(i, HALF - 1)
        low = tl.where(is_q, tl.load(q_norm_ptr + at), tl.load(k_norm_ptr + at))
        high = tl.where(is_q, tl.load(q_norm_ptr + HALF + at), tl.load(k_norm_ptr + HALF + at))
        a, b = a * rstd * low, b * rstd * high
    angle = (row % TOKENS) * HALF + i
    cos = tl.load(cos_ptr + angle, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=i < HALF, other=0.0)
    rotated_a, rotated_b = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    in_place = real
    if k_ptr is not None:
        in_place = real & is_q
        is_k = real & (head >= HEADS) & (head < HEADS + KV_HEADS)
        k = k_ptr + (row.to(tl.int64) * KV_HEADS + head - HEADS) * (2 * HALF) + i
        tl.store(k, rotated_a, mask=is_k)
        tl.store(k + HALF, rotated_b, mask=is_k)
    tl.store(source, rotated_a, mask=in_place)
    tl.store(source + HALF, rotated_b, mask=in_place)


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, norms: HeadNorms | None, keys: Tensor | None,
    values: Tensor | None,
) -> None:  # fmt: skip
    half = cos.shape[1]
    kv_heads = (qkv.shape[1] // (2 * half) - heads) // 2
    tokens = len(cos) if keys is None else keys.shape[1]
    weights = (None, None, None) if norms is None else (norms.q, norms.k, norms.eps)
    sizes = (tokens, heads, kv_heads, half)
    launch(_rotate, (len(qkv),), qkv, weights, (cos, sin), (keys, values), *sizes, num_warps=4)


@triton.jit
def _norm_heads(
    x_ptr, into, rope, eps, rows, TOKENS: constexpr, HEADS: constexpr, HALF: constexpr, LAYERS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    k_ptr, v_ptr, norm_ptr = into
    cos_ptr, sin_ptr = rope
    WIDTH: constexpr = HEADS * 2 * HALF
    let_next_start(PDL)
    row = tl.program_id(0)
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    i = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    real = (i < HALF) & (head < HEADS)
    place = head * (2 * HALF) + i
    layer = row % LAYERS
    target = (layer * (rows // LAYERS) + row // LAYERS).to(tl.int64) * WIDTH + place
    factors = norm_ptr + layer * WIDTH + place
    low, high = tl.load(factors, mask=real, other=0.0), tl.load(factors + HALF, mask=real, other=0.0)
    wait_for_previous(PDL)
    source = x_ptr + row.to(tl.int64) * (2 * WIDTH) + place
    a = tl.load(source, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
    v_low = tl.load(source + WIDTH, mask=real, other=0.0)
    v_high = tl.load(source + WIDTH + HALF, mask=real, other=0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(a * a + b * b, 1), 0) / WIDTH + eps)
    a *= rstd * low
    b *= rstd * high
    if cos_ptr is not None:
        angle = (row % TOKENS) * HALF + i
        cos = tl.load(cos_ptr + angle, mask=real, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=real, other=0.0)
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    kind = k_ptr.dtype.element_ty
    tl.store(k_ptr + target, a.to(kind), mask=real)
    tl.store(k_ptr + target + HALF, b.to(kind), mask=real)
    tl.store(v_ptr + target, v_low.to(kind), mask=real)
    tl.store(v_ptr + target + HALF, v_high.to(kind), mask=real)


def norm_heads(
    x: Tensor, into: NormedHeads, rope: tuple[Tensor, Tensor] | None, *, heads: int, eps: float, layers: int
) -> None:
    tokens, tensors = 1 if rope is None else len(rope[0]), (into.k, into.v, into.norm)
    sizes = (tokens, heads, x.shape[1] // (4 * heads), layers)
    launch(_norm_heads, (len(x),), x, tensors, rope or (None, None), eps, len(x), *sizes, num_warps=4)


@triton.jit
def _norm_rows(x_ptr, out_ptr, eps, HEADS: constexpr, DIM: constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    d = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    real = (head < HEADS) & (d < DIM)
    place = row * (HEADS * DIM) + head * DIM + d
    x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
    by_head = tl.sum(x * x, 1)
    rstd = tl.rsqrt(tl.sum(by_head, 0) / (HEADS * DIM) + eps)
    x *= rstd
    if HEADS > 1:
        x *= tl.rsqrt(by_head * rstd * rstd / DIM + eps)[:, None]
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=real)


def norm_rows(x: Tensor, out: Tensor, *, heads: int, eps: float) -> None:
    launch(_norm_rows, (len(x),), x, out, eps, heads, x.shape[1] // heads, num_warps=4)


@triton.jit
def _place_tokens(sources, order_ptr, x_ptr, IMAGES: constexpr, LENGTH: constexpr, WIDTH: constexpr):
    image_ptr, token_ptr, table_ptr = sources
    row = tl.program_id(0)
    batch, source = row // (IMAGES + LENGTH), tl.load(order_ptr + row % (IMAGES + LENGTH))
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    keep = column < WIDTH
    if source < IMAGES:
        x = tl.load(image_ptr + (batch * IMAGES + source) * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    else:
        token = tl.load(token_ptr + batch * LENGTH + source - IMAGES)
        x = tl.load(table_ptr + token * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    tl.store(x_ptr + row.to(tl.int64) * WIDTH + column, x.to(x_ptr.dtype.element_ty), mask=keep)


def place_tokens(image_tokens: Tensor, tokens: Tensor, table: Tensor, order: Tensor, x: Tensor) -> None:
    sizes = (image_tokens.shape[1], tokens.shape[1], x.shape[1])
    launch(_place_tokens, (len(x),), (image_tokens, tokens, table), order, x, *sizes, num_warps=4)


@triton.jit
def _add_at(tensors, TOKENS: constexpr, COUNT: constexpr, WIDTH: constexpr, PDL: constexpr):
    y_ptr, place_ptr, x_ptr = tensors
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    place = (row // COUNT) * TOKENS + tl.load(place_ptr + row % COUNT)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    keep = column < WIDTH
    target = x_ptr + place * WIDTH + column
    y = tl.load(y_ptr + row.to(tl.int64) * WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    x = tl.load(target, mask=keep, other=0.0).to(tl.float32) + y
    tl.store(target, x.to(x_ptr.dtype.element_ty), mask=keep)


def add_at(y: Tensor, places: Tensor, x: Tensor) -> None:
    batch, count, width = y.shape
    launch(_add_at, (batch * count,), (y, places, x), x.shape[0] // batch, count, width, num_warps=4)
