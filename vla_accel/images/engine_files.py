"""TensorRT engine files of image models: built, checked and opened.

NAME.json describes NAME.trt: the model, the profiles and the SHA-256. A damaged file, or one of another model or
library, is an error. Building with TensorRT-RTX needs no GPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from vla_accel.component import Component
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import cache, onnx, tensorrt_library
from vla_accel.engines.base import Engine
from vla_accel.engines.onnx import OnnxFile
from vla_accel.engines.tensorrt_builder import build_plan
from vla_accel.engines.tensorrt_library import Capability, Library, LibraryName, load_library
from vla_accel.engines.tensorrt_plan import Obtained, described
from vla_accel.engines.tensorrt_session import Scratch, Session, shared_engine
from vla_accel.errors import EngineError
from vla_accel.images.stage import Stage
from vla_accel.ledger import Ledger, LedgerEntry


def export_onnx(component: Component, folder: Path, *, check: Component | None) -> OnnxFile:
    """Export a component to ONNX, and compare the graph with the module at the shapes of `check`.

    `check` is the component at a small size: the largest size would take a CPU an hour.
    """
    graph = onnx.export(component, component.module, folder, verify=False)
    if check is None:
        return graph
    began = time.perf_counter()
    similarity = onnx.compare(check, component.module, graph.path)
    seconds = {**graph.seconds, "verify": time.perf_counter() - began}
    return dataclasses.replace(graph, similarity=similarity, seconds=seconds)


def build_file(
    component: Component,
    graph: OnnxFile,
    path: Path,
    library: Library,
    targets: Sequence[Capability],
    options: TensorrtOptions,
) -> Obtained:
    """Build `path` and its description from an ONNX file. Raises EngineError as `build_plan` does."""
    plan = build_plan(library, graph, component, options, targets=targets, ahead=library.name == "tensorrt_rtx")
    about = {
        "name": component.name,
        "key": identity(component),
        "component": component.name,
        "library": library.name,
        "version": library.version,
        "target": plan.target,
        "optimization_level": options.optimization_level,
        "profiles": plan.profiles,
        "inputs": [described(spec) for spec in component.inputs],
        "outputs": [described(spec) for spec in component.outputs],
        "layers": plan.layers,
        "similarity": graph.similarity,
        "seconds": {**graph.seconds, **plan.seconds},
        "torch": torch.__version__,
    }
    return Obtained(cache.write_entry(path, plan.content, about), built=True)


def found_file(component: Component, path: Path, library: LibraryName) -> Obtained | None:
    """Return the engine file at `path`, or None if there is none.

    Raises EngineError if it is damaged, or of another model or library.
    """
    if not path.is_file():
        return None
    entry, name = cache.examine(path), component.name
    if entry.problem:
        raise EngineError(f"{name}: {path}: {entry.problem}; build it again with --force-engine")
    about = entry.about
    own, there = described(component.inputs[0])["dtype"], (about.get("inputs") or [{}])[0].get("dtype")
    if about.get("component") == name and own != there:
        raise EngineError(
            f"{name}: {path} computes in {there}, and the model is in {own}: load the model in {there}, "
            f"or build the file in {own} (--dtype, with --force-engine)"
        )
    if about.get("component") != name or about.get("key") != identity(component):
        raise EngineError(
            f"{name}: {path} was built from another model ({about.get('component')}, other weights, dtype or "
            "channels): build it again with --force-engine, or name the folder of this model's engines"
        )
    if about.get("library") != library:
        raise EngineError(f"{name}: {path}: expected an engine of {library}, got one of {about.get('library')}")
    return Obtained(entry, built=False)


def identity(component: Component) -> str:
    """Return a hash of a component's weights, names and dtypes, which all its sizes share."""
    tensors = [(s.name, str(s.dtype), s.shape[1:2]) for s in (*component.inputs, *component.outputs)]
    return cache.key_of({"tensors": tensors, "weights": cache.weights_hash(component.module)})


class FileEngine(Engine):
    """An engine file at one size, with the profile that fits best.

    Raises EngineError if the library does not run on this GPU, the file is damaged, or no profile has this size.
    """

    def __init__(
        self, component: Component, device: torch.device, spec: EngineSpec, path: Path, scratch: Scratch | None = None
    ) -> None:
        super().__init__(component, device, spec)
        self.name = spec.engine
        library_name = cast(LibraryName, spec.engine)
        found = found_file(component, path, library_name)
        if found is None:
            raise EngineError(f"{component.name}: {path}: no such engine file")
        if device.type != "cuda":
            raise EngineError(f"{component.name}: {path.name} needs an NVIDIA GPU, got device {device}")
        if reason := tensorrt_library.why_not(library_name, device):
            raise EngineError(f"{component.name}: {path.name}, built for {found.entry.about['target']}: {reason}")
        library = load_library(library_name)
        self._allocate()
        engine = shared_engine(library, path, device, spec.tensorrt.weight_streaming)
        self.session = Session(library, engine, found.profiles, component, device, scratch)
        self.capturable = self.session.capturable
        self.detail = f"{library.title}, {path.name}, profile {self.session.profile}"

    def run(self) -> None:
        self.session.enqueue({**self.inputs, **self.outputs}, tensorrt_library.stream_of(self.device))


def open_file(component: Component, spec: EngineSpec, path: Path, scratch: Scratch, ledger: Ledger) -> Stage:
    """Open an engine file on the device of `scratch`, and record it in the ledger."""
    engine = FileEngine(component, scratch.device, spec, path, scratch)
    ledger.record(LedgerEntry(component.name, spec.engine, spec.engine, "", engine.detail))
    return Stage(component, spec, scratch.device, ledger, engine=engine)
