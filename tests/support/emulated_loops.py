"""The streamed denoise loop with its kernels in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda_emulator import EmulatedModule
from tests.support.gpus import H200
from tests.support.streamed_support import LoopCase
from vla_accel.families.pi0.native_loop import expert_spec, expert_weights
from vla_accel.families.pi0.network import Pi0
from vla_accel.families.pi0.step_tables import step_tables
from vla_accel.kernels import nvrtc
from vla_accel.kernels.loop import StreamedLoop
from vla_accel.nn.loop import SuffixLoop, streamed_loop
from vla_accel.nn.random_weights import random_model


class EmulatedLoop:
    """A streamed loop whose kernels may touch its own tensors and a call's, and no others. `build` makes it as it would
    for a GPU; `folder`: where compiled kernels are kept; `changed`: what is done to their source first."""

    def __init__(
        self, build: Callable[[], StreamedLoop], folder: Path, changed: Callable[[str], str] = lambda source: source
    ) -> None:
        def load(source: str, *rest: Any, **options: Any) -> EmulatedModule:
            return EmulatedModule(changed(source), *rest, folder=folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrtc, "load_module", load)
            self.loop = build()
        assert isinstance(self.loop.module, EmulatedModule)
        self.module = self.loop.module

    def run(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """As `StreamedLoop.run`."""
        loop = self.loop
        mine = (*loop._buffers.values(), *loop._constants.values(), loop.values_t)
        given = (*inputs.values(), state_token, actions)
        self.module.allow(*(tensor for tensor in (*mine, *given) if tensor is not None))
        loop.run(inputs, state_token, actions)


class Pi0Loops:
    """π0's or π0.5's loop: a case's weights and inputs; sequences differ in length, and behind each lies `beyond`."""

    def __init__(self, case: LoopCase) -> None:
        config, generator = case.config, torch.Generator().manual_seed(case.batch)
        self.case, expert = case, config.expert
        cache = (expert.depth, case.batch, case.prefix_tokens, expert.kv_heads, expert.head_dim)
        self.lengths = torch.tensor(
            [max(1, case.prefix_tokens - 7 * (b + 1)) for b in range(case.batch)], dtype=torch.int32
        )
        self.cache = {name: torch.randn(cache, generator=generator).bfloat16() for name in ("keys", "values")}
        self.state = torch.randn(case.batch, expert.width, generator=generator) if config.kind == "pi0" else None
        self.noise = torch.randn(case.batch, config.action_horizon, config.action_dim, generator=generator)
        self.guidance = {
            "target": torch.randn(self.noise.shape, generator=generator),
            "weights": torch.rand(self.noise.shape[:2], generator=generator),
        }

    def inputs(self, beyond: float, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        behind = (torch.arange(self.case.prefix_tokens) >= self.lengths[:, None])[None, :, :, None, None]
        cache = {name: value.masked_fill(behind, beyond).to(dtype) for name, value in self.cache.items()}
        return {**cache, "lengths": self.lengths, **self.guidance}

    def fused(self, precision: str) -> SuffixLoop:
        """The loop of fused ops."""
        case, model = self.case, random_model(Pi0, self.case.config)
        model = model if precision == "fp32" else model.to_compute_dtype(torch.bfloat16)
        with torch.inference_mode():
            weights = expert_weights(model, precision)
            tables = step_tables(model, weights.normed_products(), case.steps)
            return SuffixLoop(weights, expert_spec(case.config), tables, case.batch, case.prefix_tokens)

    def streamed(self) -> StreamedLoop:
        """The loop of streamed kernels."""
        case, model = self.case, random_model(Pi0, self.case.config).to_compute_dtype(torch.bfloat16)
        with torch.inference_mode():
            weights = expert_weights(model, "bf16", streamed=True)
            tables = step_tables(model, weights.normed_products(), case.steps)
            return streamed_loop(H200, weights, expert_spec(case.config), tables, case.batch, case.prefix_tokens)

    def moved(self, loop: Any, inputs: dict[str, Tensor]) -> Tensor:
        """What a loop adds to the noise."""
        actions = self.noise.clone()
        with torch.inference_mode():
            loop.run(inputs, self.state, actions)
        return actions - self.noise
