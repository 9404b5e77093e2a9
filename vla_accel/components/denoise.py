"""Denoise: the Euler loop over the action expert, with everything that depends on the step alone computed once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.models.pi0 import Pi0, euler_times


class Denoise(nn.Module):
    """noise (B, H, action_dim) float32, keys, values, then for π0 `state` (B, action_dim), then, when masked, `mask`
    (B, S), to normalised actions (B, H, action_dim) float32."""

    def __init__(self, model: Pi0, num_steps: int, takes_state: bool, masked: bool) -> None:
        super().__init__()
        self.embeddings: Tensor
        self.modulations: Tensor | None
        self.model = model
        self.takes_state, self.masked = takes_state, masked
        device = next(model.parameters()).device
        with torch.inference_mode():
            embeddings, modulations = model.conditioning(euler_times(num_steps).to(device))
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("modulations", modulations, persistent=False)

    def forward(self, noise: Tensor, keys: Tensor, values: Tensor, *rest: Tensor) -> Tensor:
        state = rest[0] if self.takes_state else None
        mask = rest[-1] if self.masked else None
        return self.model.integrate(noise, self.embeddings, self.modulations, keys, values, state, mask)


def denoise_component(model: Pi0, batch: int, prefix_tokens: int, num_steps: int, masked: bool) -> Component:
    """The loop for a fixed number of steps and prefix tokens."""
    config = model.config
    takes_state = config.kind == "pi0"
    actions = (batch, config.action_horizon, config.action_dim)
    prefix = config.prefix
    cache = (prefix.depth, batch, prefix_tokens, prefix.kv_heads, prefix.head_dim)
    inputs = [
        TensorSpec("noise", actions, torch.float32),
        TensorSpec("keys", cache, model.dtype),
        TensorSpec("values", cache, model.dtype),
    ]
    if takes_state:
        inputs.append(TensorSpec("state", (batch, config.action_dim), torch.float32))
    if masked:
        inputs.append(TensorSpec("mask", (batch, prefix_tokens), torch.bool))
    module = Denoise(model, num_steps, takes_state, masked)
    return Component("denoise", module, tuple(inputs), (TensorSpec("actions", actions, torch.float32),))
