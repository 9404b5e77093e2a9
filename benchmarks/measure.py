"""Make the stored runs again on the GPUs of this machine: `python -m benchmarks.measure`.

`benchmarks.jobs` says which command makes which run. Each is begun, in the order of the names or in that one, once
there is room: half a GPU and half of its cores, a whole one, or the machine. A run is copied to benchmarks/results when
its command has ended well, and is not made again while the work folder has it. When the time is over, what runs
is interrupted as Ctrl-C does; the same command goes on: episodes are continued from their log, other jobs begin again.
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
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.jobs import JOBS, STORED_GPU, Job
from benchmarks.markdown import commit
from benchmarks.places import Place, gpus, places, room
from benchmarks.store import RESULTS
from eval.script import run_script
from eval.throughput import by_core
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.cli.common import print_json
from vla_accel.cli.options import File, Flag, Folder, Seconds, Text, Written
from vla_accel.errors import ConfigError, EngineError
from vla_accel.files import lock, replacing

ROOT = Path(__file__).parent.parent
GRACE_S = 10.0
"""Time that an interrupted command has to write what it knows."""
DONE, CONTINUED, FAILED, LEFT_OUT = "done", "to be continued", "failed", "left out"


@dataclass(frozen=True)
class Arguments:
    """Make stored runs anew: all, or those that are named, with the runs that they are made from."""

    names: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint=""), tyro.conf.Positional
    ] = ()
    """Files of benchmarks/results without their ending, the first to be made first; * stands for anything."""
    minutes: Seconds = 9.0
    """Time that all of it may take; the same command goes on where it ended."""
    work: Annotated[Path, Written(folder=True)] = Path("runs/measure")
    """Folder of logs, of runs under way, and of those that are done, which are not made again."""
    observations: File = None
    """Recorded observations (.npz), for agreement and tuning."""
    realtime_vla: Folder = None
    """A checkout of realtime-vla, whose code is timed beside the portable kernels."""
    stress: Text = None
    """Such as noise=0.2, at which eager_fp32 wins 40 to 80 %. Default: as in the stored run."""
    starts: Folder = None
    """A folder that has one of start states of libero_spatial, 100 a task, on which nobody trained: what is played
    under stress (eval.demo.states)."""
    list: Flag = False
    """Show each job, what is stored of it, and what it lacks here; run nothing."""


@dataclass(frozen=True)
class Outcome:
    """Of `DONE`, `CONTINUED`, `FAILED`, `LEFT_OUT`, and why."""

    kind: str
    why: str = ""


@dataclass
class Measuring:
    """Jobs on the places of a machine. `given`: the options that commands have places for; `models`: names of its
    GPUs."""

    jobs: Sequence[Job]
    places: Sequence[Place]
    work: Path
    results: Path = RESULTS
    given: Mapping[str, str | None] = field(default_factory=dict)
    models: Sequence[str] = ()
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: dict[str, tuple[Job, subprocess.Popen[bytes], list[Place]]] = field(default_factory=dict)

    def made(self, job: Job) -> Path:
        """A job's JSON, once its command has ended well."""
        return self.work / f"{job.name}.json"

    def partial(self, job: Job, suffix: str = "") -> Path:
        """Where its command writes."""
        return self.work / "partial" / f"{job.name}{suffix}"

    def lacking(self, job: Job) -> str | None:
        """What a job needs that is not here; None if it can run."""
        gpus = len({place.gpu for place in self.places} - {None})
        if job.gpus > gpus:
            return f"it needs {job.gpus} GPU{'s' * (job.gpus > 1)}, found {gpus}"
        if job.only and (others := self._others(job.only)):
            return f"it needs an {job.only}, found an {others[0]}"
        if job.checkpoint and job.checkpoint not in NAMED:
            return f"it needs the bundled checkpoint {job.checkpoint}, found {', '.join(NAMED)}"
        for need in job.needs:
            if need in self.given:
                if self.given[need] is None:
                    return f"it needs --{need.replace('_', '-')}"
            elif importlib.util.find_spec(need) is None:
                return f"it needs the package {need}, which is not installed"
        return None

    def words(self, job: Job, cores: int) -> list[str]:
        """Its command line."""
        words: list[str] = []
        for word in shlex.split(job.command):
            filled = {"work": self.work, "json": self.partial(job, ".json"), "folder": self.partial(job),
                      "workers": max(1, cores - 1), **self.given}  # fmt: skip
            for name, value in filled.items():
                word = word.replace(f"{{{name}}}", str(value))
            words.append(word)
        program = {"python": [sys.executable], "vla-accel": [sys.executable, "-m", "vla_accel"]}
        return [*program[words[0]], *words[1:]]

    def run(self, end: float, grace_s: float = GRACE_S) -> None:
        """Begin jobs as there is room until the time `end` of the monotonic clock, then interrupt what runs."""
        for job in self.jobs:
            if self.made(job).is_file():
                self.outcomes[job.name] = Outcome(DONE, "before")
            elif why := self.lacking(job):
                self.outcomes[job.name] = Outcome(LEFT_OUT, why)
        try:
            while time.monotonic() < end and self._begin_some() | self._end_some():
                time.sleep(0.05)
        except KeyboardInterrupt:
            _say("interrupted")
        finally:
            with _unhindered():
                self._interrupt(grace_s)
            for job in self.jobs:
                self.outcomes.setdefault(job.name, Outcome(CONTINUED, "not begun"))

    def _begin_some(self) -> bool:
        """Begin what there is room for; whether any job waits. None overtakes one that waits for room, so that a large
        one has its turn; those that wait for other jobs are passed."""
        waits = False
        for job in self.jobs:
            if job.name in self.outcomes or job.name in self.running:
                continue
            before = {name: self.outcomes.get(name) for name in job.after}
            if broken := [name for name, outcome in before.items() if outcome and outcome.kind != DONE]:
                self._settle(job, Outcome(LEFT_OUT, f"it is made from {', '.join(broken)}"))
                continue
            waits = True
            if None in before.values():
                continue
            taken = [place for *_, theirs in self.running.values() for place in theirs]
            mine = room(job, [place for place in self.places if place not in taken], self.places)
            if mine is None:
                break
            self._begin(job, mine)
        return waits

    def _begin(self, job: Job, mine: list[Place]) -> None:
        cores = sorted({core for place in mine for core in place.cores})
        visible = ",".join(dict.fromkeys(place.gpu for place in mine if place.gpu and job.gpus))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}

        def alone() -> None:
            # A background job of a shell, and what it starts, would ignore the interrupt.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.sched_setaffinity(0, cores)

        self.partial(job).mkdir(parents=True, exist_ok=True)
        with open(self.partial(job, ".log"), "ab") as log:
            process = subprocess.Popen(
                self.words(job, len(cores)), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT,
                env=environment, preexec_fn=alone, start_new_session=True,
            )  # fmt: skip
        self.running[job.name] = (job, process, mine)
        _say(f"{job.name}: {f'GPU {visible}, ' if visible else ''}{len(cores)} core{'s' * (len(cores) > 1)}")

    def _end_some(self) -> bool:
        """Settle the jobs whose command has ended; whether any runs on."""
        for name, (job, process, _) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                _kill(process)  # what it may have left behind
                self._settle(job, self._ended(job, process.returncode))
        return bool(self.running)

    def _interrupt(self, grace_s: float) -> None:
        """Let what runs write what it knows, then end it. What ended well meanwhile counts."""
        for _, process, _ in self.running.values():
            process.send_signal(signal.SIGINT)
        end = time.monotonic() + grace_s
        for job, process, _ in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            _kill(process)
            ended = self._ended(job, process.wait())
            self._settle(job, ended if ended.kind == DONE else Outcome(CONTINUED, "interrupted"))
        self.running.clear()

    def _ended(self, job: Job, status: int) -> Outcome:
        """Keep what a command wrote that ended well. Its last words, if it did not."""
        if status != 0:
            return Outcome(FAILED, f"status {status}: {_last_line(self.partial(job, '.log'))}")
        written = self.partial(job) / job.file if job.file else self.partial(job, ".json")
        try:
            found = json.loads(written.read_text())
        except (OSError, ValueError) as error:
            return Outcome(FAILED, f"expected JSON in {written}: {error}")
        if isinstance(found, dict) and not found.get("complete", True):
            return Outcome(FAILED, f"expected a complete run in {written}, got one that was cut off")
        others = self._others(STORED_GPU) if job.name.endswith(f"_{STORED_GPU.lower()}") else []
        if job.stored and not others:
            with replacing(self.results / f"{job.name}.json") as temporary:
                shutil.copyfile(written, temporary)
        self.made(job).parent.mkdir(parents=True, exist_ok=True)
        os.replace(written, self.made(job))  # last: what is there is stored
        why = f"not stored: its name says {STORED_GPU}, this is an {others[0]}" if others else ""
        return Outcome(DONE, why if job.stored else "")

    def _others(self, gpu: str) -> list[str]:
        """The GPUs here that are none of this name."""
        return [name for name in self.models if gpu not in name]

    def _settle(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.name] = outcome
        _say(f"{job.name}: {outcome.kind}{outcome.why and ', '}{outcome.why}")


