"""lerobot's own real-time chunking on small random flows, as JSON on stdout.

Runs in an environment with lerobot (0.4.4) and torch; `--no-deps` is enough, because the packages above lerobot's RTC
modules, which import everything, are stepped over.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import torch


def rtc_modules() -> tuple[types.ModuleType, types.ModuleType, types.ModuleType]:
    """lerobot's modules, imported without running the `__init__` of the packages around them."""
    spec = importlib.util.find_spec("lerobot")
    assert spec is not None and spec.submodule_search_locations, "lerobot is not installed"
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("lerobot", "lerobot.configs", "lerobot.policies", "lerobot.policies.rtc"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    names = ("lerobot.policies.rtc.modeling_rtc", "lerobot.policies.rtc.configuration_rtc", "lerobot.configs.types")
    modeling, configuration, kinds = (importlib.import_module(name) for name in names)
    return modeling, configuration, kinds


def main() -> None:
    modeling, configuration, kinds = rtc_modules()
    batch, horizon, dim = 2, 8, 3
    cases = []
    for number, (schedule, delay, left, end) in enumerate(
        (s, d, left, end)
        for s in ("ZEROS", "ONES", "LINEAR", "EXP")
        for d, left, end in ((0, 8, 5), (2, 8, 10), (3, 5, 8), (2, 6, 4), (5, 3, 8), (8, 8, 8))
    ):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(batch, horizon, dim, generator=generator)
        previous = torch.randn(batch, left, dim, generator=generator)
        mix = torch.randn(horizon * dim, horizon * dim, generator=generator) / math.sqrt(horizon * dim)
        steps, bound = (10, 10.0) if number % 2 else (5, 4.0)
        config = configuration.RTCConfig(
            enabled=True,
            prefix_attention_schedule=kinds.RTCAttentionSchedule[schedule],
            max_guidance_weight=bound,
            execution_horizon=end,
        )
        processor = modeling.RTCProcessor(config)
        x = noise
        for step in range(steps):

            def velocity(y: torch.Tensor, step: int = step, mix: torch.Tensor = mix) -> torch.Tensor:
                return torch.tanh(y.flatten(1) @ mix + 0.1 * step).view(y.shape) + 0.3 * y

            v = processor.denoise_step(
                x_t=x,
                prev_chunk_left_over=previous,
                inference_delay=delay,
                time=1.0 - step / steps,
                original_denoise_step_partial=velocity,
                execution_horizon=None,
            )
            x = (x - v / steps).detach()
        cases.append(
            {
                "schedule": schedule.lower(),
                "delay": delay,
                "execution_horizon": end,
                "max_guidance_weight": bound,
                "steps": steps,
                "noise": noise.tolist(),
                "previous": previous.tolist(),
                "mix": mix.tolist(),
                "actions": x.tolist(),
            }
        )
    json.dump(cases, sys.stdout)


if __name__ == "__main__":
    main()
