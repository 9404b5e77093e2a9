"""Noise schedulers: the betas of the training and the steps from noise to actions, DDPM's and DDIM's.

Sources: Ho, Jain, Abbeel (2020), Song, Meng, Ermon (2021), and the conventions of diffusers' schedulers (Apache-2.0).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import ConfigError, unknown
from vla_accel.kernels.conv1d.ops import StepSizes

KINDS, BETAS, PREDICTIONS = (
    ("DDPM", "DDIM"), ("squaredcos_cap_v2", "linear", "scaled_linear"), ("epsilon", "sample"),
)  # fmt: skip
_LARGEST_BETA = 0.999
_NO_CLIP = 3e38


class Step(NamedTuple):
    """One step: x ← clean · clamp(x_of · x + out_of · e, ±clip) + keep · x + out · e + noise · z.

    `x` is the noisy chunk, `e` the network's output at `time` (a training step), `z` standard normal noise.
    """

    time: float
    x_of: float
    out_of: float
    clean: float
    keep: float
    out: float
    noise: float

    def sizes(self, clip: float | None) -> StepSizes:
        """Return the numbers of `scheduler_step`."""
        return StepSizes(*self[1:], _NO_CLIP if clip is None else clip)

    def __call__(self, x: Tensor, e: Tensor, clip: float | None, z: Tensor | None) -> Tensor:
        """Return the chunk after this step; `z` may be None where `noise` is 0."""
        clean = self.x_of * x + self.out_of * e
        after = self.clean * (clean if clip is None else clean.clamp(-clip, clip)) + self.keep * x + self.out * e
        return after if z is None or not self.noise else after + self.noise * z


@dataclass(frozen=True)
class NoiseScheduler:
    """A checkpoint's scheduler.

    Attributes:
        kind: "DDPM" draws new noise at each step but the last, "DDIM" (η = 0) draws none.
        train_steps: Steps of the training.
        betas: Name of the schedule of the betas.
        beta_start, beta_end: Its ends; "squaredcos_cap_v2" has none.
        prediction: What the network computes, the noise ("epsilon") or the clean chunk ("sample").
        clip: Bound of the clean chunk; None for no bound.
    """

    kind: Literal["DDPM", "DDIM"] = "DDPM"
    train_steps: int = 100
    betas: Literal["squaredcos_cap_v2", "linear", "scaled_linear"] = "squaredcos_cap_v2"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    prediction: Literal["epsilon", "sample"] = "epsilon"
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        checks = (("kind", KINDS), ("betas", BETAS), ("prediction", PREDICTIONS))
        for name, known in checks:
            if (value := getattr(self, name)) not in known:
                raise ConfigError(unknown(f"scheduler.{name}", value, known))

    def draws(self, num_steps: int) -> int:
        """Return the draws of noise of a call: the first chunk, and DDPM's at each step but the last."""
        return num_steps if self.kind == "DDPM" else 1

    def signal(self) -> Tensor:
        """Return the part of the clean chunk's variance that is left after each training step, (train_steps,)
        float32."""
        count = self.train_steps
        if self.betas == "linear":
            betas = torch.linspace(self.beta_start, self.beta_end, count, dtype=torch.float32)
        elif self.betas == "scaled_linear":
            betas = torch.linspace(self.beta_start**0.5, self.beta_end**0.5, count, dtype=torch.float32) ** 2
        else:
            kept = [math.cos((i / count + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(count + 1)]
            betas = torch.tensor([min(1 - b / a, _LARGEST_BETA) for a, b in itertools.pairwise(kept)])
        return torch.cumprod(1.0 - betas, 0)

    def steps(self, num_steps: int) -> tuple[Step, ...]:
        """Return `num_steps` equally spaced steps, from the noisiest to 0.

        Raises:
            ConfigError: There are more steps than in training.
        """
        if not 1 <= num_steps <= self.train_steps:
            raise ConfigError(
                f"num_steps: expected 1 to {self.train_steps}, the steps of the training, got {num_steps}"
            )
        stride, signal = self.train_steps // num_steps, self.signal().double().tolist()
        times = range((num_steps - 1) * stride, -1, -stride)
        return tuple(self._step(t, signal[t], signal[t - stride] if t >= stride else 1.0) for t in times)

    def _step(self, time: int, signal: float, after: float) -> Step:
        """A step from a time, whose part of the signal is `signal`, to one whose part is `after`."""
        noise, rest = 1.0 - signal, 1.0 - after
        predicts_noise = self.prediction == "epsilon"
        x_of, out_of = (signal**-0.5, -((noise / signal) ** 0.5)) if predicts_noise else (0.0, 1.0)
        if self.kind == "DDIM":
            # Towards the noise of the output itself, which no bound changes.
            direction = (0.0, 1.0) if predicts_noise else (noise**-0.5, -((signal / noise) ** 0.5))
            keep, out = (rest**0.5 * part for part in direction)
            return Step(time, x_of, out_of, after**0.5, keep, out, 0.0)
        ratio = float(np.float32(signal / after))  # diffusers rounds it, and one minus it loses most digits
        variance = rest / noise * (1.0 - ratio)
        clean, keep = after**0.5 * (1.0 - ratio) / noise, ratio**0.5 * rest / noise
        return Step(time, x_of, out_of, clean, keep, 0.0, variance**0.5 if time else 0.0)
