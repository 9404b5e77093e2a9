"""A component's TensorRT engine from the cache, or built now and stored there."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import cache, onnx, tensorrt_library
from vla_accel.engines.cache import EngineCache, Entry
from vla_accel.engines.tensorrt_builder import Profile, Progress, build_plan, layer_counts
from vla_accel.engines.tensorrt_library import Capability, Library, target_name

_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("engines/onnx.py", "engines/tensorrt_builder.py", "numeric.py", "pictures.py")
"""Code besides kernels and the module's own that an exported graph depends on; `pictures` has the columns of pixel
maps, by which a graph fits images."""
_NOT_CONTENT = ("targets", "cache", "cache_gb", "verify", "timing_cache")
"""Options that do not change the content of an engine."""


Built = tuple[Any, Mapping[str, Any]]
"""A serialized engine, anything with a buffer, and its description of the build (`description`)."""


@dataclass(frozen=True)
class Obtained:
    """An engine on disk. `built`: whether it was built now; `note`: why the one in the cache could not be used."""

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
    """The part of a component that is built: the body of its loop if it has one, else itself."""
    return component if component.loop is None else component.loop().body


def cache_of(options: TensorrtOptions) -> EngineCache:
    """The engine cache that the options name."""
    return EngineCache(options.cache, options.cache_gb)


def content_key(component: Component, module: nn.Module, spec: EngineSpec, kind: str) -> str:
    """Return a hash of everything that an engine is built from, except library and target."""
    options = {k: v for k, v in dataclasses.asdict(spec.tensorrt).items() if k not in _NOT_CONTENT}
    sources = [*(_PACKAGE / "kernels").rglob("*.py"), *(_PACKAGE / name for name in _SOURCES)]
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
            "code": cache.code_hash(module, *sources),
            "torch": torch.__version__,
        }
    )


def description(profiles: Any, operators: int, weight_bytes: int, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The part of every engine's description about its build; all operators of the graph are in the engine."""
    coverage = {"operators": operators, "in_engine": operators}
    return {"profiles": profiles, "coverage": coverage, "weight_bytes": weight_bytes, "seconds": dict(seconds)}


def find_or_build(
    body: Component,
    owner: str,
    spec: EngineSpec,
    library: Library,
    identity: Mapping[str, str],
    build: Callable[[], Built],
) -> Obtained:
    """Return the cached engine of `body`, a part of the component `owner`, or build and store it.

    `identity` distinguishes it from other engines of the library: "content" (`content_key`), "target", GPU, driver,
    versions.
    """
    name = owner if body.name == owner else f"{owner}-{body.name}"
    store, key = cache_of(spec.tensorrt), cache.key_of({"library": library.title, **identity})
    found = store.get(name, key)
    if found is not None and not found.problem:
        return Obtained(found, built=False)
    content, built = build()
    about = {
        "component": owner,
        "precision": spec.precision,
        "library": library.name,
        "version": library.version,
        **identity,
        "inputs": [described(s) for s in body.inputs],
        "outputs": [described(s) for s in body.outputs],
        "torch": torch.__version__,
        **built,
    }
    note = "" if found is None else f"; rebuilt: {found.problem}"
    return Obtained(store.put(name, key, content, about), built=True, note=note)


def obtain(
    component: Component,
    spec: EngineSpec,
    library: Library,
    targets: Sequence[Capability],
    *,
    device: torch.device,
    progress: Progress | None = None,
    exports: Exports | None = None,
) -> Obtained:
    """Return the engine of a component (`body_of`), from the cache or built now.

    TensorRT-RTX builds for any `targets`, TensorRT for the GPU of `device`. `exports` keeps ONNX files.
    """
    module = onnx.module_at(component, spec.precision)
    content = content_key(component, module, spec, "onnx")
    ahead = library.name == "tensorrt_rtx"
    target = "+".join(target_name(c) for c in targets)
    identity = {"content": content, "target": target, **({} if ahead else tensorrt_library.gpu_identity(device))}

    def build() -> Built:
        with contextlib.ExitStack() as stack:
            source = exports or stack.enter_context(Exports())
            graph = source.graph(content, component, module, spec.tensorrt.verify)
            plan = build_plan(
                library,
                graph,
                component,
                spec.tensorrt,
                targets=targets,
                ahead=ahead,
                timing_cache=cache_of(spec.tensorrt).folder / f"{library.name}-{target}.timing",
                progress=progress,
            )
        seconds = {**graph.seconds, **plan.seconds}
        return plan.content, {
            **description(plan.profiles, sum(graph.operators.values()), graph.weight_bytes, seconds),
            "operators": dict(graph.operators),
            "similarity": graph.similarity,
            "dtypes": layer_counts(plan),
            "layers": plan.layers,
        }

    return find_or_build(component, component.name, spec, library, identity, build)


class Exports:
    """Keeps the ONNX file of the last component on disk: one export serves all of its targets."""

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
    """An input or output in an engine's description. A dynamic dimension is its range, so that the example's size does
    not make another engine."""
    shape: list[Any] = [list(spec.ranges[d]) if d in spec.ranges else n for d, n in enumerate(spec.shape)]
    return {"name": spec.name, "dtype": str(spec.dtype).removeprefix("torch."), "shape": shape}
