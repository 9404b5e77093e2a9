"""Networks whose actions are the end of a flow from noise, and the Euler loop. t = 1 is noise, t = 0 are actions."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vla_accel.config import NamedSchedule, check_times
from vla_accel.errors import ConfigError
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.rtc import Guidance, Pinned


@dataclass(frozen=True)
class Schedule:
    """The flow times of the denoising steps.

    Attributes:
        times: n + 1 times of n Euler steps, which fall from the start (1, or less for a warm start) to 0.

    Raises:
        ConfigError: the times do not fall strictly to 0, or start above 1.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        check_times(self.times, warm_start=True)

    @classmethod
    @functools.cache
    def uniform(cls, num_steps: int) -> Schedule:
        """Return equal steps, whose times are openpi's float32 sums."""
        return cls((*euler_times(num_steps).tolist(), 0.0))

    @classmethod
    def cubic(cls, num_steps: int) -> Schedule:
        """Return t_k = (1 - k / n)^3: long steps near the noise, short ones near the actions."""
        return cls(tuple((1.0 - step / num_steps) ** 3 for step in range(num_steps + 1)))

    @classmethod
    def of(cls, setting: NamedSchedule | Sequence[float] | None, num_steps: int) -> Schedule:
        """Return the schedule of a `PolicyConfig.schedule`; None is "uniform". Raises ConfigError for bad times."""
        if setting is None or setting == "uniform":
            return cls.uniform(num_steps)
        if setting == "cubic":
            return cls.cubic(num_steps)
        check_times(setting, num_steps)
        return cls(tuple(setting))

    def from_start(self, start: float) -> Schedule:
        """Return as many steps from the time `start`: all times multiplied by it."""
        return Schedule(tuple(start * time for time in self.times))

    @property
    def start(self) -> float:
        """The time of the first evaluation: 1 for noise alone."""
        return self.times[0]

    @property
    def steps(self) -> int:
        """The number of evaluations of the velocity."""
        return len(self.times) - 1

    @property
    def is_uniform(self) -> bool:
        """Whether these are exactly the times of `uniform`."""
        return self == Schedule.uniform(self.steps)

    @property
    def described(self) -> dict[str, list[float]]:
        """The times under "schedule" for reports, where the number of steps does not imply them."""
        return {} if self.is_uniform else {"schedule": list(self.times)}

    def __str__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return steps if self.is_uniform else f"{steps} at {', '.join(f'{time:.3g}' for time in self.times[:-1])}"

    @property
    def evaluations(self) -> Tensor:
        """The times (n,) float32 at which the velocity is evaluated."""
        return torch.tensor(self.times[:-1], dtype=torch.float32)

    @property
    def dts(self) -> tuple[float, ...]:
        """The sizes of the n steps, negative."""
        if self.is_uniform:
            return (-1.0 / self.steps,) * self.steps
        return tuple(after - before for before, after in pairwise(self.times))


class FlowNetwork(PrefixNetwork):
    """A network with a velocity that reads the prefix's keys and values. `takes_state`: its suffix reads the state."""

    takes_state: bool = False

    @classmethod
    def times(cls, schedule: Schedule, dtype: torch.dtype = torch.float32) -> Tensor:
        """The times (n,) of the evaluations."""
        return cls.uniform_times(schedule.steps, dtype) if schedule.is_uniform else schedule.evaluations.to(dtype)

    @staticmethod
    def uniform_times(num_steps: int, dtype: torch.dtype) -> Tensor:
        """The times (n,) of equal steps, with the rounding of the model's own project."""
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
        state: Tensor | None = None, prefix_mask: Tensor | None = None, guidance: Guidance | Pinned | None = None, *,
        schedule: Schedule,
    ) -> Tensor:  # fmt: skip
        """Euler over the steps of a schedule. noise (B, H, action_dim) float32; returns the actions, same shape and
        dtype.

        `embeddings`, `modulations`: `conditioning(times(schedule))`, one row a step. `guidance`: towards a previous
        chunk, or with its beginning pinned (`vla_accel.nn.rtc`).
        """
        x = noise if guidance is None else guidance.started(noise)
        for step, dt in enumerate(schedule.dts):
            embedding, row = embeddings[step], None if modulations is None else modulations[step]
            if guidance is not None:
                embedding, row = guidance.conditions(embedding, row)
            v = self.velocity(x, embedding, row, state, keys, values, prefix_mask).to(x.dtype)
            if guidance is not None:
                v = guidance.corrected(v, x, step)
            x = x + dt * v
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
