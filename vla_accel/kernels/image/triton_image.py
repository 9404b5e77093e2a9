"""Kernels of image networks on (B, H, W, C). A public function runs the op of the same name in
`vla_accel.kernels.image.ops`.

All compute in float32. A pixel's channels are adjacent, so Qwen-Image's norm is a row operation; a group norm needs two
launches: partial sums over stretches of pixels (in a fixed order, so that results repeat bit for bit), then the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.image.ops import GroupNorm, Sum
from vla_accel.kernels.triton_common import LOG2E, activated, gelu_erf, softmax_step, wait_for_previous
from vla_accel.numeric import power_of_two

TILE = constexpr(4096)
"""Elements that one program holds at a time: 32 a thread with 4 warps."""
_WHOLE = 2
"""Tiles of a group that one program norms alone, so that a small image takes one launch."""


class SumKind(NamedTuple):
    """Constants of a `Sum` in a kernel: its channels, the dimensions of its shift (2: one for each image), and whether
    it is phased.
    """

    channels: int
    shift: int
    phased: bool

    @classmethod
    def of(cls, x: Sum) -> SumKind:
        """Return the constants of x."""
        return cls(x.shape[3], 0 if x.shift is None else x.shift.dim(), x.phased)


class GroupShape(NamedTuple):
    """Constants of a group norm in a kernel: groups, channels of a group, groups of a program, lanes and rows of its
    tile, and tiles of a program; a power of two that holds the partial sums of a group.
    """

    groups: int
    channels: int
    taken: int
    lanes: int
    rows: int
    passes: int
    pieces: int


@triton.jit
def _normalise_pixels(image_ptr, scale_ptr, out_ptr, pixels, out_stride, LANES: constexpr, BLOCK: constexpr):
    batch = tl.program_id(1).to(tl.int64)
    pixel, lane = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None], tl.arange(0, LANES)[None, :]
    inside, colour = pixel < pixels, lane < 3
    level = tl.load(image_ptr + (batch * pixels + pixel) * 3 + lane, mask=inside & colour, other=0).to(tl.float32)
    factor, shift = (
        tl.load(scale_ptr + lane, mask=colour, other=0.0),
        tl.load(scale_ptr + 3 + lane, mask=colour, other=0.0),
    )
    value = level * factor + shift
    tl.store(out_ptr + batch * out_stride + pixel * LANES + lane, value.to(out_ptr.dtype.element_ty), mask=inside)


def normalise_pixels(images: Tensor, scale: Tensor, out: Tensor) -> None:
    batch, height, width, lanes = out.shape
    pixels, block = height * width, TILE.value // 4 // lanes
    grid = (triton.cdiv(pixels, block), batch)
    _normalise_pixels[grid](images, scale, out, pixels, out.stride(0), lanes, block, num_warps=4)


@triton.jit
def _summed(source, row, column, keep, real, size, X: constexpr):
    # `row` counts pixels over the batch (int64), `column` counts channels, valid where `real`; the two broadcast.
    x_ptr, residual_ptr, shift_ptr = source
    height, width = size
    pixels = height * width
    batch = row // pixels
    if X.phased:
        y, x = (row % pixels) // width, row % width
        base = (batch * (height // 2 + 1) + y // 2 + y % 2) * (width // 2 + 1) + x // 2 + x % 2
        place = base * (4 * X.channels) + ((y % 2) * 2 + x % 2) * X.channels
    else:
        place = row * X.channels
    total = tl.load(x_ptr + place + column, mask=keep, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * X.channels + column, mask=keep, other=0.0).to(tl.float32)
    if X.shift == 1:
        total += tl.load(shift_ptr + column, mask=real, other=0.0)
    if X.shift == 2:
        total += tl.load(shift_ptr + batch * X.channels + column, mask=keep, other=0.0)
    return total


@triton.jit
def _rows(
    source, gamma_ptr, targets, rows, size, X: constexpr, ACTIVATION: constexpr, PAD: constexpr, PDL: constexpr
):  # fmt: skip
    C: constexpr = X.channels
    BLOCK_C: constexpr = triton.next_power_of_2(C)
    ROWS: constexpr = max(1, TILE // BLOCK_C)
    sum_ptr, out_ptr = targets
    height, width = size
    target = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_C)
    keep = (target < rows)[:, None] & (column < C)[None, :]
    if PAD:
        # The padded image has one row and one column more; its pixels there are zeros.
        padded = (height + 1) * (width + 1)
        y, x = target % padded // (width + 1), target % padded % (width + 1)
        real = (y < height) & (x < width)
        row = (target // padded) * (height * width) + y * width + x
        inside = keep & real[:, None]
    else:
        row = target
        inside = keep
    wait_for_previous(PDL)
    total = _summed(source, row[:, None], column[None, :], inside, (column < C)[None, :], size, X)
    if PAD:
        total = tl.where(inside, total, 0.0)
    if gamma_ptr is None:
        total = activated(total, ACTIVATION)
    place = target[:, None] * C + column[None, :]
    if sum_ptr is not None:
        tl.store(sum_ptr + place, total.to(sum_ptr.dtype.element_ty), mask=keep)
    if gamma_ptr is not None:
        square = tl.sum(tl.where(keep, total * total, 0.0), 1)
        # x / max(|x|, 1e-12), as F.normalize has it.
        scale = tl.sqrt(float(C)) / tl.maximum(tl.sqrt(square), 1e-12)
        gamma = tl.load(gamma_ptr + column, mask=column < C, other=0.0)
        normed = activated(total * scale[:, None] * gamma[None, :], ACTIVATION)
        tl.store(out_ptr + place, normed.to(out_ptr.dtype.element_ty), mask=keep)


def add_up(x: Sum, *, pad: bool, activation: Activation) -> Tensor:
    if x.plain and not pad and activation is Activation.NONE:
        return x.value
    return _launch_rows(x, None, activation, keep=True, pad=pad)[0]


def rms_act(x: Sum, gamma: Tensor, *, activation: Activation, keep: bool) -> tuple[Tensor, Tensor]:
    return _launch_rows(x, gamma, activation, keep=keep, pad=False)


def _launch_rows(
    x: Sum, gamma: Tensor | None, activation: Activation, *, keep: bool, pad: bool
) -> tuple[Tensor, Tensor]:
    batch, height, width, channels = x.shape
    size = (batch, height + pad, width + pad, channels)
    out = x.value.new_empty(size)
    total = out if gamma is None else x.value.new_empty(size) if keep else None
    count, source = batch * size[1] * size[2], (x.value, x.residual, x.shift)
    grid = (triton.cdiv(count, max(1, TILE.value // power_of_two(channels))),)
    kinds = SumKind.of(x), activation.code, pad
    launch(_rows, grid, source, gamma, (total, out), count, (height, width), *kinds, num_warps=4)
    return out if total is None else total, out


@triton.jit
def _group_sums(
    source, skip_ptr, sum_ptr, part_ptr, size, X: constexpr, SKIP: constexpr, G: constexpr, PDL: constexpr
):  # fmt: skip
    # A program has whole groups side by side in its lanes, so that loads are long and aligned for any width of a group.
    C: constexpr = X.channels
    pixels = size[0] * size[1]
    piece, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, G.lanes)
    channel = (block * (G.taken * G.channels) + lane)[None, :]
    real = (lane < G.taken * G.channels)[None, :] & (channel < C + SKIP)
    sums = tl.full((G.lanes,), 0.0, tl.float32)
    squares = tl.full((G.lanes,), 0.0, tl.float32)
    wait_for_previous(PDL)
    for turn in range(G.passes):
        pixel = (piece * G.passes + turn) * G.rows + tl.arange(0, G.rows)
        row = (batch * pixels + pixel)[:, None]
        keep = (pixel < pixels)[:, None] & real
        inside = channel < C
        total = _summed(source, row, channel, keep & inside, real & inside, size, X)
        if skip_ptr is not None:
            other = tl.load(skip_ptr + row * SKIP + (channel - C), mask=keep & (channel >= C), other=0.0)
            total += other.to(tl.float32)
        if sum_ptr is not None:
            tl.store(sum_ptr + row * (C + SKIP) + channel, total.to(sum_ptr.dtype.element_ty), mask=keep)
        # `_summed` gives pixels beyond the last their shift, which does not count.
        total = tl.where(keep, total, 0.0)
        sums += tl.sum(total, 0)
        squares += tl.sum(total * total, 0)
    # The channels' sums are added up to the groups', once.
    member = _membership(G)
    local = tl.arange(0, member.shape[0])
    group = block * G.taken + local
    parts = part_ptr + ((batch * tl.num_programs(0) + piece) * 2) * G.groups + group
    mine = (local < G.taken) & (group < G.groups)
    tl.store(parts, tl.sum(tl.where(member, sums[None, :], 0.0), 1), mask=mine)
    tl.store(parts + G.groups, tl.sum(tl.where(member, squares[None, :], 0.0), 1), mask=mine)


@triton.jit
def _membership(G: constexpr):
    # (groups, lanes): true where the lane belongs to the group.
    lane, local = tl.arange(0, G.lanes), tl.arange(0, triton.next_power_of_2(G.taken))
    return (lane // G.channels)[None, :] == local[:, None]


@triton.jit
def _group_apply(
    source, sums, affine, after_ptr, out_ptr, size, X: constexpr, G: constexpr, ACTIVATION: constexpr, PDL: constexpr
):  # fmt: skip
    weight_ptr, bias_ptr, eps = affine
    part_ptr, pieces = sums
    C: constexpr = X.channels
    pixels = size[0] * size[1]
    piece, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, G.lanes)
    channel = (block * (G.taken * G.channels) + lane)[None, :]
    real = (lane < G.taken * G.channels)[None, :] & (channel < C)
    member = _membership(G)
    local = tl.arange(0, member.shape[0])
    group = block * G.taken + local
    part = tl.arange(0, G.pieces)
    parts = part_ptr + (batch * pieces + part)[:, None] * (2 * G.groups) + group[None, :]
    have = (part < pieces)[:, None] & ((local < G.taken) & (group < G.groups))[None, :]
    count = pixels * G.channels * 1.0
    wait_for_previous(PDL)
    mean = tl.sum(tl.load(parts, mask=have, other=0.0), 0) / count
    square = tl.sum(tl.load(parts + G.groups, mask=have, other=0.0), 0) / count
    scale = tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    # Each channel takes its group's values: a lane belongs to one group, so the sum has one term.
    means = tl.sum(tl.where(member, mean[:, None], 0.0), 0)[None, :]
    scales = tl.sum(tl.where(member, scale[:, None], 0.0), 0)[None, :]
    weight = tl.load(weight_ptr + channel, mask=real, other=0.0) * scales
    bias = tl.load(bias_ptr + channel, mask=real, other=0.0) - means * weight
    for turn in range(G.passes):
        pixel = (piece * G.passes + turn) * G.rows + tl.arange(0, G.rows)
        row = (batch * pixels + pixel)[:, None]
        keep = (pixel < pixels)[:, None] & real
        normed = _summed(source, row, channel, keep, real, size, X) * weight + bias
        _store_normed(out_ptr, after_ptr, row * C + channel, normed, keep, ACTIVATION)


@triton.jit
def _store_normed(out_ptr, after_ptr, place, normed, keep, ACTIVATION: constexpr):
    if after_ptr is not None:
        normed += tl.load(after_ptr + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, activated(normed, ACTIVATION).to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _group_whole(
    source, affine, after_ptr, out_ptr, size, X: constexpr, G: constexpr, ACTIVATION: constexpr, PDL: constexpr
):  # fmt: skip
    # A program reads its group from the cache again for the variance and for the result.
    weight_ptr, bias_ptr, eps = affine
    C: constexpr = X.channels
    PASSES: constexpr = G.passes
    pixels = size[0] * size[1]
    batch, lane = tl.program_id(1).to(tl.int64), tl.arange(0, G.lanes)[None, :]
    channel, real = tl.program_id(0) * G.channels + lane, lane < G.channels
    weight = tl.load(weight_ptr + channel, mask=real, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=real, other=0.0)
    count = pixels * G.channels * 1.0
    mean, variance = 0.0, 0.0
    wait_for_previous(PDL)
    for turn in tl.static_range(PASSES):
        pixel = turn * G.rows + tl.arange(0, G.rows)[:, None]
        keep = (pixel < pixels) & real
        total = tl.where(keep, _summed(source, batch * pixels + pixel, channel, keep, real, size, X), 0.0)
        mean += tl.sum(tl.sum(total, 1), 0) / count
    for turn in tl.static_range(PASSES):
        pixel = turn * G.rows + tl.arange(0, G.rows)[:, None]
        keep = (pixel < pixels) & real
        centred = _summed(source, batch * pixels + pixel, channel, keep, real, size, X) - mean
        variance += tl.sum(tl.sum(tl.where(keep, centred * centred, 0.0), 1), 0) / count
    weight *= tl.rsqrt(variance + eps)
    for turn in tl.static_range(PASSES):
        pixel = turn * G.rows + tl.arange(0, G.rows)[:, None]
        row, keep = batch * pixels + pixel, (pixel < pixels) & real
        normed = (_summed(source, row, channel, keep, real, size, X) - mean) * weight + bias
        _store_normed(out_ptr, after_ptr, row * C + channel, normed, keep, ACTIVATION)


def _launch_whole(x: Sum, norm: GroupNorm, activation: Activation, after: Tensor | None) -> Tensor | None:
    """Norm a small image in one launch; None for a larger one."""
    batch, height, width, channels = x.shape
    per_group = channels // norm.groups
    lanes = power_of_two(per_group)
    rows = min(power_of_two(height * width), max(1, TILE.value // lanes))
    passes = triton.cdiv(height * width, rows)
    if passes > _WHOLE:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = GroupShape(norm.groups, per_group, 1, lanes, rows, passes, 1)
    tensors, affine = (x.value, x.residual, x.shift), (norm.weight, norm.bias, norm.eps)
    constants = (SumKind.of(x), shape, activation.code)
    grid = (norm.groups, batch)
    launch(_group_whole, grid, tensors, affine, after, out, (height, width), *constants, num_warps=4)
    return out


def group_act(
    x: Sum, norm: GroupNorm, *, activation: Activation, keep: bool, skip: Tensor | None, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    if skip is None and (x.plain or not keep):
        whole = _launch_whole(x, norm, activation, after)
        if whole is not None:
            return (x.value if keep else whole), whole
    batch, height, width, channels = x.shape
    extra = 0 if skip is None else skip.shape[-1]
    wide, pixels = channels + extra, height * width
    per_group = wide // norm.groups
    # A program takes the whole groups that 128 lanes hold: in these networks a multiple of 8 channels, or 16 bytes.
    taken = min(norm.groups, max(1, 128 // per_group))
    block = power_of_two(taken * per_group)
    blocks = triton.cdiv(norm.groups, taken)
    tile = max(1, TILE.value // block)
    # There are enough programs to fill the GPU twice, but no more partial sums than one tile holds.
    pieces = max(1, min(128, triton.cdiv(pixels, tile), triton.cdiv(264, batch * blocks)))
    passes = triton.cdiv(triton.cdiv(pixels, pieces), tile)
    pieces = triton.cdiv(pixels, passes * tile)
    device, dtype = x.value.device, x.value.dtype
    # An input that is not stored as it will be read (it is added up or appended) is written on the way, once.
    written = (keep and not x.plain) or skip is not None
    total = torch.empty((batch, height, width, wide), dtype=dtype, device=device) if written else None
    out = torch.empty((batch, height, width, wide), dtype=dtype, device=device)
    parts = torch.empty((batch, pieces, 2, norm.groups), dtype=torch.float32, device=device)
    shape = GroupShape(norm.groups, per_group, taken, block, tile, passes, power_of_two(pieces))
    tensors = (x.value, x.residual, x.shift)
    arguments, size = (tensors, skip, total, parts), (height, width)
    launch(_group_sums, (pieces, blocks, batch), *arguments, size, SumKind.of(x), extra, shape, num_warps=4)
    source = x if total is None else Sum(total)
    # Large images get more programs than partial sums, with fewer passes each, for balance.
    shape = shape._replace(passes=min(passes, 4))
    tensors, affine = (source.value, source.residual, source.shift), (norm.weight, norm.bias, norm.eps)
    constants = (SumKind.of(source), shape, activation.code)
    grid = (triton.cdiv(pixels, shape.passes * tile), blocks, batch)
    launch(_group_apply, grid, tensors, (parts, pieces), affine, after, out, size, *constants, num_warps=4)
    return (source.value if keep else out), out


@triton.jit
def _layer_norm(source, affine, sum_ptr, out_ptr, rows, C: constexpr, ROWS: constexpr):
    x_ptr, residual_ptr, shift_ptr = source
    weight_ptr, bias_ptr, eps = affine
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, triton.next_power_of_2(C))
    real = column < C
    keep = (row < rows)[:, None] & real[None, :]
    place = row[:, None] * C + column[None, :]
    total = tl.load(x_ptr + place, mask=keep, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
    if shift_ptr is not None:
        total += tl.load(shift_ptr + column, mask=real, other=0.0)[None, :]
    if sum_ptr is not None:
        tl.store(sum_ptr + place, total.to(sum_ptr.dtype.element_ty), mask=keep)
    mean = tl.sum(total, 1) / C
    centred = tl.where(keep, total - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)
    weight = tl.load(weight_ptr + column, mask=real, other=0.0)
    bias = tl.load(bias_ptr + column, mask=real, other=0.0)
    normed = centred * scale[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + place, normed.to(out_ptr.dtype.element_ty), mask=keep)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    count = x.numel() // width
    keep = residual is not None or shift is not None
    total = torch.empty_like(x) if keep else None
    out = torch.empty_like(x)
    tile = max(1, 2048 // power_of_two(width))
    source, affine = (x, residual, shift), (weight, bias, eps)
    _layer_norm[(triton.cdiv(count, tile),)](source, affine, total, out, count, width, tile, num_warps=4)
    return x if total is None else total, out


@triton.jit
def _geglu_erf(x_ptr, out_ptr, rows, HIDDEN: constexpr, BLOCK: constexpr, ROWS: constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    keep = (row < rows) & (column < HIDDEN)
    value = tl.load(x_ptr + row * (2 * HIDDEN) + column, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + row * (2 * HIDDEN) + HIDDEN + column, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + column, (value * gelu_erf(gate)).to(out_ptr.dtype.element_ty), mask=keep)


def geglu_erf(x: Tensor) -> Tensor:
    hidden = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], hidden), dtype=x.dtype, device=x.device)
    count, block = out.numel() // hidden, min(256, power_of_two(hidden))
    tile = 2048 // block
    _geglu_erf[(triton.cdiv(count, tile), triton.cdiv(hidden, block))](x, out, count, hidden, block, tile, num_warps=4)
    return out


@triton.jit
def _softmax(x_ptr, out_ptr, COLUMNS: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    # Every lane keeps its own maximum and sum; they are combined once, at the end.
    for start in range(0, COLUMNS, BLOCK):
        keep = start + column < COLUMNS
        x = tl.load(x_ptr + row * COLUMNS + start + column, mask=keep, other=-float("inf"))
        new = tl.maximum(best, x)
        safe = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp2((best - safe) * LOG2E) + tl.exp2((x - safe) * LOG2E)
        best = new
    top = tl.max(best, 0)
    total = tl.where(best == -float("inf"), 0.0, total * tl.exp2((best - top) * LOG2E))
    scale = 1.0 / tl.sum(total, 0)
    for start in range(0, COLUMNS, BLOCK):
        keep = start + column < COLUMNS
        x = tl.load(x_ptr + row * COLUMNS + start + column, mask=keep, other=-float("inf"))
        y = tl.exp2((x - top) * LOG2E) * scale
        tl.store(out_ptr + row * COLUMNS + start + column, y.to(out_ptr.dtype.element_ty), mask=keep)


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    columns = scores.shape[-1]
    _softmax[(scores.numel() // columns,)](scores, out, columns, min(4096, power_of_two(columns)), num_warps=8)
    return out


@triton.jit
def _wide_attention(tensors, tokens, row, scale, SOURCE: constexpr, D: constexpr, TILE: constexpr):
    q_ptr, k_ptr, v_ptr, out_ptr = tensors
    D1: constexpr = D[0]
    D2: constexpr = D[1]
    BLOCK_M: constexpr = TILE[0]
    BLOCK_N: constexpr = TILE[1]
    # A head has D1 + D2 channels: blocks are powers of two, and one of 512 would not fit the registers.
    batch = tl.program_id(1).to(tl.int64)
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    a, b = tl.arange(0, D1), D1 + tl.arange(0, D2)
    mine = (m < tokens)[:, None]
    place = (batch * tokens + m)[:, None] * row
    q1 = tl.load(q_ptr + place + a[None, :], mask=mine, other=0.0)
    q2 = tl.load(q_ptr + place + b[None, :], mask=mine, other=0.0)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc1 = tl.zeros((BLOCK_M, D1), tl.float32)
    acc2 = tl.zeros((BLOCK_M, D2), tl.float32)
    for start in range(0, SOURCE, BLOCK_N):
        key = start + n
        real = key < SOURCE
        there = (batch * SOURCE + key) * row
        k1 = tl.load(k_ptr + there[None, :] + a[:, None], mask=real[None, :], other=0.0)
        k2 = tl.load(k_ptr + there[None, :] + b[:, None], mask=real[None, :], other=0.0)
        s = tl.dot(q2, k2, tl.dot(q1, k1)) * scale
        s = tl.where(real[None, :], s, -float("inf"))
        p, shrink, best, total = softmax_step(s, best, total, False)
        p = p.to(q1.dtype)
        v1 = tl.load(v_ptr + there[:, None] + a[None, :], mask=real[:, None], other=0.0)
        v2 = tl.load(v_ptr + there[:, None] + b[None, :], mask=real[:, None], other=0.0)
        acc1 = tl.dot(p, v1, acc1 * shrink[:, None])
        acc2 = tl.dot(p, v2, acc2 * shrink[:, None])
    share = (1.0 / total)[:, None]
    target = (batch * tokens + m)[:, None] * (D1 + D2)
    tl.store(out_ptr + target + a[None, :], (acc1 * share).to(out_ptr.dtype.element_ty), mask=mine)
    tl.store(out_ptr + target + b[None, :], (acc2 * share).to(out_ptr.dtype.element_ty), mask=mine)


def wide_attention(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """See `vla_accel.kernels.image.ops.attend`, how "flash": heads of 384 or 512, `rows` queries a program."""
    batch, tokens, width = q.shape
    first = power_of_two(width) // 2
    row = q.stride(1)
    strides = any(t.stride() != (t.shape[1] * row, row, 1) for t in (q, k, v))
    # Triton's products take at least 16 channels.
    if strides or width - first < 16 or power_of_two(width - first) != width - first:
        raise NotImplementedError(f"wide_attention: unsupported head width {width}, or unsupported strides")
    out = torch.empty((batch, tokens, width), dtype=q.dtype, device=q.device)
    # With 8 warps 128 rows of 384 channels just fill the registers; 64 rows of either width do not.
    sizes, run = ((first, width - first), (rows, 32)), {"num_warps": 8, "num_stages": 2}
    scale = width**-0.5 * LOG2E.value
    _wide_attention[(triton.cdiv(tokens, rows), batch)]((q, k, v, out), tokens, row, scale, k.shape[1], *sizes, **run)
    return out
