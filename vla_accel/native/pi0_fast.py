"""The native programs of π0-FAST: vision and prefix are those of every PaliGemma, and decode."""

from __future__ import annotations

from typing import ClassVar

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.models.pi0_fast import Pi0Fast
from vla_accel.native.decode import DecodeWeights, NativeDecode
from vla_accel.native.prefix import PaliGemmaStore, PrefixWeights


class Pi0FastStore(PaliGemmaStore[Pi0Fast]):
    """Prepared weights of one π0-FAST. Prefix and decode are the same layers, and read the same weights."""

    paired: ClassVar[bool] = False

    def decode(self, batch: int, prefix_tokens: int, steps: int, spec: EngineSpec) -> Program:
        """At most `steps` tokens behind a prefix."""
        precision = self.loop_precision("decode", spec)
        prefix = next((w for w in self.prepared.values() if isinstance(w, PrefixWeights)), None)
        weights = self.weights(("decode", precision), lambda: DecodeWeights.of(self.model, precision, prefix))
        return NativeDecode(weights, self.model.config, batch, prefix_tokens, steps)
