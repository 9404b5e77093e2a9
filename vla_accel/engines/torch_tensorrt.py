"""The torch_tensorrt engine: the marked parts of a module as TensorRT engines, each without a fallback partition.

Vision's tower becomes one FP16 engine, with the cast to the BF16 projector after it; every MLP of the prefix becomes
an FP8 engine of its ModelOpt-quantised module; what is between them (attention, norms) stays PyTorch. Versions are
the business of `torch_tensorrt_versions`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vla_accel.component import Component, Island, TensorSpec
from vla_accel.config import EngineSpec
from vla_accel.engines import cache, onnx, tensorrt_library
from vla_accel.engines.base import Engine
from vla_accel.engines.tensorrt import check_first_run, refuse_if_not_runnable
from vla_accel.engines.tensorrt_library import load_library, major_minor
from vla_accel.engines.tensorrt_plan import Obtained, cache_of, content_key, manifest
from vla_accel.engines.tensorrt_session import Session, shared_engine
from vla_accel.engines.torch_tensorrt_versions import Flavour, conversion_options, find_flavour, load_torch_tensorrt
from vla_accel.errors import DependencyError, EngineError

# -- converting ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Converted:
    """One part as a serialized engine. `operators`: of the traced program, all of which are in the engine."""

    content: bytes
    operators: int
    seconds: Mapping[str, float]


def convert(
    torch_tensorrt: Any, version: str, name: str, module: nn.Module, inputs: tuple[Tensor, ...], spec: EngineSpec
) -> Converted:
    """One module, whole, to one serialized engine: this conversion has no partitioner, it takes all or fails.

    Raises EngineError naming what cannot be converted; DependencyError for an option that this version would not read.
    """
    began = time.perf_counter()
    function = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    given = conversion_options(major_minor(version), spec.tensorrt)
    known = inspect.signature(function).parameters
    unread = [option for option in given if option not in known]
    if unread:
        raise DependencyError(f"torch-tensorrt {version} does not know the options {', '.join(unread)}")
    # Quantisers must be single operators here and in the lowering.
    with torch.no_grad(), onnx.quantisers_as_operators(), _problems() as problems:
        exported = torch.export.export(module, inputs, strict=False)
        operators = sum(n.op == "call_function" for n in exported.graph.nodes)
        exported_s = time.perf_counter() - began
        try:
            content = function(exported, arg_inputs=list(inputs), **given)
        # 2.11 logs what went wrong, then trips over the result it does not have.
        except (RuntimeError, UnboundLocalError) as error:
            cause = problems[-1] if problems else error.__cause__ or error
            said = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
            raise EngineError(f"{name}: torch-tensorrt {version} cannot convert it whole: {said}") from error
    if not content:
        raise EngineError(f"{name}: torch-tensorrt {version} gave no engine")
    seconds = {"export": exported_s, "build": time.perf_counter() - began - exported_s}
    return Converted(bytes(content), operators, seconds)


@contextlib.contextmanager
def _problems() -> Iterator[list[BaseException]]:
    """The exceptions that Torch-TensorRT's converter logs meanwhile; its log lines hold whole graphs and are not
    shown."""
    found: list[BaseException] = []

    class Catch(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.exc_info and record.exc_info[1] is not None:
                found.append(record.exc_info[1])
                return False
            return True

    logger, catch = logging.getLogger("torch_tensorrt.dynamo._compiler"), Catch()
    logger.addFilter(catch)
    try:
        yield found
    finally:
        logger.removeFilter(catch)


def build_islands(
    component: Component, spec: EngineSpec, device: torch.device, module: nn.Module | None = None
) -> list[tuple[Island, Obtained, Component]]:
    """Every marked part of a component as an engine, from the cache or built now, in the order of their names.

    A part's engine has fixed shapes: those the component's example shapes give it.
    """
    torch_tensorrt, flavour = load_torch_tensorrt()
    if module is None:
        module = island_module(component, spec)
    store, results = cache_of(spec.tensorrt), []
    library = load_library(flavour.library)
    target = _target(flavour, device)
    for island, inputs, outputs in _recorded(component, module, device):
        body = _as_component(island, inputs, outputs)
        content = content_key(body, island.inner, spec, "torch_tensorrt")
        place = {**tensorrt_library.gpu_identity(device), "torch_tensorrt": flavour.version}
        key = cache.key_of({"content": content, "library": library.title, "target": target, **place})
        name = f"{component.name}-{island.name}"
        found = store.get(name, key)
        if found is not None and not found.problem:
            results.append((island, Obtained(found, built=False), body))
            continue
        note = "" if found is None else f"; rebuilt: {found.problem}"
        converted = convert(torch_tensorrt, flavour.version, name, island.inner, inputs, spec)
        about = manifest(
            body,
            library,
            component=component.name,
            precision=spec.precision,
            target=target,
            place=place,
            content=content,
            profiles=[{s.name: [s.shape] * 3 for s in body.inputs}],
            operators=converted.operators,
            weight_bytes=sum(p.nbytes for p in island.inner.parameters()),
            seconds=converted.seconds,
        )
        results.append((island, Obtained(store.put(name, key, converted.content, about), built=True, note=note), body))
    return results


def _target(flavour: Flavour, device: torch.device) -> str:
    # Torch-TensorRT leaves the targets to the library: TensorRT-RTX's default is every GPU from Ampere on.
    if flavour.library == "tensorrt_rtx":
        return "+".join(map(tensorrt_library.target_name, tensorrt_library.RTX_DEFAULT))
    return tensorrt_library.target_name(tensorrt_library.capability_of(device))


def island_module(component: Component, spec: EngineSpec) -> nn.Module:
    """The component's module at the precision asked for, with at least one part marked to be built.

    Raises EngineError for a component without marked parts, unless `whole` is set.
    """
    module = onnx.module_at(component, spec.precision)
    if spec.tensorrt.whole:
        return _Whole(component.name, module)
    if not any(isinstance(m, Island) for m in module.modules()):
        marked = ", ".join(component.variants) or "none"
        raise EngineError(
            f"{component.name}: torch_tensorrt finds no part to build at precision {spec.precision}; set precision "
            f"({marked}), or tensorrt.whole to build the whole component"
        )
    return module


class _Whole(nn.Module):
    """A module that is one island."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.island = Island(name, inner)

    def forward(self, *inputs: Tensor) -> Any:
        return self.island(*inputs)


