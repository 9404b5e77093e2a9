"""What the native programs of all models on PaliGemma share: the prefix."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, TypeVar

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.models.paligemma import PaliGemma
from vla_accel.native.flow import FlowStore
from vla_accel.native.prefix import NativePrefix, PrefixWeights

N = TypeVar("N", bound=PaliGemma)


class PaliGemmaStore(FlowStore[N]):
    """Prepared weights of one model on PaliGemma."""

    paired: ClassVar[bool] = True
    """As of `PrefixWeights`."""

    def kv_cache(self, batch: int, image_tokens: int, length: int, spec: EngineSpec) -> Program:
        """The prefix program of `image_tokens` image tokens and `length` prompt tokens a row."""
        weights = self.prefix_weights(spec, partial(PrefixWeights.of, paired=self.paired))
        return NativePrefix(weights, batch, image_tokens, length, spec.attention)
