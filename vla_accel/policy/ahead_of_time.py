"""Build the TensorRT engines of a policy configuration ahead of time, for `vla-accel build`.

Uses the policy's components and the engines' own build path, so that a policy finds these engines in the cache.
TensorRT-RTX engines need no GPU; the other kinds build for this machine's GPU.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vla_accel.component import Component
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.engines import ENGINES, onnx, tensorrt_library, tensorrt_plan, torch_tensorrt
from vla_accel.engines.tensorrt_builder import Progress
from vla_accel.engines.tensorrt_library import Capability, LibraryName, check_target, load_library, parse_target
from vla_accel.engines.tensorrt_plan import Exports, Obtained, body_of, obtain
from vla_accel.errors import ConfigError, DependencyError, EngineError
from vla_accel.families.loading import Checkpoint
from vla_accel.fp8 import E4M3
from vla_accel.nn.flow import Schedule
from vla_accel.numeric import DTYPES

SCHEMA = "vla_accel.build/1"


@dataclass(frozen=True)
class Job:
    """One component for one target; `target` is None where the library builds for this machine's GPU."""

    component: Component
    spec: EngineSpec
    target: Capability | None
    device: torch.device

    @property
    def title(self) -> str:
        """The job's name in a progress bar or a table."""
        target = "this GPU" if self.target is None else tensorrt_library.target_name(self.target)
        return f"{self.component.name} · {self.spec.engine} · {self.spec.precision} · {target}"


def named(specs: Mapping[str, EngineSpec]) -> dict[str, EngineSpec]:
    """Return the components with a TensorRT engine. Raises ConfigError if there is none."""
    kept = {name for name, engine in ENGINES.items() if engine.ahead_of_time}
    found = {name: spec for name, spec in specs.items() if spec.engine in kept}
    if not found:
        have = ", ".join(f"{name} {spec.engine}" for name, spec in specs.items())
        raise ConfigError(f"nothing to build: the configuration names no TensorRT engine ({have})")
    return found


def check_targets(specs: Mapping[str, EngineSpec], targets: Sequence[Capability], dtype: torch.dtype) -> None:
    """Check, before anything is loaded, that the engines of `specs` (from `named`) can be built for their GPUs.

    `targets` replace each spec's own; `dtype`: of the policy's large products. Raises ConfigError for `targets` with
    engines that build only for this machine's GPU, EngineError for a GPU that lacks the library or a precision.
    """
    if targets and not any(spec.engine == "tensorrt_rtx" for spec in specs.values()):
        engines = ", ".join(dict.fromkeys(spec.engine for spec in specs.values()))
        raise ConfigError(f"targets: only tensorrt_rtx builds for other GPUs, got targets for {engines}")
    for name, spec in specs.items():
        if spec.engine == "tensorrt_rtx":
            wanted = tuple(targets) or tuple(map(parse_target, spec.tensorrt.targets))
        elif torch.cuda.is_available():
            wanted = (tensorrt_library.capability_of(torch.device("cuda")),)
        else:
            wanted = ()  # `check_libraries` reports the missing GPU
        low = E4M3.dtype if spec.precision == "fp8" else DTYPES.get(spec.precision, dtype)
        library: LibraryName = "tensorrt_rtx" if spec.engine == "tensorrt_rtx" else "tensorrt"
        for target in wanted:
            try:
                check_target(library, target, (dtype, low))
            except EngineError as error:
                raise EngineError(f"{name}: {error}") from error


def check_libraries(specs: Mapping[str, EngineSpec], targets: Sequence[Capability]) -> None:
    """Raise one DependencyError naming everything that is missing: libraries, matching versions, a GPU."""
    problems: list[str] = []
    for engine in dict.fromkeys(spec.engine for spec in specs.values()):
        try:
            if engine == "torch_tensorrt":
                torch_tensorrt.load_torch_tensorrt()
            else:
                load_library("tensorrt" if engine == "tensorrt" else "tensorrt_rtx")
            if engine == "tensorrt" and not torch.cuda.is_available():
                raise DependencyError("engine tensorrt: expected a CUDA GPU to build for, torch finds none")
            if engine == "tensorrt_rtx" and not targets and not torch.cuda.is_available():
                raise DependencyError(
                    "engine tensorrt_rtx: expected a GPU or targets, got neither; pass --targets sm89,sm120"
                )
        except DependencyError as error:
            problems.append(str(error))
    if problems:
        raise DependencyError("; ".join(problems))


