"""How much memory a policy's weights take, before they are there: what an error says where a policy does not fit.

The same preparation runs on the meta device, where tensors have sizes and no values: what is counted is what would lie
on the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from vla_accel.config import EnginePrecision, EngineSpec
from vla_accel.engines import build
from vla_accel.errors import CheckpointError, DeviceMemoryError
from vla_accel.families.family import Family, Shape
from vla_accel.families.loading import Checkpoint
from vla_accel.fp8 import Scales
from vla_accel.kernels.gpu import Gpu
from vla_accel.ledger import Ledger
from vla_accel.nn.memory import Counted
from vla_accel.nn.network import Network
from vla_accel.policy.pipeline import Plan

_META = torch.device("meta")
ROOM = 0.1
"""Of the weights: what inputs, activations and graphs of an ordinary shape need beside them, at most."""


def weight_bytes(
    model: Network, family: Family, shape: Shape, specs: Mapping[str, EngineSpec], scales: Scales | None
) -> dict[str, int]:
    """Bytes on the device of each component's weights with these engines, `specs`. The model is left as it is."""
    twin = model.away(_Sizes(model)).placed(_META, model.dtype)
    store = family.store(twin, scales)
    found: dict[str, list[Tensor]] = {}
    for component in family.components(twin, shape, store=store, scales=scales):
        spec = _alone(specs[component.name])
        found[component.name] = list(build(component, spec, device=_META, ledger=Ledger()).weights)
    counted, prepared = Counted("meta"), store.tensors()
    return {name: counted.add([*own, *prepared.get(name, ())]) for name, own in found.items()}


def _alone(spec: EngineSpec) -> EngineSpec:
    """A spec without its fallbacks and without what only they read; nothing is measured on tensors without values."""
    if spec.engine == "native":
        return EngineSpec("native", precision=spec.precision, keep=spec.keep, attention="own", native=spec.native)
    return EngineSpec(spec.engine, precision="auto" if spec.engine == "eager" else spec.precision)


class _Sizes:
    """An `Origin` of tensors without values."""

    def __init__(self, network: Network) -> None:
        self.shapes = {name: parameter.shape for name, parameter in network.named_parameters()}

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        # What stays in host memory takes none of the device's.
        return torch.empty(self.shapes[name], dtype=dtype, device=_META if device == _META else torch.device("cpu"))

    def sample(self, name: str, stride: int) -> Tensor:
        raise NotImplementedError(f"{name} has no values")

    def progress(self) -> AbstractContextManager[None]:
        return nullcontext()


def smaller(
    family: Family, specs: Mapping[str, EngineSpec], device: torch.device, has_scales: bool
) -> Iterator[tuple[str, dict[str, EngineSpec]]]:
    """Configurations that need less, the mildest first, each with what to write. Those that only move memory lose
    nothing; FP8, and INT8 where there is none, need scales, but of weights alone."""
    gpu = Gpu.of(device)
    able = [n for n, s in specs.items() if n in family.host_embeddings and s.engine == "native"]
    on_host = {**specs, **{n: replace(specs[n], native=replace(specs[n].native, embeddings="host")) for n in able}}
    if able:
        yield "native: {embeddings: host}", on_host
    if gpu is None or not (gpu.fp8 or gpu.int8):
        return
    precision: EnginePrecision = "fp8" if gpu.fp8 else "int8"
    for parts in family.systems_in(precision).values():
        for base, word in ((specs, ""), (on_host, ", native: {embeddings: host}"))[: 2 if able else 1]:
            text = ", ".join(f"{part}: {{engine: native, precision: {precision}}}" for part in parts)
            low = {n: EngineSpec("native", precision=precision, native=base[n].native) for n in parts}
            chosen = {**base, **low}
            if has_scales or not family.needs_scales(chosen):
                yield text + word, chosen


@contextlib.contextmanager
def explained_if_too_large(
    plan: Plan, checkpoint: Checkpoint, free: tuple[int, int], shape: Callable[[], Shape]
) -> Iterator[None]:
    """Running out of device memory inside ends in one error: what the weights need, what was `free` of what before
    them, and the mildest smaller configuration that fits. `shape`: that engines are built for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        specs, scales = {name: choice.spec for name, choice in plan.choices.items()}, None
        with contextlib.suppress(CheckpointError):  # scales that are of no use make FP8 no advice
            scales = checkpoint.scales

        def count(specs: Mapping[str, EngineSpec]) -> dict[str, int]:
            return weight_bytes(plan.model, plan.family, shape(), specs, scales)

        now = count(specs)
        advice = "no smaller configuration of this model would fit"
        for text, other in smaller(plan.family, specs, plan.device, scales is not None):
            size = sum(count(other).values())
            if size < sum(now.values()) and size * (1 + ROOM) <= free[0]:
                advice = f"weights of {_gb(size)} would fit: {text}"
                break
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in now.items())
        raise DeviceMemoryError(
            f"{plan.device}: out of memory: the weights need {_gb(sum(now.values()))} ({parts}), and buffers beside "
            f"them; {_gb(free[0])} of {_gb(free[1])} were free; {advice} ({str(error).splitlines()[0]})"
        ) from error


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