@contextlib.contextmanager
def _unhindered() -> Iterator[None]:
    """A second Ctrl-C, which would leave jobs behind, does nothing in this block."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The command and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((" ".join(line.split())[-300:] for line in reversed(lines) if line.strip()), "it said nothing")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def chosen(names: Iterable[str], jobs: Sequence[Job]) -> list[Job]:
    """The jobs of these names, in the order of the names, then of `jobs`; before each what it is made from. Raises
    ConfigError."""
    by_name = {job.name: job for job in jobs}
    wanted: dict[str, Job] = {}

    def want(job: Job) -> None:
        for before in job.after:
            want(by_name[before])
        wanted.setdefault(job.name, job)

    for name in names:
        found = [job for job in jobs if fnmatchcase(job.name, name)]
        if not found:
            raise ConfigError(f"names: expected some of what --list names, got {name!r}")
        for job in found:
            want(job)
    return list(wanted.values())


def stored_stress(path: Path) -> str | None:
    """The disturbances of a stored run, as they are typed; None if it is not stored."""
    if not path.is_file():
        return None
    stress = json.loads(path.read_text())["protocol"].get("stress", {})
    return ",".join(f"{name}={value:g}" for name, value in stress.items()) or None


def _listed(measuring: Measuring, job: Job) -> str:
    """A job's line and its command."""
    said = [_stored(measuring.results / f"{job.name}.json") if job.stored else "a step towards others"]
    said += ["done"] if measuring.made(job).is_file() else []
    said += [why] if (why := measuring.lacking(job)) else []
    return f"{job.name}: {'; '.join(said)}\n    {job.command}"


