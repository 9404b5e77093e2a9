"""One Euler step of the denoise component, for engines that would otherwise unroll the loop into a large graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vla_accel.component import Component, Loop, TensorSpec
from vla_accel.components.padding import real_tokens
from vla_accel.models.pi0 import Pi0


class DenoiseStep(nn.Module):
    """noisy (B, H, action_dim) float32, keys, values, `dt` (1,) float32 and `condition` (one row of the time's
    modulations for π0.5, of its embedding for π0), then `state` for π0, then `lengths` when padded, to the next
    noisy actions."""

    def __init__(self, model: Pi0, padded: bool) -> None:
        super().__init__()
        self.model = model
        self.adaptive, self.padded = model.config.kind == "pi05", padded

    def forward(
        self, noisy: Tensor, keys: Tensor, values: Tensor, dt: Tensor, condition: Tensor, *rest: Tensor
    ) -> Tensor:
        state = None if self.adaptive else rest[0]
        mask = real_tokens(rest[-1], keys.shape[2]) if self.padded else None
        modulations = condition if self.adaptive else None
        v = self.model.velocity(noisy, condition, modulations, state, keys, values, mask)
        return noisy + dt * v.to(noisy.dtype)


def denoise_loop(
    model: Pi0, inputs: tuple[TensorSpec, ...], embeddings: Tensor, modulations: Tensor | None
) -> Callable[[], Loop]:
    """The loop of a denoise component with these inputs and these rows of `Pi0.conditioning`."""

    def make() -> Loop:
        rows = embeddings if modulations is None else modulations
        steps = len(rows)
        specs = {s.name: s for s in inputs}
        start = specs["noise"]
        body_inputs = (
            TensorSpec("noisy", start.shape, start.dtype),
            specs["keys"],
            specs["values"],
            TensorSpec("dt", (1,), torch.float32),
            TensorSpec("condition", tuple(rows.shape[1:]), rows.dtype),
            *(specs[name] for name in ("state", "lengths") if name in specs),
        )
        body = Component(
            "denoise_step",
            DenoiseStep(model, "lengths" in specs),
            body_inputs,
            (TensorSpec("next", start.shape, start.dtype),),
        )
        dt = torch.full((steps, 1), -1.0 / steps, device=rows.device)
        return Loop(body, steps, ("noisy", "next"), "noise", "actions", {"dt": dt, "condition": rows.contiguous()})

    return make
