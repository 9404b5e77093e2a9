"""`vla-accel build-unet`: a TensorRT engine file of Stable Diffusion's UNet, dynamic in batch, height and width."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from vla_accel.cli.asked.images import BuildUnet
from vla_accel.cli.build_vae import check_built, describe, pick_targets, print_files
from vla_accel.cli.common import print_json, say
from vla_accel.config import TensorrtOptions
from vla_accel.engines.onnx import OnnxFile
from vla_accel.engines.tensorrt_library import load_library
from vla_accel.errors import ConfigError
from vla_accel.files import write_json
from vla_accel.images.engine_files import BuiltFile, build_file, export_onnx, found_file, identity
from vla_accel.images.models import load_model
from vla_accel.images.parts import RANDOM, unet_engine_file
from vla_accel.images.unet import UNET, Unet, unet_component
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on


def main(options: BuildUnet, words: list[str]) -> int:
    """Run the command; the exit status."""
    began = time.perf_counter()
    if options.output_dir is None and options.sd_dir in RANDOM:
        raise ConfigError(f"output-dir: expected a folder for the files of {options.sd_dir}, got none")
    root = options.output_dir or Path(options.sd_dir)
    library = load_library(options.library)
    targets = pick_targets(options.library, options.targets, DTYPES[options.dtype])
    names = {"random": "sd-unet", "tiny-random": "tiny-sd-unet"}
    source = names.get(options.sd_dir, str(Path(options.sd_dir) / "unet"))
    loaded = load_model(source, kinds=(UNET,), dtype=DTYPES[options.dtype], device=torch.device("cpu"))
    unet = Unet(loaded, paired=False)
    file = build_unet(unet, root, options, library, targets)
    summary = {
        "command": "build-unet",
        "model": options.sd_dir,
        "dtype": options.dtype,
        "library": library.title,
        "files": [describe(file, root)],
        "seconds": round(time.perf_counter() - began, 1),
    }
    print_files("Engine file", summary["files"])
    print_json(summary)
    return 0


def build_unet(
    unet: Unet, root: Path, options: BuildUnet, library: object, targets: list[tuple[int, int]]
) -> BuiltFile:
    """The engine file under `root`: found, or exported and built."""
    component = unet_component(unet, (512, 512), batch=2, dynamic=True)
    path = unet_engine_file(root)
    found = None
    if not (options.force_engine or options.force_onnx):
        found = found_file(component, path, options.library)
    if found is not None:
        check_built(found, targets)
        return found
    folder = root / "unet" / "onnx"
    graph_file, source = folder / "unet.onnx", folder / "unet.json"
    key = {"key": identity(component)}
    with going_on(f"building {path}: minutes", say):
        if graph_file.is_file() and not options.force_onnx and _read(source) == key:
            # It was compared with the module when it was exported.
            size = sum(p.nbytes for p in unet.parameters())
            graph = OnnxFile(graph_file, {}, (unet.dtype,), size)
        else:
            check = unet_component(unet, (256, 256), batch=1) if not options.no_verify else None
            source.unlink(missing_ok=True)
            graph = export_onnx(component, folder, check=check)
            write_json(source, key)
        return build_file(component, graph, path, library, targets, TensorrtOptions())  # type: ignore[arg-type]


def _read(source: Path) -> dict[str, str] | None:
    """What an exported graph was made from; None if nobody knows."""
    try:
        return json.loads(source.read_text())
    except (OSError, ValueError):
        return None