def _stored(path: Path) -> str:
    """Commit of a stored run and the date on which it was stored."""
    if not path.is_file():
        return "not stored"
    result: dict[str, Any] = json.loads(path.read_text())
    told = [
        part
        for part in (result, *result.get("launches", ()), *result.get("policies", {}).values())
        if "software" in part
    ]
    commits = dict.fromkeys(filter(None, (commit(part).removeprefix(", ") for part in told)))
    day = subprocess.run(
        ["git", "log", "-1", "--format=%cs", "--", path], cwd=ROOT, capture_output=True, text=True
    ).stdout
    return ", ".join(["stored", *(commits or ["commit not told"]), day.strip() or "not committed"])


def run(arguments: Arguments) -> None:
    """Make the runs. Raises ConfigError for what cannot be asked, EngineError at the end if not all are done."""
    began = time.monotonic()
    for name in ("observations", "realtime_vla", "starts"):
        path = getattr(arguments, name)
        if path is not None and not path.exists():
            raise ConfigError(f"{name.replace('_', '-')}: expected a path that is there, got {path}")
    jobs = chosen(arguments.names or ("*",), JOBS)
    for name in ("observations", "realtime_vla", "starts", "stress"):
        if getattr(arguments, name) is not None and not any(f"{{{name}}}" in job.command for job in jobs):
            raise ConfigError(
                f"{name.replace('_', '-')}: expected a run that reads it, got {', '.join(job.name for job in jobs)}"
            )
    found, names = gpus()
    measuring = Measuring(
        jobs,
        places(found, by_core(os.sched_getaffinity(0))),
        arguments.work.resolve(),
        given={
            "observations": arguments.observations and str(arguments.observations.resolve()),
            "realtime_vla": arguments.realtime_vla and str(arguments.realtime_vla.resolve()),
            "starts": arguments.starts and str(arguments.starts.resolve()),
            "stress": arguments.stress or stored_stress(RESULTS / "libero_stress.json"),
        },
        models=names,
    )
    if arguments.list:
        print("\n".join(_listed(measuring, job) for job in jobs))
        return
    with alone_in(measuring.work):
        measuring.run(began + 60 * arguments.minutes - GRACE_S)
    report(measuring.outcomes)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A folder of work is this process's within the block. Raises ConfigError if it is another's."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, f"{folder}: another process works in it; wait for it, or name another folder")
        yield
    finally:
        os.close(descriptor)


def report(outcomes: Mapping[str, Outcome]) -> None:
    """Say what became of each job, and end with one JSON line. Raises EngineError if one is not done."""
    summary = {
        kind: {name: one.why for name, one in outcomes.items() if one.kind == kind}
        for kind in (DONE, CONTINUED, FAILED, LEFT_OUT)
    }
    _say("")
    for kind, of_kind in summary.items():
        for name, why in of_kind.items():
            _say(f"{kind:<{len(CONTINUED)}}  {name}{why and ': '}{why}")
    print_json(summary)
    if left := [name for name, one in outcomes.items() if one.kind != DONE]:
        raise EngineError(f"not done: {len(left)} of {len(outcomes)} jobs")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 all that was asked for is done, 1 it is not."""
    return run_script("benchmarks.measure", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
