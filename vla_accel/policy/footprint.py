"""Memory of a policy's weights without loading them, and the error of a policy that does not fit.

The engines prepare weights on the meta device, where tensors have sizes and no values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vla_accel.config import EnginePrecision, EngineSpec
from vla_accel.engines import build
from vla_accel.errors import CheckpointError, DeviceMemoryError, EngineError
from vla_accel.families.family import Family, Shape, quantised_configs
from vla_accel.families.loading import Checkpoint
from vla_accel.fp8 import FORMATS, Scales
from vla_accel.kernels.gpu import Gpu
from vla_accel.ledger import Ledger
from vla_accel.nn.memory import Counted
from vla_accel.nn.network import Network
from vla_accel.policy.pipeline import Pipelines, Plan

_META = torch.device("meta")
BUFFERS = 0.1
"""Upper bound on inputs, activations and graphs of an ordinary shape, as a fraction of the weights."""


def weight_bytes(
    model: Network, family: Family, shape: Shape, specs: Mapping[str, EngineSpec], scales: Scales | None
) -> dict[str, int]:
    """Return the bytes on the device of each component's weights with these engines; the model stays unchanged."""
    twin = model.away(_Sizes(model)).placed(_META, model.dtype)
    store = family.store_class(twin, scales)
    found: dict[str, list[Tensor]] = {}
    for component in family.components(twin, shape, store=store, scales=scales):
        spec = _alone(specs[component.name])
        found[component.name] = list(build(component, spec, device=_META, ledger=Ledger()).weights)
    counted, prepared = Counted("meta"), store.tensors()
    return {name: counted.add([*own, *prepared.get(name, ())]) for name, own in found.items()}


def _alone(spec: EngineSpec) -> EngineSpec:
    """A spec without its fallbacks and their options; kernels cannot be measured on tensors without values."""
    if spec.engine == "native":
        return EngineSpec("native", precision=spec.precision, keep=spec.keep, attention="own", native=spec.native)
    return EngineSpec(spec.engine, precision="auto" if spec.engine == "eager" else spec.precision)


class _Sizes:
    """An `Origin` of tensors without values."""

    def __init__(self, network: Network) -> None:
        self.shapes = {name: parameter.shape for name, parameter in network.named_parameters()}

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        # Weights in host memory take none of the device's.
        return torch.empty(self.shapes[name], dtype=dtype, device=_META if device == _META else torch.device("cpu"))

    def sample(self, name: str, stride: int) -> Tensor:
        raise NotImplementedError(f"{name} has no values")

    def progress(self) -> AbstractContextManager[None]:
        return nullcontext()


def memory_of(pipelines: Pipelines, encoder: Sequence[Tensor]) -> dict[str, Any]:
    """Return `OptimizedPolicy.memory`. `encoder`: weights of a text encoder outside the components."""
    plan = pipelines.plan
    counted, on_host = Counted(plan.device.type), Counted("cpu")
    prepared, own = plan.store.tensors(), pipelines.eager_weights()
    by_part = {part: [*prepared.get(part, ()), *own.get(part, ())] for part in plan.family.parts}
    weights = {part: counted.add(tensors) for part, tensors in by_part.items()}
    if of_text := counted.add(encoder):
        weights["text_encoder"] = of_text
    unused = counted.add(plan.model.parameters())
    host = on_host.add(chain(*by_part.values())) if plan.device.type == "cuda" else 0
    total = sum(weights.values()) + unused + pipelines.bytes
    return {"weights": weights, "unused": unused, "buffers": pipelines.bytes, "total": total, "host": host}


def smaller(
    family: Family, specs: Mapping[str, EngineSpec], device: torch.device, has_scales: bool
) -> Iterator[tuple[str, dict[str, EngineSpec]]]:
    """Yield configurations that need less memory, the mildest first, each with the text to write: embeddings on the
    host lose nothing; FP8, or INT8 on GPUs without it, needs scales unless only weights are quantised."""
    gpu = Gpu.of(device)
    able = [n for n, s in specs.items() if n in family.capabilities.host_embeddings and s.engine == "native"]
    on_host = {**specs, **{n: replace(specs[n], native=replace(specs[n].native, embeddings="host")) for n in able}}
    if able:
        yield "native: {embeddings: host}", on_host
    if gpu is None or not (gpu.fp8 or gpu.int8):
        return
    precision: EnginePrecision = "fp8" if gpu.fp8 else "int8"
    for parts in _quantised_parts(family, precision):
        for base, word in ((specs, ""), (on_host, ", native: {embeddings: host}"))[: 2 if able else 1]:
            text = ", ".join(f"{part}: {{engine: native, precision: {precision}}}" for part in parts)
            low = {n: EngineSpec("native", precision=precision, native=base[n].native) for n in parts}
            chosen = {**base, **low}
            if has_scales or not family.capabilities.needs_scales(chosen):
                yield text + word, chosen


def _quantised_parts(family: Family, precision: EnginePrecision) -> list[list[str]]:
    """Return the sets of components that shipped configurations have in one low precision, weights alone first, then
    those with the fewest components."""
    found = []
    for config in quantised_configs(family).values():
        low = {n: s for n, s in config.specs(family.parts).items() if s.precision in FORMATS}
        if {spec.precision for spec in low.values()} == {precision}:
            found.append((family.capabilities.needs_scales(low), len(low), [*low]))
    return [parts for _, _, parts in sorted(found)]


@contextlib.contextmanager
def explained_if_too_large(
    plan: Plan, checkpoint: Checkpoint, free: tuple[int, int], shape: Callable[[], Shape]
) -> Iterator[None]:
    """Turn torch.OutOfMemoryError into one DeviceMemoryError with the mildest smaller configuration that fits.

    `free`: bytes free and in all before the weights were loaded; `shape` returns the shape that engines are built for.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        specs, scales = {name: choice.spec for name, choice in plan.choices.items()}, None
        with contextlib.suppress(CheckpointError):  # without valid scales FP8 is no advice
            scales = checkpoint.scales

        def count(specs: Mapping[str, EngineSpec]) -> dict[str, int]:
            return weight_bytes(plan.model, plan.family, shape(), specs, scales)

        now = count(specs)
        advice = "no smaller configuration of this model would fit"
        for text, other in smaller(plan.family, specs, plan.device, scales is not None):
            try:
                size = sum(count(other).values())
            except EngineError:  # no engine has a part of this policy in this precision
                continue
            if size < sum(now.values()) and size * (1 + BUFFERS) <= free[0]:
                advice = f"weights of {_gb(size)} would fit: {text}"
                break
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in now.items())
        raise DeviceMemoryError(
            f"{plan.device}: out of memory: the weights need {_gb(sum(now.values()))} ({parts}), and buffers "
            f"in addition; {_gb(free[0])} of {_gb(free[1])} were free; {advice} ({str(error).splitlines()[0]})"
        ) from error


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
