"""Triton kernel of the step of a network that predicts actions (`mix.py`): a program for each row."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.rows.mix import Head, Mix, MixedInput
from vla_accel.kernels.triton_common import store_rounded, wait_for_previous
from vla_accel.numeric import power_of_two


class MixShape(NamedTuple):
    """Constants of the kernel: columns of a row and of an action, with the powers of two that hold them, and whether
    the step is the first or the last.
    """

    width: int
    block_w: int
    actions: int
    block_a: int
    first: bool
    last: bool


@triton.jit
def _layer_normed(x, inside, eps, WIDTH: constexpr):
    centred = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)


@triton.jit
def _mix_step(rows, head, flow, into, numbers, lengths, S: constexpr, PDL: constexpr):
    x_ptr, h_ptr = rows
    w_out_ptr, b_out_ptr, eps = head
    noise_ptr, actions_ptr = flow
    w_in_ptr, base_ptr, shift_ptr, others_ptr = into
    time, inverse_scale = numbers
    horizon, tokens = lengths
    # The last step has programs for actions alone.
    each = horizon if S.last else tokens
    batch, token = tl.program_id(0) // each, tl.program_id(0) % each
    column, action = tl.arange(0, S.block_w), tl.arange(0, S.block_a)
    inside, real = column < S.width, action < S.actions
    both = real[:, None] & inside[None, :]
    tile = action[:, None] * S.width + column[None, :]
    row = (batch * tokens + token).to(tl.int64) * S.width + column
    wait_for_previous(PDL)
    value = tl.full((S.block_w,), 0.0, tl.float32)
    if token < horizon:
        place = (batch * horizon + token) * S.actions + action
        predicted = tl.full((S.block_a,), 0.0, tl.float32)
        if not S.first:
            x = tl.load(x_ptr + row, mask=inside, other=0.0).to(tl.float32)
            x = _layer_normed(x, inside, eps, S.width)
            w_out = tl.load(w_out_ptr + tile, mask=both, other=0.0)
            predicted = tl.sum(w_out * x[None, :], 1) + tl.load(b_out_ptr + action, mask=real, other=0.0)
        if S.last:
            tl.store(actions_ptr + place, predicted, mask=real)
        else:
            noise = tl.load(noise_ptr + place, mask=real, other=0.0)
            noisy = predicted + time * (noise - predicted)
            w_in = tl.load(w_in_ptr + tile, mask=both, other=0.0)
            base = (batch * horizon + token) * S.width + column
            value = tl.load(base_ptr + base, mask=inside, other=0.0)
            value += tl.load(shift_ptr + column, mask=inside, other=0.0)
            value += tl.sum(w_in * noisy[:, None], 0)
    else:
        other = (batch * (tokens - horizon) + token - horizon) * S.width + column
        value = tl.load(others_ptr + other, mask=inside, other=0.0).to(tl.float32)
    if not S.last:
        rounded = value.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row, rounded, mask=inside)
        # The norm takes the rounded row, to which the blocks add.
        normed = _layer_normed(rounded.to(tl.float32), inside, eps, S.width)
        store_rounded(h_ptr + row, normed, inside, inverse_scale)


def mix_step(
    x: Tensor, h: Tensor, head: Head, noise: Tensor, into: MixedInput, actions: Tensor, at: Mix, *,
    inverse_scale: float | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.rows.mix.mix_step`."""
    (batch, horizon, numbers), width = noise.shape, x.shape[1]
    tokens = len(x) // batch
    shape = MixShape(width, power_of_two(width), numbers, power_of_two(numbers), at.first, at.last)
    tensors = ((x, h), (head.weight, head.bias, head.eps), (noise, actions))
    source = (into.weight, into.base, into.shift, into.others)
    grid = (batch * (horizon if at.last else tokens),)
    launch(_mix_step, grid, *tensors, source, (at.time, inverse_scale), (horizon, tokens), shape, num_warps=8)
