"""The denoise component of a `DitNetwork`: noise and the keys and values of its cross-attention → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.nn.dit import QUANTISED, DitConfig, DitNetwork, Source, StepConstants
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.flow import Schedule


def cache_specs(
    config: DitConfig, batch: int, tokens: Mapping[Source, int], dtype: torch.dtype
) -> tuple[TensorSpec, ...]:
    """Keys and values of each source, (blocks, B, tokens, heads, head_dim); `tokens`: how many each source has."""
    shape = {s: (len(config.blocks(s)), batch, tokens[s], config.heads, config.head_dim) for s in config.sources}
    return tuple(
        TensorSpec(f"{source}_{kind}", shape[source], dtype) for source in config.sources for kind in ("keys", "values")
    )


class Denoise(Fixed[DitNetwork]):
    """noise (B, H, A) float32, the cache; `state` (B, state_dim) if the model has one; if `guided`, `target` (B, H, A)
    and `weights` (B, H) float32 of a previous chunk (weights of zero: a plain call); then, where rows of the first
    source may be shorter, `lengths` (B,) int32; to normalised actions (B, H, A) float32."""

    def __init__(self, model: DitNetwork, schedule: Schedule, guided: bool) -> None:
        # The constants have the times' and the norms' share; the cache has the rest.
        others = ("head.vl_", "head.time_", "head.final_modulation")
        names = [n for n in model.names("head") if not n.startswith(others)]
        read = [n for n in names if ".kv_proj." not in n and ".modulation." not in n]
        super().__init__(model, lambda: model.constants(schedule), read)
        self.schedule, self.guided = schedule, guided

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"times={self.schedule.times}"

    def forward(self, noise: Tensor, *inputs: Tensor) -> Tensor:
        sources = self.model.config.head.sources
        cache = {s: (inputs[2 * i], inputs[2 * i + 1]) for i, s in enumerate(sources)}
        others = [*inputs[2 * len(sources) :]]
        state = others.pop(0) if self.model.config.head.state else None
        guidance = (others.pop(0), others.pop(0)) if self.guided else (None, None)
        lengths = others[0] if others else None
        constants = StepConstants(*self.kept())
        return self.model.integrate(noise, constants, state, cache, lengths, *guidance, schedule=self.schedule)


def denoise_component(
    model: DitNetwork, schedule: Schedule, cache: tuple[TensorSpec, ...], *, guided: bool, padded: bool,
    native: Callable[..., Any] | None,
) -> Component:  # fmt: skip
    """The component. `cache`: as of `cache_specs`; `padded`: rows of the first source may have fewer tokens."""
    config, batch = model.config, cache[0].shape[1]
    actions = (batch, config.action_horizon, config.action_dim)
    inputs = [TensorSpec("noise", actions, torch.float32), *cache]
    if config.head.state:
        inputs.append(TensorSpec("state", (batch, config.state_dim), torch.float32))
    if guided:
        inputs += [TensorSpec("target", actions, torch.float32), TensorSpec("weights", actions[:2], torch.float32)]
    if padded:
        inputs.append(TensorSpec("lengths", (batch,), torch.int32))
    module = Denoise(model, schedule, guided)
    return Component(
        "denoise", module, tuple(inputs), (TensorSpec("actions", actions, torch.float32),), native,
        quantised=QUANTISED["denoise"], fetch=module.fetch, products=model.dtype,
    )  # fmt: skip