def jobs(checkpoint: Checkpoint, config: PolicyConfig, targets: Sequence[Capability], inputs: Any = None) -> list[Job]:
    """Return what to build, in order. `inputs`: a prepared observation that decides the example sizes; an ordinary one
    by default. Raises EngineError if a library does not know a target."""
    specs = config.specs(checkpoint.family.parts)
    inputs = checkpoint.processor.prepare(checkpoint.processor.example()) if inputs is None else inputs
    device = next(checkpoint.model.parameters()).device

    components = functools.cache(functools.partial(_components, checkpoint, config, inputs))
    found = []
    for name, spec in named(specs).items():
        wanted = tuple(targets) or tuple(map(parse_target, spec.tensorrt.targets))
        if spec.engine != "tensorrt_rtx":
            here = tensorrt_library.capability_of(device) if device.type == "cuda" else (0, 0)
            found += [Job(component, spec, None, device) for component in components(here)[name]]
            continue
        for target in wanted or (tensorrt_library.capability_of(torch.device("cuda")),):
            check_target("tensorrt_rtx", target, ())
            found += [Job(component, spec, target, device) for component in components(target)[name]]
    return found


def _components(
    checkpoint: Checkpoint, config: PolicyConfig, inputs: Any, capability: Capability
) -> dict[str, list[Component]]:  # fmt: skip
    """The components of a policy on such a GPU, where the engines of `auto` decide whether prompts are padded. The last
    component appears twice if a warm start needs another engine: an engine of the whole loop contains its schedule."""
    family, model = checkpoint.family, checkpoint.model
    specs = config.specs(family.parts)
    for name, spec in specs.items():
        if spec.engine == "auto":
            native = capability >= (8, 0) and model.dtype == torch.bfloat16
            specs[name] = replace(spec, engine="native") if native else EngineSpec("eager")
    scales = checkpoint.scales if family.capabilities.needs_scales(specs) else None
    schedule, rtc = family.schedule(model.config, config), family.chunking.resolve(model.config, config.rtc)

    def made(schedule: Schedule) -> Sequence[Component]:
        shape = family.shape(model.config, [inputs], schedule, specs)
        return family.components(model, shape, scales=scales, rtc=rtc)

    found = {component.name: [component] for component in made(schedule)}
    if config.warm_start is not None and (last := made(schedule.from_start(config.warm_start))[-1]).loop is None:
        found[last.name].append(last)
    return found


def build(job: Job, progress: Progress | None = None, exports: Exports | None = None) -> list[dict[str, Any]]:
    """Build one job, or find it in the cache; return a manifest row for each engine (torch_tensorrt: for each part)."""
    began = time.perf_counter()
    if job.spec.engine == "torch_tensorrt":
        obtained = [o for _, o, _ in torch_tensorrt.build_islands(job.component, job.spec, job.device)]
    else:
        name: LibraryName = "tensorrt" if job.spec.engine == "tensorrt" else "tensorrt_rtx"
        target = job.target or tensorrt_library.capability_of(job.device)
        obtained = [
            obtain(
                body_of(job.component),
                job.spec,
                load_library(name),
                [target],
                device=job.device,
                progress=progress,
                exports=exports,
            )
        ]
    wall = time.perf_counter() - began
    return [_row(job, one, wall / len(obtained)) for one in obtained]


def is_cached(job: Job) -> bool | None:
    """Whether the cache has the engine; None where only building shows it (torch_tensorrt's parts)."""
    if job.spec.engine == "torch_tensorrt" or job.target is None:
        return None
    body = body_of(job.component)
    content = tensorrt_plan.content_key(body, onnx.module_at(body, job.spec.precision), job.spec, "onnx")
    targets = tensorrt_plan.cache_of(job.spec.tensorrt).targets(body.name, content)
    return tensorrt_library.target_name(job.target) in targets


def manifest(rows: Sequence[Mapping[str, Any]], *, config: str, checkpoint: str, seconds: float) -> dict[str, Any]:
    """The record of one `vla-accel build`."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "schema": SCHEMA,
        "config": config,
        "checkpoint": checkpoint,
        "machine": {"gpu": gpu, "cpu_threads": torch.get_num_threads(), "system": platform.platform(terse=True)},
        "software": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(seconds, 2),
        "engines": [dict(row) for row in rows],
    }


def _row(job: Job, obtained: Obtained, wall: float) -> dict[str, Any]:
    about = obtained.entry.about
    return {
        **{name: about[name] for name in ("name", "target", "weight_bytes", "coverage")},
        **{name: about.get(name) for name in ("torch_tensorrt", "similarity", "dtypes")},
        "component": job.component.name,
        "engine": job.spec.engine,
        "precision": job.spec.precision,
        "library": f"{tensorrt_library.TITLES[about['library']]} {about['version']}",
        "file": obtained.entry.path.name,
        "bytes": obtained.entry.size,
        "seconds": {k: round(v, 2) for k, v in about["seconds"].items()},
        "wall_s": round(wall, 2),
        "built": obtained.built,
        "note": obtained.note.removeprefix("; "),
    }


def default_manifest(spec: EngineSpec, config: Path | str) -> Path:
    """The default path of a manifest, under the engines' folder."""
    return tensorrt_plan.cache_of(spec.tensorrt).folder / "manifests" / f"{Path(config).stem}.json"
