"""Repeat the stored runs on the GPUs of this machine, within a time limit: `python -m benchmarks.measure`.

Each job of `benchmarks.jobs` gets GPUs of its own with their share of the cores. The result of a command that succeeded
is copied to benchmarks/results, and the job is skipped as long as the work folder has it. At the deadline commands are
interrupted like by Ctrl-C. The same command continues: evaluations from their episode log, other jobs from their start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmarks.jobs import JOBS, STORED_GPU, Job
from benchmarks.tables.registry import RESULTS, ROOT
from benchmarks.tables.table import commit
from eval.script import run_script
from eval.throughput import by_core
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.cli.common import print_json
from vla_accel.cli.options import Argument, Folder, Seconds, Written
from vla_accel.errors import ConfigError, EngineError
from vla_accel.files import lock, replacing

GRACE_S = 10.0
"""Time that an interrupted command has to write its results."""
DONE, CONTINUED, FAILED, LEFT_OUT = "done", "to be continued", "failed", "left out"
INPUTS = ("observations", "realtime_vla", "starts", "stress")
"""Options that commands of jobs read as {NAME}."""


@dataclass(frozen=True)
class Arguments:
    """Make stored runs again: all of them, or the named ones with the runs that they are made from."""

    names: Annotated[tuple[str, ...], Argument("[NAME ...]", positional=True)] = ()
    """Files of benchmarks/results without their suffix, in the order in which to make them; * matches any text."""
    minutes: Seconds = 9.0
    """Time for all of them; the same command continues."""
    work: Annotated[Path, Written(folder=True)] = Path("runs/measure")
    """Folder for logs, unfinished runs, and finished runs, which are not made again."""
    observations: Path | None = None
    """Recorded observations (.npz), for agreement and tuning."""
    realtime_vla: Folder = None
    """A checkout of realtime-vla, whose code is timed with the portable kernels."""
    stress: str | None = None
    """Disturbances under which eager_fp32 wins 40 to 80 %, such as noise=0.2. Default: those of the stored run."""
    starts: Folder = None
    """A folder with start states of libero_spatial, 100 a task, that no training used (eval.demo.states)."""
    list: bool = False
    """Show each job, its stored run, and what it lacks on this machine; run nothing."""


@dataclass(frozen=True)
class Outcome:
    """`DONE`, `CONTINUED`, `FAILED` or `LEFT_OUT`, and the reason."""

    kind: str
    why: str = ""


@dataclass(frozen=True)
class Slot:
    """A GPU as CUDA_VISIBLE_DEVICES has it (None on a machine without one), and its share of the cores."""

    gpu: str | None
    cores: tuple[int, ...]


def slots(gpus: Sequence[str], cores: Sequence[int]) -> list[Slot]:
    """A slot for each GPU, or one for a machine without any; each has at least one core."""
    names = [*gpus] or [None]
    bounds = [i * len(cores) // len(names) for i in range(len(names) + 1)]
    return [Slot(gpu, tuple(cores[bounds[i] : bounds[i + 1]] or cores[:1])) for i, gpu in enumerate(names)]


@dataclass
class Running:
    """A command under way, and the slots that it occupies."""

    job: Job
    process: subprocess.Popen[bytes]
    slots: list[Slot]


@dataclass
class Runner:
    """Runs jobs on the slots of a machine. `inputs`: values of the options that commands read, None if missing;
    `models`: names of the machine's GPUs."""

    jobs: Sequence[Job]
    slots: Sequence[Slot]
    work: Path
    results: Path = RESULTS
    inputs: Mapping[str, str | None] = field(default_factory=dict)
    models: Sequence[str] = ()
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)

    def finished(self, job: Job) -> Path:
        """The JSON of a job whose command succeeded."""
        return self.work / f"{job.name}.json"

    def partial(self, job: Job, suffix: str = "") -> Path:
        """Where its command writes."""
        return self.work / "partial" / f"{job.name}{suffix}"

    def why_not(self, job: Job) -> str | None:
        """What a job needs that this machine lacks; None if it can run."""
        count = sum(slot.gpu is not None for slot in self.slots)
        if job.gpus > count:
            return f"it needs {job.gpus} GPU{'s' * (job.gpus > 1)}, found {count}"
        if job.only and (others := self._other_models(job.only)):
            return f"it needs an {job.only}, found an {others[0]}"
        if job.checkpoint and job.checkpoint not in NAMED:
            return f"it needs the bundled checkpoint {job.checkpoint}, found {', '.join(NAMED)}"
        for need in job.needs:
            if need in self.inputs:
                if self.inputs[need] is None:
                    return f"it needs --{need.replace('_', '-')}"
            elif importlib.util.find_spec(need) is None:
                return f"it needs the package {need}, which is not installed"
        return None

    def command(self, job: Job, cores: int) -> list[str]:
        """The words of its command line."""
        values = {"work": self.work, "json": self.partial(job, ".json"), "folder": self.partial(job)}
        values |= {"workers": max(1, cores - 1), **self.inputs}
        words = shlex.split(job.command)
        for name, value in values.items():
            words = [word.replace(f"{{{name}}}", str(value)) for word in words]
        program = {"python": [sys.executable], "vla-accel": [sys.executable, "-m", "vla_accel"]}
        return [*program[words[0]], *words[1:]]

    def run(self, end: float, grace_s: float = GRACE_S) -> None:
        """Run jobs until the time `end` of the monotonic clock, then interrupt the rest."""
        for job in self.jobs:
            if self.finished(job).is_file():
                self.outcomes[job.name] = Outcome(DONE, "before")
            elif why := self.why_not(job):
                self.outcomes[job.name] = Outcome(LEFT_OUT, why)
        try:
            while time.monotonic() < end and self._start() | self._collect():
                time.sleep(0.05)
        except KeyboardInterrupt:
            _say("interrupted")
        finally:
            with _signals_ignored():
                self._interrupt(grace_s)
            for job in self.jobs:
                self.outcomes.setdefault(job.name, Outcome(CONTINUED, "not begun"))

    def _start(self) -> bool:
        """Start the jobs with free slots, in order, so that large jobs get their turn; returns whether any job
        waits."""
        waiting = False
        for job in self.jobs:
            if job.name in self.outcomes or any(job is running.job for running in self.running):
                continue
            before = {name: self.outcomes.get(name) for name in job.after}
            if broken := [name for name, outcome in before.items() if outcome and outcome.kind != DONE]:
                self._settle(job, Outcome(LEFT_OUT, f"it is made from {', '.join(broken)}"))
                continue
            waiting = True
            if None in before.values():
                continue
            occupied = [slot for running in self.running for slot in running.slots]
            free = [slot for slot in self.slots if slot not in occupied]
            count = len(self.slots) if job.whole_machine else max(1, job.gpus)
            if len(free) < count:
                break
            self._begin(job, free[:count])
        return waiting

    def _begin(self, job: Job, mine: list[Slot]) -> None:
        cores = sorted({core for slot in mine for core in slot.cores})
        visible = ",".join(slot.gpu for slot in mine if slot.gpu and job.gpus)

        def prepare() -> None:
            # A background job of a shell would inherit that interrupts are ignored.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.sched_setaffinity(0, cores)

        self.partial(job).mkdir(parents=True, exist_ok=True)
        with open(self.partial(job, ".log"), "ab") as log:
            process = subprocess.Popen(
                self.command(job, len(cores)),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                preexec_fn=prepare,
                start_new_session=True,
            )
        self.running.append(Running(job, process, mine))
        _say(f"{job.name}: {f'GPU {visible}, ' if visible else ''}{len(cores)} core{'s' * (len(cores) > 1)}")

    def _collect(self) -> bool:
        """Settle the jobs whose command has ended; returns whether any still runs."""
        for running in list(self.running):
            if running.process.poll() is not None:
                self.running.remove(running)
                _kill(running.process)  # processes that it left behind
                self._settle(running.job, self._result(running.job, running.process.returncode))
        return bool(self.running)

    def _interrupt(self, grace_s: float) -> None:
        """Interrupt all commands, and kill those that do not end. One that succeeds meanwhile counts."""
        for running in self.running:
            running.process.send_signal(signal.SIGINT)
        end = time.monotonic() + grace_s
        for running in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, end - time.monotonic()))
            _kill(running.process)
            outcome = self._result(running.job, running.process.wait())
            self._settle(running.job, outcome if outcome.kind == DONE else Outcome(CONTINUED, "interrupted"))
        self.running.clear()

    def _result(self, job: Job, status: int) -> Outcome:
        """Keep the result of a command that succeeded."""
        if status != 0:
            return Outcome(FAILED, f"status {status}: {_last_line(self.partial(job, '.log'))}")
        written = self.partial(job) / job.file if job.file else self.partial(job, ".json")
        try:
            found = json.loads(written.read_text())
        except (OSError, ValueError) as error:
            return Outcome(FAILED, f"expected JSON in {written}: {error}")
        if isinstance(found, dict) and not found.get("complete", True):
            return Outcome(FAILED, f"expected a complete run in {written}, got an interrupted one")
        others = self._other_models(STORED_GPU) if job.name.endswith(f"_{STORED_GPU.lower()}") else []
        if job.stored and not others:
            with replacing(self.results / f"{job.name}.json") as temporary:
                shutil.copyfile(written, temporary)
        self.finished(job).parent.mkdir(parents=True, exist_ok=True)
        os.replace(written, self.finished(job))  # last: a finished job is stored
        return Outcome(DONE, f"not stored: its name says {STORED_GPU}, this is an {others[0]}" if others else "")

    def _other_models(self, gpu: str) -> list[str]:
        """The GPUs of this machine that are not of this model."""
        return [name for name in self.models if gpu not in name]

    def _settle(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.name] = outcome
        _say(f"{job.name}: {outcome.kind}{outcome.why and ', '}{outcome.why}")


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore interrupts within the block: a second Ctrl-C would leave commands running."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((" ".join(line.split())[-300:] for line in reversed(lines) if line.strip()), "no output")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def gpus() -> tuple[list[str], list[str]]:
    """The usable GPUs as CUDA_VISIBLE_DEVICES has them, and the names of all. Loads no CUDA."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True)
        names = done.stdout.strip().splitlines() if done.returncode == 0 else []
    except FileNotFoundError:
        names = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(i) for i in range(len(names))] if visible is None else [word for word in visible.split(",") if word]
    return every if names else [], names


def selected(names: Iterable[str], jobs: Sequence[Job]) -> list[Job]:
    """The jobs of these names, each after the jobs that it is made from. Raises ConfigError for an unknown name."""
    by_name = {job.name: job for job in jobs}
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        for before in job.after:
            add(by_name[before])
        found.setdefault(job.name, job)

    for name in names:
        matching = [job for job in jobs if fnmatchcase(job.name, name)]
        if not matching:
            raise ConfigError(f"names: expected names that --list shows, got {name!r}")
        for job in matching:
            add(job)
    return list(found.values())


def stored_stress(path: Path) -> str | None:
    """The disturbances of a stored run as --stress takes them; None if it is not stored."""
    stress = json.loads(path.read_text())["protocol"].get("stress", {}) if path.is_file() else {}
    return ",".join(f"{name}={value:g}" for name, value in stress.items()) or None


def _listed(runner: Runner, job: Job) -> str:
    """A job's line and its command."""
    words = [_stored(runner.results / f"{job.name}.json") if job.stored else "a step of other jobs"]
    words += ["done"] if runner.finished(job).is_file() else []
    words += [why] if (why := runner.why_not(job)) else []
    return f"{job.name}: {'; '.join(words)}\n    {job.command}"


