"""Choose the engine of a component for `auto`: the fastest one on this machine that loses no accuracy.

On a GPU of compute capability 8.0 or newer with triton that is the native engine in BF16, elsewhere eager. `auto` uses
a lower precision only if a parity report shows that it agrees for exactly these weights (`Shown`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vla_accel.config import EnginePrecision, EngineSpec, NativeOptions
from vla_accel.engines.native import NativeEngine, why_not
from vla_accel.errors import ConfigError
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import DTYPES


@dataclass(frozen=True)
class Choice:
    """What a component is built with. `why` is the reason of "auto"; empty if the configuration named the engine."""

    spec: EngineSpec
    why: str = ""


@dataclass(frozen=True)
class Shown:
    """Precisions by component that agree with the reference for these weights, as the report `source` shows."""

    precisions: Mapping[str, EnginePrecision]
    source: str


def choose(
    specs: Mapping[str, EngineSpec], device: torch.device, dtype: torch.dtype, shown: Shown | None = None
) -> dict[str, Choice]:
    """Choose the engine of every component with engine "auto", for a model whose large products are in `dtype`.

    `shown` counts only if all components are "auto", because it was measured for all of them together.
    """
    free = all(spec.engine == "auto" and spec.precision == "auto" for spec in specs.values())
    choices = {
        name: _choice(name, spec, device, dtype, shown if free else None) if spec.engine == "auto" else Choice(spec)
        for name, spec in specs.items()
    }
    # `PolicyConfig.native` is for all native engines: it is enough that one of them reads it.
    read = [choice.spec.native for choice in choices.values()]
    for name, spec in specs.items():
        if spec.native != NativeOptions() and spec.native not in read:
            raise ConfigError(f"{name}.native: engine auto chooses eager here, because {choices[name].why}")
    return choices


def _choice(name: str, spec: EngineSpec, device: torch.device, dtype: torch.dtype, shown: Shown | None) -> Choice:
    gpu, pinned = Gpu.of(device), spec.precision
    if gpu is None:
        reason = "there is no GPU"
    elif dtype != torch.bfloat16:
        reason = f"the native kernels need BF16, got {str(dtype).removeprefix('torch.')}"
    else:
        reason = NativeEngine.why_not(device) or why_not(gpu, pinned) or ""
    if gpu is None or reason:
        try:
            return Choice(replace(spec, engine="eager", native=NativeOptions()), reason)
        except ConfigError as error:
            raise ConfigError(f"{name}: engine auto chooses eager here, because {reason}: {error}") from error
    why = f"{gpu.name} has compute capability {gpu.version}"
    lower = None if shown is None else shown.precisions.get(name)
    if shown is not None and lower not in (None, "auto", "bf16") and why_not(gpu, lower) is None:
        spec, why = replace(spec, precision=lower), f"{why}, and {shown.source} shows that {lower} agrees"
    # Eager must not replace a precision that the user named.
    fallback = ("eager",) if pinned in ("auto", *(n for n, d in DTYPES.items() if d == dtype)) else ()
    return Choice(replace(spec, engine="native", fallback=fallback), why)
