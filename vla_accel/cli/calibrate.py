"""`vla-accel calibrate CHECKPOINT --observations FILE`: FP8 scales of a checkpoint from recorded observations."""

from __future__ import annotations

from vla_accel.cli.asked.policies import Calibrate
from vla_accel.cli.common import say
from vla_accel.errors import ConfigError
from vla_accel.families.loading import load
from vla_accel.files import require_writable_folder
from vla_accel.machine import resolve_device
from vla_accel.measure.recording import RECORDED, load_observations, named
from vla_accel.measure.statistics import fits


def main(chosen: Calibrate, words: list[str]) -> int:
    """Calibrate and write; the exit status."""
    if chosen.observations is None:
        raise ConfigError(f"observations: expected --observations FILE, {RECORDED}, got none")
    recorded = load_observations(chosen.observations, chosen.count)
    settings = chosen.settings()
    device = resolve_device(chosen.device or settings.device)
    checkpoint = load(chosen.checkpoint or "demo", settings, device=device, whole=False)
    folder = chosen.output or checkpoint.kept
    assert folder is not None
    require_writable_folder(folder, "output")
    with named(chosen.observations):
        prepared = [checkpoint.processor.prepare(o) for o in recorded]
        fit = fits(checkpoint.processor, recorded, prepared)
    for line in (line for one in fit if one.rows for line in one.lines()):
        say(line)
    say(f"calibrating on {len(prepared)} observations")
    scales = checkpoint.family.calibrate(checkpoint.model, prepared, chosen.observations.name)
    path = scales.save(folder)
    largest = max(scales.amax, key=scales.amax.__getitem__)
    print(f"{path}: {len(scales.amax)} products, {scales.observations} observations; largest input "
          f"{scales.amax[largest]:.1f} at {largest}")  # fmt: skip
    return 0
