"""One run from beginning to end: load, resume, play, report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from eval.harness import figures, report
from eval.harness.benchmark import Benchmark, Suite, schema
from eval.harness.log import EpisodeLog, log_path
from eval.harness.options import RUNS, Arguments
from eval.harness.pages import print_run, run_page
from eval.harness.policies import PolicySource, check_chunks
from eval.harness.progress import EpisodeProgress
from eval.harness.protocol import EpisodeKey, Protocol, Shard, fingerprint
from eval.harness.runner import VIDEO_EVERY, Setup, software
from eval.harness.workers import LocalWorkers
from vla_accel import latency, machine
from vla_accel.errors import ConfigError
from vla_accel.files import write_json
from vla_accel.progress import going_on
from vla_accel.report import page
from vla_accel.view import open_view

if TYPE_CHECKING:
    from eval.harness.cluster import RayWorkers

Workers: TypeAlias = "LocalWorkers | RayWorkers"


@dataclass(frozen=True)
class Request:
    """What to evaluate.

    Attributes:
        options: the options of the command line, checked.
        suites: the played suites of the benchmark, loaded.
        protocol: makes the protocol from the policy's metadata (empty for the expert).
        compare: results by name whose latencies are shown for comparison; None for the stored ones of the same model.
        command: the command line, for the record.
    """

    options: Arguments
    benchmark: Benchmark
    suites: tuple[Suite, ...]
    protocol: Callable[[Mapping[str, Any]], Protocol]
    source: PolicySource
    compare: Mapping[str, Mapping[str, Any]] | None
    command: list[str]

    @property
    def shard(self) -> Shard | None:
        """The part of the plan to play, or None for all of it."""
        return None if self.options.shard is None else Shard.parse(self.options.shard)

    @property
    def label(self) -> str:
        """Start of the name of a result without a name."""
        quick = ["quick"] if self.options.quick else []
        part = [f"shard{self.shard.number}of{self.shard.count}"] if self.shard is not None else []
        return "-".join([self.source.name, "+".join(suite.name for suite in self.suites), *quick, *part])

    def plan(self, protocol: Protocol) -> tuple[EpisodeKey, ...]:
        """The episodes of this run. Raises `ConfigError` if there are fewer than shards."""
        return protocol.plan() if self.shard is None else self.shard.part(protocol.plan())


def evaluate(request: Request, console: Console) -> dict[str, Any]:
    """Play the episodes that are not in the log yet, write the result file and print the tables.

    Returns:
        The result JSON, with the paths `output`, `figure` and `report` added.

    Raises:
        VlaAccelError: bad input, or a policy or simulator that cannot start. Episodes that crash do not raise: they
            are errors in the result.
    """
    start, options, name = time.perf_counter(), request.options, request.benchmark.name
    with closing(open_view(options.view)) as view, closing(_start_workers(request, console)) as workers:
        loaded = workers.loaded
        protocol = request.protocol(loaded.metadata or {})
        if loaded.metadata is not None:
            check_chunks(loaded.metadata, request.source, protocol, supports_prev_chunk=loaded.supports_prev_chunk)
        mark = fingerprint(protocol, loaded.identity)
        output = options.output or RUNS / name / f"{request.label}-{mark[:8]}.json"
        _clear(output, overwrite=options.overwrite)
        video_folder, filmed = _films(request, protocol, output)
        if filmed and figures.check_video_packages() == "gif":
            console.print("rollout videos are GIFs: the package imageio-ffmpeg is not installed")
        workers.warm_up(protocol, request.suites[0].tasks[protocol.tasks[0]].instruction)
        launch = {
            "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": request.command,
            "git": machine.commit(),
            "hardware": loaded.hardware,
            "software": {**software(request.benchmark), "platform": platform.platform()},
            "workers": workers.size,
        }
        identity = {"protocol": protocol.to_json(), "policy": loaded.identity}
        with EpisodeLog(log_path(output), schema(name, "log"), mark, identity, partial(_warn, console)) as log:
            if options.retry_errors and (count := log.forget_errors()):
                console.print(f"running {count} episodes again that ended in an error")
            missing = _missing(log, request.plan(protocol), console, launch["git"])
            if missing:
                log.begin_launch(launch)
                every = protocol.replan_steps if options.film_all else VIDEO_EVERY
                filming = {"video_folder": video_folder, "video_keys": frozenset(filmed), "video_every": every}
                setup = Setup(request.benchmark, protocol, request.source, **filming, view=view)
                _play(setup, missing, workers, log, console)
            result = _result(request, protocol, mark, workers, log, video_folder)
    compare = request.compare if request.compare is not None else report.stored_like(result, name)
    result["figure"] = figures.draw_result(result, output, compare)
    result["elapsed_s"] = round(time.perf_counter() - start, 3)
    write_json(output, result, allow_nan=False)
    html = options.report or (output.with_suffix(".html") if options.quick else None)
    if html is not None:
        page.write(run_page(result, compare), html)
    if not console.quiet:
        print_run(result)
    return {**result, "output": str(output), "report": None if html is None else str(html)}


def _start_workers(request: Request, console: Console) -> Workers:
    source, workers = request.source, request.options.workers
    with nullcontext() if source.kind == "expert" else going_on(f"loading policy {source.where}", console.print):
        if request.options.ray is None:
            return LocalWorkers(source, request.benchmark, workers or 1)
        from eval.harness.cluster import RayWorkers

        return RayWorkers(request.options.ray, source, request.benchmark, workers, partial(_warn, console))


def _clear(output: Path, *, overwrite: bool) -> None:
    """Remove an earlier run if `overwrite`; refuse a result without a log, which cannot be continued."""
    if output.is_dir() or output.suffix != ".json":
        raise ConfigError(f"output: expected a file name ending in .json, got {str(output)!r}")
    log = log_path(output)
    if overwrite:
        log.unlink(missing_ok=True)
        output.unlink(missing_ok=True)
    elif output.exists() and not log.exists():
        raise ConfigError(
            f"output: {output} exists, but its episode log {log.name} does not; pass another name, or --overwrite"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: cannot create the folder {output.parent} ({error})") from error


def _films(request: Request, protocol: Protocol, output: Path) -> tuple[Path | None, list[EpisodeKey]]:
    """The folder for videos, and the filmed episodes: all, the first trial of each task, or one if only quick."""
    plan = request.plan(protocol)
    first = [key for key in plan if key.trial == 0]
    if request.options.film_all:
        return request.options.video or output.with_suffix(""), list(plan)
    if request.options.video is not None:
        return request.options.video, first
    if request.options.quick and request.benchmark.cameras:
        return output.with_suffix(""), first[:1]
    return None, []


def _missing(
    log: EpisodeLog, plan: Sequence[EpisodeKey], console: Console, git: Mapping[str, Any] | None
) -> list[EpisodeKey]:
    """The episodes to play; prints how many the log holds."""
    missing = [key for key in plan if key not in log.results]
    if done := len(plan) - len(missing):
        when = log.launches[-1].get("began", "an unknown time")
        console.print(
            f"{done} of {len(plan)} episodes are on record in {log.path} (last launch: "
            f"{when}) and are not played again; --overwrite starts afresh",
            style="yellow",
        )
        if any(launch.get("git") != git for launch in log.launches):
            _warn(console, "some of them ran with another version of the code")
    return missing


def _play(setup: Setup, episodes: list[EpisodeKey], workers: Workers, log: EpisodeLog, console: Console) -> None:
    """Play the episodes, log each and show the progress."""
    done = len(log.results)
    with (
        EpisodeProgress(console, setup.protocol.suite, plan=done + len(episodes), done=done) as progress,
        closing(workers.play(setup, episodes)) as results,
    ):
        for result in results:
            log.append(result)
            progress.show(result, list(log.results.values()), workers.nodes())


def _result(
    request: Request, protocol: Protocol, mark: str, workers: Workers, log: EpisodeLog, video_folder: Path | None
) -> dict[str, Any]:
    results = {key: log.results[key] for key in request.plan(protocol) if key in log.results}
    played = report.Played(protocol, results, log.launches, log.launch_of)
    suites = {suite.name: suite for suite in request.suites}
    names = {key.task: suites[protocol.suite_of(key)].tasks[key.task_id].instruction for key in protocol.plan()}
    own_limit = protocol.limits == tuple(suite.max_steps for suite in request.suites)
    source = request.benchmark.limits_by if own_limit else "--max-steps"
    metadata = workers.loaded.metadata
    videos = [result.video for result in results.values() if result.video]
    return {
        "schema": schema(request.benchmark.name, "result"),
        "fingerprint": mark,
        "protocol": {**protocol.to_json(), "max_steps_source": source},
        **({} if request.shard is None else {"shard": str(request.shard)}),
        "policy": {**workers.loaded.identity, "metadata": None if metadata is None else _plain(metadata)},
        "command": request.command,
        **played.to_json(names, request.options.target_hz, partial(_breakdown, workers, log)),
        "videos": [str(video_folder / video) if video_folder else video for video in videos],
    }


def _breakdown(workers: Workers, log: EpisodeLog, steps: int | None, samples: report.Samples) -> dict[str, Any]:
    """The breakdown JSON of `vla_accel.latency`, with the engines that really ran."""
    import torch

    metadata = workers.metadata_at(steps)
    made = latency.breakdown(
        model=_plain(metadata.get("model", {})),
        engines=_plain(metadata.get("engines", [])),
        steps=steps if steps is not None else metadata.get("num_steps", 0),
        device=torch.device("cpu"),
        components=latency.summarise(samples.sections, samples.totals),
        samples=len(samples.totals),
    )
    last = log.launches[max(log.launch_of.values())]
    return {**made, "hardware": last["hardware"], "workers": last["workers"]}


def _warn(console: Console, text: str) -> None:
    console.print(f"warning: {text}", style="yellow")


def _plain(value: Any) -> Any:
    """Metadata as JSON types; a server may send anything that msgpack carries."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)
