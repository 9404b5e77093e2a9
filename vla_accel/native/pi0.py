"""The native programs of π0 and π0.5: the components written in fused ops over static buffers, for a CUDA graph."""

from __future__ import annotations

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.models.pi0 import Pi0
from vla_accel.native.expert import ExpertWeights, NativeDenoise, steps_of, why_not_streamed
from vla_accel.native.prefix import PaliGemmaStore


class Pi0Store(PaliGemmaStore[Pi0]):
    """Prepared weights of one π0 or π0.5."""

    def denoise(
        self, batch: int, prefix_tokens: int, num_steps: int, spec: EngineSpec, max_weight: float | None = None,
        trained: bool = False,
    ) -> Program:  # fmt: skip
        """The whole Euler loop of `num_steps`. `max_weight`, `trained`: as in `RtcConfig`."""
        key, weights, why_not = self.loop_weights(spec, batch, trained, why_not_streamed, ExpertWeights.of)
        steps = (*key, num_steps, max_weight, trained)
        tables = self.weights(steps, lambda: steps_of(self.model, weights, num_steps, max_weight, trained))
        return NativeDenoise(weights, self.model.config, tables, batch, prefix_tokens, why_not)
