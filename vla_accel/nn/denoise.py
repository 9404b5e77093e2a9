"""Denoise: the Euler loop over the action expert, with everything that depends on the step alone computed once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, Loop, TensorSpec
from vla_accel.config import RtcConfig
from vla_accel.nn.flow import FlowNetwork, Schedule
from vla_accel.nn.padding import MOST_VIEWS, longest_prompt, real_tokens
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.rtc import Guidance, Pinned, corrected, step_gains


class Denoise(nn.Module):
    """noise (B, H, action_dim) float32, keys, values, `target` (B, H, action_dim) and `weights` (B, H) float32 of the
    guidance (weights of zero: a plain call), then for π0 `state` (B, action_dim), then, when padded, `lengths` (B,)
    int32 of the prefix, to normalised actions (B, H, action_dim) float32."""

    def __init__(self, model: FlowNetwork, schedule: Schedule, padded: bool, rtc: RtcConfig) -> None:
        super().__init__()
        self.model, self.schedule, self.padded, self.trained = model, schedule, padded, rtc.trained
        self.times: list[float] = model.times(schedule).tolist()
        self.gains = step_gains(self.times, schedule.dts, rtc.max_guidance_weight)
        self.embeddings: Any
        self.modulations: Any
        self.clean_embedding: Any
        self.clean_modulations: Any
        for name in ("embeddings", "modulations", "clean_embedding", "clean_modulations"):
            self.register_buffer(name, None, persistent=False)
        if model.origin is None:
            self.fetch()

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"times={self.schedule.times}, gains={self.gains}"

    def fetch(self) -> list[Tensor]:
        """Compute what depends on the steps alone, and bring the weights that `forward` reads."""
        if self.embeddings is None:
            times = self.model.times(self.schedule).to(self.model.device)
            with torch.inference_mode():
                self.embeddings, self.modulations = self.model.conditioning(times)
                if self.trained:
                    clean, modulations = self.model.conditioning(times.new_zeros(1))
                    self.clean_embedding = clean[0]
                    self.clean_modulations = None if modulations is None else modulations[0]
        small = ["action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out"]
        small += ["state_proj"] if self.model.takes_state else []
        parts = [name for name in small if hasattr(self.model, name)]
        # The adaptive norms' dense layers and the time's MLP are in the modulations, what makes keys and values of the
        # prefix's in these.
        inside = (".dense.", ".key_proj.", ".value_proj.")
        parts += [name for name in self.model.names("expert") if not any(part in name for part in inside)]
        return self.model.fetch(*parts)

    def forward(
        self, noise: Tensor, keys: Tensor, values: Tensor, target: Tensor, weights: Tensor, *rest: Tensor
    ) -> Tensor:
        state = rest[0] if self.model.takes_state else None
        mask = real_tokens(rest[-1], keys.shape[2]) if self.padded else None
        guidance: Guidance | Pinned = Guidance(target, weights, self.times, self.gains)
        if self.trained:
            guidance = Pinned(target, weights, self.clean_embedding, self.clean_modulations)
        rows = self.embeddings, self.modulations
        return self.model.integrate(noise, *rows, keys, values, state, mask, guidance, schedule=self.schedule)


class DenoiseStep(nn.Module):
    """noisy (B, H, action_dim) float32, keys, values, `target` and `weights` as in `Denoise`, float32 (1,) each: `dt`,
    the step's `time` and its guidance's `gain`; `condition` (one row of the time's modulations for π0.5, of its
    embedding for π0), then `state` for π0, then `lengths` when padded, to the next noisy actions."""

    def __init__(self, model: FlowNetwork, adaptive: bool, padded: bool) -> None:
        super().__init__()
        self.model = model
        self.adaptive, self.padded = adaptive, padded

    def forward(
        self, noisy: Tensor, keys: Tensor, values: Tensor, target: Tensor, weights: Tensor, dt: Tensor, time: Tensor,
        gain: Tensor, condition: Tensor, *rest: Tensor,
    ) -> Tensor:  # fmt: skip
        state = rest[0] if self.model.takes_state else None
        mask = real_tokens(rest[-1], keys.shape[2]) if self.padded else None
        modulations = condition if self.adaptive else None
        v = self.model.velocity(noisy, condition, modulations, state, keys, values, mask).to(noisy.dtype)
        return noisy + dt * corrected(v, noisy, time, gain, target, weights)


def denoise_loop(denoise: Denoise, inputs: Sequence[TensorSpec]) -> Loop:
    """The loop of a denoise component with these inputs, step by step."""
    model, adaptive = denoise.model, denoise.modulations is not None
    rows = denoise.modulations if adaptive else denoise.embeddings
    specs = {s.name: s for s in inputs}
    start = specs["noise"]
    body_inputs = (
        TensorSpec("noisy", start.shape, start.dtype),
        specs["keys"],
        specs["values"],
        specs["target"],
        specs["weights"],
        *(TensorSpec(name, (1,), torch.float32) for name in ("dt", "time", "gain")),
        TensorSpec("condition", tuple(rows.shape[1:]), rows.dtype),
        *(specs[name] for name in ("state", "lengths") if name in specs),
    )
    body = Component(
        "denoise_step",
        DenoiseStep(model, adaptive, "lengths" in specs),
        body_inputs,
        (TensorSpec("next", start.shape, start.dtype),),
        products=model.dtype,
    )
    scalars = {"dt": denoise.schedule.dts, "time": denoise.times, "gain": denoise.gains}
    tables = {n: torch.tensor(v, dtype=torch.float32, device=rows.device)[:, None] for n, v in scalars.items()}
    return Loop(body, len(rows), ("noisy", "next"), "noise", "actions", {**tables, "condition": rows.contiguous()})


def denoise_component(
    model: FlowNetwork, batch: int, prefix_tokens: int, schedule: Schedule, padded: bool, store: Any = None,
    rtc: RtcConfig | None = None,
) -> Component:  # fmt: skip
    """The loop for a fixed schedule and number of prefix tokens. One that pins a trained prefix has no step of its own
    for engines that take it one by one: its tables are of one flow time for all actions."""
    rtc = rtc or RtcConfig()
    config = model.config
    actions = (batch, config.action_horizon, config.action_dim)
    cache = (config.prefix.depth, batch, prefix_tokens, *model.cache_heads)
    ranges = {2: (1, max(prefix_tokens, config.prefix_tokens(MOST_VIEWS, longest_prompt(model))))}
    inputs = [
        TensorSpec("noise", actions, torch.float32),
        TensorSpec("keys", cache, model.dtype, ranges),
        TensorSpec("values", cache, model.dtype, ranges),
        TensorSpec("target", actions, torch.float32),
        TensorSpec("weights", actions[:2], torch.float32),
    ]
    if model.takes_state:
        inputs.append(TensorSpec("state", (batch, config.action_dim), torch.float32))
    if padded:
        inputs.append(TensorSpec("lengths", (batch,), torch.int32))
    native = None
    if store is not None and padded:
        native = partial(
            store.denoise, batch, prefix_tokens, schedule, max_weight=rtc.max_guidance_weight, trained=rtc.trained
        )
    module = Denoise(model, schedule, padded, rtc)
    loop = None if rtc.trained else partial(denoise_loop, module, inputs)
    outputs = (TensorSpec("actions", actions, torch.float32),)
    return Component(
        "denoise", module, tuple(inputs), outputs, native, loop=loop,
        quantised=QUANTISED["denoise"], fetch=module.fetch, products=model.dtype,
    )  # fmt: skip
