"""An ONNX file to a serialized, strongly typed TensorRT engine, with either library, for this GPU or for others."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vla_accel.component import Component, TensorSpec
from vla_accel.config import TensorrtOptions
from vla_accel.engines.onnx import OnnxFile
from vla_accel.engines.tensorrt_library import Capability, Library, check_target, dotted, target_name
from vla_accel.errors import ConfigError, EngineError
from vla_accel.files import replacing_privately, require_private

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""Input name to its minimum, optimum and maximum shape."""


class Progress(Protocol):
    """Receives the progress of a build, from the builder's threads."""

    def start(self, phase: str, parent: str | None, steps: int) -> None: ...
    def step(self, phase: str, step: int) -> None: ...
    def finish(self, phase: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """A serialized engine. `content`: the library's buffer; `layers`: (kind, name, dtype) of the parsed network."""

    content: Any
    target: str
    profiles: tuple[Profile, ...]
    layers: tuple[tuple[str, str, str], ...]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return memoryview(self.content).nbytes


def profiles_of(component: Component, options: TensorrtOptions) -> tuple[Profile, ...]:
    """Return the profiles in `options.profiles`, or one over the component's whole ranges. Raises ConfigError."""
    return tuple(_profile(component, text) for text in options.profiles or ("",))


def _profile(component: Component, text: str) -> Profile:
    bounds = {(s.name, d): (low, high, high) for s in component.inputs for d, (low, high) in s.ranges.items()}
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\.(\d+)\s*=\s*(\d+):(\d+):(\d+)", item)
        if match is None:
            raise ConfigError(f"profile of {component.name}: expected INPUT.DIMENSION=MIN:OPT:MAX, got {item!r}")
        where, (low, best, high) = (match[1], int(match[2])), map(int, match.group(3, 4, 5))
        if where not in bounds:
            known = ", ".join(f"{n}.{d}" for n, d in bounds) or "none"
            raise ConfigError(
                f"profile of {component.name}: {match[1]}.{match[2]} is not dynamic; dynamic are: {known}"
            )
        allowed = bounds[where]
        if not allowed[0] <= low <= best <= high <= allowed[2]:
            raise ConfigError(
                f"profile of {component.name}: {item}: expected {allowed[0]} <= MIN <= OPT <= MAX <= {allowed[2]}"
            )
        bounds[where] = (low, best, high)

    def shapes(spec: TensorSpec) -> tuple[Shape, Shape, Shape]:
        low, best, high = (
            tuple(bounds[spec.name, d][i] if d in spec.ranges else n for d, n in enumerate(spec.shape))
            for i in range(3)
        )
        return low, best, high

    return {s.name: shapes(s) for s in component.inputs}


def pick_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape], what: str) -> int:
    """Return the index of the profile that covers all shapes and has the nearest optimum. Raises EngineError if none
    covers them."""

    def covers(profile: Profile) -> bool:
        return all(
            len(shape) == len(profile[n][0])
            and all(a <= x <= b for a, x, b in zip(profile[n][0], shape, profile[n][2], strict=True))
            for n, shape in shapes.items()
        )

    def distance(index: int) -> int:
        return sum(abs(a - b) for n, s in shapes.items() for a, b in zip(s, profiles[index][n][1], strict=True))

    fitting = [i for i, p in enumerate(profiles) if covers(p)]
    if not fitting:
        needed = ", ".join(f"{n} {s}" for n, s in shapes.items())
        ranges = [[f"{n} {low}..{high}" for n, (low, _, high) in p.items() if n in shapes] for p in profiles]
        have = "; ".join(map(", ".join, ranges))
        raise EngineError(f"{what}: no optimization profile covers {needed}; the engine has: {have}")
    return min(fitting, key=distance)


