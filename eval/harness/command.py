"""The command line of a benchmark: play a policy through it and report success and latency.

Prints progress and tables on stderr, and one JSON line on stdout at the end. Exit code: 0 when every episode ran to its
end (successes or failures), 1 when some crashed, 2 for bad input, 130 when interrupted.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from eval.harness.benchmark import Benchmark, Suite
from eval.harness.options import RUNS, Arguments
from eval.harness.policies import PolicySource
from eval.harness.progress import stderr_console
from eval.harness.protocol import Protocol, parse_tasks
from eval.harness.report import policy_name, read_result, row_line
from eval.harness.stress import parse_stress
from eval.script import concluded
from vla_accel.cli.common import print_json
from vla_accel.cli.options import read
from vla_accel.errors import ConfigError
from vla_accel.files import require_writable_folder
from vla_accel.report.page import check_path

if TYPE_CHECKING:
    from eval.harness.evaluation import Request

QUICK_TASKS = 3
QUICK_TRIALS = 3


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
    if arguments.view is not None and ((arguments.workers or 1) > 1 or arguments.ray is not None):
        raise ConfigError("view: expected one simulator in this process, got --workers or --ray")
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

    compare = {path.stem: read_result(path)[0] for path in arguments.compare} or None
    request = Request(arguments, benchmark, suites, protocol, source, compare, command)
    # Check the numbers before anything is loaded; the step count of the policy is not known yet.
    request.plan(protocol({} if source.kind == "expert" else {"num_steps": (steps or (1,))[0]}))
    return request


def _source(benchmark: Benchmark, arguments: Arguments, steps: tuple[int, ...] | None) -> PolicySource:
    if not arguments.expert:
        source = PolicySource.parse(
            arguments.policy, benchmark, config=arguments.config, device=arguments.device, chunking=arguments.chunking,
            api_key_file=arguments.api_key_file, tls_ca=arguments.tls_ca,
        )  # fmt: skip
        if source.kind == "local" and arguments.ray is None:  # else it is on the nodes
            from vla_accel.cli.common import check_names

            check_names(source.where, source.config)
        if source.kind == "lerobot" and arguments.ray is not None:
            raise ConfigError("ray: a cluster plays this package's own policies, not lerobot's code; leave --ray out")
        if source.kind == "remote" and steps is not None and len(steps) > 1:
            raise ConfigError(f"steps: a remote policy has its server's step count, got a sweep {list(steps)}")
        return source
    if steps is not None:
        raise ConfigError("steps: the scripted expert has no denoising steps; leave --steps out")
    own = {field.name: field.default for field in dataclasses.fields(arguments)}
    for name in ("config", "stress", "chunking", "device", "policy", "api_key_file", "tls_ca"):
        if getattr(arguments, name) != own[name]:
            raise ConfigError(f"{name}: the scripted expert reads the simulator and answers at once; leave it out")
    if benchmark.make_expert is None:
        raise ConfigError(f"expert: {benchmark.name} has none")
    if not {name.strip() for name in arguments.suite.split(",")} <= set(benchmark.expert_suites):
        raise ConfigError(f"expert: it plays {', '.join(benchmark.expert_suites)} only, got --suite {arguments.suite}")
    return PolicySource("expert")


def _episodes(benchmark: Benchmark, arguments: Arguments, suites: Sequence[Suite]) -> tuple[tuple[int, ...], int]:
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
    rules = ("suite", "tasks", "trials", "max_steps", "seed", "stress")
    return {
        "benchmark": benchmark.name,
        **{key: protocol[key] for key in rules if key in protocol},
        "policy": policy_name(result),
        **({"shard": result["shard"]} if "shard" in result else {}),
        "rows": [row_line(row) for row in result["summary"]["rows"]],
        "errors": errors,
        **{key: result[key] for key in ("elapsed_s", "output", "figure", "report", "videos")},
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
