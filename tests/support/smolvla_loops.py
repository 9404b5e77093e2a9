"""SmolVLA's denoise loop, streamed and in fused ops, over the same random weights and inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_accel.families.smolvla.native_loop import expert_spec, expert_weights, steps_of
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import StreamedLoop
from vla_accel.nn.gemma import SmolLmConfig
from vla_accel.nn.loop import SuffixLoop, streamed_loop
from vla_accel.nn.random_weights import random_model
from vla_accel.nn.siglip import SiglipConfig


def expert_of(
    *, width: int = 80, mlp: int = 128, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, depth: int = 2,
    horizon: int = 10, action_dim: int = 9, self_every: int = 2,
) -> SmolVlaConfig:  # fmt: skip
    """A model of this expert, with little before it."""
    shared = {"depth": depth, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return SmolVlaConfig(
        vision=SiglipConfig(width=32, depth=1, mlp_dim=64, heads=2, image_size=32, patch_size=8),
        prefix=SmolLmConfig(width=64, mlp_dim=64, **shared),
        expert=SmolLmConfig(width=width, mlp_dim=mlp, **shared),
        vocab_size=64, shuffle=2, self_every=self_every, state_dim=8, action_dim=action_dim, action_horizon=horizon,
    )  # fmt: skip


FULL: dict[str, Any] = {
    "width": 720, "mlp": 2048, "heads": 15, "kv_heads": 5, "horizon": 50, "action_dim": 32,
}  # fmt: skip


@dataclass(frozen=True)
class ExpertCase:
    """`lengths`: real prefix tokens of each sequence, of `prefix_tokens`."""

    config: SmolVlaConfig
    prefix_tokens: int
    lengths: tuple[int, ...]
    steps: int = 2


# One to four tiles of rows, one and two rounds of keys, layers that cross always, sometimes and never, prefixes of one
# token and of more than there are threads, several sequences, the published size.
EXPERTS = {
    **{f"{n} actions": ExpertCase(expert_of(horizon=n), 40, (33,)) for n in (1, 16, 17, 33, 50, 64)},
    "one token": ExpertCase(expert_of(), 1, (1,)),
    "long": ExpertCase(expert_of(), 300, (257,)),
    "whole prefix": ExpertCase(expert_of(horizon=33), 48, (48,)),
    "all cross": ExpertCase(expert_of(self_every=0), 40, (33,)),
    "none crosses": ExpertCase(expert_of(self_every=1), 40, (33,)),
    "every third": ExpertCase(expert_of(self_every=3, depth=4), 40, (16,)),
    "heads of 128": ExpertCase(expert_of(head_dim=128), 40, (33,)),
    "large heads": ExpertCase(expert_of(head_dim=256), 40, (33,)),
    "three sequences": ExpertCase(expert_of(), 40, (33, 40, 7)),
    "three long sequences": ExpertCase(expert_of(horizon=20), 70, (33, 40, 70)),
    "full": ExpertCase(expert_of(**FULL), 177, (160,)),
    "full short": ExpertCase(expert_of(**FULL), 145, (130,)),
    "full three views": ExpertCase(expert_of(**FULL), 241, (241,)),
}


class Loops:
    """A case's weights and inputs. `beyond`: what keys and values are behind each length."""

    def __init__(self, case: ExpertCase, beyond: float = float("nan")) -> None:
        config, self.case = case.config, case
        expert, batch, generator = config.expert, len(case.lengths), torch.Generator().manual_seed(3)
        cache = (expert.depth, batch, case.prefix_tokens, expert.kv_heads, expert.head_dim)
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        behind = (torch.arange(case.prefix_tokens) >= lengths[:, None])[None, :, :, None, None]
        keys, values = (
            torch.randn(cache, generator=generator).bfloat16().masked_fill(behind, beyond) for _ in range(2)
        )
        self.noise = torch.randn(batch, config.action_horizon, config.action_dim, generator=generator)
        target = torch.randn(self.noise.shape, generator=generator)
        weights = torch.rand(self.noise.shape[:2], generator=generator)
        self.inputs = {"keys": keys, "values": values, "lengths": lengths, "target": target, "weights": weights}

    def model(self, device: str, dtype: torch.dtype) -> SmolVla:
        return random_model(SmolVla, self.case.config).to(device).to_compute_dtype(dtype)

    def fused(self, precision: str, device: str) -> SuffixLoop:
        """The loop of fused ops."""
        case = self.case
        model = self.model(device, torch.float32 if precision == "fp32" else torch.bfloat16)
        with torch.inference_mode():
            weights = expert_weights(model, precision)
            tables = steps_of(self.model(device, torch.float32), case.steps)
            return SuffixLoop(weights, expert_spec(case.config), tables, len(case.lengths), case.prefix_tokens)

    def streamed(self, gpu: Gpu, device: str) -> StreamedLoop:
        """The loop of streamed kernels."""
        case = self.case
        with torch.inference_mode():
            weights = expert_weights(self.model(device, torch.bfloat16), "bf16", streamed=True)
            tables = steps_of(self.model(device, torch.float32), case.steps, streamed=True)
            return streamed_loop(gpu, weights, expert_spec(case.config), tables, len(case.lengths), case.prefix_tokens)

    def placed(
        self, device: str, dtype: torch.dtype = torch.bfloat16, *, beyond: float | None = None
    ) -> dict[str, Tensor]:
        """The inputs on a device, the cache in `dtype`; `beyond`: instead of what is behind the lengths."""
        inputs = dict(self.inputs)
        behind = torch.arange(self.case.prefix_tokens) >= inputs["lengths"][:, None]
        for name in ("keys", "values"):
            if beyond is not None:
                inputs[name] = inputs[name].masked_fill(behind[None, :, :, None, None], beyond)
            inputs[name] = inputs[name].to(dtype)
        return {name: value.to(device) for name, value in inputs.items()}

    def moved(self, loop: Any, inputs: dict[str, Tensor]) -> Tensor:
        """What a loop adds to the noise, on the CPU."""
        device = inputs["keys"].device
        actions = self.noise.to(device, copy=True)
        with torch.inference_mode():
            loop.run(inputs, None, actions)
        return actions.cpu() - self.noise
