"""Real-time chunking as a plain loop over a velocity: what engines are compared with. `vla_accel.nn.rtc` says what the
letters mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from vla_accel.nn.rtc import corrected, step_gains


def pad_chunk(previous: Tensor, horizon: int, action_dim: int) -> Tensor:
    """Return a previous chunk (B, k, a) as (B, horizon, action_dim), padded with zeros, cut after `horizon`."""
    padded = previous.new_zeros(previous.shape[0], horizon, action_dim)
    kept = previous[:, :horizon]
    padded[:, : kept.shape[1], : kept.shape[2]] = kept
    return padded


def guided_euler(
    velocity: Callable[[Tensor, int], Tensor],
    noise: Tensor,
    times: Sequence[float],
    target: Tensor,
    weights: Tensor,
    max_weight: float | None = None,
) -> Tensor:
    """Integrate `velocity(x, step)` from noise (B, H, A) by Euler, guided; return actions of the noise's dtype.

    `times`: n + 1 of n steps, the last one 0. `target` (B, H, A): the padded previous chunk; `weights` (H,) or (B, H).
    """
    x, dts = noise, [after - before for before, after in pairwise(times)]
    for step, (dt, gain) in enumerate(zip(dts, step_gains(times, dts, max_weight), strict=True)):
        v = velocity(x, step).to(x.dtype)
        x = x + dt * corrected(v, x, times[step], gain, target, weights.to(x))
    return x
