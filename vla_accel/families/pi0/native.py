"""The native programs of π0, π0.5 and π0-FAST: components in fused ops over static buffers, for a CUDA graph."""

from __future__ import annotations

from functools import partial

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.pi0.native_loop import expert_spec, expert_weights, steps_of, why_not_streamed
from vla_accel.families.pi0.network import Pi0
from vla_accel.families.pi0_fast.native_decode import DecodeWeights, NativeDecode
from vla_accel.families.pi0_fast.network import Pi0Fast
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import LoopProgram
from vla_accel.nn.native_prefix import PrefixStore, PrefixWeights
from vla_accel.nn.quantised import QUANTISED


class Pi0Store(PrefixStore[Pi0]):
    """Prepared weights of one π0 or π0.5."""

    def denoise(
        self, batch: int, prefix_tokens: int, schedule: Schedule, spec: EngineSpec, max_weight: float | None = None,
        trained: bool = False,
    ) -> Program:  # fmt: skip
        """The whole Euler loop. `max_weight`, `trained`: as in `RtcConfig`."""
        key, weights, why_not = self.loop_weights(spec, batch, trained, why_not_streamed, expert_weights)
        steps = (*key, schedule, max_weight, trained)
        tables = self.weights(steps, lambda: steps_of(self.model, weights, schedule, max_weight, trained))
        return LoopProgram(weights, expert_spec(self.model.config), tables, batch, prefix_tokens, why_not)


class Pi0FastStore(PrefixStore[Pi0Fast]):
    """Prepared weights of one π0-FAST. Prefix and decode are the same layers, and read the same weights."""

    prefix_weights = staticmethod(partial(PrefixWeights.of, paired=False))

    def decode(self, batch: int, prefix_tokens: int, steps: int, spec: EngineSpec) -> Program:
        """At most `steps` tokens behind a prefix."""
        precision = self.precision("decode", spec, QUANTISED["decode"]["native"])
        prefix = next((w for w in self.prepared.values() if isinstance(w, PrefixWeights)), None)
        weights = self.weights(("decode", precision), lambda: DecodeWeights.of(self.model, precision, prefix))
        return NativeDecode(weights, self.model.config, batch, prefix_tokens, steps)
