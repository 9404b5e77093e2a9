"""The native programs that flow networks share: their vision."""

from __future__ import annotations

from typing import TypeVar

import torch

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.models.flow import FlowNetwork
from vla_accel.native.store import NativeStore
from vla_accel.native.vision import NativeVision, VisionWeights

N = TypeVar("N", bound=FlowNetwork)


class FlowStore(NativeStore[N]):
    """Prepared weights of one flow network."""

    def vision(self, batch: int, views: int, spec: EngineSpec) -> Program:
        """The vision program of `batch` observations of `views` images."""
        precision = self.precision("vision", spec, ("fp8", "int8", "fp16"))
        weights = self.weights(
            ("vision", precision, spec.keep),
            lambda: VisionWeights.of(self.model, precision, self.scales, spec.keep),
        )
        return NativeVision(weights, batch, views, spec.attention)

    def beside_bf16(self, *precisions: str) -> tuple[str, ...]:
        """Precisions of the two that share keys and values: their programs keep those in BF16, as only a BF16 policy
        does."""
        return precisions if self.model.dtype == torch.bfloat16 else ()
