"""`vla-accel tune CHECKPOINT`: the fastest configuration on this machine that loses nothing, with the evidence."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vla_accel.cli.asked.policies import Tune
from vla_accel.cli.common import print_json, print_table, say
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.loading import base_and_lora, family_of
from vla_accel.files import content_hash, without_folders, write_json
from vla_accel.machine import hardware, resolve_device, software
from vla_accel.measure.host import beside
from vla_accel.measure.random_policy import random_observations
from vla_accel.measure.recording import RECORDED, load_observations, named
from vla_accel.policy import OptimizedPolicy
from vla_accel.policy.agreement import PATTERN
from vla_accel.progress import going_on
from vla_accel.report.page import check_path, write
from vla_accel.report.tune import page, times_as_fast, verdict
from vla_accel.transforms.robots import load_preset
from vla_accel.tune import candidates
from vla_accel.tune.journal import Journal
from vla_accel.tune.measuring import PolicyBench
from vla_accel.tune.noninferiority import Rule
from vla_accel.tune.outcome import outcome, write_config
from vla_accel.tune.search import Episodes, Search, Settings

MOST_KEPT = 3
"""Products of a component that are kept at once, at most: a layer has four."""

OF_EPISODES = ("margin", "confidence", "finalists", "episodes", "workers", "no_films")
"""Options of gate two, which only a benchmark has."""
QUICK = {"count": 8, "draws": 1, "calls": 10}
"""Options that --quick limits, and to what."""

Opener = Callable[..., Episodes]
"""`open(checkpoint, *, suite, tasks, device, workers, seed, folder, films)`: a benchmark's `Episodes`. `suite`, `tasks`
and `device` may be None; `folder` is for files of its own; `films`: whether episodes are filmed."""


def main(chosen: Tune, words: list[str]) -> int:
    """Search and write; 0 once something is chosen."""
    began = time.perf_counter()
    report = chosen.report or chosen.output / "report.html"
    check_path(report)
    rule = Rule(chosen.margin / 100, (1 - chosen.confidence / 100) / 2)
    # Starting simulators takes seconds: between two looks each plays several episodes.
    settings = Settings(rule, chosen.finalists, chosen.episodes, block=max(20, 8 * chosen.workers))
    if chosen.allow_steps and chosen.benchmark is None:
        raise ConfigError("allow-steps: expected --benchmark beside it: another number of steps is judged by success")
    if chosen.benchmark is None and (alone := chosen.suite or chosen.tasks):
        raise ConfigError(f"suite, tasks: expected --benchmark beside them, got {alone} alone")
    _refuse_unread(chosen)
    if chosen.observations is None and not chosen.quick:
        raise ConfigError(f"observations: expected --observations FILE, {RECORDED}, or --quick, got none")
    opener = None if chosen.benchmark is None else find_benchmark(chosen.benchmark)
    checkpoint, base = chosen.checkpoint or "demo", _base(chosen)
    parts = family_of(base_and_lora(checkpoint, base.checkpoint.lora)[0]).parts
    device = resolve_device(base.device)
    # Before a journal is begun, or thrown away: a suite or tasks that are not there are said here.
    episodes = None if opener is None else opener(
        checkpoint, suite=chosen.suite, tasks=chosen.tasks, device=chosen.device, workers=chosen.workers,
        seed=chosen.seed, folder=chosen.output / "episodes", films=not chosen.no_films,
    )  # fmt: skip
    observations, recorded = _observations(chosen, checkpoint, base)
    quick = {name: min(most, getattr(chosen, name)) for name, most in QUICK.items()} if chosen.quick else {}
    chosen = replace(chosen, **quick)
    reference = candidates.reference(base, parts)
    bench = PolicyBench(checkpoint, reference, observations[: chosen.count], draws=chosen.draws, calls=chosen.calls,
                        seed=chosen.seed)  # fmt: skip
    about = _about(chosen, checkpoint, base, recorded)
    path = chosen.output / "journal.jsonl"
    if chosen.overwrite:
        path.unlink(missing_ok=True)
    with Journal(path, about) as journal:
        if known := len(journal.found):
            say(f"continuing {path}: {known} measurements are there; --overwrite starts afresh")
        first, left_out = candidates.engines(base, parts, device)
        stages = [
            first,
            candidates.precisions(bench.lower),
            *(candidates.products(bench.lower, count) for count in range(1, MOST_KEPT + 1)),
            candidates.together(parts),
            candidates.attentions(parts),
        ]
        if chosen.allow_steps:
            stages.append(candidates.steps(chosen.allow_steps))
        try:
            with Teller() as teller, named(chosen.observations):
                search = Search(reference, stages, bench, journal, settings, episodes, teller)
                best = search.run()
        except KeyboardInterrupt:
            print("vla-accel tune: interrupted; the same command continues from the journal", file=sys.stderr)
            return 130
    told = {
        "command": ["vla-accel", "tune", *without_folders(words)],
        "hardware": hardware(device),
        "software": software(),
        "checkpoint": checkpoint,
        "settings": {**about, "benchmark": None if episodes is None else episodes.name},
        "seconds": round(time.perf_counter() - began, 1),
        "measured_before": known,
    }
    result = outcome(search, best, left_out, told)
    where = told["hardware"].get("gpu") or told["hardware"]["cpu"]
    comment = f"Made by `{' '.join(told['command'])}`\non {where}: {result['why']}."
    tuned = write_config(best.candidate.config, chosen.output / "tuned.yaml", comment)
    write_json(chosen.output / "tune.json", result)
    write(page(result), report)
    _print(result)
    say(f"configuration: {tuned}, as in `vla-accel serve {checkpoint} --config {tuned}`")
    say(f"report: {report}")
    said = {"chosen": result["chosen"], "why": result["why"], "times_as_fast": result["times_as_fast"]}
    print_json({**said, "config": str(tuned), "output": str(chosen.output / "tune.json"), "report": str(report)})
    return 0


def find_benchmark(name: str) -> Opener:
    """The function that opens a benchmark's episodes: of `eval.NAME.tune`, or MODULE:FUNCTION. Found from the current
    folder, too, as `python -m` finds it. Raises ConfigError where it is not there."""
    module, _, function = (name if ":" in name else f"eval.{name}.tune:episodes").partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if not all(word.isidentifier() for word in (*module.split("."), function)):
            raise ModuleNotFoundError("it is no name of Python's")
        found = getattr(importlib.import_module(module), function)
        asked = ("suite", "tasks", "device", "workers", "seed", "folder", "films")
        inspect.signature(found).bind("checkpoint", **dict.fromkeys(asked))
        return found
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"benchmark: expected libero or MODULE:FUNCTION, got {name!r} ({error}); the benchmarks lie in eval/ of "
            "the repository and are no part of the installed package: run this in the repository's folder"
        ) from error


class Teller:
    """Says on standard error what happens: a bar with the time left on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        title = TextColumn("{task.description}", markup=False)
        columns = (title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)
        self._began = time.perf_counter()

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, text: str) -> None:
        self._bar.start()  # not before: what refuses to begin has no bar
        self._bar.update(self._task, description=text, completed=done, total=total)
        if self._bar.disable:
            spent = time.perf_counter() - self._began
            # What a journal knew took no time, and tells none.
            left = round(spent / done * (total - done)) if done else 0
            told = f", about {left} s left" if left else ""
            print(f"[{done}/{total}] {text} ({spent:.0f} s so far{told})", file=sys.stderr, flush=True)


