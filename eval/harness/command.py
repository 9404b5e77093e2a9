"""The command line of a benchmark: play a policy through it and report success and latency.

Prints progress and tables on stderr, and one JSON line on stdout at the end. Exit code: 0 when every episode ran to its
end (won or lost), 1 when some crashed, 2 for bad input, 130 when interrupted. Running the same command again continues
an interrupted run.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from eval.harness.benchmark import Benchmark, Suite
from eval.harness.policies import Chunking, PolicySource
from eval.harness.protocol import REPLAN_STEPS, SEED, Protocol, Shard, parse_tasks
from eval.harness.report import policy_name, read_result, row_line
from eval.harness.stress import parse_stress
from eval.harness.tables import stderr_console
from eval.script import concluded
from vla_accel.cli.common import print_json
from vla_accel.cli.options import Listed, Number, OutputFile, OutputFolder, Text, Within, Written, read
from vla_accel.errors import ConfigError
from vla_accel.files import require_writable_folder
from vla_accel.report.page import check_path

if TYPE_CHECKING:
    from eval.harness.evaluation import Request

RUNS = Path("runs")
QUICK_TASKS = 3
QUICK_TRIALS = 3


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of every benchmark. The command of a benchmark sets defaults for `suite` and `policy`."""

    suite: str
    """Which tasks; several suites with commas between them."""
    steps: Annotated[Listed[int], Within(1)] = ()
    """Denoising steps: 3, or 1,2,3,5,10 for a sweep. Default: the policy's own."""
    quick: bool = False
    """The first 3 tasks with 3 trials each, and a rollout video; --tasks and --trials go first."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="N,...", help_behavior_hint="")] = None
    """Task indices, such as "0-2,5". Default: all."""
    trials: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Episodes per task, each from a shipped start state. Default: the benchmark's."""
    policy: str
    """A checkpoint's folder or name on the hub, or ws://host:port."""
    config: Text = None
    """Of a policy in this process: a PolicyConfig file (YAML or JSON), or a shipped configuration's name. Default: the
    policy's own."""
    device: str = "auto"
    """auto, cpu or cuda."""
    seed: int = SEED
    """Seed of the simulator and of the policy's noise."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint=""), Written(suffix=".json")] = None
    """Result JSON. Default: runs/BENCHMARK/, named after the run. The episode log goes into the same folder."""
    video: OutputFolder = None
    """Folder for videos of the first trial of each task. With --quick one is made in any case."""
    film_all: bool = False
    """Film every episode, with the images of the policy, into --video's folder or one named after the output, so that
    `eval.paired --report` can show lost episodes next to those of the reference."""
    report: OutputFile = None
    """HTML file that opens offline: pictures, tables, films, conditions. With --quick one is made in any case."""
    beside: Listed[Path] = ()
    """Result files whose latencies the pictures show for comparison. Default: stored runs of the same model on the
    same kind of device."""
    workers: Number = None
    """Simulators that play at once. More are faster, but they slow down each other's policy calls. Default: 1, or one
    for each core of a Ray cluster."""
    ray: Text = None
    """Play on a Ray cluster: "auto" for the one that this machine belongs to, HOST:PORT for another, "local" for one
    that is started here and ends with the run. One policy for each GPU, or each machine if there is none."""
    max_steps: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Actions before an episode is lost. Default: the benchmark's limit for the suite."""
    stress: Annotated[str | None, tyro.conf.arg(metavar="NAME=VALUE,...", help_behavior_hint="")] = None
    """Disturbances of what the policy sees, such as "noise=0.1,brightness=0.8", or of when its actions arrive
    ("latency=2", in control ticks). An unknown name lists all of them."""
    chunking: Chunking = "plain"
    """rtc: each chunk is guided to join what is left of the last one (real-time chunking)."""
    expert: bool = False
    """Play the scripted expert instead of a policy, to check the simulator."""
    target_hz: float = 20.0
    """Rate for which the report computes what each component would have to reach."""
    replan: int = REPLAN_STEPS
    """Actions executed of each predicted chunk."""
    overwrite: bool = False
    """Start again instead of continuing an earlier run."""
    retry_errors: bool = False
    """Play episodes again that an earlier launch ended with an error."""
    shard: Annotated[str | None, tyro.conf.arg(metavar="K/N", help_behavior_hint="")] = None
    """Play a part of the run, such as "3/16" (counted from 1), for `python -m eval.merge` to put together."""

    def played(self, benchmark: Benchmark) -> Benchmark:
        """The benchmark as these arguments have it."""
        return benchmark


