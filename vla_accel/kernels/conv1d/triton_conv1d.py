"""The kernels of `vla_accel.kernels.conv1d.ops`: a program computes one group of channels of one sequence, or one row,
which stays in registers from its sums until it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.conv1d.ops import MOST_TARGETS, Film, StepSizes, Target, check
from vla_accel.kernels.image.ops import GroupNorm
from vla_accel.kernels.triton_common import activated, let_next_start, wait_for_previous
from vla_accel.numeric import power_of_two

MISH = constexpr(Activation.MISH.code)
_LANES = 64
"""Channels of a program without a norm."""


class Place(NamedTuple):
    """Constants of a `Target` in a kernel: its rows for each sequence, and its other fields; no taps: there is none."""

    length: int = 0
    channels: int = 0
    taps: int = 0
    stride: int = 1
    pad: int = 0
    offset: int = 0


class MapShape(NamedTuple):
    """Constants of a map in a kernel: rows of a sequence, channels, channels of a program, and its tile; whether there
    is a norm; the conditions of a channel."""

    length: int
    channels: int
    taken: int
    rows: int
    lanes: int
    normed: bool
    films: int


@triton.jit
def _put(out_ptr, y, at, keep, P: constexpr):
    """Store a sequence's values y in the places of one target. `at`: the sequence, rows (T, 1) and columns (1, C)."""
    batch, row, column = at
    TAPS: constexpr = P.taps
    if TAPS > 0:
        for tap in tl.static_range(TAPS):
            shifted = row + (P.pad - tap)
            target = shifted // P.stride
            inside = keep & (shifted >= 0) & (target < P.length) & (shifted % P.stride == 0)
            place = (batch * P.length + target) * (P.taps * P.channels) + (tap * P.channels + P.offset) + column
            tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _put_all(targets, y, at, keep, A: constexpr, B: constexpr, C: constexpr, D: constexpr):
    _put(targets[0], y, at, keep, A)
    _put(targets[1], y, at, keep, B)
    _put(targets[2], y, at, keep, C)
    _put(targets[3], y, at, keep, D)


