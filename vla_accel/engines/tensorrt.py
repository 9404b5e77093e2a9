"""Engines of TensorRT and TensorRT-RTX: a cached or freshly built plan, run on our static buffers.

`run` only enqueues on the current stream. Knows nothing about models. Needs a GPU; where there is none, only
`tensorrt_plan` can be used.
"""

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
from vla_accel.engines.tensorrt_library import (
    TITLES,
    Capability,
    LibraryName,
    dotted,
    known_capabilities,
    load_library,
    runs_on,
)
from vla_accel.engines.tensorrt_plan import cache_of, content_key, obtain
from vla_accel.engines.tensorrt_session import Session, shared_engine
from vla_accel.errors import EngineError
from vla_accel.numeric import cosine

SIMILARITY = 0.99
"""Least cosine of an engine's first output with the eager module: far below any rounding, far above any mistake."""


class TensorrtEngine(Engine):
    """ONNX → TensorRT for the GPU at hand. Dynamic dimensions in the component's ranges share one plan."""

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
        require_runnable(self.library_name, capability, body, spec)
        library = load_library(self.library_name)
        obtained = obtain(body, spec, library, [capability], device=device)
        self.detail = obtained.detail
        self._allocate()
        self._prepare_loop()
        engine = shared_engine(library, obtained.entry.path, device, spec.tensorrt.weight_streaming)
        self.session = Session(library, engine, obtained.profiles, body, device)
        self.capturable = self.session.capturable
        if spec.tensorrt.verify:
            check_first_run(self)

    def bind(self, name: str, source: Tensor) -> None:
        """As `Engine.bind`; the source must be contiguous, because the engine gets only its address."""
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
        for step, (source, target) in enumerate(self._hops()):
            rows = {name: rows[step] for name, rows in self._rows.items()}
            self.session.enqueue({**constant, **rows, carried: source, following: target}, stream)

    def _prepare_loop(self) -> None:
        if self.loop is None:
            return
        self._rows = {n: rows.to(self.device).contiguous() for n, rows in self.loop.rows.items()}
        like = self.outputs[self.loop.end]
        # Two in turn: an engine must not write what it reads.
        self._between = (torch.empty_like(like), torch.empty_like(like))

    def _hops(self) -> list[tuple[Tensor, Tensor]]:
        """(source, target) of the carried tensor for every run of the body."""
        assert self.loop is not None
        places = [self._between[i % 2] for i in range(self.loop.count - 1)]
        return list(itertools.pairwise([self.inputs[self.loop.start], *places, self.outputs[self.loop.end]]))


class TensorrtRtxEngine(TensorrtEngine):
    """ONNX → TensorRT-RTX: plans built ahead of time, compiled for the GPU when first run."""

    name: ClassVar[str] = "tensorrt_rtx"
    library_name: ClassVar[LibraryName] = "tensorrt_rtx"


def require_runnable(name: LibraryName, capability: Capability, body: Component, spec: EngineSpec) -> None:
    """Raise EngineError if the library cannot run on this GPU, with the targets an engine has been built for."""
    if runs_on(name, capability):
        return
    store = cache_of(spec.tensorrt)
    built: list[str] = []
    # The key of a large model takes seconds: only where there is something to find.
    if any(e.about.get("name") == body.name for e in store.entries()):
        module = onnx.module_at(body, spec.precision)
        built = store.targets(body.name, content_key(body, module, spec, "onnx"))
    refuse_if_not_runnable(name, capability, built)


def refuse_if_not_runnable(name: LibraryName, capability: Capability, built: Sequence[str]) -> None:
    """Raise EngineError if the library cannot run on this GPU. `built`: targets that engines are there for."""
    if runs_on(name, capability):
        return
    targets = {tensorrt_library.parse_target(t) for target in built for t in target.split("+")}
    what = f"built for {dotted(list(targets))}" if targets else "not built"
    raise EngineError(
        f"{what}; not runnable on {dotted([capability])} ({TITLES[name]} runs on {known_capabilities(name)})"
    )


def check_first_run(engine: Engine) -> None:
    """Run an engine once on examples and compare with its module. Synchronises: this is loading, not running."""
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
    bad = int((~np.isfinite(a)).sum())
    if bad:
        raise EngineError(
            f"{name}: the engine gave {bad} non-finite values of {a.size}; FP16 overflows at 65504, try precision auto"
        )
    similarity = cosine(a, b)
    if similarity < SIMILARITY:
        raise EngineError(f"{name}: the engine differs from the module: cosine {similarity:.4f}, expected {SIMILARITY}")
