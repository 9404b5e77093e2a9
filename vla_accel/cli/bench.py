"""`vla-accel bench`: time configurations of a checkpoint, or random weights of a published size."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np

from vla_accel.cli.common import print_json, print_table, say, write_if
from vla_accel.cli.options import Argument, Checkpoint, Count, Folder, Number, OutputFile, Within, schedule_of
from vla_accel.config import AUTO, PolicyConfig, load_config
from vla_accel.errors import ConfigError
from vla_accel.files import without_folders
from vla_accel.measure.host import busy_host
from vla_accel.measure.start import starts
from vla_accel.progress import going_on
from vla_accel.report.bench import console_tables, page
from vla_accel.report.page import check_path, write


@dataclass(frozen=True)
class Bench:
    """Time whole calls of a checkpoint's policy in several configurations. Without a checkpoint, time random weights of
    --model's published size (default: pi05) and the original project's own code."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name, or owner/name[@revision][/folder] on the hub."""
    config: tuple[str, ...] = (AUTO,)
    """With a checkpoint: the configurations to time in addition to eager, as names of shipped ones or files."""
    model: str | None = None
    """Random weights of a model family's published size: pi05, pi0, pi0_fast, smolvla, vla_jepa, evo1, molmoact2,
    starvla_groot, starvla_pi, starvla_oft, openvla_oft, groot (N1.7), groot_n16, groot_n15, act, diffusion_policy,
    multi_task_dit, fastwam or xvla."""
    systems: tuple[str, ...] = ()
    """With random weights: eager; native-bf16, native-fp8 and -int8, each also with -vision; native-int8-denoise,
    native-fp8-int8-denoise (pi0_fast: native-fp8, native-fp8-decode, native-int8-decode); portable- instead of native-
    runs without Hopper's kernels, triton- also without the persistent denoise kernel; openpi-eager, -compile,
    -max-autotune (pi0, pi05); oft-eager (openvla_oft); lerobot-eager, and -compile or -graph, of lerobot's models. An
    unknown name lists the model's own. Default: eager, native without INT8, and the other project's eager code."""
    realtime_vla: Folder = None
    """With random weights: a checkout of realtime-vla, whose code is also timed, at ten steps."""
    prompt_tokens: Number = None
    """Length of the prompt in tokens. Default: about 20."""
    steps: Annotated[tuple[int, ...], Within(1)] = ()
    """Denoising steps (pi0_fast: tokens). Default: those of the configurations, else a checkpoint's own number and the
    family's (10,3,1; GR00T: 4,2,1; pi0_fast: 64; diffusion_policy and multi_task_dit: 100,10). Systems that
    torch.compile compiles are timed at the first only."""
    schedule: Annotated[str | None, Argument("SCHEDULE")] = None
    """Flow times of the steps of this package's systems: uniform, cubic, or the times themselves from 1 to 0, such as
    1,0.3,0.01,0 for three steps. Default: those of the configurations, else uniform."""
    camera: Annotated[str | None, Argument("HEIGHTxWIDTH")] = None
    """Size of the camera images, such as 480x640, for this package's systems. Default: the model's size."""
    views: Number = None
    """With random weights: images of a call. Default: the family's, 2 for π0.5 and 3 for π0."""
    horizon: Number = None
    """With random weights: actions of a chunk. Default: the family's, 10 for π0.5 and 50 for π0."""
    batch: Annotated[tuple[int, ...], Within(1)] = ()
    """Also measure the throughput of these batch sizes, at the first of --steps, such as 1,2,4,8,16."""
    hz: Annotated[float | None, Argument("HZ"), Within(0, above=True)] = None
    """Also time calls at this rate, with the GPU's power."""
    starts: bool = False
    """Also time two starts of each system of this package up to the first action, without and with filled caches."""
    calls: Count = 100
    """Timed calls of each system."""
    profile: bool = False
    """Also list the kernels of one call of each system of this package: duration, overlap, idle time before it."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configurations'."""
    output: OutputFile = None
    """JSON file."""
    report: OutputFile = None
    """HTML file that opens offline: figures, tables, engines, conditions."""


