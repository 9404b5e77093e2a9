"""`vla-accel build-vae`: TensorRT engine files of an autoencoder: one for every size, or one folder a size."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vla_accel.cli.asked.images import BuildVae
from vla_accel.cli.common import print_json, print_table, say
from vla_accel.config import TensorrtOptions
from vla_accel.engines.tensorrt_library import (
    LibraryName,
    capability_of,
    check_target,
    load_library,
    parse_target,
    target_name,
)
from vla_accel.errors import ConfigError
from vla_accel.files import write_json
from vla_accel.images.autoencoder import AUTOENCODERS, Half, split_autoencoder
from vla_accel.images.config import TrtVaeConfig, VaeConfig
from vla_accel.images.engine_files import BuiltFile, build_file, export_onnx, found_file
from vla_accel.images.models import load_model
from vla_accel.images.vae_component import (
    PROFILES,
    SMALLEST,
    Side,
    Size,
    parse_size,
    profile_texts,
    static_sizes,
    vae_component,
)
from vla_accel.machine import resolve_device
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on


def main(options: BuildVae, words: list[str]) -> int:
    """Run the command; the exit status."""
    began = time.perf_counter()
    library = load_library(options.library)
    targets = pick_targets(options.library, options.targets, DTYPES[options.dtype])
    # Weights stay on the CPU: the builder takes them from the ONNX file.
    encoder, decoder = split_autoencoder(
        load_model(options.vae, kinds=AUTOENCODERS, dtype=DTYPES[options.dtype], device=torch.device("cpu"))
    )
    halves: dict[Side, Half] = {"encoder": encoder, "decoder": decoder}
    files: list[BuiltFile] = []
    for side in options.sides:
        for path, size, dynamic in _wanted(options, side):
            component = vae_component(halves[side], side, size, dynamic=dynamic)
            found = None if options.force_engine else found_file(component, path, options.library)
            if found is not None:
                check_built(found, targets, options.optimization_level)
            else:
                check = vae_component(halves[side], side, (SMALLEST, SMALLEST)) if dynamic else None
                tuned = TensorrtOptions(
                    optimization_level=options.optimization_level, profiles=profile_texts(component) if dynamic else ()
                )
                scratched = tempfile.TemporaryDirectory(prefix="vla_accel-onnx-")
                with going_on(f"building {path}: minutes", say), scratched as scratch:
                    graph = export_onnx(component, Path(scratch), check=check)
                    found = build_file(component, graph, path, library, targets, tuned)
            files.append(found)
    config = VaeConfig(options.library, TrtVaeConfig(str(options.output_dir), not options.static))
    _write_config(options.output_dir / "vae_config.json", config)
    summary = {
        "command": "build-vae",
        "vae": options.vae,
        "dtype": options.dtype,
        "library": library.title,
        "targets": [f.about["target"] for f in files][:1],
        "files": [describe(f, options.output_dir) for f in files],
        "profiles": len(PROFILES) if not options.static else 1,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print_files("Engine files", summary["files"])
    print_json(summary)
    return 0


def _wanted(options: BuildVae, side: Side) -> list[tuple[Path, Size, bool]]:
    if not options.static:
        if options.sizes or options.only:
            raise ConfigError("--sizes and --only belong to --static: a multi-profile engine takes every size")
        return [(options.output_dir / f"vae_{side}_multi_profile.trt", (512, 512), True)]
    if options.sizes and options.only:
        raise ConfigError("--sizes adds to the five ratios, --only takes their place: expected one of them, got both")
    sizes = static_sizes(options.sizes)
    if options.only:
        wanted = [parse_size(t) for t in options.only]
        sizes = {k: s for k, s in static_sizes(options.only).items() if s in wanted}
    return [(options.output_dir / key / f"vae_{side}.trt", size, False) for key, size in sizes.items()]


def pick_targets(library: LibraryName, texts: tuple[str, ...], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Compute capabilities to build for: those named, or this machine's GPU's. Raises ConfigError for neither, and for
    targets of a library that builds for this machine's GPU alone; EngineError for a GPU that the library does not run
    on, or that lacks `dtype`."""
    if texts and library != "tensorrt_rtx":
        raise ConfigError(f"targets: only --library tensorrt_rtx builds for other GPUs, got targets for {library}")
    if texts:
        targets = [parse_target(t) for t in texts]
    elif torch.cuda.is_available():
        targets = [capability_of(resolve_device("auto"))]
    else:
        raise ConfigError(f"targets: no GPU here; expected --targets (like sm89) for {library}, got none")
    for target in targets:
        check_target(library, target, (dtype,))
    return targets


def check_built(found: BuiltFile, targets: list[tuple[int, int]], level: int | None = None) -> None:
    """Raise ConfigError if an engine file that is there was built for other GPUs, or with another effort."""
    wanted, there = {target_name(c) for c in targets}, set(str(found.about["target"]).split("+"))
    if not wanted <= there:
        raise ConfigError(
            f"targets: expected an engine for {', '.join(sorted(wanted))}, got {found.path}, which was built for "
            f"{', '.join(sorted(there))}; build it again with --force-engine"
        )
    if level is not None and found.about.get("optimization_level") != level:
        raise ConfigError(
            f"optimization-level: expected an engine built with {level}, got {found.path}, which was built with "
            f"{found.about.get('optimization_level', 'the default')}; build it again with --force-engine"
        )


def describe(file: BuiltFile, root: Path) -> dict[str, Any]:
    """One file for tables and JSON."""
    seconds = file.about["seconds"]
    return {
        "file": str(file.path.relative_to(root)),
        "mb": round(file.about["bytes"] / 1e6, 1),
        "profiles": len(file.about["profiles"]),
        "target": file.about["target"],
        "built": file.built,
        "seconds": {k: round(v, 1) for k, v in seconds.items()},
        "similarity": file.about["similarity"],
    }


def print_files(title: str, files: list[dict[str, Any]]) -> None:
    """A table of engine files."""
    rows = [
        [f["file"], f"{f['mb']:.1f}", str(f["profiles"]), f["target"], "built" if f["built"] else "was there",
         f"{sum(f['seconds'].values()):.1f}", "-" if f["similarity"] is None else f"{f['similarity']:.6f}"]
        for f in files
    ]  # fmt: skip
    print_table(title, ["file", "MB", "profiles", "target", "state", "s", "ONNX cosine"], rows)


def _write_config(path: Path, config: VaeConfig) -> None:
    # LightX2V's keys and no others: it reads this file, too.
    content = {"vae_type": config.vae_type, "trt_vae_config": dataclasses.asdict(config.trt_vae_config)}
    write_json(path, content)
