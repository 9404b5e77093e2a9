"""Engines of TensorRT and TensorRT-RTX: a plan from the cache or a new one, run on static buffers. Needs a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.component import Component
from vla_accel.config import EngineSpec
from vla_accel.engines import onnx, tensorrt_library
from vla_accel.engines.base import Engine
from vla_accel.engines.tensorrt_library import Capability, LibraryName, dotted, load_library, runs_on
from vla_accel.engines.tensorrt_plan import cache_of, content_key, obtain
from vla_accel.engines.tensorrt_session import Session, shared_engine
from vla_accel.errors import EngineError
from vla_accel.numeric import cosine

SIMILARITY = 0.99
"""Least cosine of an engine's first output with the eager module: below any rounding error, above any mistake."""


class TensorrtEngine(Engine):
    """ONNX → TensorRT for this GPU. Dynamic dimensions in the component's ranges share one plan."""

    name: ClassVar[str] = "tensorrt"
    ahead_of_time: ClassVar[bool] = True
    by_time: ClassVar[bool] = True
    library_name: ClassVar[LibraryName] = "tensorrt"

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        return tensorrt_library.why_not(cls.library_name, device)

    def __init__(self, component: Component, device: torch.device, spec: EngineSpec) -> None:
        super().__init__(component, device, spec)
        capability = tensorrt_library.capability_of(device)
        self.loop = None if component.loop is None else component.loop()
        body = component if self.loop is None else self.loop.body
        if not runs_on(self.library_name, capability):
            refuse_if_not_runnable(self.library_name, capability, _built_targets(body, spec))
        library = load_library(self.library_name)
        obtained = obtain(body, spec, library, [capability], device=device)
        self.detail = obtained.detail
        self._allocate()
        if self.loop is not None:
            self._rows = {n: rows.to(device).contiguous() for n, rows in self.loop.rows.items()}
            # Two buffers that alternate: an engine must not write what it reads.
            between = [torch.empty_like(self.outputs[self.loop.end]) for _ in range(2)]
            self._between = [between[i % 2] for i in range(self.loop.count - 1)]
        engine = shared_engine(library, obtained.entry.path, device, spec.tensorrt.weight_streaming)
        self.session = Session(library, engine, obtained.profiles, body, device)
        self.capturable = self.session.capturable
        if spec.tensorrt.verify:
            check_first_run(self)

    def bind(self, name: str, source: Tensor) -> None:
        """As `Engine.bind`; the source must be contiguous, because the library reads its address."""
        if not source.is_contiguous():
            raise EngineError(f"{self.component.name}.{name}: expected a contiguous tensor")
        super().bind(name, source)

    def run(self) -> None:
        stream = tensorrt_library.stream_of(self.device)
        if self.loop is None:
            self.session.enqueue({**self.inputs, **self.outputs}, stream)
            return
        carried, following = self.loop.carry
        constant = {n: t for n, t in self.inputs.items() if n != self.loop.start}
        states = [self.inputs[self.loop.start], *self._between, self.outputs[self.loop.end]]
        for step, (source, target) in enumerate(itertools.pairwise(states)):
            rows = {name: rows[step] for name, rows in self._rows.items()}
            self.session.enqueue({**constant, **rows, carried: source, following: target}, stream)


class TensorrtRtxEngine(TensorrtEngine):
    """ONNX → TensorRT-RTX: plans built ahead of time, compiled for the GPU when first run."""

    name: ClassVar[str] = "tensorrt_rtx"
    library_name: ClassVar[LibraryName] = "tensorrt_rtx"


def _built_targets(body: Component, spec: EngineSpec) -> list[str]:
    """Targets for which the cache has an engine of `body`."""
    store = cache_of(spec.tensorrt)
    # The key of a large model takes seconds.
    if not any(e.about.get("name") == body.name for e in store.entries()):
        return []
    return store.targets(body.name, content_key(body, onnx.module_at(body, spec.precision), spec, "onnx"))


def refuse_if_not_runnable(name: LibraryName, capability: Capability, built: Sequence[str]) -> None:
    """Raise EngineError if the library cannot run on this GPU; the message names the targets `built` so far."""
    if runs_on(name, capability):
        return
    targets = {tensorrt_library.parse_target(t) for target in built for t in target.split("+")}
    what = f"built for {dotted(list(targets))}" if targets else "not built"
    supported = f"{tensorrt_library.TITLES[name]} runs on {tensorrt_library.known_capabilities(name)}"
    raise EngineError(f"{what}; not runnable on {dotted([capability])} ({supported})")


def check_first_run(engine: Engine) -> None:
    """Run an engine once on examples and compare it with its module. Synchronises; part of loading."""
    component = engine.component
    for spec, value in zip(component.inputs, onnx.examples(component, lambda s: s.shape), strict=True):
        engine.write(spec.name, value.to(engine.device))
    engine.run()
    with torch.inference_mode():
        expected = component.module(*(engine.inputs[s.name] for s in component.inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for spec, want in zip(component.outputs, expected, strict=True):
        check_output(f"{component.name}.{spec.name}", engine.outputs[spec.name], want)


def check_output(name: str, got: Tensor, want: Tensor) -> None:
    """Raise EngineError unless an engine's output is finite and agrees with the module's."""
    a, b = got.detach().float().cpu().flatten().numpy(), want.detach().float().cpu().flatten().numpy()
    if bad := int((~np.isfinite(a)).sum()):
        raise EngineError(
            f"{name}: {bad} of {a.size} values are not finite; FP16 overflows at 65504, try precision auto"
        )
    similarity = cosine(a, b)
    if similarity < SIMILARITY:
        raise EngineError(f"{name}: the engine differs from the module: cosine {similarity:.4f}, expected {SIMILARITY}")