def main(options: Bench, words: list[str]) -> int:
    """Time the systems and report; the exit status."""
    from vla_accel.families.bench import bench_card
    from vla_accel.machine import hardware, resolve_device, software
    from vla_accel.measure.bench import SCHEMA, add_speedups, run
    from vla_accel.measure.paced import paced
    from vla_accel.measure.roofline import add_batch_floors, measure_ceilings, rates, steps_timed
    from vla_accel.measure.systems import (
        Factory,
        camera_size,
        choose_systems,
        free,
        make_baselines,
        observer,
        profile,
        throughput,
        timed_once,
        without_scales,
    )

    if options.report is not None:
        check_path(options.report)
    configs = [load_config(name) for name in options.config] if options.checkpoint is not None else []
    device = resolve_device(options.device or _device(configs))
    if options.profile and device.type != "cuda":
        raise ConfigError(f"profile: expected a GPU, whose kernels it lists, got {device}")
    ceilings = measure_ceilings(device) if device.type == "cuda" else None
    factory = make_factory(options, str(device), ceilings)
    family, card, random = factory.family, bench_card(factory.family), isinstance(factory, Factory)
    named = tuple(dict.fromkeys(one.num_steps for one in factory.configs.values() if one.num_steps is not None))
    sweep = options.steps or named or factory.sweep
    for config, steps in itertools.product(factory.configs.values(), sweep):
        config.with_steps(steps)  # a list of times has one number of steps
    camera = camera_size(options.camera)
    systems = choose_systems(factory, options.systems, fitted=camera is None)
    unknown = [name for name in systems if name not in factory.names]
    if unknown:
        raise ConfigError(f"systems: expected some of {', '.join(factory.names)}, got {', '.join(unknown)}")
    if device.type == "cpu" and random:
        cost = "takes minutes to load and a call many seconds; for a quick look: vla-accel bench demo"
        say(f"no GPU: {family.name} at its published size {cost}")
    # Before anything is built.
    uncalibrated = without_scales(factory, systems, say, requested=bool(options.systems))
    systems = tuple(name for name in systems if name not in uncalibrated)
    say(f"timing {', '.join(systems)}")
    once = timed_once(factory, systems, sweep)
    others = {n: once[n]["steps"] if n in once else sweep[0] for n in systems if n in factory.baselines}
    ready, left_out = make_baselines(factory, others, say)
    left_out = {**uncalibrated, **left_out}
    names = [name for name in systems if name not in left_out]
    for name, reason in once.items():
        say(f"{name}: timed at {reason['steps']} steps only: {reason['why']}")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "complete": False,
        "command": " ".join(("vla-accel", "bench", *without_folders(words))),
        "hardware": hardware(device),
        "software": software(),
        "model": {},
        "ceilings": None if ceilings is None else ceilings.__dict__,
        "prompt_tokens": options.prompt_tokens,
        "camera": camera,
        "host": {"cores": os.cpu_count(), "others_busy": None},
        "left_out": left_out,
        "timed_once": once,
        "parts": family.parts,
        "rows": [],
        "throughput": [],
    }
    host, rows = report["host"], report["rows"]

    def record_load(cores: float | None) -> None:
        if cores is not None:
            host["others_busy"] = max(round(cores, 1), host["others_busy"] or 0.0)

    for steps in sweep:
        made = []
        for name in names:
            if name not in once or once[name]["steps"] == steps:
                with going_on(f"preparing {name}, {steps} step{'s' * (steps > 1)}", say):
                    made.append(ready.pop(name, None) or factory.make(name, steps))
        processor = factory.processor
        if processor is None:
            raise ConfigError("systems: expected at least one of this package's own in addition to the others")
        report["model"] = factory.about()
        observe = observer(family, processor, options.prompt_tokens, camera)
        found = run(made, observe, calls=options.calls, progress=say, heard=record_load)
        for system, row in zip(made, found, strict=True):
            if options.hz:
                with going_on(f"calls of {system.name} at {options.hz:g} Hz", say):
                    example = partial(observe, np.random.default_rng(0))
                    row["paced"] = paced(system, example, options.hz, options.calls, device)
            if options.starts and system.name in factory.configs and steps == sweep[0]:
                settings = replace(factory.configs[system.name], num_steps=steps, device=str(device))
                with going_on(f"two starts of {system.name}", say):
                    row["start"] = starts(settings, factory.source())
            if "work" in row:
                row |= rates(row)
            inside, last = steps_timed(row), family.parts[-1]
            if random and last in row["parts_ms"] and inside:  # with random weights no token ends the steps early
                row["step_ms"] = row["parts_ms"][last] / inside
        rows += found
        free()
        add_speedups(rows, next((n for n in names if n in card.baselines), "eager"))
        write_if(options.output, report)  # an interrupted run keeps its rows
    ours = [n for n in names if n in factory.configs]
    observer_of = partial(observer, tokens=options.prompt_tokens, camera=camera)
    report["throughput"] = throughput(factory, ours, sweep[0], options.batch, options.calls, observer_of, say)
    if ceilings is not None:
        add_batch_floors(report["throughput"], rows, ceilings)
    if options.profile:
        write_if(options.output, report)
        report["kernels"] = {n: profile(factory, n, sweep[0]) for n in ours}
    report["complete"] = True
    for table in console_tables(report):
        print_table(*table)
    if warning := busy_host(host):
        say(warning)
    write_if(options.output, report)
    if options.report is not None:
        say(f"report: {write(page(report), options.report)}")
    print_json(report)
    return 0


