"""Networks whose actions are the end of a flow from noise, and the Euler loop. t = 1 is noise, t = 0 are actions."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from vla_accel.errors import ConfigError
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.rtc import Guidance, Pinned


class FlowNetwork(PrefixNetwork):
    """A network with a velocity that reads the prefix's keys and values. `takes_state`: its suffix reads the state."""

    takes_state: bool = False

    @staticmethod
    def times(num_steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The times (n,) of the evaluations."""
        return euler_times(num_steps, dtype)

    @abstractmethod
    def conditioning(self, times: Tensor) -> tuple[Tensor, Tensor | None]:
        """All that depends on time only, a row a time (n,): what the noisy actions are embedded with, and every
        adaptive norm's modulation, None where norms are plain."""

    @abstractmethod
    def velocity(
        self, noisy: Tensor, time_embedding: Tensor, modulations: Tensor | None, state: Tensor | None, keys: Tensor,
        values: Tensor, prefix_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The flow's velocity at `noisy` (B, H, action_dim); returns the same shape, in the projections' dtype.

        keys, values (depth, B, S, kv_heads, head_dim); prefix_mask (B, S) bool or None; the time-only inputs are one
        row of `conditioning`, or one for each action, (B, H, …).
        """

    def integrate(
        self, noise: Tensor, embeddings: Tensor, modulations: Tensor | None, keys: Tensor, values: Tensor,
        state: Tensor | None = None, prefix_mask: Tensor | None = None, guidance: Guidance | Pinned | None = None,
    ) -> Tensor:  # fmt: skip
        """Euler from t = 1 to 0. noise (B, H, action_dim) float32; returns the actions, same shape and dtype.

        `embeddings`, `modulations`: `conditioning(times)`, one row a step. `guidance`: towards a previous chunk, or
        with its beginning pinned (`vla_accel.nn.rtc`).
        """
        steps = len(embeddings)
        x = noise if guidance is None else guidance.started(noise)
        for step in range(steps):
            embedding, row = embeddings[step], None if modulations is None else modulations[step]
            if guidance is not None:
                embedding, row = guidance.conditions(embedding, row)
            v = self.velocity(x, embedding, row, state, keys, values, prefix_mask).to(x.dtype)
            if guidance is not None:
                v = guidance.corrected(v, x, step)
            x = x + (-1.0 / steps) * v
        return x


def euler_times(num_steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Times (n,) of the evaluations: t = 1, then dt = -1 / n added n - 1 times in `dtype`, as openpi does."""
    if num_steps < 1:
        raise ConfigError(f"num_steps: expected at least 1, got {num_steps}")
    dt = torch.tensor(-1.0 / num_steps, dtype=dtype)
    times = [torch.tensor(1.0, dtype=dtype)]
    for _ in range(num_steps - 1):
        times.append(times[-1] + dt)
    return torch.stack(times)


def sinusoidal_embedding(time: Tensor, width: int) -> Tensor:
    """Sine-cosine embedding of flow time with periods from 0.004 to 4, as openpi's. time (B,) to (B, width) float32,
    formed in float64."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = 4e-3 * (4.0 / 4e-3) ** fraction
    angle = time.double()[..., None] * (2 * math.pi / period)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).to(torch.promote_types(time.dtype, torch.float32))
