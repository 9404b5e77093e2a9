"""Denoise: the Euler loop over the action expert, with everything that depends on the step alone computed once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, Loop, TensorSpec
from vla_accel.config import RtcConfig
from vla_accel.nn.flow import FlowNetwork
from vla_accel.nn.padding import MOST_VIEWS, longest_prompt, real_tokens
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.rtc import Guidance, Pinned, step_gains
from vla_accel.nn.step import denoise_loop


class Denoise(nn.Module):
    """noise (B, H, action_dim) float32, keys, values, `target` (B, H, action_dim) and `weights` (B, H) float32 of the
    guidance (weights of zero: a plain call), then for π0 `state` (B, action_dim), then, when padded, `lengths` (B,)
    int32 of the prefix, to normalised actions (B, H, action_dim) float32. `max_weight` and `trained`: as in
    `RtcConfig`."""

    def __init__(
        self, model: FlowNetwork, num_steps: int, takes_state: bool, padded: bool, max_weight: float | None = None,
        trained: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.trained = trained
        self.embeddings: Any
        self.modulations: Any
        self.clean_embedding: Any
        self.clean_modulations: Any
        self.model = model
        self.takes_state, self.padded = takes_state, padded
        self.times: list[float] = model.times(num_steps).tolist()
        self.gains = step_gains(self.times, max_weight)
        self.register_buffer("embeddings", None, persistent=False)
        self.register_buffer("modulations", None, persistent=False)
        self.register_buffer("clean_embedding", None, persistent=False)
        self.register_buffer("clean_modulations", None, persistent=False)
        if model.origin is None:
            self.fetch()

    def fetch(self) -> list[Tensor]:
        """Compute what depends on the steps alone, and bring the weights that `forward` reads."""
        if self.embeddings is None:
            times = self.model.times(len(self.times)).to(self.model.device)
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
        state = rest[0] if self.takes_state else None
        mask = real_tokens(rest[-1], keys.shape[2]) if self.padded else None
        guidance: Guidance | Pinned = Guidance(target, weights, self.times, self.gains)
        if self.trained:
            guidance = Pinned(target, weights, self.clean_embedding, self.clean_modulations)
        return self.model.integrate(noise, self.embeddings, self.modulations, keys, values, state, mask, guidance)


def denoise_component(
    model: FlowNetwork,
    batch: int,
    prefix_tokens: int,
    num_steps: int,
    padded: bool,
    store: Any = None,
    rtc: RtcConfig | None = None,
) -> Component:
    """The loop for a fixed number of steps and prefix tokens. One that pins a trained prefix has no step of its own for
    engines that take it one by one: its tables are of one flow time for all actions."""
    rtc = rtc or RtcConfig()
    max_weight = rtc.max_guidance_weight
    config = model.config
    takes_state = model.takes_state
    actions = (batch, config.action_horizon, config.action_dim)
    prefix = config.prefix
    cache = (prefix.depth, batch, prefix_tokens, prefix.kv_heads, prefix.head_dim)
    ranges = {2: (1, max(prefix_tokens, config.prefix_tokens(MOST_VIEWS, longest_prompt(model))))}
    inputs = [
        TensorSpec("noise", actions, torch.float32),
        TensorSpec("keys", cache, model.dtype, ranges),
        TensorSpec("values", cache, model.dtype, ranges),
        TensorSpec("target", actions, torch.float32),
        TensorSpec("weights", actions[:2], torch.float32),
    ]
    if takes_state:
        inputs.append(TensorSpec("state", (batch, config.action_dim), torch.float32))
    if padded:
        inputs.append(TensorSpec("lengths", (batch,), torch.int32))
    native = None
    if store is not None and padded:
        native = partial(store.denoise, batch, prefix_tokens, num_steps, max_weight=max_weight, trained=rtc.trained)
    module = Denoise(model, num_steps, takes_state, padded, max_weight, rtc.trained)
    outputs = (TensorSpec("actions", actions, torch.float32),)

    def loop() -> Loop:
        return denoise_loop(model, tuple(inputs), module.embeddings, module.modulations, module.times, module.gains)

    return Component(
        "denoise", module, tuple(inputs), outputs, native, loop=None if rtc.trained else loop,
        quantised=QUANTISED["denoise"], fetch=module.fetch, products=model.dtype,
    )  # fmt: skip