def _stored(path: Path) -> str:
    """The commit of a stored run, and the date on which it was stored."""
    if not path.is_file():
        return "not stored"
    result: dict[str, Any] = json.loads(path.read_text())
    parts = (result, *result.get("launches", ()), *result.get("policies", {}).values())
    commits = dict.fromkeys(filter(None, (commit(part).removeprefix(", ") for part in parts if "software" in part)))
    log = ["git", "log", "-1", "--format=%cs", "--", path]
    day = subprocess.run(log, cwd=ROOT, capture_output=True, text=True).stdout
    return ", ".join(["stored", *(commits or ["unknown commit"]), day.strip() or "not committed"])


def run(arguments: Arguments) -> None:
    """Make the runs. Raises ConfigError for unusable options, EngineError at the end if not all jobs are done."""
    began = time.monotonic()
    paths = {name: getattr(arguments, name) for name in INPUTS if name != "stress"}
    for name, path in paths.items():
        if path is not None and not path.exists():
            raise ConfigError(f"{name.replace('_', '-')}: expected an existing path, got {path}")
    jobs = selected(arguments.names or ("*",), JOBS)
    for name in INPUTS:
        if getattr(arguments, name) is not None and not any(f"{{{name}}}" in job.command for job in jobs):
            raise ConfigError(
                f"{name.replace('_', '-')}: expected a run that reads it, got {', '.join(job.name for job in jobs)}"
            )
    found, names = gpus()
    inputs = {name: path and str(path.resolve()) for name, path in paths.items()}
    inputs["stress"] = arguments.stress or stored_stress(RESULTS / "libero_stress.json")
    machine = slots(found, by_core(os.sched_getaffinity(0)))
    runner = Runner(jobs, machine, arguments.work.resolve(), inputs=inputs, models=names)
    if arguments.list:
        print("\n".join(_listed(runner, job) for job in jobs))
        return
    with exclusive(runner.work):
        runner.run(began + 60 * arguments.minutes - GRACE_S)
    report(runner.outcomes)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock a work folder for this process. Raises ConfigError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, f"{folder}: another process works in it; wait for it, or name another folder")
        yield
    finally:
        os.close(descriptor)


def report(outcomes: Mapping[str, Outcome]) -> None:
    """Print every outcome, and one JSON line at the end. Raises EngineError if a job is not done."""
    kinds = (DONE, CONTINUED, FAILED, LEFT_OUT)
    summary = {kind: {name: one.why for name, one in outcomes.items() if one.kind == kind} for kind in kinds}
    _say("")
    for kind, jobs in summary.items():
        for name, why in jobs.items():
            _say(f"{kind:<{len(CONTINUED)}}  {name}{why and ': '}{why}")
    print_json(summary)
    if left := [name for name, one in outcomes.items() if one.kind != DONE]:
        raise EngineError(f"not done: {len(left)} of {len(outcomes)} jobs")


main = partial(run_script, "benchmarks.measure", Arguments, run)


if __name__ == "__main__":
    sys.exit(main(None))
