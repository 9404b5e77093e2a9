"""Every TensorRT engine that a policy configuration names, built before the policy is loaded.

Uses the policy's own components and the engines' own build path, so that what is built here is what a policy finds in
the cache. Runs nothing. TensorRT-RTX engines need no GPU; the other kinds build for the GPU at hand.
"""

from __future__ import annotations

import dataclasses
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel.component import Component
from vla_accel.components import denoise_component, kv_cache_component, vision_component
from vla_accel.components.calibration import calibration
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.engines import onnx, tensorrt_library, tensorrt_plan, torch_tensorrt, torch_tensorrt_versions
from vla_accel.engines.tensorrt_builder import Progress
from vla_accel.engines.tensorrt_library import Capability, LibraryName, check_target, load_library, parse_target
from vla_accel.engines.tensorrt_plan import Exports, Obtained, body_of, obtain
from vla_accel.errors import ConfigError, DependencyError
from vla_accel.fp8 import Scales
from vla_accel.models.pi0 import PRESETS, Pi0
from vla_accel.models.random_weights import random_model
from vla_accel.quantize import calibrate

SCHEMA = "vla_accel.build/1"
BUILT = ("tensorrt", "tensorrt_rtx", "torch_tensorrt")
PARTS = ("vision", "kv_cache", "denoise")


@dataclass(frozen=True)
class Job:
    """One component for one target. `target` is None where the library decides by the GPU at hand."""

    component: Component
    spec: EngineSpec
    target: Capability | None
    device: torch.device

    @property
    def title(self) -> str:
        """For a progress bar or a table."""
        target = "this GPU" if self.target is None else tensorrt_library.target_name(self.target)
        return f"{self.component.name} · {self.spec.engine} · {self.spec.precision} · {target}"


@dataclass(frozen=True)
class Shapes:
    """Example sizes: what the policy's first observation has."""

    views: int = 2
    tokens: int = 20


def named(config: PolicyConfig) -> dict[str, EngineSpec]:
    """The components that the configuration gives a TensorRT engine. Raises ConfigError if there is none."""
    specs: dict[str, EngineSpec] = {name: getattr(config, name) for name in PARTS}
    found = {name: spec for name, spec in specs.items() if spec.engine in BUILT}
    if not found:
        have = ", ".join(f"{name} {spec.engine}" for name, spec in specs.items())
        raise ConfigError(f"nothing to build: the configuration names no TensorRT engine ({have})")
    return found


def check_libraries(specs: Mapping[str, EngineSpec], targets: Sequence[Capability]) -> None:
    """Raise one DependencyError naming all that is missing: libraries, wrong pairs, a GPU where one is needed."""
    problems: list[str] = []
    for engine in dict.fromkeys(spec.engine for spec in specs.values()):
        try:
            if engine == "torch_tensorrt":
                torch_tensorrt_versions.load_torch_tensorrt()
            else:
                load_library("tensorrt" if engine == "tensorrt" else "tensorrt_rtx")
            if engine == "tensorrt" and not torch.cuda.is_available():
                raise DependencyError("engine tensorrt: it builds for the GPU it runs on, and torch sees none")
            if engine == "tensorrt_rtx" and not targets and not torch.cuda.is_available():
                raise DependencyError(
                    "engine tensorrt_rtx: there is no GPU to build for; name the GPUs, as in --target sm89,sm120"
                )
        except DependencyError as error:
            problems.append(str(error))
    if problems:
        raise DependencyError("; ".join(problems))


def jobs(
    model: Pi0, config: PolicyConfig, shapes: Shapes, targets: Sequence[Capability], scales: Scales | None
) -> list[Job]:
    """What there is to build, in order. Raises EngineError for a target that a library does not know."""
    padded = config.pads_prompts
    tokens = -(-shapes.tokens // 32) * 32 if padded else shapes.tokens
    prefix_tokens = shapes.views * model.config.vision.tokens + tokens
    components = {
        "vision": vision_component(model, 1, shapes.views),
        "kv_cache": kv_cache_component(model, 1, shapes.views, tokens, padded, scales=scales),
        "denoise": denoise_component(
            model, 1, prefix_tokens, config.num_steps, padded, max_weight=config.rtc.max_guidance_weight
        ),
    }
    device = next(model.parameters()).device
    found = []
    for name, spec in named(config).items():
        wanted = tuple(targets) or tuple(map(parse_target, spec.tensorrt.targets))
        if spec.engine != "tensorrt_rtx":
            found.append(Job(components[name], spec, None, device))
            continue
        for target in wanted or (tensorrt_library.capability_of(torch.device("cuda")),):
            check_target("tensorrt_rtx", target, ())
            found.append(Job(components[name], spec, target, device))
    return found


def build(
    job: Job,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    exports: Exports | None = None,
) -> list[dict[str, Any]]:
    """Build one job, or find it in the cache. A manifest row per engine: torch_tensorrt makes one for every part."""
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
                cancel=cancel,
                exports=exports,
            )
        ]
    wall = time.perf_counter() - began
    return [_row(job, one, wall / len(obtained)) for one in obtained]


def is_cached(job: Job) -> bool | None:
    """Whether the cache has the engine; None where only building can tell (torch_tensorrt's parts)."""
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
        "name": about["name"],
        "component": job.component.name,
        "engine": job.spec.engine,
        "precision": job.spec.precision,
        "target": about["target"],
        "library": f"{tensorrt_library.TITLES[about['library']]} {about['version']}",
        "torch_tensorrt": about.get("torch_tensorrt"),
        "file": obtained.entry.path.name,
        "bytes": obtained.entry.size,
        "weight_bytes": about["weight_bytes"],
        "coverage": about["coverage"],
        "similarity": about.get("similarity"),
        "seconds": {k: round(v, 2) for k, v in about["seconds"].items()},
        "wall_s": round(wall, 2),
        "dtypes": about.get("dtypes"),
        "built": obtained.built,
        "note": obtained.note.removeprefix("; "),
    }


# -- models -------------------------------------------------------------------------------------------------------


def sized_model(preset: str, dtype: torch.dtype, device: torch.device, depth: int | None = None) -> Pi0:
    """A model of a preset's size with random weights, for measuring builds. `depth`: layers of prefix and expert;
    vision stays whole."""
    if preset not in PRESETS:
        raise ConfigError(f"random: expected one of {', '.join(PRESETS)}, got {preset!r}")
    config = PRESETS[preset]()
    if depth is not None:
        cut = {n: dataclasses.replace(getattr(config, n), depth=depth) for n in ("prefix", "expert")}
        config = dataclasses.replace(config, **cut)
    return random_model(config, device=str(device), dtype=dtype)


def random_scales(model: Pi0) -> Scales:
    """FP8 scales of a random model from one random observation: for measuring builds, not for acting."""
    size, rng = model.config.vision.image_size, np.random.default_rng(0)
    images = rng.integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    return calibrate(model, calibration(model), [(images, rng.integers(0, model.config.vocab_size, 20))], "random")


def default_manifest(spec: EngineSpec, config: Path | str) -> Path:
    """Where a manifest goes unless told: under the engines' folder."""
    return tensorrt_plan.cache_of(spec.tensorrt).folder / "manifests" / f"{Path(config).stem}.json"
