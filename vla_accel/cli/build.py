"""`vla-accel build CHECKPOINT`: build the TensorRT engines of a configuration into the cache, with a manifest."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from vla_accel.cli.common import print_json, print_table, say, write_if
from vla_accel.cli.options import Argument, Number, OutputFile, OutputFolder, PolicySource
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.files import require_writable_folder
from vla_accel.progress import Advance, in_lines


@dataclass(frozen=True)
class Build(PolicySource):
    """Build the TensorRT engines of a configuration ahead of time."""

    config: Annotated[str | None, Argument("CONFIG", default="tensorrt_rtx")] = None
    """A shipped configuration's name (tensorrt, tensorrt_rtx, ...), or a YAML or JSON file, as for a policy."""
    targets: tuple[str, ...] = ()
    """Compute capabilities, such as sm89,sm120 (TensorRT-RTX only); default: the configuration's, else this GPU's."""
    model: str | None = None
    """Instead of a checkpoint: random weights of a named size, such as pi05 or pi05_demo, for measuring builds."""
    depth: Number = None
    """With --model: this many layers in the large stacks (of π0 prefix and expert), at full width."""
    cache: OutputFolder = None
    """Folder of the engines. Default: the configuration's."""
    manifest: OutputFile = None
    """File for the manifest; by default in the folder of the engines."""
    no_verify: bool = False
    """Do not compare the exported graphs with the modules."""
    dry_run: bool = False
    """Only say what would be built, and what is in the cache already."""


def main(options: Build, words: list[str]) -> int:
    """Build the engines, write the manifest; the exit status."""
    import torch

    from vla_accel.engines import tensorrt_plan
    from vla_accel.engines.tensorrt_library import parse_target
    from vla_accel.families.bench import sized
    from vla_accel.families.loading import base_and_lora, family_of
    from vla_accel.policy import ahead_of_time as building

    folder = base_and_lora(options.checkpoint or "demo")[0]
    family = sized(options.model)[0].family if options.model else family_of(folder)
    name = options.config or "tensorrt_rtx"
    config = replace(options, config=name).settings()
    changes = {"cache": str(options.cache)} if options.cache is not None else {}
    changes |= {"verify": False} if options.no_verify else {}
    specs = building.named(config.specs(family.parts))
    specs = {part: replace(spec, tensorrt=replace(spec.tensorrt, **changes)) for part, spec in specs.items()}
    config = config.with_specs({**config.specs(family.parts), **specs})
    if options.model and (source := options.checkpoint or options.lora):
        raise ConfigError(f"model: expected no checkpoint with it, got {source}")
    if options.depth is not None and not options.model:
        raise ConfigError("depth: expected --model with it: a checkpoint has its own depth")
    targets = [parse_target(t) for t in options.targets]
    if options.dry_run and options.manifest is not None:
        raise ConfigError(f"manifest: expected no --dry-run with it, which builds nothing, got {options.manifest}")
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    building.check_targets(specs, targets, dtype)
    building.check_libraries(specs, targets or [parse_target(t) for s in specs.values() for t in s.tensorrt.targets])
    began = time.perf_counter()
    todo = building.jobs(_checkpoint(options, config, specs, dtype), config, targets)
    if options.dry_run:
        words_of = {True: "in the cache", False: "to build", None: "to build, or in the cache"}
        states = [words_of[building.is_cached(job)] for job in todo]
        rows = [[*job.title.split(" · "), state] for job, state in zip(todo, states, strict=True)]
        print_table("engines to build", ("component", "engine", "precision", "target", "state"), rows)
        print_json({"jobs": [job.title for job in todo], "states": states})
        return 0
    for spec in specs.values():  # building takes minutes
        require_writable_folder(tensorrt_plan.cache_of(spec.tensorrt).folder, "cache")
    made: list[dict[str, Any]] = []
    try:
        with _Bars() as bars, tensorrt_plan.Exports() as exports:
            for job in todo:
                for row in building.build(job, bars.watch(job), exports=exports):
                    made.append(row)
                    bars.say(_line(row))
    except KeyboardInterrupt:
        print(f"vla-accel build: interrupted after {len(made)} engines; they are in the cache", file=sys.stderr)
        return 130
    _table(made)
    source = options.checkpoint or "demo"
    if options.model:
        depth = "" if options.depth is None else f", {options.depth} layers in the large stacks"
        source = f"random weights of {options.model}'s size{depth}"
    record = building.manifest(made, config=Path(name).name, checkpoint=source, seconds=time.perf_counter() - began)
    target = options.manifest or building.default_manifest(next(iter(specs.values())), name)
    write_if(target, record)
    say(f"manifest: {target}")
    print_json(record)
    return 0


def _checkpoint(options: Build, config: PolicyConfig, specs: Mapping[str, EngineSpec], dtype: Any) -> Any:
    """Load the model in the dtype that it has on a GPU, or make one with random weights."""
    import torch

    from vla_accel.families.bench import sized
    from vla_accel.families.loading import Checkpoint, load
    from vla_accel.measure.random_policy import calibrate_on_noise

    on_gpu = torch.cuda.is_available() and any(s.engine != "tensorrt_rtx" for s in specs.values())
    device = torch.device("cuda" if on_gpu else "cpu")
    if not options.model:
        return load(options.checkpoint or "demo", config, device=device, dtype=dtype)
    card, size = sized(options.model)
    sizes = size() if options.depth is None else card.shallow(size(), options.depth)
    model = card.random(sizes, seed=0, device=str(device), dtype=dtype).whole()
    processor = card.dummy(sizes, card.views)
    family, scales = card.family, None
    if family.capabilities.needs_scales(specs):
        scales = calibrate_on_noise(family, model, processor, count=1)
    return Checkpoint(f"random {options.model}", family, model, processor, calibrated=scales, settings=config)


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
    """The builder's phases: progress bars on a terminal, lines elsewhere."""

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

    def watch(self, job: Any) -> _Bars:
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
