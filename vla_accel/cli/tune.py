"""`vla-accel tune CHECKPOINT`: find the fastest configuration without regressions on this machine."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vla_accel.cli.common import print_json, print_table, say
from vla_accel.cli.flow import Flow
from vla_accel.cli.options import Argument, Count, OutputFile, PolicySource, Seed, StepOptions, Within, Written
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.files import content_hash, without_folders, write_json
from vla_accel.measure.host import busy_host
from vla_accel.measure.recording import RECORDED, load_observations, named
from vla_accel.progress import going_on
from vla_accel.report.page import check_path, write
from vla_accel.report.tune import page, times_as_fast, tried
from vla_accel.transforms.robots import load_preset
from vla_accel.tune.journal import Journal
from vla_accel.tune.noninferiority import Rule
from vla_accel.tune.search import Episodes, Search, Settings, Stage, outcome, write_config

MOST_KEPT = 3
"""Products of a component that are kept at once, at most: a layer has four."""

OF_EPISODES = ("margin", "confidence", "finalists", "episodes", "workers", "no_films")
"""Options of gate two, which only a benchmark has."""
QUICK = {"count": 8, "draws": 1, "calls": 10}
"""Options that --quick limits, and to what."""

Opener = Callable[..., Episodes]
"""`open(checkpoint, *, suite, tasks, device, workers, seed, folder, films)`: a benchmark's `Episodes`. `suite`, `tasks`
and `device` may be None; `folder` is for files of its own; `films`: whether episodes are filmed."""


@dataclass(frozen=True)
class Tune(StepOptions, PolicySource):
    """Find the fastest configuration of a checkpoint on this machine that agrees with FP32 eager and, with a benchmark,
    succeeds as often. Writes tuned.yaml, tune.json and a report. The same command continues an interrupted search."""

    config: Annotated[str | None, Argument("CONFIG")] = None
    """A shipped configuration's name, or a YAML or JSON file. The search replaces its engines and precision; every
    candidate keeps the rest (steps, prompt, robot, real-time chunking)."""
    observations: Path | None = None
    """Observations that vla_accel.measure.recording.save_observations wrote. Default with --quick: random ones."""
    benchmark: str | None = None
    """Benchmark that compares success on paired episodes: libero, or your own MODULE:FUNCTION."""
    suite: str | None = None
    """Suite of the benchmark. Default: its first."""
    tasks: str | None = None
    """Tasks of the suite, such as 0-2,5. Default: all."""
    margin: Annotated[float, Within(0, 99, above=True)] = 2.0
    """Largest loss of success, in percentage points, with which a candidate counts as not worse."""
    confidence: Annotated[float, Within(50, 99.99)] = 95.0
    """Confidence of the two-sided interval, in percent: with 95, at most 2.5 % of searches accept a worse one."""
    finalists: Count = 3
    """Number of candidates that may play episodes, the fastest first, until one passes. They share the error rate."""
    episodes: Count = 1000
    """Maximum number of paired episodes of a candidate. Clear cases stop early."""
    workers: Count = 1
    """Simulator processes."""
    no_films: bool = False
    """Do not film episodes. This saves about a second for each; the report then has no videos."""
    allow_steps: Annotated[tuple[int, ...], Within(1)] = ()
    """Also try these numbers of denoising steps, even if the actions differ from the exact flow (vla-accel flow).
    Needs --benchmark, because only success can judge different actions."""
    count: Count = 64
    """Maximum number of observations."""
    draws: Count = 4
    """Noise draws for each observation."""
    calls: Count = 100
    """Timed calls of each candidate."""
    quick: bool = False
    """At most 8 observations with one noise each, and 10 timed calls."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    seed: Seed = 0
    """Seed of the noise and of the order of episodes."""
    output: Annotated[Path, Written(folder=True)] = Path("runs/tune")
    """Folder of tuned.yaml, tune.json, report.html, the journal, and a file for each candidate."""
    report: OutputFile = None
    """HTML file. Default: report.html in the output folder."""
    overwrite: bool = False
    """Start again instead of continuing."""


