"""`vla-accel build-vae` and `build-unet`: TensorRT engine files of an autoencoder, and of Stable Diffusion's UNet."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vla_accel.cli.common import print_json, print_table, say
from vla_accel.cli.image_options import BuildUnet, BuildVae
from vla_accel.config import TensorrtOptions
from vla_accel.engines.onnx import OnnxFile
from vla_accel.engines.tensorrt_library import capability_of, check_target, load_library, parse_target, target_name
from vla_accel.engines.tensorrt_plan import Obtained
from vla_accel.errors import ConfigError
from vla_accel.files import user_path, write_json
from vla_accel.images.autoencoder import AUTOENCODERS, split_autoencoder
from vla_accel.images.config import TrtVaeConfig
from vla_accel.images.engine_files import build_file, export_onnx, found_file, identity
from vla_accel.images.models import load_model
from vla_accel.images.parts import RANDOM, unet_engine_file
from vla_accel.images.unet import UNET, Unet, unet_component
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


def main(options: BuildVae | BuildUnet, words: list[str]) -> int:
    """Run the command; return the exit status."""
    began = time.perf_counter()
    if isinstance(options, BuildVae):
        command, model, root, build = "build-vae", {"vae": options.vae}, options.output_dir, _vae
    else:
        if options.output_dir is None and options.sd_dir in RANDOM:
            raise ConfigError(f"output-dir: expected a folder for the files of {options.sd_dir}, got none")
        root = options.output_dir or user_path(options.sd_dir)
        command, model, build = "build-unet", {"model": options.sd_dir}, _unet
    library = load_library(options.library)
    files = [*build(options, root, _Builder(options, library, _targets(options)))]  # pyright: ignore[reportArgumentType]
    summary: dict[str, Any] = {
        "command": command,
        **model,
        "dtype": options.dtype,
        "library": library.title,
        "files": [_describe(file, root) for file in files],
    }
    if isinstance(options, BuildVae):
        targets = [file.entry.about["target"] for file in files][:1]
        summary |= {"targets": targets, "profiles": 1 if options.static else len(PROFILES)}
    summary["seconds"] = round(time.perf_counter() - began, 1)
    print_table(
        "Engine files" if len(files) > 1 else "Engine file",
        ["file", "MB", "profiles", "target", "state", "s", "ONNX cosine"],
        [_cells(file) for file in summary["files"]],
    )
    print_json(summary)
    return 0


def _cells(file: dict[str, Any]) -> list[str]:
    state, seconds = "built" if file["built"] else "existing", f"{sum(file['seconds'].values()):.1f}"
    similarity = "-" if file["similarity"] is None else f"{file['similarity']:.6f}"
    return [file["file"], f"{file['mb']:.1f}", str(file["profiles"]), file["target"], state, seconds, similarity]


def _targets(options: BuildVae | BuildUnet) -> list[tuple[int, int]]:
    """Return the requested compute capabilities, or this machine's GPU's. Raises ConfigError or EngineError."""
    library = options.library
    if options.targets and library != "tensorrt_rtx":
        raise ConfigError(f"targets: only --library tensorrt_rtx builds for other GPUs, got targets for {library}")
    if options.targets:
        targets = [parse_target(text) for text in options.targets]
    elif torch.cuda.is_available():
        targets = [capability_of(resolve_device("auto"))]
    else:
        raise ConfigError(f"targets: expected --targets (like sm89) for {library} without a GPU, got none")
    for target in targets:
        check_target(library, target, (DTYPES[options.dtype],))
    return targets


@dataclasses.dataclass
class _Builder:
    options: BuildVae | BuildUnet
    library: Any
    targets: list[tuple[int, int]]

    def build(
        self, component: Any, path: Path, export: Callable[[], OnnxFile], tuning: TensorrtOptions, force: bool
    ) -> Obtained:
        """Return the engine file at `path`, built if there is none. Raises ConfigError for one built differently."""
        found = None if force else found_file(component, path, self.options.library)
        if found is None:
            with going_on(f"building {path}: minutes", say):
                return build_file(component, export(), path, self.library, self.targets, tuning)
        about, level = found.entry.about, tuning.optimization_level
        wanted, there = {target_name(c) for c in self.targets}, {*about["target"].split("+")}
        problem = ""
        if not wanted <= there:
            problem = f"targets: expected an engine for {', '.join(sorted(wanted))}, got {path}, which was built for "
            problem += ", ".join(sorted(there))
        elif level is not None and about.get("optimization_level") != level:
            problem = f"optimization-level: expected an engine built with {level}, got {path}, which was built with "
            problem += str(about.get("optimization_level", "the default"))
        if problem:
            raise ConfigError(f"{problem}; build it again with --force-engine")
        return found


def _vae(options: BuildVae, root: Path, builder: _Builder) -> Iterator[Obtained]:
    # Weights stay on the CPU: the builder reads them from the ONNX file.
    vae = load_model(options.vae, kinds=AUTOENCODERS, dtype=DTYPES[options.dtype], device=torch.device("cpu"))
    halves = dict(zip(("encoder", "decoder"), split_autoencoder(vae), strict=True))
    for side in options.sides:
        half, dynamic = halves[side], not options.static
        for path, size in _wanted(options, side):
            component = vae_component(half, side, size, dynamic=dynamic)
            small = vae_component(half, side, (SMALLEST, SMALLEST)) if dynamic else None
            profiles = profile_texts(component) if dynamic else ()
            tuning = TensorrtOptions(optimization_level=options.optimization_level, profiles=profiles)
            with tempfile.TemporaryDirectory(prefix="vla_accel-onnx-") as folder:
                export = lambda c=component, f=folder, s=small: export_onnx(c, Path(f), check=s)  # noqa: E731
                yield builder.build(component, path, export, tuning, options.force_engine)
    # LightX2V's keys and no others, as LightX2V reads this file, too.
    files = dataclasses.asdict(TrtVaeConfig(str(root), not options.static))
    write_json(root / "vae_config.json", {"vae_type": options.library, "trt_vae_config": files})


def _wanted(options: BuildVae, side: Side) -> list[tuple[Path, Size]]:
    """The engine files of one side, and the size of each."""
    if not options.static:
        if options.sizes or options.only:
            raise ConfigError("--sizes and --only belong to --static: a multi-profile engine takes every size")
        return [(options.output_dir / f"vae_{side}_multi_profile.trt", (512, 512))]
    if options.sizes and options.only:
        raise ConfigError("--sizes adds to the five ratios, --only replaces them: expected one of them, got both")
    only = [parse_size(text) for text in options.only]
    sizes = static_sizes((*options.sizes, *options.only)).items()
    return [(options.output_dir / key / f"vae_{side}.trt", size) for key, size in sizes if not only or size in only]


def _unet(options: BuildUnet, root: Path, builder: _Builder) -> Iterator[Obtained]:
    random = {"random": "sd-unet", "tiny-random": "tiny-sd-unet"}
    model = random.get(options.sd_dir, Path(options.sd_dir) / "unet")
    loaded = load_model(model, kinds=(UNET,), dtype=DTYPES[options.dtype], device=torch.device("cpu"))
    unet = Unet(loaded, paired=False)
    component = unet_component(unet, (512, 512), batch=2, dynamic=True)
    folder = root / "unet" / "onnx"
    graph, source = folder / "unet.onnx", folder / "unet.json"

    def export() -> OnnxFile:
        """The exported graph, if it is of this model; else export it."""
        key = {"key": identity(component)}
        if graph.is_file() and not options.force_onnx and _read(source) == key:
            # It was compared with the module when it was exported.
            return OnnxFile(graph, {}, (unet.dtype,), sum(p.nbytes for p in unet.parameters()))
        source.unlink(missing_ok=True)
        small = None if options.no_verify else unet_component(unet, (256, 256), batch=1)
        exported = export_onnx(component, folder, check=small)
        write_json(source, key)
        return exported

    force = options.force_engine or options.force_onnx
    yield builder.build(component, unet_engine_file(root), export, TensorrtOptions(), force)


def _read(source: Path) -> dict[str, str] | None:
    """What an exported graph was made from; None if that is unknown."""
    try:
        return json.loads(source.read_text())
    except (OSError, ValueError):
        return None


def _describe(file: Obtained, root: Path) -> dict[str, Any]:
    about = file.entry.about
    return {
        "file": str(file.entry.path.relative_to(root)),
        "mb": round(about["bytes"] / 1e6, 1),
        "profiles": len(about["profiles"]),
        "target": about["target"],
        "built": file.built,
        "seconds": {k: round(v, 1) for k, v in about["seconds"].items()},
        "similarity": about["similarity"],
    }
