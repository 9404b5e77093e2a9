"""`vla-accel convert`: an openpi JAX checkpoint to safetensors that this package and openpi's PyTorch code load, or a
checkpoint of starVLA or openvla-oft to a folder that this package loads."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vla_accel.checkpoints.orbax import OrbaxParameters, check_folder
from vla_accel.cli.common import print_json, say
from vla_accel.cli.options import Argument, Folder, Number, Within, Written
from vla_accel.errors import ConfigError, unknown
from vla_accel.progress import shown
from vla_accel.transforms.normalisation import load_statistics, statistics_by_asset
from vla_accel.transforms.robots import OPENPI_CONFIGS, PRESETS, OpenpiConfig, of_another


@dataclass(frozen=True)
class Convert:
    """Convert an openpi JAX checkpoint (orbax) to a folder with model.safetensors, config.json and the statistics, on
    the CPU; needs pip install 'vla_accel[jax]'. conversion.json in the output lists every parameter.

    Or convert a starVLA checkpoint, RUN/checkpoints/NAME.pt or NAME.safetensors, to a folder with its weights, settings
    and statistics; or the pickles in the folder of an openvla-oft run. OUTPUT may then be that folder."""

    checkpoint: Annotated[Path, Argument("CHECKPOINT", positional=True)]
    """The checkpoint's folder: the one that holds params/ and assets/, or params/ itself; or starVLA's file; or
    openvla-oft's folder."""
    output: Annotated[Path, Argument("OUTPUT", positional=True), Written(folder=True)]
    """Folder to write, created if needed."""
    config: str | None = None
    """openpi's training config of the checkpoint (pi05_libero, pi0_droid, …): fixes horizon, preset and prompt."""
    action_horizon: Number = None
    """Actions of a chunk, without --config."""
    precision: Literal["mixed", "bfloat16", "float32"] = "mixed"
    """mixed: float32 where openpi computes in float32, bfloat16 for the rest. Others: one type for all weights."""
    assets: Folder = None
    """Folder of the statistics, if it is not in the folder of params/."""
    lora_scale: Annotated[float, Within(0, above=True)] = 1.0
    """alpha / rank of the attention's LoRA adapters, which are merged; openpi's variants have alpha = rank."""
    unused_head: bool = False
    """Also write the expert's unused output head, which openpi's own loader requires."""


def main(options: Convert, words: list[str]) -> int:
    """Convert and report; the exit status."""
    if options.checkpoint.suffix in (".pt", ".safetensors"):
        return _starvla(options)
    from vla_accel.families.openvla_oft import convert as openvla_oft

    if openvla_oft.is_run(options.checkpoint):
        return _converted("OpenVLA-OFT", options, openvla_oft.convert)
    from vla_accel.families.pi0.convert import convert

    if options.config is not None and options.config not in OPENPI_CONFIGS:
        raise ConfigError(unknown("config", options.config, OPENPI_CONFIGS))
    if options.assets is not None and not options.assets.is_dir():
        raise ConfigError(f"assets: expected a folder with <asset_id>/norm_stats.json, got {str(options.assets)!r}")
    check_folder(options.checkpoint)
    known = OPENPI_CONFIGS[options.config] if options.config is not None else None
    horizon = options.action_horizon or (known.action_horizon if known else None)
    if horizon is None:
        raise ConfigError("action-horizon: expected it or --config, because no parameter shows it, got neither")
    if known is not None and horizon != known.action_horizon:
        raise ConfigError(
            f"--action-horizon {horizon} and --config {options.config} ({known.action_horizon}) contradict"
        )

    started = time.perf_counter()
    parameters = OrbaxParameters(options.checkpoint)
    assets = options.assets or parameters.folder.parent / "assets"
    if known is not None and (wrong := contradiction(options.config or "", known, parameters, assets)):
        raise ConfigError(f"config: {options.config} is of another checkpoint than {options.checkpoint}: {wrong}")
    with shown("converting") as advance:
        report = convert(
            parameters,
            options.output,
            action_horizon=horizon,
            precision=options.precision,
            source=str(options.checkpoint),
            assets=assets,
            discrete_state_input=known.discrete_state_input if known else None,
            preset=known.preset if known else None,
            unused_head=options.unused_head,
            lora_scale=options.lora_scale,
            advance=lambda name: advance(1, len(parameters.shapes)),
        )
    tensors, folder = len(report["rows"]), shlex.quote(str(options.output))
    made = f"{report['kind']}, {report['parameters']:,} parameters in {tensors} tensors"
    print(f"{options.output}: {made}; conversion.json in it lists the parameters; vla-accel serve {folder}")
    if not statistics_by_asset(options.output / "assets"):
        say(
            "no assets/<asset_id>/norm_stats.json came with the checkpoint: name its folder with --assets, or put it "
            "there before loading"
        )
    line = {
        **{name: report[name] for name in ("schema", "output", "kind", "parameters")},
        "tensors": tensors,
        "adapters": report["adapters"],
        "bytes": (options.output / "model.safetensors").stat().st_size,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print_json(line)
    return 0


def _starvla(options: Convert) -> int:
    """Convert a checkpoint of starVLA and report; the exit status."""
    from vla_accel.families.starvla.convert import convert

    if not options.checkpoint.is_file():
        raise ConfigError(f"checkpoint: expected a file, got {str(options.checkpoint)!r}")
    return _converted("starVLA", options, convert)


def _converted(name: str, options: Convert, convert: Callable[[Path, Path], dict[str, Any]]) -> int:
    """Convert a checkpoint of a project whose conversion has no options, and report; the exit status."""
    usual = Convert(options.checkpoint, options.output)
    if other := [field for field in vars(usual) if getattr(options, field) != getattr(usual, field)]:
        raise ConfigError(f"{other[0].replace('_', '-')}: expected no such option for a checkpoint of {name}")
    started = time.perf_counter()
    report = convert(options.checkpoint, options.output)
    print(f"{options.output}: {name}, {report['parameters']:,} parameters in {report['tensors']} tensors")
    print_json({**report, "seconds": round(time.perf_counter() - started, 1)})
    return 0


def contradiction(name: str, known: OpenpiConfig, parameters: Any, assets: Path) -> str | None:
    """Return how the weights or statistics contradict openpi's config `name`, or None. Statistics under a name that
    openpi does not use may belong to any robot with as many dimensions."""
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
        numbers = statistics[what]
        found = next((len(v) for v in (numbers.mean, numbers.q01) if v is not None), count)
        if found < count:
            return f"expected at least {count} numbers of {what}, found {found} in {file}"
    return None