def main(options: Tune, words: list[str]) -> int:
    """Search, write the files and report; the exit status."""
    from vla_accel.families.loading import base_and_lora, family_of
    from vla_accel.machine import hardware, resolve_device, software
    from vla_accel.measure.schedules import FEWEST
    from vla_accel.tune import candidates
    from vla_accel.tune.measuring import PolicyBench

    began = time.perf_counter()
    report = options.report or options.output / "report.html"
    check_path(report)
    rule = Rule(options.margin / 100, (1 - options.confidence / 100) / 2)
    # Starting simulators takes seconds: between two looks each plays several episodes.
    settings = Settings(rule, options.finalists, options.episodes, block=max(20, 8 * options.workers))
    if options.allow_steps and options.benchmark is None:
        raise ConfigError("allow-steps: expected --benchmark with it: another number of steps is judged by success")
    if options.benchmark is None and (alone := options.suite or options.tasks):
        raise ConfigError(f"suite, tasks: expected --benchmark with them, got {alone} alone")
    _refuse_unread(options)
    if options.observations is None and not options.quick:
        raise ConfigError(f"observations: expected --observations FILE, {RECORDED}, or --quick, got none")
    opener = None if options.benchmark is None else find_benchmark(options.benchmark)
    checkpoint, base = options.checkpoint or "demo", _base(options)
    family = family_of(base_and_lora(checkpoint, base.checkpoint.lora)[0])
    parts = family.parts
    device = resolve_device(base.device)
    # Before a journal is begun or overwritten: this refuses unknown suites and tasks.
    episodes = None if opener is None else opener(
        checkpoint, suite=options.suite, tasks=options.tasks, device=options.device, workers=options.workers,
        seed=options.seed, folder=options.output / "episodes", films=not options.no_films,
    )  # fmt: skip
    observations, recorded = _observations(options, checkpoint, base)
    quick = {name: min(most, getattr(options, name)) for name, most in QUICK.items()} if options.quick else {}
    options = replace(options, **quick)
    reference = candidates.reference(base, parts)
    bench = PolicyBench(checkpoint, reference, observations[: options.count], draws=options.draws, calls=options.calls,
                        seed=options.seed)  # fmt: skip
    about = _about(options, checkpoint, base, recorded)
    path = options.output / "journal.jsonl"
    if options.overwrite:
        path.unlink(missing_ok=True)
    with Journal(path, about) as journal:
        if known := len(journal.found):
            say(f"continuing {path}: {known} measurements are there; --overwrite starts again")
        first, left_out = candidates.engines(base, parts, device)
        stages: list[Stage] = [
            lambda _: first,
            partial(candidates.precisions, lower_of=bench.lower),
            *(partial(candidates.products, lower_of=bench.lower, count=n) for n in range(1, MOST_KEPT + 1)),
            partial(candidates.together, parts=parts),
            partial(candidates.attentions, parts=parts),
        ]
        if options.allow_steps:
            stages.append(partial(candidates.steps, numbers=options.allow_steps))

        def flow() -> dict[str, Any]:
            known = journal.get("flow", reference.key)
            return known or journal.put("flow", reference.key, bench.flow(Flow.steps, say))

        has_flow = family.flow and bench.has_flow()
        if has_flow and len(bench.observations) >= FEWEST:
            stages.append(partial(candidates.schedules, flow=flow))
        elif has_flow:
            say(f"fewer denoising steps are not tried: expected at least {FEWEST} observations to judge them by, got "
                f"{len(bench.observations)}")  # fmt: skip
        try:
            with Teller() as teller, named(options.observations):
                search = Search(reference, stages, bench, journal, settings, episodes, teller)
                best = search.run()
        except KeyboardInterrupt:
            print("vla-accel tune: interrupted; the same command continues from the journal", file=sys.stderr)
            return 130
    about_run = {
        "command": ["vla-accel", "tune", *without_folders(words)],
        "hardware": hardware(device),
        "software": software(),
        "checkpoint": checkpoint,
        "settings": {**about, "benchmark": None if episodes is None else episodes.name},
        "seconds": round(time.perf_counter() - began, 1),
        "measured_before": known,
        "flow": journal.get("flow", reference.key),
    }
    result = outcome(search, best, left_out, about_run)
    where = about_run["hardware"].get("gpu") or about_run["hardware"]["cpu"]
    comment = f"Made by `{' '.join(about_run['command'])}`\non {where}: {result['why']}."
    tuned = write_config(best.candidate.config, options.output / "tuned.yaml", comment)
    write_json(options.output / "tune.json", result)
    write(page(result), report)
    _print(result)
    say(f"configuration: {tuned}, as in `vla-accel serve {checkpoint} --config {tuned}`")
    say(f"report: {report}")
    line = {name: result[name] for name in ("chosen", "why", "times_as_fast")}
    print_json({**line, "config": str(tuned), "output": str(options.output / "tune.json"), "report": str(report)})
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
        names = ("suite", "tasks", "device", "workers", "seed", "folder", "films")
        inspect.signature(found).bind("checkpoint", **dict.fromkeys(names))
        return found
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"benchmark: expected libero or MODULE:FUNCTION, got {name!r} ({error}); the benchmarks lie in eval/ of "
            "the repository and are no part of the installed package: run this in the repository's folder"
        ) from error