@triton.jit
def _normed(
    x_ptr, affine, film, residual_ptr, targets, M: constexpr, A: constexpr, B: constexpr, C: constexpr, D: constexpr,
    PDL: constexpr,
):  # fmt: skip
    weight_ptr, bias_ptr, eps = affine
    step_ptr, own_ptr, own_pitch = film
    group, batch = tl.program_id(0), tl.program_id(1)
    row, lane = tl.arange(0, M.rows)[:, None], tl.arange(0, M.lanes)[None, :]
    column = group * M.taken + lane
    real = (lane < M.taken) & (column < M.channels)
    keep = (row < M.length) & real
    # Constants, before the wait.
    if M.normed:
        weight = tl.load(weight_ptr + column, mask=real, other=0.0)
        bias = tl.load(bias_ptr + column, mask=real, other=0.0)
    if M.films > 0:
        shift = tl.load(step_ptr + (M.films - 1) * M.channels + column, mask=real, other=0.0)
    if M.films > 1:
        scale = tl.load(step_ptr + column, mask=real, other=0.0)
    wait_for_previous(PDL)
    place = (batch * M.length + row) * M.channels + column
    y = tl.load(x_ptr + place, mask=keep, other=0.0).to(tl.float32)
    if M.normed:
        count: constexpr = M.length * M.taken
        mean = tl.sum(tl.sum(y, 1), 0) / count
        centred = tl.where(keep, y - mean, 0.0)
        variance = tl.sum(tl.sum(centred * centred, 1), 0) / count
        y = activated(centred * tl.rsqrt(variance + eps) * weight + bias, MISH)
    own = own_ptr + batch * own_pitch + column
    if M.films > 1:
        y *= scale + tl.load(own, mask=real, other=0.0)
    if M.films > 0:
        y += shift + tl.load(own + (M.films - 1) * M.channels, mask=real, other=0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
    _put_all(targets, y, (batch, row, column), keep, A, B, C, D)


def normed(
    x: Tensor, length: int, targets: Sequence[Target], norm: GroupNorm | None, film: Film | None,
    residual: Tensor | None,
) -> None:  # fmt: skip
    batch, channels = x.shape[0] // length, x.shape[1]
    taken = min(_LANES, channels) if norm is None else channels // norm.groups
    films = 0 if film is None else film.step.numel() // channels
    shape = MapShape(length, channels, taken, power_of_two(length), power_of_two(taken), norm is not None, films)
    affine = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    # A pointer that is never read, where there is no film.
    condition = (x, x, 0) if film is None else (film.step, film.own, film.own.stride(0))
    places, rows = _places(targets, batch, x)
    warps = max(1, min(8, shape.rows * shape.lanes // 512))
    grid = (triton.cdiv(channels, taken), batch)
    launch(_normed, grid, x, affine, condition, residual, rows, shape, *places, num_warps=warps)


@triton.jit
def _scheduler_step(
    pointers, sizes, targets, strides, M: constexpr, A: constexpr, B: constexpr, C: constexpr, D: constexpr,
    PDL: constexpr,
):  # fmt: skip
    output_ptr, before_ptr, noise_ptr, after_ptr = pointers
    x_of, out_of, clean, keep_x, out_e, noise, clip = sizes
    of_output, of_before, of_noise = strides
    batch = tl.program_id(0)
    row, column = tl.arange(0, M.rows)[:, None], tl.arange(0, M.lanes)[None, :]
    keep = (row < M.length) & (column < M.channels)
    inside = row * M.channels + column
    wait_for_previous(PDL)
    x = tl.load(before_ptr + batch * of_before + inside, mask=keep, other=0.0)
    if output_ptr is not None:
        e = tl.load(output_ptr + (batch * M.length + row) * of_output + column, mask=keep, other=0.0)
        bounded = tl.minimum(tl.maximum(x_of * x + out_of * e, -clip), clip)
        x = clean * bounded + keep_x * x + out_e * e
        if noise_ptr is not None:
            x += noise * tl.load(noise_ptr + batch * of_noise + inside, mask=keep, other=0.0)
    tl.store(after_ptr + batch * (M.length * M.channels) + inside, x, mask=keep)
    _put_all(targets, x, (batch, row, column), keep, A, B, C, D)


def scheduler_step(
    before: Tensor, output: Tensor | None, noise: Tensor | None, after: Tensor, sizes: StepSizes,
    targets: Sequence[Target],
) -> None:  # fmt: skip
    batch, length, actions = before.shape
    places, rows = _places(targets, batch, after)
    numbers = (sizes.x_of, sizes.out_of, sizes.clean, sizes.keep, sizes.out, sizes.noise, sizes.clip)
    strides = (0 if output is None else output.stride(0), before.stride(0), 0 if noise is None else noise.stride(0))
    shape = MapShape(length, actions, actions, power_of_two(length), power_of_two(actions), normed=False, films=0)
    pointers = (output, before, noise, after)
    launch(_scheduler_step, (batch,), pointers, numbers, rows, strides, shape, *places, num_warps=4)


@triton.jit
def _modulate(tensors, film, sizes, eps, WIDTH: constexpr, PDL: constexpr):
    x_ptr, y_ptr, out_ptr, h_ptr = tensors
    step_ptr, own_ptr, own_pitch = film
    length, x_rows = sizes
    let_next_start(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    keep = column < WIDTH
    # Constants, before the wait.
    gate = tl.load(step_ptr + column, mask=keep, other=0.0)
    if eps is not None:
        shift = tl.load(step_ptr + WIDTH + column, mask=keep, other=0.0)
        scale = tl.load(step_ptr + 2 * WIDTH + column, mask=keep, other=0.0)
    wait_for_previous(PDL)
    own = own_ptr + (row // length).to(tl.int64) * own_pitch + column
    gate += tl.load(own, mask=keep, other=0.0)
    place = row.to(tl.int64) * WIDTH + column
    x = tl.load(x_ptr + (row % x_rows).to(tl.int64) * WIDTH + column, mask=keep, other=0.0)
    x += gate * tl.load(y_ptr + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, x, mask=keep)
    h = x
    if eps is not None:
        shift += tl.load(own + WIDTH, mask=keep, other=0.0)
        scale += tl.load(own + 2 * WIDTH, mask=keep, other=0.0)
        centred = tl.where(keep, x - tl.sum(x, 0) / WIDTH, 0.0)
        h = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps) * (1.0 + scale) + shift
    tl.store(h_ptr + place, h.to(h_ptr.dtype.element_ty), mask=keep)


def modulate(x: Tensor, y: Tensor, out: Tensor, h: Tensor, film: Film, *, eps: float | None) -> None:
    rows, width = y.shape
    condition, sizes = (film.step, film.own, film.own.stride(0)), (rows // len(film.own), len(x))
    warps = 4 if width <= 2048 else 8
    launch(_modulate, (rows,), (x, y, out, h), condition, sizes, eps, width, num_warps=warps)


def _places(targets: Sequence[Target], batch: int, spare: Tensor) -> tuple[tuple[Place, ...], tuple[Tensor, ...]]:
    """Return the constants and the buffers of `MOST_TARGETS` targets; those that are missing have no taps."""
    check(targets)
    missing = MOST_TARGETS - len(targets)
    places = [Place(len(t.rows) // batch, t.channels, t.taps, t.stride, t.pad, t.offset) for t in targets]
    return (*places, *(Place(),) * missing), (*(t.rows for t in targets), *(spare,) * missing)
