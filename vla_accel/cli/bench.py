"""`vla-accel bench`: a checkpoint's configurations beside eager, or random weights of a published size beside openpi's
or lerobot's code, in turns; a table and one JSON line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from vla_accel.cli.asked.policies import Bench
from vla_accel.cli.common import print_json, print_table, say, write_asked
from vla_accel.config import AUTO, PolicyConfig, load_config
from vla_accel.errors import ConfigError, DependencyError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import Family, family_named
from vla_accel.files import without_folders
from vla_accel.machine import hardware, resolve_device, software
from vla_accel.measure.bench import SCHEMA, System, add_speedups, run
from vla_accel.measure.host import beside
from vla_accel.measure.overlap import recorded
from vla_accel.measure.paced import paced
from vla_accel.measure.roofline import Ceilings, add_batch_floors, measure_ceilings, rates, steps_timed
from vla_accel.measure.start import starts
from vla_accel.measure.systems import (
    REALTIME_VLA_STEPS,
    CheckpointFactory,
    Factory,
    camera_size,
    free,
    observer,
    system_name,
)
from vla_accel.nn.calibration import load_modelopt
from vla_accel.progress import going_on
from vla_accel.report.bench import page, ran, tables
from vla_accel.report.page import check_path, write


def main(chosen: Bench, words: list[str]) -> int:
    """Time and report."""
    if chosen.report is not None:
        check_path(chosen.report)
    configs = [load_config(name) for name in chosen.config] if chosen.checkpoint is not None else []
    device = resolve_device(chosen.device or _device(configs))
    if chosen.profile and device.type != "cuda":
        raise ConfigError(f"profile: expected a GPU, whose kernels it tells, got {device}")
    ceilings = measure_ceilings(device) if device.type == "cuda" else None
    factory = _factory(chosen, str(device), ceilings)
    family, card = factory.family, bench_card(factory.family)
    named = tuple(dict.fromkeys(config.num_steps for config in configs if config.num_steps is not None))
    sweep = chosen.steps or named or factory.sweep
    camera = camera_size(chosen.camera)
    systems = _systems(factory, chosen.systems, fitted=camera is None)
    unknown = [name for name in systems if name not in factory.names]
    if unknown:
        raise ConfigError(f"systems: expected some of {', '.join(factory.names)}, got {', '.join(unknown)}")
    if device.type == "cpu" and isinstance(factory, Factory):
        said = "takes minutes to load and a call many seconds; for a quick look: vla-accel bench demo"
        say(f"no GPU: {family.name} at its published size {said}")
    say(f"timing {', '.join(systems)}")
    if isinstance(factory, Factory):
        asked = [factory.configs[name].specs(family.parts) for name in systems if name in factory.configs]
        if any(map(family.needs_scales, asked)):
            load_modelopt()  # where it is missing that is said before anything is built
    once = timed_once(factory, systems, sweep)
    others = [name for name in systems if name in factory.baselines]
    ready, left_out = _baselines(factory, {n: once[n]["steps"] if n in once else sweep[0] for n in others})
    names = [name for name in systems if name not in left_out]
    for name, told in once.items():
        say(f"{name}: timed at {told['steps']} steps alone: {told['why']}")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "complete": False,
        "command": " ".join(("vla-accel", "bench", *without_folders(words))),
        "hardware": hardware(device),
        "software": software(),
        "model": {},
        "ceilings": None if ceilings is None else ceilings.__dict__,
        "prompt_tokens": chosen.prompt_tokens,
        "camera": camera,
        "host": {"cores": os.cpu_count(), "others_busy": None},
        "left_out": left_out,
        "timed_once": once,
        "parts": family.parts,
        "rows": [],
        "throughput": [],
    }
    rows: list[dict[str, Any]] = report["rows"]
    for steps in sweep:
        made = []
        for name in names:
            if name not in once or once[name]["steps"] == steps:
                with going_on(f"preparing {name}, {steps} step{'s' * (steps > 1)}", say):
                    made.append(ready.pop(name, None) or factory.make(name, steps))
        processor = factory.processor
        if processor is None:
            raise ConfigError("systems: expected at least one of this package's own beside the others")
        report["model"] = factory.about()
        observe = observer(family, processor, chosen.prompt_tokens, camera)
        found = run(made, observe, calls=chosen.calls, progress=say, heard=partial(_heard, report["host"]))
        for system, row in zip(made, found, strict=True):
            if chosen.hz:
                rng = np.random.default_rng(0)
                with going_on(f"calls of {system.name} at {chosen.hz:g} Hz", say):
                    row["paced"] = paced(system, partial(observe, rng), chosen.hz, chosen.calls, device)
            if chosen.starts and system.name in factory.configs and steps == sweep[0]:
                settings = replace(factory.configs[system.name], num_steps=steps, device=str(device))
                with going_on(f"two starts of {system.name}", say):
                    row["start"] = starts(settings, factory.source())
            if "work" in row:
                row |= rates(row)
            inside = steps_timed(row)
            if isinstance(factory, Factory) and family.parts[-1] in row["parts_ms"] and inside:
                # Of random weights every step is taken: no token ends them early.
                row["step_ms"] = row["parts_ms"][family.parts[-1]] / inside
        rows += found
        free()
        add_speedups(rows, next((n for n in names if n in card.baselines), "eager"))
        # A run that is cut off leaves the rows that it had.
        write_asked(chosen.output, report)
    ours = [n for n in names if n in factory.configs]
    given = partial(observer, tokens=chosen.prompt_tokens, camera=camera)
    report["throughput"] = _throughput(factory, ours, sweep[0], chosen.batch, chosen.calls, given)
    if ceilings is not None:
        add_batch_floors(report["throughput"], rows, ceilings)
    if chosen.profile:
        write_asked(chosen.output, report)
        report["kernels"] = {n: profile(factory, n, sweep[0]) for n in ours}
    report["complete"] = True
    _print(report)
    if told := beside(report["host"]):
        say(told)
    write_asked(chosen.output, report)
    if chosen.report is not None:
        say(f"report: {write(page(report), chosen.report)}")
    print_json(report)
    return 0


def _heard(host: dict[str, Any], cores: float | None) -> None:
    """Keep the busiest of what a report's rows heard of the machine."""
    if cores is not None:
        host["others_busy"] = max(round(cores, 1), host["others_busy"] or 0.0)


