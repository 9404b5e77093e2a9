"""`vla-accel build-unet`: a TensorRT engine file of Stable Diffusion's UNet, dynamic in batch, height and width.

    SD_DIR/unet/onnx/unet.onnx, SD_DIR/unet/trt/unet.trt

What is there is used, unless forced. Ends with one JSON line.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from vla_accel.cli.build_vae import describe, pick_targets, print_files
from vla_accel.cli.common import Dtype, parse
from vla_accel.cli.generate import RANDOM
from vla_accel.cli.options import OutputFolder
from vla_accel.components.unet import unet_component
from vla_accel.config import TensorrtOptions
from vla_accel.diffusion.engine_files import BuiltFile, build_file, export_onnx, found_file
from vla_accel.diffusion.models import load_model
from vla_accel.diffusion.stable import unet_engine_file
from vla_accel.engines.onnx import OnnxFile
from vla_accel.engines.tensorrt_library import LibraryName, load_library
from vla_accel.errors import ConfigError
from vla_accel.models.unet import Unet
from vla_accel.numeric import DTYPES


@dataclass(frozen=True)
class Options:
    """Build a TensorRT engine file of Stable Diffusion's UNet: one for every batch and size, for text and image."""

    sd_dir: str
    """A diffusers folder; random or tiny-random for random weights, which needs --output-dir."""
    output_dir: OutputFolder = None
    """Instead of SD_DIR: the files go to unet/onnx and unet/trt in it."""
    force_onnx: bool = False
    """Export again (and build again) what is there."""
    force_engine: bool = False
    """Build again what is there."""
    library: LibraryName = "tensorrt_rtx"
    """tensorrt_rtx builds on any machine, for the --targets; tensorrt for the GPU at hand."""
    targets: tuple[str, ...] = ()
    """Compute capabilities, like sm89; needed by tensorrt_rtx where there is no GPU."""
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    verify: bool = True
    """Compare the ONNX graph with the module on the smallest picture."""


def main(arguments: list[str]) -> int:
    """Run the command; the exit status."""
    options = parse(Options, arguments, "vla-accel build-unet", __doc__)
    began = time.perf_counter()
    if options.output_dir is None and options.sd_dir in RANDOM:
        raise ConfigError(f"output_dir: expected a folder for the files of {options.sd_dir}, got none")
    root = options.output_dir or Path(options.sd_dir)
    library = load_library(options.library)
    targets = pick_targets(options.library, options.targets)
    dtype: Dtype = options.dtype
    names = {"random": "sd-unet", "tiny-random": "tiny-sd-unet"}
    source = names.get(options.sd_dir, str(Path(options.sd_dir) / "unet"))
    unet = Unet(load_model(source, dtype=DTYPES[dtype], device=torch.device("cpu")), paired=False)
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
    print(json.dumps(summary))
    return 0


def build_unet(unet: Unet, root: Path, options: Options, library: object, targets: list[tuple[int, int]]) -> BuiltFile:
    """The engine file under `root`: found, or exported and built."""
    component = unet_component(unet, (512, 512), batch=2, dynamic=True)
    path = unet_engine_file(root)
    found = None
    if not (options.force_engine or options.force_onnx):
        found = found_file(component, path, options.library)
    if found is not None:
        return found
    folder = root / "unet" / "onnx"
    graph_file = folder / "unet.onnx"
    if graph_file.is_file() and not options.force_onnx:
        # Exported before and compared then.
        size = sum(p.nbytes for p in unet.parameters())
        graph = OnnxFile(graph_file, {}, (unet.dtype,), size)
    else:
        check = unet_component(unet, (256, 256), batch=1) if options.verify else None
        graph = export_onnx(component, folder, check=check)
    return build_file(component, graph, path, library, targets, TensorrtOptions())  # type: ignore[arg-type]
