"""Deserialized engines and their execution contexts, which share one engine and one scratch memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import Component
from vla_accel.engines import tensorrt_library
from vla_accel.engines.tensorrt_builder import Profile, pick_profile
from vla_accel.engines.tensorrt_library import Library
from vla_accel.errors import EngineError
from vla_accel.files import require_private

_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "BOOL": torch.bool,
    "FP8": torch.float8_e4m3fn,
}


class Session:
    """An engine with one execution context, its profile chosen for fixed shapes."""

    def __init__(
        self,
        library: Library,
        engine: Any,
        profiles: Sequence[Profile],
        component: Component,
        device: torch.device,
        scratch: Scratch | None = None,
    ) -> None:
        """`scratch`: memory of contexts that never run at the same time; by default the device's."""
        self.library, self.engine, self.what = library, engine, component.name
        trt = library.trt
        shapes = {s.name: tuple(s.shape) for s in component.inputs}
        self.profile = pick_profile(profiles, shapes, self.what)
        self.context = self.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self.context is None:
            raise EngineError(f"{self.what}: no execution context: {library.take_errors()}")
        stream = tensorrt_library.stream_of(device)
        if not self.context.set_optimization_profile_async(self.profile, stream):
            raise EngineError(f"{self.what}: profile {self.profile} was refused: {library.take_errors()}")
        self.names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self._check_tensors(component, shapes)
        (scratch or scratch_of(device)).add(self, int(self.engine.device_memory_size_v2))
        # TensorRT-RTX reports contexts that cannot be captured: it compiles on their first run.
        self.capturable = bool(getattr(self.context, "is_stream_capturable", lambda _: True)(stream))

    def _check_tensors(self, component: Component, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            # An input that the graph does not need is not in the engine.
            if name in self.names and not self.context.set_input_shape(name, shape):
                raise EngineError(f"{self.what}.{name}: shape {shape} was refused: {self.library.take_errors()}")
        specs = {s.name: s for s in (*component.inputs, *component.outputs)}
        for name in self.names:
            if name not in specs:
                raise EngineError(f"{self.what}: the engine has a tensor {name} that the component does not declare")
            spec, shape = specs[name], tuple(self.context.get_tensor_shape(name))
            kind = str(self.engine.get_tensor_dtype(name)).rpartition(".")[2]
            dtype = _DTYPES.get(kind, kind)
            if shape != tuple(spec.shape) or dtype != spec.dtype:
                raise EngineError(
                    f"{self.what}.{name}: declared {tuple(spec.shape)} {spec.dtype}, the engine has {shape} {dtype}"
                )

    def enqueue(self, tensors: Mapping[str, Tensor], stream: int) -> None:
        """Enqueue one run over these tensors, by name, on a stream."""
        for name in self.names:
            self.context.set_tensor_address(name, tensors[name].data_ptr())
        if not self.context.execute_async_v3(stream):
            raise EngineError(f"{self.what}: enqueueing failed: {self.library.take_errors()}")


class Scratch:
    """Memory for the activations of several contexts that never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: Tensor | None = None
        self.old: list[Tensor] = []
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    def add(self, session: Session, size: int) -> None:
        """Set a context's scratch memory; a larger block replaces the current one for all. Raises EngineError."""
        memory = self.memory
        if memory is None or size > memory.numel():
            free = tensorrt_library.free_memory(self.device)
            if size > free:
                sizes = f"{size / 2**20:.0f} MiB of GPU memory, {free / 2**20:.0f} MiB is free"
                raise EngineError(f"{session.what}: the engine needs {sizes}")
            if memory is not None:
                # A recorded CUDA graph may hold the old address.
                self.old.append(memory)
            self.memory = memory = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
            for other in self.sessions:
                other.context.set_device_memory(memory.data_ptr(), memory.numel())
        self.sessions.add(session)
        session.context.set_device_memory(memory.data_ptr(), memory.numel())


@functools.cache
def scratch_of(device: torch.device) -> Scratch:
    """The scratch memory of a device, for contexts that one thread runs."""
    return Scratch(device)


class _Shared:
    """A deserialized engine that several contexts use, and the runtime that made it."""

    def __init__(self, runtime: Any, engine: Any) -> None:
        self.runtime, self.engine = runtime, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


_engines: weakref.WeakValueDictionary[tuple[str, str, float], _Shared] = weakref.WeakValueDictionary()


def shared_engine(library: Library, path: Path, device: torch.device, streaming: bool) -> Any:
    """Return the engine of a plan file, deserialized once for any number of contexts. Raises EngineError."""
    key = (str(path), str(device), path.stat().st_mtime)
    if (found := _engines.get(key)) is not None:
        return found
    require_private(path)
    init_plugins(library)
    runtime = library.trt.Runtime(library.logger)
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise EngineError(f"{path.name}: {library.title} cannot load the engine: {library.take_errors()}")
    if streaming:
        engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
    shared = _Shared(runtime, engine)
    _engines[key] = shared
    return shared


@functools.cache
def init_plugins(library: Library) -> None:
    """Register the library's plugins, once a process: an engine that uses one cannot be loaded before."""
    if start := getattr(library.trt, "init_libnvinfer_plugins", None):
        start(library.logger, "")
