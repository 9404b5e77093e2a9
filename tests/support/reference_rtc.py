"""Real-time chunking as a plain loop over a velocity, also with the exact Jacobian of the paper: what engines are
compared with. `vla_accel.nn.rtc` says what the letters mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vla_accel.nn.rtc import corrected, step_gains

Jacobian = Literal["identity", "exact"]


def pad_chunk(previous: Tensor, horizon: int, action_dim: int) -> Tensor:
    """A previous chunk (B, k, a) as (B, horizon, action_dim): zeros where it has nothing, cut after `horizon`."""
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
    (H,) or (B, H).
    """
    weights = weights.to(x)
    if jacobian == "identity":
        return corrected(velocity(x).to(x.dtype), x, time, weight, target, weights)
    with torch.enable_grad():
        start = x.detach().requires_grad_(True)
        v = velocity(start).to(x.dtype)
        clean = start - time * v
        error = (weights.unsqueeze(-1) * (target - clean)).detach()
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
    x = noise
    for step, (time, weight) in enumerate(zip(times, step_gains(times, max_weight), strict=True)):
        v = guided_velocity(lambda y, step=step: velocity(y, step), x, time, weight, target, weights, jacobian)
        x = x + (-1.0 / steps) * v
    return x
