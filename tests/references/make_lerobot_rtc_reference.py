"""lerobot's own real-time chunking on random flows, as JSON on stdout. Needs an interpreter with lerobot 0.4.4."""

from __future__ import annotations

import itertools
import json
import math
import sys

import lerobot_frame  # noqa: F401  # first: it replaces what lerobot imports and this script does not need
import torch

# isort: split
from lerobot.configs.types import RTCAttentionSchedule
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor

BATCH, HORIZON, DIM = 2, 8, 3
SCHEDULES = ("ZEROS", "ONES", "LINEAR", "EXP")
DELAYS = ((0, 8, 5), (2, 8, 10), (3, 5, 8), (2, 6, 4), (5, 3, 8), (8, 8, 8))
"""Delay, actions left of the previous chunk, execution horizon."""


def main() -> None:
    cases = []
    for number, (schedule, (delay, left, end)) in enumerate(itertools.product(SCHEDULES, DELAYS)):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(BATCH, HORIZON, DIM, generator=generator)
        previous = torch.randn(BATCH, left, DIM, generator=generator)
        mix = torch.randn(HORIZON * DIM, HORIZON * DIM, generator=generator) / math.sqrt(HORIZON * DIM)
        steps, bound = (10, 10.0) if number % 2 else (5, 4.0)
        config = RTCConfig(
            enabled=True, prefix_attention_schedule=RTCAttentionSchedule[schedule], max_guidance_weight=bound,
            execution_horizon=end,
        )  # fmt: skip
        processor, x = RTCProcessor(config), noise
        for step in range(steps):

            def velocity(y: torch.Tensor, step: int = step, mix: torch.Tensor = mix) -> torch.Tensor:
                return torch.tanh(y.flatten(1) @ mix + 0.1 * step).view(y.shape) + 0.3 * y

            v = processor.denoise_step(
                x_t=x, prev_chunk_left_over=previous, inference_delay=delay, time=1.0 - step / steps,
                original_denoise_step_partial=velocity, execution_horizon=None,
            )  # fmt: skip
            x = (x - v / steps).detach()
        numbers = {"noise": noise, "previous": previous, "mix": mix, "actions": x}
        cases.append({
            "schedule": schedule.lower(), "delay": delay, "execution_horizon": end, "max_guidance_weight": bound,
            "steps": steps, **{name: value.tolist() for name, value in numbers.items()},
        })  # fmt: skip
    json.dump(cases, sys.stdout)


if __name__ == "__main__":
    main()
