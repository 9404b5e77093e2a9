"""One integration step of a flow: from the velocity of one evaluation to the input of the next.

Conventions as in `vla_accel.kernels.rows.rows`. B sequences of T tokens, of which the last H are actions of A numbers;
W: the width of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import op
from vla_accel.kernels.rows.rows import normed


@dataclass(frozen=True)
class ActionOutput:
    """The last norm, x / rms(x) * (1 + scale) + shift, and the projection to a velocity.

    `scale` (W,) float32, or None, where only the first step runs; `shift` (W,) float32 or None; `weight` (A, W), `bias`
    (A,) float32.
    """

    scale: Tensor | None
    shift: Tensor | None
    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True)
class ActionInput:
    """The projection of actions to rows: activation(actions · weight + bias) + positions.

    `weight` (A, W) float32; `bias` (W,) float32, or (2, W): the second row for actions that are pinned; `positions` (H,
    W) float32, or None. `step` takes no positions, and `flow_step` one bias.
    """

    weight: Tensor
    bias: Tensor
    activation: Activation = Activation.SILU
    positions: Tensor | None = None


@dataclass(frozen=True)
class Guidance:
    """What pulls a flow towards `target` (B, H, A), float32, by `weights` (B, H), float32. Weights of zero change no
    bit. `pinned`: instead, actions begin at the target where their weight is not zero, and move by 1 - weight of the
    velocity; `step` takes them from its caller, and weights of one alone."""

    target: Tensor
    weights: Tensor
    pinned: bool = False


@dataclass(frozen=True)
class EulerStep:
    """A step of size `dt` from the flow's time `time`, guided by `gain`. `first`: there is no velocity yet; `last`: no
    evaluation follows."""

    dt: float
    time: float = 0.0
    gain: float = 0.0
    first: bool = False
    last: bool = False


@op("rows.triton_flow")
def step(
    x: Tensor, output: ActionOutput, actions: Tensor, guidance: Guidance, into: ActionInput, following: Tensor,
    at: EulerStep, *, tokens: int,
) -> None:  # fmt: skip
    """Between two evaluations of a flow: final norm, output projection, Euler step, and the next evaluation's input.

    Args:
        x: (B * T, W), T = `tokens`, the output of the last evaluation. Not read if `at.first`.
        actions: (B, H, A) float32, += dt * velocity. The guidance subtracts
            gain * weights ∘ (target - (actions - time * velocity)) from the velocity.
        following: (B * T, W); its last H rows of every T receive the next input. Not written if `at.last`.
    """
    batch, horizon, _ = actions.shape
    weights, stays = guidance.weights, guidance.weights > 0
    if not at.first:
        assert output.scale is not None
        tail = x.view(batch, tokens, -1)[:, tokens - horizon :]
        final = normed(tail, False, output.eps) * (1.0 + output.scale)
        final = final if output.shift is None else final + output.shift
        velocity = (final @ output.weight.T + output.bias).to(actions.dtype)
        if guidance.pinned:
            velocity = velocity.masked_fill(stays[..., None], 0)
        else:
            error = guidance.target - (actions - at.time * velocity)
            velocity = velocity - at.gain * (weights[..., None] * error)
        actions += at.dt * velocity
    if not at.last:
        bias = into.bias if into.bias.ndim == 1 else into.bias[stays.long()]
        embedded = reference.activate(actions.to(into.weight.dtype) @ into.weight + bias, into.activation)
        following.view(batch, tokens, -1)[:, tokens - horizon :] = embedded.to(following.dtype)


@op("rows.triton_flow")
def flow_step(
    velocity: Tensor, before: Tensor, guidance: Guidance, into: ActionInput, after: Tensor, hidden: Tensor,
    at: EulerStep, *, tokens: int,
) -> None:  # fmt: skip
    """Euler step of a flow from noise to actions, and the input of the next evaluation.

    Args:
        velocity: (B * T, A) float32, T = `tokens`; its last H rows of every T are read, none if `at.first`.
        before, after: (B, H, A) float32: after = before + dt velocity, guided as by `step`. If `at.first`, after =
            before or, where an action is pinned, the target.
        hidden: (B * T, W); its last H rows of every T receive the next input, unless `at.last`.
    """
    batch, horizon, _ = before.shape
    target, weights = guidance.target, guidance.weights[..., None]
    if at.first:
        after.copy_(torch.where(weights > 0, target, before) if guidance.pinned else before)
    else:
        moved = velocity.view(batch, tokens, -1)[:, tokens - horizon :]
        if guidance.pinned:
            moved = (1.0 - weights) * moved
        else:
            moved = moved - at.gain * (weights * (target - (before - at.time * moved)))
        after.copy_(before + at.dt * moved)
    if not at.last:
        embedded = reference.activate(after.to(into.weight.dtype) @ into.weight + into.bias, into.activation)
        embedded = embedded if into.positions is None else embedded + into.positions
        hidden.view(batch, tokens, -1)[:, tokens - horizon :] = embedded.to(hidden.dtype)
