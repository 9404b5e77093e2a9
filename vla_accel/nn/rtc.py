"""Real-time chunking: guide a flow towards actions that the robot will have executed before the new chunk is ready.

Pure functions over a velocity of any flow model, in the model's time: t = 1 is noise, t = 0 is actions. The previous
chunk must be in the model's own (normalised, padded) actions.

At each step the flow's guess of the clean actions is x̂ = x − t·v(x, t). The velocity is corrected by
−w(t)·Jᵀ[W·(Y − x̂)], with Y the previous chunk, W in [0, 1] how much each of its actions counts (`prefix_weights`),
w(t) from `guidance_weight`, and J = ∂x̂/∂x.

Source: Black, Galliker, Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025), with their time
reversed. As in lerobot's `RTCProcessor` (0.4.4), J is the identity (`corrected`, `Guidance`): it needs no backward pass
and is elementwise, so one captured graph serves every delay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.config import GuidanceSchedule, RtcConfig
from vla_accel.errors import ConfigError


def chunk_weights(config: RtcConfig, delay: int, previous: int, horizon: int) -> Tensor:
    """`prefix_weights` (horizon,) for a previous chunk of which `previous` actions are left."""
    if config.trained:
        return prefix_weights(delay, min(delay, previous), horizon, "zeros")
    end = previous if config.execution_horizon is None else min(config.execution_horizon, previous)
    return prefix_weights(delay, end, horizon, config.schedule)


def prefix_weights(delay: int, end: int, horizon: int, schedule: GuidanceSchedule) -> Tensor:
    """How much each action of the previous chunk counts, (horizon,) float32.

    1 for the first `delay` actions (they will be executed whatever the new chunk is), 0 from `end` on, and between
    them 0 ("zeros"), 1 ("ones"), or falling linearly ("linear") or faster ("exp"). `delay` is at most `end`.
    """
    if delay < 0 or end < 0:
        raise ConfigError(f"rtc: expected delay and end of 0 or more, got {delay} and {end}")
    end = min(end, horizon)
    delay = min(delay, end)
    between = end - delay
    falling = torch.linspace(1.0, 0.0, between + 2)[1:-1]
    middle = {
        "zeros": torch.zeros(between),
        "ones": torch.ones(between),
        "linear": falling,
        "exp": falling * torch.expm1(falling) / math.expm1(1.0),
    }[schedule]
    return torch.cat((torch.ones(delay), middle, torch.zeros(horizon - end)))


def guidance_weight(t: float, max_weight: float) -> float:
    """w(t) = t / (1 − t) · (t² + (1 − t)²) / t², at most `max_weight`; 0 at t = 0."""
    if t <= 0.0:
        return 0.0
    return min(math.inf if t >= 1.0 else (t * t + (1 - t) ** 2) / (t * (1 - t)), max_weight)


def step_gains(times: Sequence[float], dts: Sequence[float], max_weight: float | None) -> tuple[float, ...]:
    """w(t) of every evaluation of a loop with steps of these sizes; `max_weight` None: see `RtcConfig`."""
    most = [-1.0 / dt for dt in dts] if max_weight is None else [max_weight] * len(dts)
    return tuple(map(guidance_weight, times, most))


def corrected(
    v: Tensor, x: Tensor, time: float | Tensor, gain: float | Tensor, target: Tensor, weights: Tensor
) -> Tensor:
    """The velocity v (B, H, A) at x, guided towards the target with the identity for a Jacobian.

    `gain`: w(time); `weights` (B, H). Where a weight is zero it is v, bit for bit (but for the sign of a zero), as
    long as everything is finite.
    """
    return v - gain * (weights.unsqueeze(-1) * (target - (x - time * v)))


@dataclass(frozen=True)
class Guidance:
    """What a guided loop takes besides a plain one: `target` (B, H, A), the padded previous chunk; `weights` (B, H);
    by step, `times` t and `gains` w(t)."""

    target: Tensor
    weights: Tensor
    times: Sequence[float]
    gains: Sequence[float]

    def corrected(self, v: Tensor, x: Tensor, step: int) -> Tensor:
        """`corrected` for a step of the loop."""
        return corrected(v, x, self.times[step], self.gains[step], self.target, self.weights)

    def started(self, noise: Tensor) -> Tensor:
        """Where the loop begins."""
        return noise

    def conditions(self, embedding: Tensor, modulations: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the velocity is conditioned on, from a step's rows."""
        return embedding, modulations


@dataclass(frozen=True)
class Pinned:
    """Replaces `Guidance` where the model was trained with clean prefixes: actions whose weight is not zero are the
    target's, at flow time 0, in every evaluation and in the end. `embedding`, `modulations`: `conditioning` of t = 0.

    Source: Black, Ren, Equi, Levine, "Training-Time Action Conditioning for Efficient Real-Time Chunking" (2025), with
    their time reversed; for π0.5 lerobot's `hard_prefix` (pull request 4056).
    """

    target: Tensor
    weights: Tensor
    embedding: Tensor
    modulations: Tensor | None

    @property
    def pinned(self) -> Tensor:
        """(B, H, 1) bool."""
        return self.weights.unsqueeze(-1) > 0

    def started(self, noise: Tensor) -> Tensor:
        """Where the loop begins: the pinned actions are clean."""
        return torch.where(self.pinned, self.target, noise)

    def conditions(self, embedding: Tensor, modulations: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Each action's own rows, (B, H, …): of t = 0 where it is pinned, else of the step."""
        if modulations is None:
            return torch.where(self.pinned, self.embedding, embedding), None
        assert self.modulations is not None
        return embedding, torch.where(self.pinned.unsqueeze(-1), self.modulations, modulations)

    def corrected(self, v: Tensor, x: Tensor, step: int) -> Tensor:
        """The velocity, zero where an action is pinned: it stays what it is, bit for bit."""
        return torch.where(self.pinned, torch.zeros_like(v), v)