def main(benchmark: Benchmark, arguments: type[Arguments], words: Sequence[str]) -> int:
    """Run a benchmark's command line; returns the exit code."""
    later = "; the same command continues from the episode log"
    return concluded(lambda: run(benchmark, arguments, words), error=2, later=later)


def run(benchmark: Benchmark, arguments: type[Arguments], words: Sequence[str]) -> int:
    """Play and print the results; returns 1 if an episode crashed."""
    console = stderr_console()
    program = ("python", "-m", f"eval.{benchmark.name}")
    options = read(arguments, words, " ".join(program))
    from eval.harness.evaluation import evaluate  # loads torch, so only after the options are read

    with stdout_to_stderr():
        result = evaluate(make_request(benchmark, options, [*program, *words]), console)
    errors = sum(row["success"]["errors"] for row in result["summary"]["rows"])
    for name in ("output", "figure", "report"):
        path = result[name]
        if path:
            console.print(f"{name}: {path}", soft_wrap=True)
    for video in result["videos"]:
        console.print(f"video: {video}", soft_wrap=True)
    if errors:
        console.print(f"{errors} episodes ended in an error; they count in no rate", style="red")
    print_json(_line(benchmark, result, errors), allow_nan=False)
    return 1 if errors else 0


def make_request(benchmark: Benchmark, arguments: Arguments, command: list[str]) -> Request:
    """Check the arguments and load the suites; the protocol also needs the policy's metadata.

    Raises:
        ConfigError: an argument that cannot be used, or two that contradict each other.
        VlaAccelError: what the benchmark needs is missing.
    """
    from eval.harness.evaluation import Request

    benchmark = arguments.played(benchmark)
    names = [name.strip() for name in arguments.suite.split(",")]
    for name in names:
        benchmark.check_suite(name)
    if not (math.isfinite(arguments.target_hz) and arguments.target_hz > 0):
        raise ConfigError(f"target-hz: expected a number above 0, got {arguments.target_hz}")
    for name, used in (("video", arguments.video is not None), ("film-all", arguments.film_all)):
        if used and not benchmark.cameras:
            raise ConfigError(f"{name}: {benchmark.name} has no cameras")
    if arguments.overwrite and arguments.retry_errors:
        raise ConfigError("retry-errors: expected it without --overwrite, which discards the episodes, got both")
    if arguments.report is not None:
        check_path(arguments.report)
    if arguments.output is None:
        require_writable_folder(RUNS / benchmark.name, "output")
    steps = arguments.steps or None
    stress = {} if arguments.stress is None else parse_stress(arguments.stress, benchmark.disturbances)
    source = _source(benchmark, arguments, steps)
    suites = tuple(benchmark.load_suite(name) for name in names)
    tasks, trials = _episodes(benchmark, arguments, suites)
    limits, several = tuple(suite.max_steps for suite in suites), len(suites) > 1

    def protocol(metadata: Mapping[str, Any]) -> Protocol:
        return Protocol(
            suite=",".join(suite.name for suite in suites),
            tasks=tasks,
            trials=trials,
            steps=_steps(steps, metadata.get("num_steps"), source),
            max_steps=arguments.max_steps if arguments.max_steps is not None else limits if several else limits[0],
            seed=arguments.seed,
            replan_steps=arguments.replan,
            settings=benchmark.settings_of(metadata),
            stress=stress,
        )

    shard = None if arguments.shard is None else Shard.parse(arguments.shard)
    quick = ["quick"] if arguments.quick else []
    part = [f"shard{shard.number}of{shard.count}"] if shard is not None else []
    request = Request(
        benchmark=benchmark,
        suites=suites,
        protocol=protocol,
        source=source,
        output=arguments.output,
        folder=RUNS / benchmark.name,
        label="-".join([source.name, "+".join(suite.name for suite in suites), *quick, *part]),
        video=arguments.video,
        film_all=arguments.film_all,
        report=arguments.report,
        beside=None if not arguments.beside else {path.stem: read_result(path)[0] for path in arguments.beside},
        quick=arguments.quick,
        workers=arguments.workers,
        ray=arguments.ray,
        target_hz=arguments.target_hz,
        overwrite=arguments.overwrite,
        retry_errors=arguments.retry_errors,
        shard=shard,
        command=command,
    )
    # Check the numbers before anything is loaded; the step count of the policy is not known yet.
    request.plan(protocol({} if source.kind == "expert" else {"num_steps": (steps or (1,))[0]}))
    return request


