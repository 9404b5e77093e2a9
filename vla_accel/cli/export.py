"""`vla-accel export CHECKPOINT`: write a policy as ONNX graphs or torch.export's programs, and a script to run them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from vla_accel.cli.common import print_json, print_table, say
from vla_accel.cli.options import Argument, Count, PolicySource, StepOptions, Written
from vla_accel.errors import ConfigError
from vla_accel.progress import going_on


@dataclass(frozen=True, kw_only=True)
class Export(StepOptions, PolicySource):
    """Write a policy's components in FP32 as files that run without this package."""

    format: Literal["onnx", "torch-export"] = "onnx"
    """onnx: graphs for ONNX Runtime and TensorRT; torch-export: programs for torch only."""
    output: Annotated[Path, Argument("FOLDER"), Written(folder=True)]
    """A new folder: a file for each component, manifest.json, example.npz and run.py."""
    batch: Count = 1
    """Observations of a call. The files hold this number."""


def main(options: Export, words: list[str]) -> int:
    """Export, run the files on the example, and print how far the actions are apart; 1 if too far."""
    import torch

    from vla_accel.engines import onnx
    from vla_accel.families.loading import load
    from vla_accel.measure.parity import reference_of
    from vla_accel.measure.random_policy import random_observations
    from vla_accel.policy.export import export, require_new

    # Loading and tracing take minutes.
    require_new(options.output)
    if options.format == "onnx":
        onnx.require_packages()
    name, settings = options.checkpoint or "demo", options.with_steps(options.settings())
    with going_on(f"preparing {name} in FP32 eager", say):
        checkpoint = load(name, settings, device=torch.device("cpu"), dtype=torch.float32)
        engines = {spec.engine for spec in settings.specs(checkpoint.family.parts).values()} - {"auto", "eager"}
        if engines:
            raise ConfigError(
                f"config: expected none with engines, for files in FP32, got {', '.join(sorted(engines))}"
            )
        policy = reference_of(replace(settings, device="cpu"), checkpoint)
    manifest = export(policy, random_observations(policy, options.batch), options.format, options.output, say)
    rows = [
        [part["name"], part["file"], " ".join(one["name"] for one in part["inputs"]),
         " ".join(one["name"] for one in part["outputs"])]
        for part in manifest["components"]
    ]  # fmt: skip
    print_table(f"{options.output}: {options.format}", ("component", "file", "inputs", "outputs"), rows)
    print_json(manifest)
    # As a reader runs it: in a process of its own, without this package.
    return subprocess.run([sys.executable, str(options.output / "run.py")], check=False).returncode
