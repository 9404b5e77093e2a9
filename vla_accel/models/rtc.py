"""Real-time chunking: guide a flow towards actions that the robot will have executed before the new chunk is ready.

Pure functions over a velocity, in the model's time: t = 1 is noise, t = 0 is actions. Knows nothing about π0, robots
or units; the previous chunk must be in the model's own (normalised, padded) actions.

At each step the flow's guess of the clean actions is x̂ = x − t·v(x, t). The velocity is corrected by
−w(t)·Jᵀ[W·(Y − x̂)], with Y the previous chunk, W in [0, 1] how much each of its actions counts (`prefix_weights`),
w(t) from `guidance_weights`, and J = ∂x̂/∂x, exact or taken as the identity.

Source: Black, Galliker, Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025), with their time
reversed. lerobot's `RTCProcessor` (0.4.4) evaluates v before it asks for gradients, so that its J is the identity;
that needs no backward pass and can be captured in a graph, and is the default here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_accel.errors import ConfigError, EngineError

Schedule = Literal["zeros", "ones", "linear", "exp"]
Jacobian = Literal["identity", "exact"]


@dataclass(frozen=True)
class RtcConfig:
    """How strongly, and how far, a new chunk follows the previous one.

    `schedule`: of the weights between the delay and the execution horizon. `max_guidance_weight`: bound of w(t); None
    is the number of steps, because one Euler step moves x by w / steps of the error, so that more overshoots at t = 1
    (lerobot: 10, for 10 steps). `execution_horizon`: the action up to which the previous chunk counts; None is all of
    it. `jacobian`: see the module.
    """

    schedule: Schedule = "linear"
    max_guidance_weight: float | None = None
    execution_horizon: int | None = None
    jacobian: Jacobian = "identity"

    def __post_init__(self) -> None:
        if self.schedule not in ("zeros", "ones", "linear", "exp"):
            raise ConfigError(f"rtc.schedule: expected zeros, ones, linear or exp, got {self.schedule!r}")
        if self.jacobian not in ("identity", "exact"):
            raise ConfigError(f"rtc.jacobian: expected identity or exact, got {self.jacobian!r}")
        if self.max_guidance_weight is not None and not self.max_guidance_weight >= 0:
            raise ConfigError(f"rtc.max_guidance_weight: expected 0 or more, got {self.max_guidance_weight}")
        if self.execution_horizon is not None and self.execution_horizon < 1:
            raise ConfigError(f"rtc.execution_horizon: expected at least 1, got {self.execution_horizon}")

    def weights(self, delay: int, previous: int, horizon: int) -> Tensor:
        """`prefix_weights` (horizon,) for a previous chunk of which `previous` actions are left."""
        end = previous if self.execution_horizon is None else min(self.execution_horizon, previous)
        return prefix_weights(delay, end, horizon, self.schedule)


def prefix_weights(delay: int, end: int, horizon: int, schedule: Schedule) -> Tensor:
    """How much each action of the previous chunk counts, (horizon,) float32.

    1 for the first `delay` actions (they will be executed whatever the new chunk says), 0 from `end` on, and between
    them: "zeros" nothing, "ones" all, "linear" falling evenly, "exp" falling faster. `delay` is cut to `end`.
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


def guidance_weights(times: Sequence[float], max_weight: float) -> list[float]:
    """w(t) = t / (1 − t) · (t² + (1 − t)²) / t² at each time, at most `max_weight`; 0 at t = 0."""
    result = []
    for t in times:
        if t <= 0.0:
            result.append(0.0)
        else:
            result.append(min(math.inf if t >= 1.0 else (t * t + (1 - t) ** 2) / (t * (1 - t)), max_weight))
    return result


def pad_chunk(previous: Tensor, horizon: int, action_dim: int) -> Tensor:
    """A previous chunk (B, k, a) as (B, horizon, action_dim): zeros where it has nothing, cut after `horizon`."""
    if previous.ndim != 3 or previous.shape[2] > action_dim:
        raise ConfigError(f"rtc: expected a chunk (B, k, at most {action_dim}), got {tuple(previous.shape)}")
    padded = previous.new_zeros(previous.shape[0], horizon, action_dim)
    kept = previous[:, :horizon]
    padded[:, : kept.shape[1], : kept.shape[2]] = kept
    return padded


def guided_velocity(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    time: float,
    weight: float,
    target: Tensor,
    weights: Tensor,
    jacobian: Jacobian = "identity",
) -> Tensor:
    """The corrected velocity at x (B, H, A), same shape and dtype.

    Args: `velocity` of x alone, at `time`; `weight`: w(time); `target` (B, H, A): the padded previous chunk; `weights`
    (H,) or (B, H). Raises EngineError for the exact Jacobian in inference mode, which keeps no graph.
    """
    weights = weights.to(x).unsqueeze(-1)
    if jacobian == "identity":
        v = velocity(x).to(x.dtype)
        return v - weight * (weights * (target - (x - time * v)))
    if torch.is_inference_mode_enabled():
        raise EngineError("rtc.jacobian: exact needs gradients, which inference mode does not keep; use no_grad")
    with torch.enable_grad():
        start = x.detach().requires_grad_(True)
        v = velocity(start).to(x.dtype)
        clean = start - time * v
        error = (weights * (target - clean)).detach()
        (correction,) = torch.autograd.grad(clean, start, error)
    return v.detach() - weight * correction


def guided_euler(
    velocity: Callable[[Tensor, int], Tensor],
    noise: Tensor,
    times: Sequence[float],
    target: Tensor,
    weights: Tensor,
    max_weight: float | None = None,
    jacobian: Jacobian = "identity",
) -> Tensor:
    """Euler from t = 1 to 0 with guidance; with weights of zero exactly plain Euler.

    Args: `velocity(x, step)`; noise (B, H, A); `times` (n,) as `euler_times` gives them; target and weights as in
    `guided_velocity`: tensors, so that one captured graph serves every delay. `max_weight`: None is n.
    Returns actions (B, H, A) in the noise's dtype.
    """
    steps = len(times)
    bounded = guidance_weights(times, float(steps) if max_weight is None else max_weight)
    x = noise
    for step, (time, weight) in enumerate(zip(times, bounded, strict=True)):
        v = guided_velocity(lambda y, step=step: velocity(y, step), x, time, weight, target, weights, jacobian)
        x = x + (-1.0 / steps) * v
    return x