class Teller:
    """Reports progress on standard error: a bar with the time left on a terminal, lines elsewhere."""

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
        self._bar.start()  # not earlier: a search that is refused shows no bar
        self._bar.update(self._task, description=text, completed=done, total=total)
        if self._bar.disable:
            spent = time.perf_counter() - self._began
            # Measurements of the journal took no time.
            left = round(spent / done * (total - done)) if done else 0
            rest = f", about {left} s left" if left else ""
            print(f"[{done}/{total}] {text} ({spent:.0f} s so far{rest})", file=sys.stderr, flush=True)


def _refuse_unread(options: Tune) -> None:
    """Raise ConfigError for options that have no effect with the others."""
    usual = {field.name: field.default for field in dataclasses.fields(options)}
    changed = {name: value for name, value in vars(options).items() if value != usual[name]}
    if options.benchmark is None and (alone := [name for name in OF_EPISODES if name in changed]):
        name = alone[0]
        raise ConfigError(f"{name.replace('_', '-')}: expected --benchmark with it, got {changed[name]} alone")
    for name, most in QUICK.items() if options.quick else ():
        if name in changed and changed[name] > most:
            raise ConfigError(f"{name}: expected at most {most} with --quick, got {changed[name]}")


def _base(options: Tune) -> PolicyConfig:
    """The configuration without engines: the part that is not searched."""
    settings = options.with_steps(options.settings().with_specs({}))
    for steps in options.allow_steps:
        settings.with_steps(steps)  # a list of times has one number of steps
    return replace(settings, precision="auto", device=options.device or settings.device)


def _observations(options: Tune, checkpoint: str, base: PolicyConfig) -> tuple[list[Any], str | None]:
    """The observations of gate one, and the name of their file; random ones are reported."""
    from vla_accel.measure.random_policy import random_observations
    from vla_accel.policy import OptimizedPolicy

    if options.observations is not None:
        return load_observations(options.observations, options.count), content_hash(options.observations)
    print("warning: gate one judges on random observations; recorded ones say more (--observations)", file=sys.stderr)
    with going_on(f"loading {checkpoint}", say):
        policy = OptimizedPolicy.from_pretrained(checkpoint, replace(base, num_steps=1, schedule=None))
    return random_observations(policy, min(8, options.count), seed=options.seed), None


def _about(options: Tune, checkpoint: str, base: PolicyConfig, recorded: str | None) -> dict[str, Any]:
    """Everything that a measurement depends on; a journal that differs is not continued."""
    from vla_accel.families.loading import base_and_lora
    from vla_accel.machine import hardware, resolve_device, software
    from vla_accel.policy.agreement import PATTERN

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
        **{n: getattr(options, n) for n in ("count", "draws", "calls", "seed", "benchmark", "suite", "tasks")},
    }


def _print(result: dict[str, Any]) -> None:
    table = tried(result["tried"])
    print_table(table.title, table.header, [[*map(str, row)] for row in table.rows])
    # Candidates are timed one after the other: a changing load affects their order.
    busy = (row["latency"].get("others_busy") or 0.0 for row in result["tried"] if row["latency"])
    if warning := busy_host({"cores": os.cpu_count(), "others_busy": max(busy, default=0.0)}):
        say(f"warning: {warning}, and another candidate may be the fastest")
    print(f"{result['chosen']}: {times_as_fast(result)}; {result['why']}")
