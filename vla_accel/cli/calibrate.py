"""`vla-accel calibrate CHECKPOINT --observations FILE`: FP8 scales of a checkpoint from recorded observations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_accel.checkpoints.loading import load
from vla_accel.cli.common import Checkpoint, parse, without_option
from vla_accel.cli.options import Count, File, OutputFolder, Text
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.fp8 import FILE
from vla_accel.machine import resolve_device
from vla_accel.measure.recording import load_observations


@dataclass(frozen=True)
class Arguments:
    """Measure the largest inputs of what FP8 may compute through NVIDIA ModelOpt; store them beside the checkpoint."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name or one on the hub."""
    observations: File = None
    """Recorded observations (.npz), which must be given: real ones, never noise."""
    output: OutputFolder = None
    """Folder for the scales; the checkpoint's own if not given."""
    lora: Text = None
    """A LoRA adapter's folder or name on the hub, folded into the weights; the scales then lie beside it."""
    limit: Count = 256
    """At most so many observations, spread over the file."""
    device: str = "auto"
    """cpu, cuda or cuda:N."""


def main(arguments: list[str]) -> int:
    """Calibrate and write; the exit status."""
    words, named = without_option(arguments, "--checkpoint")
    chosen = parse(Arguments, words, "vla-accel calibrate")
    source, file = chosen.checkpoint, chosen.observations
    if source is not None and source.endswith(".npz"):  # the former spelling: OBSERVATIONS --checkpoint CHECKPOINT
        source, file = None, Path(source)
    if file is None:
        raise ConfigError("observations: expected recorded ones, as in --observations observations.npz, got none")
    settings = PolicyConfig() if chosen.lora is None else PolicyConfig().with_lora(chosen.lora)
    checkpoint = load(source or named or "demo", settings, device=resolve_device(chosen.device))
    recorded = load_observations(file, chosen.limit)
    prepared = [checkpoint.processor.prepare(o) for o in recorded]
    scales = checkpoint.family.calibrate(checkpoint.model, prepared, file.name)
    folder = chosen.output or checkpoint.kept
    assert folder is not None
    if not folder.is_dir():
        raise CheckpointError(f"output: expected a folder, got {folder}")
    path = scales.save(folder)
    largest = max(scales.amax, key=scales.amax.__getitem__)
    print(f"{path.name}: {len(scales.amax)} products, {scales.observations} observations; largest input "
          f"{scales.amax[largest]:.1f} at {largest} ({FILE} stands beside the weights)")  # fmt: skip
    return 0
