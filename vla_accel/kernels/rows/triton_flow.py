"""Triton kernels of the step of a flow (`flow.py`)."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.rows.flow import ActionInput, ActionOutput, EulerStep, Guidance
from vla_accel.kernels.triton_common import SILU, activated, wait_for_previous
from vla_accel.numeric import power_of_two


class StepShape(NamedTuple):
    """Constants of a kernel: columns of the suffix and of an action, and the powers of two that hold them; whether the
    step is the first or the last; the code of the input's activation; whether actions are pinned, not guided; whether
    pinned actions have an input bias of their own.
    """

    width: int
    block_w: int
    actions: int
    block_a: int
    first: bool
    last: bool
    activation: int = 0
    pinned: bool = False
    two_inputs: bool = False


@triton.jit
def _step(rows, output, actions_ptr, guidance, into, times, lengths, S: constexpr, PDL: constexpr):
    x_ptr, next_ptr = rows
    horizon, tokens = lengths
    scale_ptr, shift_ptr, w_out_ptr, b_out_ptr, eps = output
    target_ptr, weights_ptr = guidance
    w_in_ptr, b_in_ptr = into
    dt, time, gain = times
    row = tl.program_id(0)
    batch, place = row // horizon, row % horizon
    token_row = batch * tokens + (tokens - horizon) + place
    column = tl.arange(0, S.block_w)
    in_width = column < S.width
    action = tl.arange(0, S.block_a)
    in_actions = action < S.actions
    both = in_actions[:, None] & in_width[None, :]
    tile = action[:, None] * S.width + column[None, :]
    wait_for_previous(PDL)
    noisy = tl.load(actions_ptr + row * S.actions + action, mask=in_actions, other=0.0)
    follow = tl.load(weights_ptr + row)
    if not S.first:
        x = tl.load(x_ptr + token_row * S.width + column, mask=in_width, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / S.width + eps)
        scale = tl.load(scale_ptr + column, mask=in_width, other=0.0)
        if shift_ptr is not None:
            shift = tl.load(shift_ptr + column, mask=in_width, other=0.0)
            # Norm and projection stay in float32; nothing is rounded between them.
            normed = normed * (1.0 + scale) + shift
        else:
            normed = normed * (1.0 + scale)
        w_out = tl.load(w_out_ptr + tile, mask=both, other=0.0)
        velocity = tl.sum(w_out * normed[None, :], 1) + tl.load(b_out_ptr + action, mask=in_actions, other=0.0)
        if S.pinned:
            velocity = tl.where(follow > 0.0, 0.0, velocity)
        else:
            target = tl.load(target_ptr + row * S.actions + action, mask=in_actions, other=0.0)
            velocity -= gain * (follow * (target - (noisy - time * velocity)))
        noisy += dt * velocity
        tl.store(actions_ptr + row * S.actions + action, noisy, mask=in_actions)
    if not S.last:
        w_in = tl.load(w_in_ptr + tile, mask=both, other=0.0)
        own = 0
        if S.two_inputs:
            own = (follow > 0.0).to(tl.int32) * S.width
        embedded = tl.sum(w_in * noisy[:, None], 0) + tl.load(b_in_ptr + own + column, mask=in_width, other=0.0)
        if S.activation == SILU:
            embedded = embedded / (1.0 + tl.exp(-embedded))
        tl.store(next_ptr + token_row * S.width + column, embedded.to(next_ptr.dtype.element_ty), mask=in_width)


def step(
    x: Tensor, output: ActionOutput, actions: Tensor, guidance: Guidance, into: ActionInput, following: Tensor,
    at: EulerStep, *, tokens: int,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.rows.flow.step`."""
    batch, horizon, action_dim = actions.shape
    width = output.weight.shape[1]
    kind = (at.first, at.last, into.activation.code, guidance.pinned, into.bias.ndim == 2)
    shape = StepShape(width, power_of_two(width), action_dim, power_of_two(action_dim), *kind)
    last = (output.scale, output.shift, output.weight, output.bias, output.eps)
    guided, first, times = (guidance.target, guidance.weights), (into.weight, into.bias), (at.dt, at.time, at.gain)
    arguments = ((x, following), last, actions, guided, first, times, (horizon, tokens), shape)
    launch(_step, (batch * horizon,), *arguments, num_warps=8, num_stages=1)


@triton.jit
def _flow_step(velocity_ptr, actions, guidance, into, hidden_ptr, times, sizes, S: constexpr, PDL: constexpr):
    before_ptr, after_ptr = actions
    target_ptr, weights_ptr = guidance
    w_in_ptr, b_in_ptr, place_ptr = into
    dt, time, gain = times
    rows, horizon, tokens = sizes
    ACTIONS: constexpr = S.actions
    WIDTH: constexpr = S.width
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    real = row < rows
    token = (row // horizon) * tokens + (tokens - horizon) + row % horizon
    action = tl.arange(0, S.block_a)
    both = real[:, None] & (action < ACTIONS)[None, :]
    place = row[:, None] * ACTIONS + action[None, :]
    column = tl.program_id(0) * S.block_w + tl.arange(0, S.block_w)
    wait_for_previous(PDL)
    weight = tl.load(weights_ptr + row, mask=real, other=0.0)[:, None]
    moved = tl.load(before_ptr + place, mask=both, other=0.0)
    target = tl.load(target_ptr + place, mask=both, other=0.0)
    if S.first:
        if S.pinned:
            moved = tl.where(weight > 0, target, moved)
    else:
        velocity = tl.load(velocity_ptr + token[:, None] * ACTIONS + action[None, :], mask=both, other=0.0)
        if S.pinned:
            velocity = (1.0 - weight) * velocity
        else:
            velocity -= gain * (weight * (target - (moved - time * velocity)))
        moved += dt * velocity
    if tl.program_id(0) == 0:
        tl.store(after_ptr + place, moved, mask=both)
    if not S.last:
        w_in = tl.load(
            w_in_ptr + action[:, None] * WIDTH + column[None, :],
            mask=(action < ACTIONS)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        embedded = tl.dot(moved, w_in, input_precision="ieee")
        embedded += tl.load(b_in_ptr + column, mask=column < WIDTH, other=0.0)[None, :]
        embedded = activated(embedded, S.activation)
        if place_ptr is not None:
            places = (row % horizon)[:, None] * WIDTH + column[None, :]
            embedded += tl.load(place_ptr + places, mask=real[:, None] & (column < WIDTH)[None, :], other=0.0)
        out = hidden_ptr + token[:, None] * WIDTH + column[None, :]
        tl.store(out, embedded.to(hidden_ptr.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])


def flow_step(
    velocity: Tensor, before: Tensor, guidance: Guidance, into: ActionInput, after: Tensor, hidden: Tensor,
    at: EulerStep, *, tokens: int,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.rows.flow.flow_step`."""
    batch, horizon, actions = before.shape
    rows, width = batch * horizon, into.weight.shape[1]
    kind = (at.first, at.last, into.activation.code, guidance.pinned)
    shape = StepShape(width, 32, actions, max(16, power_of_two(actions)), *kind)
    grid = (1 if at.last else triton.cdiv(width, 32), triton.cdiv(rows, 16))
    guided, first = (guidance.target, guidance.weights), (into.weight, into.bias, into.positions)
    times, sizes = (at.dt, at.time, at.gain), (rows, horizon, tokens)
    arguments = (velocity, (before, after), guided, first, hidden, times, sizes, shape)
    launch(_flow_step, grid, *arguments, num_warps=4, num_stages=1)
