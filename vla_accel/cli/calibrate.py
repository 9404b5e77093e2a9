"""`vla-accel calibrate CHECKPOINT --observations FILE`: FP8 scales of a checkpoint from recorded observations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vla_accel.cli.common import say
from vla_accel.cli.options import Argument, Count, OutputFolder, PolicySource
from vla_accel.errors import ConfigError
from vla_accel.files import require_writable_folder
from vla_accel.measure.recording import RECORDED, load_observations, named
from vla_accel.measure.statistics import fits


@dataclass(frozen=True)
class Calibrate(PolicySource):
    """Measure the largest inputs of the FP8 products with NVIDIA ModelOpt and store them in the checkpoint's folder."""

    config: Annotated[str | None, Argument("CONFIG")] = None
    """A YAML or JSON file with settings that the checkpoint lacks: preset, tokenizer, embodiment."""
    observations: Path | None = None
    """Observations that vla_accel.measure.recording.save_observations wrote; required."""
    output: OutputFolder = None
    """Folder for the scales, created if needed. Default: the checkpoint's, or its LoRA adapter's."""
    count: Count = 256
    """Maximum number of observations, spread over the file."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""


def main(options: Calibrate, words: list[str]) -> int:
    """Calibrate and write; the exit status."""
    from vla_accel.families.bench import bench_card
    from vla_accel.families.loading import load
    from vla_accel.machine import resolve_device
    from vla_accel.measure.systems import load_modelopt

    if options.observations is None:
        raise ConfigError(f"observations: expected --observations FILE, {RECORDED}, got none")
    load_modelopt()  # an error before the checkpoint is loaded
    recorded = load_observations(options.observations, options.count)
    settings = options.settings()
    device = resolve_device(options.device or settings.device)
    checkpoint = load(options.checkpoint or "demo", settings, device=device, whole=False)
    folder = options.output or checkpoint.kept
    assert folder is not None
    require_writable_folder(folder, "output")
    with named(options.observations):
        prepared = [checkpoint.processor.prepare(o) for o in recorded]
        fit = fits(checkpoint.processor, recorded, prepared)
    for line in (line for one in fit if one.rows for line in one.lines()):
        say(line)
    say(f"calibrating on {len(prepared)} observations")
    scales = bench_card(checkpoint.family).calibrate(checkpoint.model, prepared, options.observations.name)
    path = scales.save(folder)
    largest = max(scales.amax, key=scales.amax.__getitem__)
    print(f"{path}: {len(scales.amax)} products, {scales.observations} observations; largest input "
          f"{scales.amax[largest]:.1f} at {largest}")  # fmt: skip
    return 0
