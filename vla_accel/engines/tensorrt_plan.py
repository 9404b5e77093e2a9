"""A component's TensorRT engine from the cache, or exported, built and stored there.

The one path that `vla-accel build` and the engines share, so that what was built ahead is what a policy loads. Knows
nothing about running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import cache, onnx
from vla_accel.engines.cache import EngineCache, Entry
from vla_accel.engines.tensorrt_builder import Profile, Progress, build_plan, layer_counts
from vla_accel.engines.tensorrt_library import Capability, Library, gpu_identity, target_name

_HERE = Path(__file__).parent
# Options that only say where engines are kept or which are built, not what is in them.
_NOT_CONTENT = ("targets", "cache", "cache_gb", "verify", "timing_cache")


@dataclass(frozen=True)
class Obtained:
    """An engine on disk. `built`: it was built now; `note`: why, when the cache had one that could not be used."""

    entry: Entry
    built: bool
    note: str = ""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The optimization profiles, as they were built."""
        return tuple(
            {n: tuple(tuple(s) for s in shapes) for n, shapes in p.items()}  # type: ignore[misc]
            for p in self.entry.about["profiles"]
        )

    @property
    def detail(self) -> str:
        """One line for the ledger."""
        about, size = self.entry.about, self.entry.size / 1e6
        how = f"built in {sum(about['seconds'].values()):.1f} s" if self.built else "from the cache"
        return f"{about['library']} {about['version']}, {about['target']}, {size:.1f} MB, {how}{self.note}"


def body_of(component: Component) -> Component:
    """What is built of a component: the body of its loop, where it has one, else itself."""
    return component if component.loop is None else component.loop().body


def cache_of(options: TensorrtOptions) -> EngineCache:
    """The engine cache that the options name."""
    return EngineCache(options.cache, options.cache_gb)


def content_key(component: Component, module: nn.Module, spec: EngineSpec, kind: str) -> str:
    """A hash of all that an engine is built from, except library and target."""
    options = {k: v for k, v in dataclasses.asdict(spec.tensorrt).items() if k not in _NOT_CONTENT}
    return cache.key_of(
        {
            "kind": kind,
            "component": component.name,
            "inputs": [described(s) for s in component.inputs],
            "outputs": [s.name for s in component.outputs],
            "precision": spec.precision,
            "options": options,
            "module": repr(module),
            "weights": cache.weights_hash(module),
            "code": cache.code_hash(
                module, *(_HERE.parent / "kernels").rglob("*.py"), _HERE / "onnx.py", _HERE / "tensorrt_builder.py"
            ),
            "torch": torch.__version__,
        }
    )


def obtain(
    component: Component,
    spec: EngineSpec,
    library: Library,
    targets: Sequence[Capability],
    *,
    device: torch.device,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    exports: Exports | None = None,
) -> Obtained:
    """The engine of a component (see `body_of`) for compute capabilities, from the cache or built now.

    TensorRT-RTX always builds ahead of time, so its engines do not depend on the machine they are built on; TensorRT
    builds for the GPU of `device`. `exports`: where ONNX files of earlier targets are. Raises as `onnx.export` and
    `build_plan` do.
    """
    module = onnx.module_at(component, spec.precision)
    content = content_key(component, module, spec, "onnx")
    ahead = library.name == "tensorrt_rtx"
    target = "+".join(target_name(c) for c in targets)
    place = {} if ahead else gpu_identity(device)
    key = cache.key_of({"content": content, "library": library.title, "target": target, **place})
    store = cache_of(spec.tensorrt)
    found = store.get(component.name, key)
    if found is not None and not found.problem:
        return Obtained(found, built=False)
    note = "" if found is None else f"; rebuilt: {found.problem}"
    with contextlib.ExitStack() as stack:
        exports = exports or stack.enter_context(Exports())
        graph = exports.graph(content, component, module, spec.tensorrt.verify)
        plan = build_plan(
            library,
            graph,
            component,
            spec.tensorrt,
            targets=targets,
            ahead=ahead,
            timing_cache=store.folder / f"{library.name}-{target}.timing",
            progress=progress,
            cancel=cancel,
        )
    about = {
        **manifest(
            component,
            library,
            precision=spec.precision,
            target=target,
            place=place,
            content=content,
            profiles=plan.profiles,
            operators=sum(graph.operators.values()),
            weight_bytes=graph.weight_bytes,
            seconds={**graph.seconds, **plan.seconds},
        ),
        "operators": dict(graph.operators),
        "similarity": graph.similarity,
        "dtypes": layer_counts(plan),
        "layers": plan.layers,
    }
    return Obtained(store.put(component.name, key, plan.content, about), built=True, note=note)


def manifest(
    body: Component,
    library: Library,
    *,
    precision: str,
    target: str,
    place: Mapping[str, Any],
    content: str,
    profiles: Sequence[Mapping[str, Any]],
    operators: int,
    weight_bytes: int,
    seconds: Mapping[str, float],
    component: str | None = None,
) -> dict[str, Any]:
    """What stands beside every engine in the cache, whoever built it: what it is, for what, made in which time.

    `component`: whose part `body` is, where it is a part. `operators`: all of them are in the engine.
    """
    return {
        "component": component or body.name,
        "precision": precision,
        "library": library.name,
        "version": library.version,
        "target": target,
        **place,
        "content": content,
        "profiles": profiles,
        "inputs": [described(s) for s in body.inputs],
        "outputs": [described(s) for s in body.outputs],
        "coverage": {"operators": operators, "in_engine": operators},
        "weight_bytes": weight_bytes,
        "seconds": dict(seconds),
        "torch": torch.__version__,
    }


class Exports:
    """The ONNX file of the last component, kept on disk meanwhile: one export serves all of its targets."""

    def __enter__(self) -> Exports:
        self._folder = tempfile.TemporaryDirectory(prefix="vla_accel-onnx-")
        self._last: tuple[str, onnx.OnnxFile] | None = None
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def graph(self, content: str, component: Component, module: nn.Module, verify: bool) -> onnx.OnnxFile:
        """The file of this content key, exported now unless it was the last one."""
        if self._last is None or self._last[0] != content:
            for path in Path(self._folder.name).iterdir():
                path.unlink()
            self._last = (content, onnx.export(component, module, Path(self._folder.name), verify=verify))
        return self._last[1]


def described(spec: TensorSpec) -> dict[str, Any]:
    """A component's input or output, as it stands beside an engine."""
    # A dynamic dimension counts by its range: which example was at hand must not make another engine.
    shape: list[Any] = [list(spec.ranges[d]) if d in spec.ranges else n for d, n in enumerate(spec.shape)]
    return {"name": spec.name, "dtype": str(spec.dtype).removeprefix("torch."), "shape": shape}
