"""`vla-accel build CHECKPOINT`: every TensorRT engine that a configuration names, into the cache, with a manifest.

Ends with one JSON line: the manifest. Exit status 130 when interrupted: what was whole by then is in the cache.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vla_accel.cli.asked.policies import Build
from vla_accel.cli.common import print_json, print_table, say, write_asked
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.engines import tensorrt_plan
from vla_accel.engines.tensorrt_library import parse_target
from vla_accel.errors import ConfigError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import Family, sized
from vla_accel.families.loading import Checkpoint, base_and_lora, family_of, load
from vla_accel.files import require_writable_folder
from vla_accel.measure.random_policy import calibrate_on_noise
from vla_accel.policy import ahead_of_time as building
from vla_accel.policy.ahead_of_time import Job
from vla_accel.progress import Advance, in_lines


def main(options: Build, words: list[str]) -> int:
    """The command; see `Build`."""
    family = sized(options.model)[0] if options.model else family_of(base_and_lora(options.checkpoint or "demo")[0])
    name = options.config or "tensorrt_rtx"
    config = _with_options(replace(options, config=name).settings(), family, options)
    if options.model and (beside := options.checkpoint or options.lora):
        raise ConfigError(f"model: expected no checkpoint beside it, got {beside}")
    if options.depth is not None and not options.model:
        raise ConfigError("depth: expected --model beside it: a checkpoint has its own depth")
    targets = [parse_target(t) for t in options.targets]
    if options.dry_run and options.manifest is not None:
        raise ConfigError(f"manifest: expected no --dry-run with it, which builds nothing, got {options.manifest}")
    specs = building.named(config.specs(family.parts))
    building.check_targets(specs, targets, _dtype(config))
    building.check_libraries(specs, targets or [parse_target(t) for s in specs.values() for t in s.tensorrt.targets])
    began = time.perf_counter()
    todo = building.jobs(_checkpoint(options, config, specs), config, targets)
    if options.dry_run:
        return _dry_run(todo)
    for spec in specs.values():  # building takes minutes
        require_writable_folder(tensorrt_plan.cache_of(spec.tensorrt).folder, "cache")
    rows: list[dict[str, Any]] = []
    try:
        with _Bars() as bars, tensorrt_plan.Exports() as exports:
            for job in todo:
                made = building.build(job, bars.watch(job), exports=exports)
                rows += made
                for row in made:
                    bars.say(_line(row))
    except KeyboardInterrupt:
        print(f"vla-accel build: interrupted after {len(rows)} engines; they are in the cache", file=sys.stderr)
        return 130
    _table(rows)
    source = options.checkpoint or "demo"
    if options.model:
        depth = "" if options.depth is None else f", {options.depth} layers in the large stacks"
        source = f"random weights of {options.model}'s size{depth}"
    record = building.manifest(rows, config=Path(name).name, checkpoint=source, seconds=time.perf_counter() - began)
    target = options.manifest or building.default_manifest(next(iter(specs.values())), name)
    write_asked(target, record)
    say(f"manifest: {target}")
    print_json(record)
    return 0


def _with_options(config: PolicyConfig, family: Family, options: Build) -> PolicyConfig:
    changes: dict[str, Any] = {}
    if options.cache is not None:
        changes["cache"] = str(options.cache)
    if options.no_verify:
        changes["verify"] = False
    specs = config.specs(family.parts)
    for name, spec in building.named(specs).items():
        specs[name] = replace(spec, tensorrt=replace(spec.tensorrt, **changes))
    return config.with_specs(specs)


def _dtype(config: PolicyConfig) -> torch.dtype:
    """Of the large products on a GPU."""
    return torch.float32 if config.precision == "fp32" else torch.bfloat16


def _checkpoint(options: Build, config: PolicyConfig, specs: Mapping[str, EngineSpec]) -> Checkpoint:
    """The model in the dtype it has on a GPU, and what belongs to it."""
    on_gpu = torch.cuda.is_available() and any(s.engine != "tensorrt_rtx" for s in specs.values())
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = _dtype(config)
    if not options.model:
        return load(options.checkpoint or "demo", config, device=device, dtype=dtype)
    family, size = sized(options.model)
    card = bench_card(family)
    sizes = size() if options.depth is None else card.shallow(size(), options.depth)
    model = card.random(sizes, seed=0, device=str(device), dtype=dtype).whole()
    processor = card.dummy(sizes, card.views)
    scales = calibrate_on_noise(family, model, processor, count=1) if family.needs_scales(specs) else None
    return Checkpoint(f"random {options.model}", family, model, processor, calibrated=scales, settings=config)


def _dry_run(todo: list[Job]) -> int:
    words = {True: "in the cache", False: "to build", None: "to build, or in the cache"}
    states = [words[building.is_cached(job)] for job in todo]
    columns = ("component", "engine", "precision", "target", "state")
    rows = [[*job.title.split(" · "), state] for job, state in zip(todo, states, strict=True)]
    print_table("what there is to build", columns, rows)
    print_json({"jobs": [job.title for job in todo], "states": states})
    return 0


def _line(row: dict[str, Any]) -> str:
    how = f"built in {row['wall_s']:.1f} s" if row["built"] else "in the cache"
    note = f" ({row['note']})" if row["note"] else ""
    return f"{row['name']} {row['target']}: {row['bytes'] / 1e6:.1f} MB, {how}{note}"


def _table(rows: list[dict[str, Any]]) -> None:
    def cells(row: dict[str, Any]) -> list[str]:
        coverage = f"{row['coverage']['in_engine']}/{row['coverage']['operators']}"
        similar = "" if row["similarity"] is None else f"{row['similarity']:.6f}"
        size, took = f"{row['bytes'] / 1e6:.1f}", f"{row['wall_s']:.1f}" if row["built"] else "cached"
        return [row["name"], row["library"], row["target"], row["precision"], coverage, similar, size, took]

    columns = ("engine", "library", "target", "precision", "operators", "ONNX cosine", "MB", "s")
    print_table("engines", columns, [cells(r) for r in rows])


class _Bars:
    """The builder's phases as progress bars on a terminal; elsewhere a line for each job, and now and then one for a
    phase."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True, markup=False, emoji=False),
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, tuple[Any, int, Advance]] = {}
        self._lock = threading.Lock()
        self._job: Any = None

    def __enter__(self) -> _Bars:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def say(self, line: str) -> None:
        """A line above the bars."""
        self._progress.console.print(line, highlight=False)

    def watch(self, job: Job) -> _Bars:
        """Show a new job."""
        if self._job is not None:
            self._progress.remove_task(self._job)
        self._job, self._title = self._progress.add_task(job.title, total=None), job.title
        if self._progress.disable:
            self.say(job.title)
        return self

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        with self._lock:
            task = self._progress.add_task(f"  {phase}", total=steps)
            self._tasks[phase] = task, steps, in_lines(f"{self._title}: {phase}")

    def step(self, phase: str, step: int) -> None:
        with self._lock:
            if phase in self._tasks:
                task, steps, tell = self._tasks[phase]
                self._progress.update(task, completed=step + 1)
                if self._progress.disable:
                    tell(1, steps)

    def finish(self, phase: str) -> None:
        with self._lock:
            if phase in self._tasks:
                self._progress.remove_task(self._tasks.pop(phase)[0])