def _device(configs: Sequence[PolicyConfig]) -> str:
    """The device of the configurations. Raises ConfigError if they name several."""
    named = [*dict.fromkeys(config.device for config in configs if config.device != "auto")]
    if len(named) > 1:
        raise ConfigError(f"device: expected one of all configurations, or --device, got {', '.join(named)}")
    return named[0] if named else "auto"


def make_factory(options: Bench, device: str, ceilings: Any) -> Any:
    """The factory of the systems. Raises ConfigError for options of the other one."""
    from vla_accel.families.bench import bench_card
    from vla_accel.families.family import family_named
    from vla_accel.measure.systems import CheckpointFactory, Factory

    shared: dict[str, Any] = {"device": device, "ceilings": ceilings, "tokens": options.prompt_tokens}
    if options.checkpoint is not None:
        if options.systems:
            got = ",".join(options.systems)
            raise ConfigError(f"systems: expected none with checkpoint {options.checkpoint}; use --config, got {got}")
        for name in ("model", "views", "horizon", "realtime_vla"):
            if value := getattr(options, name):
                raise ConfigError(f"{name}: expected none with checkpoint {options.checkpoint}, got {value}")
        names = tuple(dict.fromkeys((*options.config, "eager")))
        return _placed(options, CheckpointFactory(options.checkpoint, names, **shared))
    if options.config != (AUTO,):
        got = ",".join(options.config)
        raise ConfigError(f"config: expected a checkpoint with it; random weights have --systems, got {got}")
    family = family_named(options.model or "pi05")
    card = bench_card(family)
    views, horizon = options.views or card.views, options.horizon or card.published().action_horizon
    return _placed(options, Factory(family, views=views, horizon=horizon, checkout=options.realtime_vla, **shared))


def _placed(options: Bench, factory: Any) -> Any:
    """Place the steps of a factory's configurations."""
    schedule = schedule_of(options.schedule)
    factory.configs = {name: config.with_steps(schedule=schedule) for name, config in factory.configs.items()}
    return factory
