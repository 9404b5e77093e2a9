"""`build` makes the engine of a component. No other function falls back to another engine."""

from __future__ import annotations

import torch

from vla_accel.component import Component
from vla_accel.config import EngineSpec
from vla_accel.engines.base import Engine
from vla_accel.engines.eager import EagerEngine
from vla_accel.engines.native import NativeEngine
from vla_accel.engines.tensorrt import TensorrtEngine, TensorrtRtxEngine
from vla_accel.engines.torch_tensorrt import TorchTensorrtEngine
from vla_accel.errors import ConfigError, DependencyError, EngineError
from vla_accel.fp8 import FORMATS
from vla_accel.ledger import Ledger, LedgerEntry

ENGINES: dict[str, type[Engine]] = {
    "eager": EagerEngine,
    "native": NativeEngine,
    "tensorrt": TensorrtEngine,
    "tensorrt_rtx": TensorrtRtxEngine,
    "torch_tensorrt": TorchTensorrtEngine,
}
"""Every engine by the name used in configurations."""


def build(component: Component, spec: EngineSpec, *, device: torch.device, ledger: Ledger, why: str = "") -> Engine:
    """Build the requested engine, or the next one that `spec.fallback` allows, and record it in the ledger.

    Running out of memory raises: another engine would need as much.

    Args:
        why: Why "auto" chose `spec` (`engines.auto`); stepping down is then no fallback. Empty if `spec` is the
            user's.
    """
    reasons = [why] if why else []
    requested = "auto" if why else spec.engine
    for name in (spec.engine, *spec.fallback):
        if name not in ENGINES:
            raise ConfigError(f"{component.name}: expected an engine of {', '.join(ENGINES)}, got {name!r}")
        lacking = ENGINES[name].lacks(component, spec.precision)
        # A fallback to eager is also one to the policy's own precision.
        if lacking is not None and (name == spec.engine or name != "eager"):
            reasons.append(f"{name}: {lacking}")
            continue
        try:
            engine = ENGINES[name](component, device, spec)
        except (EngineError, DependencyError, ImportError) as error:
            # The message names the component once, before all reasons.
            reasons.append(f"{name}: {str(error).removeprefix(f'{component.name}: ')}")
            continue
        detail = engine.detail
        if spec.precision in FORMATS:
            # Engines differ in which products they compute in a low precision.
            keep = spec.keep if name == "native" else ()
            products = component.quantised.get(name)
            detail += f"; {products.without(keep).described(spec.precision)}" if products else ""
            detail += f", kept as they are: {', '.join(keep)}" if keep else ""
        detail += f"; {lacking}" if lacking else ""
        ledger.record(LedgerEntry(component.name, requested, name, "; ".join(reasons), detail))
        return engine
    raise EngineError(f"{component.name}: no engine could be built ({'; '.join(reasons)})")


__all__ = ["ENGINES", "Engine", "build"]
