"""The torch_tensorrt engine: the marked parts of a module (`Island`) as TensorRT engines, the rest in PyTorch.

Importing torch_tensorrt needs a CUDA build of torch and a GPU, so versions are checked first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vla_accel.component import Component, Island, TensorSpec
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import onnx, tensorrt_library
from vla_accel.engines.base import Engine
from vla_accel.engines.tensorrt import check_first_run, refuse_if_not_runnable
from vla_accel.engines.tensorrt_library import TITLES, LibraryName, installed_version, load_library, major_minor
from vla_accel.engines.tensorrt_plan import Built, Obtained, cache_of, content_key, description, find_or_build
from vla_accel.engines.tensorrt_session import Session, shared_engine
from vla_accel.errors import DependencyError, EngineError

Version = tuple[int, int]
PAIRS: dict[Version, tuple[Version, Version, Version]] = {
    (2, 11): ((2, 11), (10, 15), (1, 4)),
    (2, 12): ((2, 12), (10, 16), (1, 4)),
    (2, 13): ((2, 13), (11, 0), (1, 5)),
    (2, 14): ((2, 14), (11, 1), (1, 6)),
}
"""The torch, TensorRT and TensorRT-RTX that a torch-tensorrt works with (its wheels' own requirements; 2.11 with
TensorRT-RTX 1.4 was tried)."""


@dataclass(frozen=True)
class Flavour:
    """An installed Torch-TensorRT, built on TensorRT or on TensorRT-RTX."""

    version: str
    library: LibraryName


def find_flavour(versions: Mapping[str, str | None] | None = None) -> Flavour:
    """Return the installed Torch-TensorRT, without importing it. Raises DependencyError unless `versions` match."""
    found = _installed() if versions is None else dict(versions)
    torch_version = major_minor(str(found["torch"]))
    rtx = found.get("torch-tensorrt") is None and found.get("torch-tensorrt-rtx") is not None
    package = "torch-tensorrt-rtx" if rtx else "torch-tensorrt"
    library: LibraryName = "tensorrt_rtx" if rtx else "tensorrt"
    version, library_version = found.get(package), found.get(library.replace("_", "-"))
    name, hint = f"{package} {version}", _install(torch_version, rtx)
    if version is None:
        raise DependencyError(f"engine torch_tensorrt: torch-tensorrt is not installed; {hint}")
    if (pair := PAIRS.get(major_minor(version))) is None:
        known = ", ".join(map(_dotted, PAIRS))
        raise DependencyError(f"engine torch_tensorrt: expected {package} {known}, got {version}")
    wanted, needed = _dotted(pair[0]), _dotted(pair[2] if rtx else pair[1])
    if _dotted(torch_version) != wanted:
        got = f"{found['torch']}; {hint}"
        raise DependencyError(f"engine torch_tensorrt: {name} works with torch {wanted}, got torch {got}")
    if library_version is None or _dotted(major_minor(library_version)) != needed:
        got = "none is installed" if library_version is None else f"got {library_version}"
        raise DependencyError(f"engine torch_tensorrt: {name} works with {TITLES[library]} {needed}, {got}; {hint}")
    return Flavour(version, library)


def _installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {"torch": torch.__version__}
    found |= {name: installed_version(name) for name in ("torch-tensorrt", "torch-tensorrt-rtx")}
    for name in ("tensorrt", "tensorrt-rtx"):
        packages = (name, *(f"{name}-{cuda}{part}" for cuda in ("cu13", "cu12") for part in ("", "-libs")))
        found[name] = next(filter(None, map(installed_version, packages)), None)
    return found


def _install(torch_version: Version, rtx: bool) -> str:
    for version, pair in PAIRS.items():
        if pair[0] == torch_version:
            library = f"tensorrt-rtx-cu13=={_dotted(pair[2])}.*" if rtx else f"tensorrt=={_dotted(pair[1])}.*"
            package = f"torch-tensorrt{'-rtx' * rtx}=={_dotted(version)}.*"
            return f"the set for torch {_dotted(torch_version)}: pip install '{package}' '{library}'"
    known = ", ".join(_dotted(pair[0]) for pair in PAIRS.values())
    return f"no torch-tensorrt is known for torch {_dotted(torch_version)}; it exists for torch {known}"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def load_torch_tensorrt() -> tuple[Any, Flavour]:
    """Import the package. Raises DependencyError if versions do not match, or there is no CUDA torch or GPU."""
    flavour = find_flavour()
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise DependencyError(
            f"engine torch_tensorrt: importing it needs a CUDA build of torch and a GPU; torch is {torch.__version__} "
            f"and sees {torch.cuda.device_count()} GPUs"
        )
    try:
        return importlib.import_module("torch_tensorrt"), flavour
    except (ImportError, OSError, RuntimeError) as error:
        raise DependencyError(
            f"engine torch_tensorrt: torch-tensorrt {flavour.version} does not import: {error}"
        ) from error


def conversion_options(version: Version, options: TensorrtOptions) -> dict[str, Any]:
    """The options of Torch-TensorRT's conversion. Precision comes from the module's dtypes, which 2.11 and 2.12 need an
    option for; later versions would ignore it."""
    chosen: dict[str, Any] = {
        "require_full_compilation": True,
        "min_block_size": 1,
        "truncate_double": True,
        "cache_built_engines": False,
        "reuse_cached_engines": False,
        "immutable_weights": not options.refit,
        "version_compatible": options.version_compatible,
        "hardware_compatible": options.hardware_compatible,
        "enable_weight_streaming": options.weight_streaming,
    }
    if options.optimization_level is not None:
        chosen["optimization_level"] = options.optimization_level
    if options.workspace_mb is not None:
        chosen["workspace_size"] = options.workspace_mb * 2**20
    if version < (2, 13):
        chosen["use_explicit_typing"] = True
    return chosen


def convert(
    torch_tensorrt: Any, version: str, name: str, module: nn.Module, inputs: tuple[Tensor, ...], spec: EngineSpec
) -> Built:
    """Convert a module with all its operators. Raises EngineError or DependencyError, which name the problem."""
    began = time.perf_counter()
    function = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    options = conversion_options(major_minor(version), spec.tensorrt)
    if ignored := [option for option in options if option not in inspect.signature(function).parameters]:
        raise DependencyError(f"torch-tensorrt {version} does not know the options {', '.join(ignored)}")
    # Quantisers must be single operators here and in the lowering.
    with torch.no_grad(), onnx.quantisers_as_operators(), _problems() as problems:
        exported = torch.export.export(module, inputs, strict=False)
        operators = sum(n.op == "call_function" for n in exported.graph.nodes)
        exported_s = time.perf_counter() - began
        try:
            content = function(exported, arg_inputs=list(inputs), **options)
        # 2.11 logs what went wrong, then fails on its missing result.
        except (RuntimeError, UnboundLocalError) as error:
            cause = problems[-1] if problems else error.__cause__ or error
            text = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
            raise EngineError(f"{name}: torch-tensorrt {version} cannot convert it whole: {text}") from error
    if not content:
        raise EngineError(f"{name}: torch-tensorrt {version} returned no engine")
    seconds = {"export": exported_s, "build": time.perf_counter() - began - exported_s}
    profiles = [{f"input{i}": [tuple(x.shape)] * 3 for i, x in enumerate(inputs)}]
    return bytes(content), description(profiles, operators, sum(p.nbytes for p in module.parameters()), seconds)


@contextlib.contextmanager
def _problems() -> Iterator[list[BaseException]]:
    """Collect the exceptions that Torch-TensorRT's converter logs; hide its log lines, which hold whole graphs."""
    found: list[BaseException] = []

    def catch(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            found.append(record.exc_info[1])
            return False
        return True

    logger = logging.getLogger("torch_tensorrt.dynamo._compiler")
    logger.addFilter(catch)
    try:
        yield found
    finally:
        logger.removeFilter(catch)


def build_islands(
    component: Component, spec: EngineSpec, device: torch.device, module: nn.Module | None = None
) -> list[tuple[Island, Obtained, Component]]:
    """Return every marked part of a component as an engine of fixed shapes, from the cache or built now."""
    torch_tensorrt, flavour = load_torch_tensorrt()
    module = island_module(component, spec) if module is None else module
    library, results = load_library(flavour.library), []
    # Torch-TensorRT leaves the targets to the library: TensorRT-RTX builds for every GPU from Ampere on.
    rtx = flavour.library == "tensorrt_rtx"
    capabilities = tensorrt_library.RTX_DEFAULT if rtx else (tensorrt_library.capability_of(device),)
    identity = {
        "target": "+".join(map(tensorrt_library.target_name, capabilities)),
        "torch_tensorrt": flavour.version,
        **tensorrt_library.gpu_identity(device),
    }
    for island, inputs, outputs in _recorded(component, module, device):
        body = Component(island.name, island.inner, _specs("input", inputs), _specs("output", outputs))
        name, content = f"{component.name}-{island.name}", content_key(body, island.inner, spec, "torch_tensorrt")
        build = functools.partial(convert, torch_tensorrt, flavour.version, name, island.inner, inputs, spec)
        obtained = find_or_build(body, component.name, spec, library, {**identity, "content": content}, build)
        results.append((island, obtained, body))
    return results


def _specs(prefix: str, tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{prefix}{i}", tuple(t.shape), t.dtype) for i, t in enumerate(tensors))


def island_module(component: Component, spec: EngineSpec) -> nn.Module:
    """The component's module with its marked parts. Raises EngineError if there are none, unless `whole` is set."""
    module = onnx.module_at(component, spec.precision)
    if spec.tensorrt.whole:
        return Island(component.name, module)
    if not any(isinstance(m, Island) for m in module.modules()):
        marked = ", ".join(component.variants) or "none"
        raise EngineError(
            f"{component.name}: torch_tensorrt finds no part to build at precision {spec.precision}; set precision "
            f"({marked}), or tensorrt.whole to build the whole component"
        )
    return module


def _recorded(
    component: Component, module: nn.Module, device: torch.device
) -> list[tuple[Island, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Every island with its inputs and outputs when the module runs on the component's examples."""
    seen: dict[str, Any] = {}

    def record(island: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        assert isinstance(island, Island)
        outputs = output if isinstance(output, tuple) else (output,)
        seen[island.name] = (island, tuple(x.detach().clone() for x in inputs), outputs)

    handles = [m.register_forward_hook(record) for m in module.modules() if isinstance(m, Island)]
    try:
        with torch.no_grad():
            module(*(x.to(device) for x in onnx.examples(component, lambda s: s.shape)))
    finally:
        for handle in handles:
            handle.remove()
    return list(seen.values())


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
        capability, flavour = tensorrt_library.capability_of(device), find_flavour()
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
        self._copy_results(self.module(*(self.inputs[s.name] for s in self.component.inputs)))


def _renamed(body: Component, engine: Any, trt: Any) -> Component:
    """The component with the names that Torch-TensorRT gave the engine's tensors, which keep their order."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
    outputs = [n for n in names if n not in inputs]
    if (len(inputs), len(outputs)) != (len(body.inputs), len(body.outputs)):
        raise EngineError(
            f"{body.name}: the engine has {len(inputs)} inputs and {len(outputs)} outputs, the part has "
            f"{len(body.inputs)} and {len(body.outputs)}"
        )
    return replace(
        body,
        inputs=tuple(replace(s, name=n) for s, n in zip(body.inputs, inputs, strict=True)),
        outputs=tuple(replace(s, name=n) for s, n in zip(body.outputs, outputs, strict=True)),
    )


class _Runner(nn.Module):
    """Replaces a part's module by a session."""

    def __init__(self, session: Session, body: Component) -> None:
        super().__init__()
        self.session, self.body = session, body

    def forward(self, *inputs: Tensor) -> Any:
        device = inputs[0].device
        outputs = {s.name: s.empty(device) for s in self.body.outputs}
        tensors = {s.name: x.contiguous() for s, x in zip(self.body.inputs, inputs, strict=True)}
        self.session.enqueue({**tensors, **outputs}, tensorrt_library.stream_of(device))
        results = list(outputs.values())
        return tuple(results) if len(results) > 1 else results[0]
