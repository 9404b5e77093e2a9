"""Triton kernels of the step of a flow (`flow.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.chain import launch
from vla_accel.kernels.rows.flow import ActionInput, ActionOutput, EulerStep, Guidance
from vla_accel.kernels.triton_common import SILU, wait_for_previous
from vla_accel.numeric import power_of_two


@triton.jit
def _step(x_ptr, scale_ptr, shift_ptr, w_out_ptr, b_out_ptr, actions_ptr, target_ptr, weights_ptr, w_in_ptr,
          b_in_ptr, next_ptr, dt, time, gain, eps, tokens, horizon, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
          ACTIONS: tl.constexpr, BLOCK_A: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
          HAS_SHIFT: tl.constexpr, ACTIVATION: tl.constexpr, PINNED: tl.constexpr, TWO_INPUTS: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    batch, place = row // horizon, row % horizon
    token_row = batch * tokens + (tokens - horizon) + place
    column = tl.arange(0, BLOCK_W)
    in_width = column < WIDTH
    action = tl.arange(0, BLOCK_A)
    in_actions = action < ACTIONS
    both = in_actions[:, None] & in_width[None, :]
    tile = action[:, None] * WIDTH + column[None, :]
    wait_for_previous(PDL)
    noisy = tl.load(actions_ptr + row * ACTIONS + action, mask=in_actions, other=0.0)
    follow = tl.load(weights_ptr + row)
    if not FIRST:
        x = tl.load(x_ptr + token_row * WIDTH + column, mask=in_width, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        scale = tl.load(scale_ptr + column, mask=in_width, other=0.0)
        if HAS_SHIFT:
            shift = tl.load(shift_ptr + column, mask=in_width, other=0.0)
            # Norm and projection stay in float32; nothing is rounded between them.
            normed = normed * (1.0 + scale) + shift
        else:
            normed = normed * (1.0 + scale)
        w_out = tl.load(w_out_ptr + tile, mask=both, other=0.0)
        velocity = tl.sum(w_out * normed[None, :], 1) + tl.load(b_out_ptr + action, mask=in_actions, other=0.0)
        if PINNED:
            velocity = tl.where(follow > 0.0, 0.0, velocity)
        else:
            target = tl.load(target_ptr + row * ACTIONS + action, mask=in_actions, other=0.0)
            velocity -= gain * (follow * (target - (noisy - time * velocity)))
        noisy += dt * velocity
        tl.store(actions_ptr + row * ACTIONS + action, noisy, mask=in_actions)
    if not LAST:
        w_in = tl.load(w_in_ptr + tile, mask=both, other=0.0)
        own = 0
        if TWO_INPUTS:
            own = (follow > 0.0).to(tl.int32) * WIDTH
        embedded = tl.sum(w_in * noisy[:, None], 0) + tl.load(b_in_ptr + own + column, mask=in_width, other=0.0)
        if ACTIVATION == SILU:
            embedded = embedded / (1.0 + tl.exp(-embedded))
        tl.store(next_ptr + token_row * WIDTH + column, embedded.to(next_ptr.dtype.element_ty), mask=in_width)


def step(
    x: Tensor, output: ActionOutput, actions: Tensor, guidance: Guidance, into: ActionInput, following: Tensor,
    at: EulerStep, *, tokens: int,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.rows.flow.step`."""
    batch, horizon, action_dim = actions.shape
    width, scale, shift = output.weight.shape[1], output.scale, output.shift
    launch(
        _step, (batch * horizon,),
        x, scale if scale is not None else x, shift if shift is not None else x, output.weight, output.bias, actions,
        guidance.target, guidance.weights, into.weight, into.bias, following, at.dt, at.time, at.gain, output.eps,
        tokens, horizon, width, power_of_two(width), action_dim, power_of_two(action_dim), at.first, at.last,
        shift is not None, into.activation.code, guidance.pinned, into.bias.ndim == 2, num_warps=8, num_stages=1,
    )  # fmt: skip


@triton.jit
def _flow_step(velocity_ptr, before_ptr, target_ptr, weights_ptr, w_in_ptr, b_in_ptr, after_ptr, hidden_ptr, dt, rows,
               horizon, tokens, WIDTH: tl.constexpr, ACTIONS: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_W: tl.constexpr, BLOCK_A: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    token = (row // horizon) * tokens + (tokens - horizon) + row % horizon
    action = tl.arange(0, BLOCK_A)
    both = real[:, None] & (action < ACTIONS)[None, :]
    place = row[:, None] * ACTIONS + action[None, :]
    column = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    wait_for_previous(PDL)
    weight = tl.load(weights_ptr + row, mask=real, other=0.0)[:, None]
    moved = tl.load(before_ptr + place, mask=both, other=0.0)
    if FIRST:
        moved = tl.where(weight > 0, tl.load(target_ptr + place, mask=both, other=0.0), moved)
    else:
        velocity = tl.load(velocity_ptr + token[:, None] * ACTIONS + action[None, :], mask=both, other=0.0)
        moved += dt * (1.0 - weight) * velocity
    if tl.program_id(0) == 0:
        tl.store(after_ptr + place, moved, mask=both)
    if not LAST:
        w_in = tl.load(
            w_in_ptr + action[:, None] * WIDTH + column[None, :],
            mask=(action < ACTIONS)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        embedded = tl.dot(moved, w_in, input_precision="ieee")
        embedded += tl.load(b_in_ptr + column, mask=column < WIDTH, other=0.0)[None, :]
        embedded = embedded / (1.0 + tl.exp(-embedded))
        out = hidden_ptr + token[:, None] * WIDTH + column[None, :]
        tl.store(out, embedded.to(hidden_ptr.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])


def flow_step(
    velocity: Tensor, before: Tensor, guidance: Guidance, w_in: Tensor, b_in: Tensor, after: Tensor,
    hidden: Tensor, *, dt: float, tokens: int, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.rows.flow.flow_step`."""
    batch, horizon, actions = before.shape
    rows, width = batch * horizon, w_in.shape[1]
    grid = (1 if last else triton.cdiv(width, 32), triton.cdiv(rows, 16))
    launch(
        _flow_step, grid,
        velocity, before, guidance.target, guidance.weights, w_in, b_in, after, hidden,
        dt, rows, horizon, tokens, width, actions, 16, 32,
        max(16, power_of_two(actions)), first, last, num_warps=4, num_stages=1,
    )  # fmt: skip