def _device(configs: Sequence[PolicyConfig]) -> str:
    """The device that the configurations name. Raises ConfigError where they name several."""
    named = [*dict.fromkeys(config.device for config in configs if config.device != "auto")]
    if len(named) > 1:
        raise ConfigError(f"device: expected one of all configurations, or --device, got {', '.join(named)}")
    return named[0] if named else "auto"


def _factory(chosen: Bench, device: str, ceilings: Ceilings | None) -> Factory | CheckpointFactory:
    """What makes the systems. Raises ConfigError for options of the other one."""
    if chosen.checkpoint is not None:
        given = {
            "model": chosen.model, "systems": chosen.systems, "views": chosen.views, "horizon": chosen.horizon,
            "realtime_vla": chosen.realtime_vla,
        }  # fmt: skip
        wrong = [name for name, value in given.items() if value]
        if wrong:
            raise ConfigError(f"{wrong[0]}: expected none beside checkpoint {chosen.checkpoint}, got {given[wrong[0]]}")
        configs = dict.fromkeys((*chosen.config, "eager"))
        return CheckpointFactory(
            chosen.checkpoint, tuple(configs), device=device, ceilings=ceilings, tokens=chosen.prompt_tokens
        )
    if chosen.config != (AUTO,):
        given = ",".join(chosen.config)
        raise ConfigError(f"config: expected a checkpoint beside it; random weights have --systems, got {given}")
    family = family_named(chosen.model or "pi05")
    card = bench_card(family)
    views = chosen.views or card.views
    horizon = chosen.horizon or card.published().action_horizon
    return Factory(
        family, views=views, horizon=horizon, device=device, ceilings=ceilings, checkout=chosen.realtime_vla,
        tokens=chosen.prompt_tokens,
    )  # fmt: skip


def _systems(factory: Factory | CheckpointFactory, named: tuple[str, ...], *, fitted: bool) -> tuple[str, ...]:
    """What is timed, those that are named or the quickest first; of the baselines the one that needs no compilation.
    `fitted`: images come in the model's size; only systems of this package fit others. A checkout that was given takes
    its turns whatever else does, with all its systems where none of them is named."""
    if not isinstance(factory, Factory):
        return factory.names
    named = tuple(map(system_name, named))
    if not fitted:
        if others := [name for name in named if name in factory.baselines]:
            raise ConfigError(f"camera: expected systems that fit images themselves, got {', '.join(others)}")
        return named or tuple(dict.fromkeys((*factory.default[1:], "eager")))
    installed = factory.card.baselines
    systems = named or (*factory.default[1:], "eager", *installed[:1])
    of_checkout = factory.baselines[len(installed) :]
    return tuple(dict.fromkeys(systems if {*named} & {*of_checkout} else (*systems, *of_checkout)))


