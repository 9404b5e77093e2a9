"""`vla-accel convert`: an openpi JAX checkpoint to safetensors that this package and openpi's PyTorch code load."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from vla_accel.checkpoints.orbax import OrbaxParameters, check_folder
from vla_accel.cli.asked.policies import Convert
from vla_accel.cli.common import print_json, say
from vla_accel.errors import ConfigError, unknown
from vla_accel.families.pi0.convert import Parameters, convert
from vla_accel.progress import shown
from vla_accel.transforms.normalisation import load_statistics, statistics_by_asset
from vla_accel.transforms.robots import OPENPI_CONFIGS, PRESETS, OpenpiConfig, of_another


def main(asked: Convert, words: list[str]) -> int:
    """Convert, say what came of it and print the JSON line. Raises VlaAccelError for anything wrong."""
    if asked.config is not None and asked.config not in OPENPI_CONFIGS:
        raise ConfigError(unknown("config", asked.config, OPENPI_CONFIGS))
    if asked.assets is not None and not asked.assets.is_dir():
        raise ConfigError(f"assets: expected a folder with <asset_id>/norm_stats.json, got {str(asked.assets)!r}")
    check_folder(asked.checkpoint)
    known = OPENPI_CONFIGS[asked.config] if asked.config is not None else None
    horizon = asked.action_horizon or (known.action_horizon if known else None)
    if horizon is None:
        raise ConfigError("action-horizon: expected it, or --config, as no parameter shows it; got neither")
    if known is not None and horizon != known.action_horizon:
        raise ConfigError(f"--action-horizon {horizon} and --config {asked.config} ({known.action_horizon}) contradict")

    started = time.perf_counter()
    parameters = OrbaxParameters(asked.checkpoint)
    assets = asked.assets or parameters.folder.parent / "assets"
    if known is not None and (wrong := contradiction(asked.config or "", known, parameters, assets)):
        raise ConfigError(f"config: {asked.config} is of another checkpoint than {asked.checkpoint}: {wrong}")
    with shown("converting") as advance:
        report = convert(
            parameters,
            asked.output,
            action_horizon=horizon,
            precision=asked.precision,
            source=str(asked.checkpoint),
            assets=assets,
            discrete_state_input=known.discrete_state_input if known else None,
            preset=known.preset if known else None,
            unused_head=asked.unused_head,
            lora_scale=asked.lora_scale,
            advance=lambda name: advance(1, len(parameters.shapes)),
        )
    made, folder = f"{report.parameters:,} parameters in {len(report.rows)} tensors", shlex.quote(str(asked.output))
    print(f"{asked.output}: {report.kind}, {made}; conversion.json there says which is which; vla-accel serve {folder}")
    if not statistics_by_asset(asked.output / "assets"):
        say(
            "no assets/<asset_id>/norm_stats.json came with the checkpoint: name its folder with --assets, or put it "
            "there before loading"
        )
    line = {
        "schema": report.schema,
        "output": str(asked.output),
        "kind": report.kind,
        "parameters": report.parameters,
        "tensors": len(report.rows),
        "adapters": report.adapters,
        "bytes": (asked.output / "model.safetensors").stat().st_size,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print_json(line)
    return 0


def contradiction(name: str, known: OpenpiConfig, parameters: Parameters, assets: Path) -> str | None:
    """What in the weights or the statistics says that they are not of openpi's config `name`; None where nothing does:
    statistics under a name that openpi does not use may be of any robot with so many numbers."""
    kind, stored = name.partition("_")[0], "pi05" if "time_mlp_in/kernel" in parameters.shapes else "pi0"
    if kind != stored:
        return f"expected weights of {kind}, found {stored}"
    robot, files = PRESETS[known.preset], statistics_by_asset(assets)
    if files and all(of_another(known.preset, asset) for asset in files):
        return f"expected statistics of {known.preset}, found assets/{', assets/'.join(files)}"
    if len(files) != 1:  # none, or a base checkpoint's, of several robots
        return None
    (file,) = files.values()
    statistics = load_statistics(file)
    for what, count in (("state", robot.state_dim), ("actions", robot.action_dim)):
        told = statistics[what]
        found = next((len(v) for v in (told.mean, told.q01) if v is not None), count)
        if found < count:
            return f"expected at least {count} numbers of {what}, found {found} in {file}"
    return None
