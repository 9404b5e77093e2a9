"""`vla-accel calibrate`: FP8 scales of a checkpoint from recorded observations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vla_accel.checkpoints.loading import load
from vla_accel.errors import CheckpointError
from vla_accel.fp8 import FILE
from vla_accel.machine import resolve_device
from vla_accel.measure.recording import load_observations


@dataclass(frozen=True)
class Arguments:
    """Measure the largest inputs of what FP8 may compute through NVIDIA ModelOpt; store them beside the checkpoint."""

    observations: Annotated[Path, tyro.conf.Positional]
    """Recorded observations (.npz): real ones, never noise."""
    checkpoint: str = "demo"
    """A folder, or a bundled checkpoint's name."""
    output: Path | None = None
    """Folder for the scales; the checkpoint's own if not given."""
    limit: int = 256
    """At most so many observations, spread over the file."""
    device: str = "auto"


def main(arguments: list[str]) -> int:
    """Calibrate and write; the exit status."""
    chosen = tyro.cli(Arguments, args=arguments, prog="vla-accel calibrate")
    checkpoint = load(chosen.checkpoint, device=resolve_device(chosen.device))
    recorded = load_observations(chosen.observations, chosen.limit)
    prepared = [checkpoint.processor.prepare(o) for o in recorded]
    scales = checkpoint.family.calibrate(checkpoint.model, prepared, chosen.observations.name)
    folder = chosen.output or checkpoint.folder
    assert folder is not None
    if not folder.is_dir():
        raise CheckpointError(f"output: expected a folder, got {folder}")
    path = scales.save(folder)
    largest = max(scales.amax, key=scales.amax.__getitem__)
    print(f"{path.name}: {len(scales.amax)} products, {scales.observations} observations; largest input "
          f"{scales.amax[largest]:.1f} at {largest} ({FILE} stands beside the weights)")  # fmt: skip
    return 0