def timed_once(
    factory: Factory | CheckpointFactory, names: Sequence[str], sweep: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Of several numbers of steps the one at which a system is timed, and why, for those that are timed once. Raises
    ConfigError where that one was not asked for."""
    card = bench_card(factory.family)
    found = dict.fromkeys(card.baselines[1:], (sweep[0], "torch.compile takes minutes for each number"))
    found |= dict.fromkeys(card.realtime_vla, (REALTIME_VLA_STEPS, "its kernels are written for so many"))
    asked = {name: {"steps": steps, "why": why} for name, (steps, why) in found.items() if name in names}
    for name, told in asked.items():
        if told["steps"] not in sweep:
            raise ConfigError(f"steps: expected {told['steps']} among them for {name}, got {','.join(map(str, sweep))}")
    return asked if len(sweep) > 1 else {}


def _baselines(
    factory: Factory | CheckpointFactory, names: Mapping[str, int]
) -> tuple[dict[str, System], dict[str, str]]:
    """Systems of other projects by name, each made for its number of steps, and why others are left out."""
    ready: dict[str, System] = {}
    left_out: dict[str, str] = {}
    for name, steps in names.items():
        try:
            ready[name] = factory.make(name, steps)
        except DependencyError as error:
            left_out[name] = str(error)
            say(f"left out: {name}: {error}")
    return ready, left_out


def _throughput(
    factory: Factory | CheckpointFactory, names: list[str], steps: int, batches: Sequence[int], calls: int,
    observer_of: Callable[[Family, Any], Callable[[np.random.Generator], dict[str, Any]]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Observations a second of batched calls of one policy."""
    rows = []
    for name in names:
        policy = factory.policies[name].with_steps(steps)
        observe = observer_of(policy.family, policy.processor)
        for batch in batches:
            rng = np.random.default_rng(batch)
            observations = [observe(rng) for _ in range(batch)]
            system = System(name, lambda _, p=policy, o=observations: p.infer_batch(o)[0], steps)
            row = run([system], lambda _: {}, calls=max(10, calls // 4))[0]
            say(f"{name}: batches of {batch}")
            rows.append({"system": name, "steps": steps, "batch": batch, "median_ms": row["median_ms"],
                         "per_second": 1e3 * batch / row["median_ms"], "parts_ms": row["parts_ms"],
                         "engines": policy.ledger.as_list()})  # fmt: skip
    return rows


def profile(factory: Factory | CheckpointFactory, name: str, steps: int) -> dict[str, Any]:
    """The kernels of one call as it runs (`measure.overlap`); `graph`: whether it replays one."""
    policy = factory.policies[name].with_steps(steps)
    policy.warm_up()
    observation = policy.processor.example()
    found = recorded(lambda: policy.infer(observation))
    return {"steps": steps, "graph": policy.pipelines.newest.captured is not None, **found}


def _print(report: dict[str, Any]) -> None:
    timed = ["system", "steps", "median ms", "p10", "p90", "speed-up"]
    parts_of = report["parts"]
    columns = [*timed, *(name.replace("_", " ") for name in parts_of), "a step", "floor", "of floor", "GB"]
    body = []
    for row in report["rows"]:
        parts, floor, speedup = row["parts_ms"], row["floors_ms"].get("total"), row["speedup"]
        body.append([
            ran(row), str(row["steps"]), f"{row['median_ms']:.2f}", f"{row['p10_ms']:.2f}", f"{row['p90_ms']:.2f}",
            f"{speedup:.1f}×" if speedup else "-",
            *(f"{parts[n]:.2f}" if n in parts else "-" for n in parts_of),
            f"{row['step_ms']:.2f}" if "step_ms" in row else "-",
            f"{floor:.2f}" if floor else "-", f"{100 * row['share_of_floor']:.0f} %" if floor else "-",
            f"{row['memory']['total'] / 1e9:.2f}" if row["memory"] else "-",
        ])  # fmt: skip
    print_table("whole calls, NumPy in to NumPy out", columns, body)
    if report["throughput"]:
        body = [
            [ran(r), str(r["steps"]), str(r["batch"]), f"{r['median_ms']:.2f}", f"{r['per_second']:.0f}",
             *(f"{r['parts_ms'][n]:.2f}" for n in parts_of),
             f"{r['floors_ms']['total']:.2f}" if "floors_ms" in r else "-"]
            for r in report["throughput"]
        ]  # fmt: skip
        header = ["system", "steps", "batch", "median ms", "observations/s"]
        print_table("batched calls", [*header, *(name.replace("_", " ") for name in parts_of), "floor"], body)
    for more in tables(report):
        print_table(*more)