def build_plan(
    library: Library,
    graph: OnnxFile,
    component: Component,
    options: TensorrtOptions,
    *,
    targets: Sequence[Capability],
    ahead: bool,
    timing_cache: Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Parse and build. KeyboardInterrupt stops the builder, then propagates.

    Args:
        targets: Compute capabilities of the engine.
        ahead: Build for other GPUs than this machine's (TensorRT-RTX only).
        timing_cache: File to read and update.
    """
    for capability in targets:
        check_target(library.name, capability, graph.dtypes)
    if ahead and not hasattr(library.trt, "ComputeCapability"):
        raise EngineError(
            f"{library.title} builds only for the GPU it runs on, got target {dotted(targets)}; use engine "
            "tensorrt_rtx to build ahead of time, or build on such a GPU"
        )
    check_memory(component.name, graph.weight_bytes)
    trt = library.trt
    library.take_errors()
    profiles = profiles_of(component, options)
    began = time.perf_counter()
    builder = trt.Builder(library.logger)
    if builder is None:
        raise EngineError(f"{component.name}: {library.title} returned no builder: {library.take_errors()}")
    # TensorRT 11 knows strongly typed networks only, and may drop the flag.
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, library.logger)
    if not parser.parse_from_file(str(graph.path)):
        raise EngineError(f"{component.name}: {_parse_problem(parser, library)}")
    parsed = time.perf_counter()
    config = builder.create_builder_config()
    _set_flags(config, library, options)
    if ahead:
        config.num_compute_capabilities = len(targets)
        for index, capability in enumerate(targets):
            member = getattr(trt.ComputeCapability, target_name(capability).upper(), None)
            if member is None:
                raise EngineError(f"{library.title} cannot build for compute capability {dotted([capability])}")
            config.set_compute_capability(member, index)
    _add_profiles(builder, config, network, profiles, component.name, library)
    cached = _load_timing_cache(config, timing_cache) if options.timing_cache else None
    stop = threading.Event()
    config.progress_monitor = _monitor(trt, progress, stop)
    content = _build(builder, network, config, stop)
    if content is None:
        reason = library.take_errors() or "the library reported no reason"
        raise EngineError(f"{component.name}: build for {dotted(targets)} with {library.title}: {reason}")
    if cached is not None and timing_cache is not None and (timings := config.get_timing_cache()) is not None:
        with replacing_privately(timing_cache) as temporary:
            temporary.write_bytes(memoryview(timings.serialize()))
    target = "+".join(target_name(c) for c in targets)
    seconds = {"parse": parsed - began, "build": time.perf_counter() - parsed}
    return Plan(content, target, profiles, _layers(network), seconds)


def check_memory(name: str, weight_bytes: int) -> None:
    """Raise EngineError if there is less memory than measured peaks: three times the weights and half a gigabyte."""
    needed, free = 3 * weight_bytes + 512 * 2**20, available_memory()
    if free is not None and needed > free:
        raise EngineError(
            f"{name}: building needs about {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB is free"
        )


def available_memory() -> int | None:
    """Bytes this process may still allocate: the machine's, or its control group's if fewer; None if unknown."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found) if found else None


def _set_flags(config: Any, library: Library, options: TensorrtOptions) -> None:
    trt = library.trt
    wanted = {
        "WEIGHT_STREAMING": options.weight_streaming,
        "REFIT": options.refit,
        "VERSION_COMPATIBLE": options.version_compatible,
        "DISABLE_TIMING_CACHE": not options.timing_cache,
    }
    for name, on in wanted.items():
        if on:
            config.set_flag(getattr(trt.BuilderFlag, name))
    if options.hardware_compatible:
        level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        config.hardware_compatibility_level = level
        # TensorRT-RTX accepts the call and ignores it.
        if config.hardware_compatibility_level != level:
            raise EngineError(f"{library.title} has no hardware compatibility; build for each of the targets instead")
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb * 2**20)
    # `vla-accel inspect` shows precisions, not only names.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED


def _add_profiles(
    builder: Any, config: Any, network: Any, profiles: Sequence[Profile], name: str, library: Library
) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = [t for t in inputs if -1 in tuple(t.shape)]
    for values in profiles if dynamic else profiles[:1]:
        profile = builder.create_optimization_profile()
        for tensor in dynamic:
            low, best, high = values[tensor.name]
            fixed = tuple(tensor.shape)
            for shape in (low, best, high):
                if len(shape) != len(fixed) or any(f not in (-1, n) for f, n in zip(fixed, shape, strict=True)):
                    raise EngineError(f"{name}.{tensor.name}: the profile's {shape} does not fit the graph's {fixed}")
            profile.set_shape(tensor.name, low, best, high)
        if config.add_optimization_profile(profile) < 0:
            raise EngineError(f"{name}: the builder refused the profile {dict(values)}: {library.take_errors()}")


def _build(builder: Any, network: Any, config: Any, stop: threading.Event) -> Any:
    """Build in another thread, so that Ctrl-C reaches this one."""
    result: list[Any] = []

    def work() -> None:
        result.append(builder.build_serialized_network(network, config))

    thread = threading.Thread(target=work, name="tensorrt-build", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        stop.set()
        thread.join()
        raise
    return result[0] if result else None


def _monitor(trt: Any, progress: Progress | None, stop: threading.Event) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        """Forwards phases, and stops the build once `stop` is set."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if progress is not None:
                progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if progress is not None:
                progress.step(phase_name, step)
            return not stop.is_set()

        def phase_finish(self, phase_name: str) -> None:
            if progress is not None:
                progress.finish(phase_name)

    return Monitor()


def _parse_problem(parser: Any, library: Library) -> str:
    """The operators that the parser refused, by name."""
    problems = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        operator, node = error.node_operator(), error.node_name()
        if "UNSUPPORTED" in str(error.code()):
            problems.append(f"{library.title} has no ONNX operator {operator} (node {node})")
        else:
            problems.append(f"operator {operator} (node {node}): {' '.join(error.desc().split())[:300]}")
    library.take_errors()
    return "; ".join(dict.fromkeys(problems)) or "the parser refused the graph without a reason"


def _load_timing_cache(config: Any, path: Path | None) -> Any:
    content = b""
    if path is not None and path.is_file():
        require_private(path)
        content = path.read_bytes()
    cache = config.create_timing_cache(content)
    # A cache of another version or GPU is refused or empty: start a new one.
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _layers(network: Any) -> tuple[tuple[str, str, str], ...]:
    found = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        dtype = str(layer.get_output(0).dtype).rpartition(".")[2].lower() if layer.num_outputs else ""
        found.append((str(layer.type).rpartition(".")[2].lower(), layer.name, dtype))
    return tuple(found)


def layer_counts(plan: Plan) -> dict[str, int]:
    """How many parsed layers compute in each dtype."""
    return dict(Counter(dtype for _, _, dtype in plan.layers if dtype))