def _refuse_unread(chosen: Tune) -> None:
    """Raise ConfigError for options that others leave without effect."""
    usual = {field.name: field.default for field in dataclasses.fields(chosen)}
    changed = {name: value for name, value in vars(chosen).items() if value != usual[name]}
    if chosen.benchmark is None and (alone := [name for name in OF_EPISODES if name in changed]):
        name = alone[0]
        raise ConfigError(f"{name.replace('_', '-')}: expected --benchmark with it, got {changed[name]} alone")
    for name, most in QUICK.items() if chosen.quick else ():
        if name in changed and changed[name] > most:
            raise ConfigError(f"{name}: expected at most {most} with --quick, got {changed[name]}")


def _base(chosen: Tune) -> PolicyConfig:
    """The configuration without engines: what is not searched."""
    given = chosen.settings().with_specs({})
    told = {"device": chosen.device, "num_steps": chosen.num_steps}
    return replace(given, precision="auto", **{name: value for name, value in told.items() if value is not None})


def _observations(chosen: Tune, checkpoint: str, base: PolicyConfig) -> tuple[list[Any], str | None]:
    """The observations of gate one, and the name of their file; random ones are said aloud."""
    if chosen.observations is not None:
        return load_observations(chosen.observations, chosen.count), content_hash(chosen.observations)
    print("warning: gate one judges on random observations; recorded ones say more (--observations)", file=sys.stderr)
    with going_on(f"loading {checkpoint}", say):
        policy = OptimizedPolicy.from_pretrained(checkpoint, replace(base, num_steps=1))
    return random_observations(policy, min(8, chosen.count), seed=chosen.seed), None


def _about(chosen: Tune, checkpoint: str, base: PolicyConfig, recorded: str | None) -> dict[str, Any]:
    """What decides a measurement: a journal about something else is not continued."""
    folders = zip(("checkpoint", "lora"), base_and_lora(checkpoint, base.checkpoint.lora), strict=True)
    # Kept reports decide nothing: no candidate has the engine auto.
    files = {
        what: {str(f.relative_to(folder)): content_hash(f)
               for f in sorted((*folder.iterdir(), *folder.glob("assets/**/*")))
               if f.suffix in (".safetensors", ".json") and not f.match(PATTERN)}
        for what, folder in folders if folder is not None
    }  # fmt: skip
    return {
        **files,
        "base": dataclasses.asdict(base),
        "robot": None if base.preset is None else dataclasses.asdict(load_preset(base.preset)),
        "observations": recorded,
        "hardware": hardware(resolve_device(base.device)),
        "software": software(),
        **{n: getattr(chosen, n) for n in ("count", "draws", "calls", "seed", "benchmark", "suite", "tasks")},
    }


def _print(result: dict[str, Any]) -> None:
    body = []
    for row in result["tried"]:
        agreement, latency, success = row["agreement"], row["latency"], row["success"]
        body.append([
            row["name"],
            f"{latency['median_ms']:.2f}" if latency else "-",
            f"{agreement['cosine']:.6f}" if agreement else "-",
            f"{success['lost']} / {success['gained']} of {success['pairs']}" if success else "-",
            verdict(row),
        ])  # fmt: skip
    print_table("what was tried", ["configuration", "median ms", "cosine", "lost / gained", "verdict"], body)
    # Candidates are timed one after the other: load that came or went in between moves their order.
    busy = (row["latency"].get("others_busy") or 0.0 for row in result["tried"] if row["latency"])
    if told := beside({"cores": os.cpu_count(), "others_busy": max(busy, default=0.0)}):
        say(f"warning: {told}, and another candidate may be the fastest")
    print(f"{result['chosen']}: {times_as_fast(result)}; {result['why']}")