def _recorded(
    component: Component, module: nn.Module, device: torch.device
) -> list[tuple[Island, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Every island with the inputs and outputs it has when the module runs on the component's examples."""
    seen: dict[str, tuple[Island, tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    def record(island: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        assert isinstance(island, Island)
        outputs = output if isinstance(output, tuple) else (output,)
        seen[island.name] = (island, tuple(x.detach().clone() for x in inputs), outputs)

    islands = [m for m in module.modules() if isinstance(m, Island)]
    handles = [m.register_forward_hook(record) for m in islands]
    try:
        with torch.no_grad():
            module(*(x.to(device) for x in onnx.examples(component, lambda s: s.shape)))
    finally:
        for handle in handles:
            handle.remove()
    return list(seen.values())


def _as_component(island: Island, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Component:
    def specs(prefix: str, tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{i}", tuple(t.shape), t.dtype) for i, t in enumerate(tensors))

    return Component(island.name, island.inner, specs("input", inputs), specs("output", outputs))


# -- running ------------------------------------------------------------------------------------------------------


class TorchTensorrtEngine(Engine):
    """A module whose marked parts run as TensorRT engines and whose rest runs in PyTorch."""

    name: ClassVar[str] = "torch_tensorrt"
    ahead_of_time: ClassVar[bool] = True
    by_time: ClassVar[bool] = True

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        try:
            return tensorrt_library.why_not(find_flavour().library, device)
        except DependencyError as error:
            return str(error)

    def __init__(self, component: Component, device: torch.device, spec: EngineSpec) -> None:
        super().__init__(component, device, spec)
        capability = tensorrt_library.capability_of(device)
        flavour = find_flavour()
        stored = [e.about for e in cache_of(spec.tensorrt).entries() if e.about.get("torch_tensorrt")]
        targets = [a["target"] for a in stored if a["component"] == component.name]
        refuse_if_not_runnable(flavour.library, capability, targets)
        library = load_library(flavour.library)
        self.module = island_module(component, spec)
        built = build_islands(component, spec, device, self.module)
        for island, obtained, body in built:
            engine = shared_engine(library, obtained.entry.path, device, spec.tensorrt.weight_streaming)
            body = _renamed(body, engine, library.trt)
            profile = {s.name: (s.shape, s.shape, s.shape) for s in body.inputs}
            island.inner = _Runner(Session(library, engine, (profile,), body, device), body)
        size = sum(o.entry.size for _, o, _ in built) / 1e6
        notes = "".join(sorted({o.note for _, o, _ in built if o.note}))
        self.detail = f"torch-tensorrt {flavour.version}, {len(built)} engines, {size:.1f} MB{notes}"
        self._allocate()
        self.capturable = True
        if spec.tensorrt.verify:
            check_first_run(self)

    @torch.inference_mode()
    def run(self) -> None:
        results = self.module(*(self.inputs[s.name] for s in self.component.inputs))
        for spec, result in zip(
            self.component.outputs, results if isinstance(results, tuple) else (results,), strict=True
        ):
            self.outputs[spec.name].copy_(result)


def _renamed(body: Component, engine: Any, trt: Any) -> Component:
    """The component with the names that Torch-TensorRT gave the engine's tensors, which keep their order."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    taken = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
    given = [n for n in names if n not in taken]
    if (len(taken), len(given)) != (len(body.inputs), len(body.outputs)):
        raise EngineError(
            f"{body.name}: the engine has {len(taken)} inputs and {len(given)} outputs, the part has "
            f"{len(body.inputs)} and {len(body.outputs)}"
        )
    return replace(
        body,
        inputs=tuple(replace(s, name=n) for s, n in zip(body.inputs, taken, strict=True)),
        outputs=tuple(replace(s, name=n) for s, n in zip(body.outputs, given, strict=True)),
    )


class _Runner(nn.Module):
    """A part as a session: takes the place of the part's module."""

    def __init__(self, session: Session, body: Component) -> None:
        super().__init__()
        self.session, self.body = session, body

    def forward(self, *inputs: Tensor) -> Any:
        device = inputs[0].device
        outputs = {s.name: s.empty(device) for s in self.body.outputs}
        # Kept by name until the work is enqueued: only addresses are handed on.
        tensors = {s.name: x.contiguous() for s, x in zip(self.body.inputs, inputs, strict=True)}
        self.session.enqueue({**tensors, **outputs}, tensorrt_library.stream_of(device))
        results = list(outputs.values())
        return tuple(results) if len(results) > 1 else results[0]
