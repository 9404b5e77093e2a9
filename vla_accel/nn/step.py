"""One Euler step of the denoise component, for engines that would otherwise unroll the loop into a large graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vla_accel.component import Component, Loop, TensorSpec
from vla_accel.nn.flow import FlowNetwork
from vla_accel.nn.padding import real_tokens
from vla_accel.nn.rtc import corrected


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


def denoise_loop(
    model: FlowNetwork,
    inputs: tuple[TensorSpec, ...],
    embeddings: Tensor,
    modulations: Tensor | None,
    times: Sequence[float],
    gains: Sequence[float],
) -> Loop:
    """The loop of a denoise component with these inputs, these rows of `Pi0.conditioning` and, by step, the time and
    the guidance's gain."""
    rows = embeddings if modulations is None else modulations
    steps = len(rows)
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
        DenoiseStep(model, modulations is not None, "lengths" in specs),
        body_inputs,
        (TensorSpec("next", start.shape, start.dtype),),
        products=model.dtype,
    )
    scalars = {"dt": [-1.0 / steps] * steps, "time": times, "gain": gains}
    tables = {n: torch.tensor(v, dtype=torch.float32, device=rows.device)[:, None] for n, v in scalars.items()}
    return Loop(body, steps, ("noisy", "next"), "noise", "actions", {**tables, "condition": rows.contiguous()})