def _source(benchmark: Benchmark, arguments: Arguments, steps: tuple[int, ...] | None) -> PolicySource:
    if not arguments.expert:
        source = PolicySource.parse(arguments.policy, config=arguments.config, device=arguments.device,
                                    chunking=arguments.chunking)  # fmt: skip
        if source.kind == "local" and arguments.ray is None:  # else it is on the nodes
            from vla_accel.cli.common import check_names

            check_names(source.where, source.config)
        if source.kind == "remote" and steps is not None and len(steps) > 1:
            raise ConfigError(f"steps: a remote policy has its server's step count, got a sweep {list(steps)}")
        return source
    if steps is not None:
        raise ConfigError("steps: the scripted expert has no denoising steps; leave --steps out")
    own = {field.name: field.default for field in dataclasses.fields(arguments)}["policy"]
    for name, used in (
        ("config", arguments.config), ("stress", arguments.stress), ("chunking", arguments.chunking != "plain"),
        ("device", arguments.device != "auto"), ("policy", arguments.policy != own),
    ):  # fmt: skip
        if used:
            raise ConfigError(f"{name}: the scripted expert reads the simulator and answers at once; leave it out")
    if benchmark.make_expert is None:
        raise ConfigError(f"expert: {benchmark.name} has none")
    if not {name.strip() for name in arguments.suite.split(",")} <= set(benchmark.expert_suites):
        raise ConfigError(f"expert: it plays {', '.join(benchmark.expert_suites)} only, got --suite {arguments.suite}")
    return PolicySource("expert")


def _episodes(
    benchmark: Benchmark, arguments: Arguments, suites: Sequence[Suite]
) -> tuple[tuple[int, ...], int]:  # fmt: skip
    """Task indices, the same of each suite, and trials per task."""
    counts = {suite.name: len(suite.tasks) for suite in suites}
    if arguments.tasks is not None:
        tasks = parse_tasks(arguments.tasks, min(counts.values()))
    elif arguments.quick:
        tasks = tuple(range(min(QUICK_TASKS, *counts.values())))
    elif len(set(counts.values())) > 1:
        raise ConfigError(f"suite: expected suites of equally many tasks, or --tasks, got {counts}")
    else:
        tasks = tuple(range(min(counts.values())))
    trials = arguments.trials
    if trials is None:
        trials = QUICK_TRIALS if arguments.quick else benchmark.trials
    shipped = min(len(suite.tasks[i].start_states) for suite in suites for i in tasks)
    if trials > shipped:
        raise ConfigError(f"trials: expected at most {shipped}, one for each start state, got {trials}")
    return tasks, trials


def _steps(requested: tuple[int, ...] | None, own: int | None, source: PolicySource) -> tuple[int | None, ...]:
    """The step counts to run; `own`: that of the policy."""
    if source.kind == "remote":
        # Only the server can change its step count.
        if requested is not None and own is not None and requested != (own,):
            raise ConfigError(f"steps: the server at {source.where} runs {own}, got {requested[0]}")
        if requested is not None and own is None:
            raise ConfigError(
                f"steps: the server at {source.where} does not report its step count, and only "
                "it can set it; leave --steps out"
            )
        return (None,)
    return requested if requested is not None else (own,)


def _line(benchmark: Benchmark, result: dict[str, Any], errors: int) -> dict[str, Any]:
    """The JSON line at the end of a run."""
    protocol = result["protocol"]
    return {
        "benchmark": benchmark.name,
        **{
            key: protocol[key] for key in ("suite", "tasks", "trials", "max_steps", "seed", "stress") if key in protocol
        },
        "policy": policy_name(result),
        **({"shard": result["shard"]} if "shard" in result else {}),
        "rows": [row_line(row) for row in result["summary"]["rows"]],
        "errors": errors,
        "elapsed_s": result["elapsed_s"],
        "output": result["output"],
        "figure": result["figure"],
        "report": result["report"],
        "videos": result["videos"],
    }


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout of libraries and worker processes to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
