"""The eager engine calls the module as it is. It runs anywhere and is the reference for every other engine."""

from __future__ import annotations

import torch

from vla_accel.component import Component
from vla_accel.config import EnginePrecision, EngineSpec
from vla_accel.engines.base import Engine
from vla_accel.numeric import DTYPES


class EagerEngine(Engine):
    """Runs the module under inference mode and copies its results into the output buffers."""

    name = "eager"
    needs = "parts"

    @classmethod
    def lacks(cls, component: Component, precision: EnginePrecision) -> str | None:
        if precision == "auto" or DTYPES.get(precision) == component.dtype:
            return None
        own = next((name for name, dtype in DTYPES.items() if dtype == component.dtype), str(component.dtype))
        return f"it computes in the policy's own precision, {own}, got {precision}"

    def __init__(self, component: Component, device: torch.device, spec: EngineSpec) -> None:
        super().__init__(component, device, spec)
        self.detail = f"torch {torch.__version__}"
        self._allocate()

    @torch.inference_mode()
    def run(self) -> None:
        self._copy_results(self.component.module(*(self.inputs[s.name] for s in self.component.inputs)))
