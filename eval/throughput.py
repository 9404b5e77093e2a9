"""Episodes an hour with more simulators and more GPUs, and what the machine is busy with meanwhile.

`python -m eval.throughput` runs `python -m eval.libero` once for each case and watches the machine. The rate is that of
the time in which all simulators play: from the first recorded result to the n-th last, with n simulators.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from eval.harness.log import log_path
from eval.script import run_script
from vla_accel.cli.common import say
from vla_accel.cli.options import Count, OutputFolder, Seconds, Written
from vla_accel.errors import ConfigError, EngineError
from vla_accel.files import write_json
from vla_accel.measure.host import busy_s
from vla_accel.progress import going_on

SCHEMA = "vla_accel.throughput/1"
CPUS = Path("/sys/devices/system/cpu")
_EVERY_S = 0.25
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """One run. `ray`: over a Ray cluster that it starts, else worker processes; `gpus`: how many it sees, 0 for none;
    `cores`: how many it may use, 0 for all, both threads of a core before another core's."""

    ray: bool
    gpus: int
    simulators: int
    trials: int
    cores: int = 0

    @classmethod
    def parse(cls, text: str) -> Case:
        """`ray:2:30:30:32` or `plain:1:14:6`. Raises ConfigError."""
        how, *numbers = text.split(":")
        if how not in ("ray", "plain") or len(numbers) not in (3, 4) or not all(n.isdecimal() for n in numbers):
            raise ConfigError(f"case: expected ray or plain:GPUS:SIMULATORS:TRIALS[:CORES], got {text!r}")
        case = cls(how == "ray", *map(int, numbers))
        if min(case.simulators, case.trials) < 1:
            raise ConfigError(f"case: expected at least one simulator and one trial, got {text!r}")
        return case


@dataclass(frozen=True)
class Arguments:
    """Run each case, and write the report after each."""

    output: Annotated[Path, Written()]
    """JSON file."""
    runs: OutputFolder = None
    """Folder for the results of the runs. Default: the name of the output without its suffix."""
    case: tuple[str, ...] = ("plain:1:4:6", "plain:1:8:6", "plain:1:14:6", "ray:1:14:6")
    """Each is ray or plain:GPUS:SIMULATORS:TRIALS[:CORES]; GPUS of 0 plays on the CPU."""
    module: str = "eval.libero"
    """The benchmark's command."""
    steps: Count = 10
    """Denoising steps."""
    options: str = ""
    """More words for the benchmark's command, with spaces between them, such as --options="--config native_fp8"."""
    limit_s: Seconds = 300.0
    """Longest that a case may take."""


def run(arguments: Arguments) -> None:
    """Play the cases. One that fails has its error in its row. Raises EngineError at the end if one did."""
    cases = [Case.parse(text) for text in arguments.case]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    runs = arguments.runs or arguments.output.with_suffix("")
    runs.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command_line(arguments),
        "steps": arguments.steps,
        "cores": len(os.sched_getaffinity(0)),
        "rows": [],
    }
    for case, name in zip(cases, arguments.case, strict=True):
        row = asdict(case)
        try:
            with going_on(f"case {name}", say):
                result, watch = _play(case, arguments, runs / f"{name.replace(':', '-')}.json")
            row |= figures(result, watch, case.simulators)
            last = result["launches"][-1]
            report |= {"hardware": last["hardware"], "software": last["software"]}
        except EngineError as error:
            row["error"] = str(error)
        report["rows"].append(row)
        write_json(arguments.output, report)
        print(json.dumps({"case": name, **row}), flush=True)
    if failed := [name for name, row in zip(arguments.case, report["rows"], strict=True) if "error" in row]:
        raise EngineError(f"cases that failed: {', '.join(failed)}")


@dataclass
class Watch:
    """What was seen every quarter of a second, a list item each. `at`: seconds since the start; `episodes`: on record;
    `busy_s`: cores' busy seconds so far; `policy_s`: CPU seconds so far of the process that holds a policy, by process;
    `gpus`: share of each GPU's time in which it computed or drew."""

    at: list[float] = field(default_factory=list)
    episodes: list[int] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    policy_s: list[dict[int, float]] = field(default_factory=list)
    gpus: list[list[float]] = field(default_factory=list)

    def look(self, began: float, pid: int, log: Path, gpus: Sequence[Any]) -> None:
        """Add an item to each list."""
        busy = busy_s()
        assert busy is not None, "only Linux is supported"
        lines = log.read_bytes().splitlines() if log.exists() else []
        self.at.append(time.monotonic() - began)
        self.episodes.append(sum(line.startswith(b'{"kind":"episode"') for line in lines))
        self.busy_s.append(busy)
        self.policy_s.append(_policies_s(pid))
        self.gpus.append([_gpu_busy(handle) for handle in gpus])


def figures(result: dict[str, Any], watch: Watch, simulators: int) -> dict[str, Any]:
    """A row of the report: the rate, and where time went, over the time in which all simulators played.

    `waiting`: share of a simulator's time in which it waited for an answer; `call_ms`: such a wait, and `policy_ms`
    what the policy took of it, medians; `cores_busy`: cores' worth of work, of everything on the machine;
    `policy_core`: share of a core that the busiest process with a policy used; `gpu_busy`: of each GPU.
    """
    episodes = result["episodes"]
    calls, own = ([ms for e in episodes for ms in e["timings_ms"].get(name, ())] for name in ("wall", "total"))
    first = next(i for i, count in enumerate(watch.episodes) if count > 0)
    last = next(i for i, count in enumerate(watch.episodes) if count >= len(episodes) - simulators)
    if last <= first:  # too few episodes for a time in which all play
        first, last = 0, len(watch.at) - 1
    seconds = watch.at[last] - watch.at[first]
    used = [watch.policy_s[last][p] - watch.policy_s[first].get(p, 0.0) for p in watch.policy_s[last]]
    gpus = np.array(watch.gpus[first : last + 1], dtype=float)
    return {
        "episodes": len(episodes),
        "errors": sum(e["error"] is not None for e in episodes),
        "successes": sum(e["success"] for e in episodes),
        "per_hour": round(3600 * (watch.episodes[last] - watch.episodes[first]) / seconds),
        "seconds": round(seconds, 2),
        "start_s": round(watch.at[first], 1),
        "elapsed_s": result["elapsed_s"],
        "waiting": round(sum(calls) / 1e3 / result["episodes_s"], 4),
        "call_ms": _median(calls),
        "policy_ms": _median(own),
        "cores_busy": round((watch.busy_s[last] - watch.busy_s[first]) / seconds, 2),
        "policy_core": round(max(used, default=0.0) / seconds, 3),
        "gpu_busy": gpus.mean(axis=0).round(3).tolist() if gpus.size else [],
    }


def _median(values: Sequence[float]) -> float | None:
    return round(float(np.median(values)), 3) if values else None


def _play(case: Case, arguments: Arguments, output: Path) -> tuple[dict[str, Any], Watch]:
    """Run a case to its end. Raises EngineError if it fails, or takes too long."""
    words = [sys.executable, "-m", arguments.module, "--steps", str(arguments.steps), "--trials", str(case.trials)]
    words += ["--workers", str(case.simulators), "--output", str(output), "--overwrite", *arguments.options.split()]
    words += [*(("--ray", "local") if case.ray else ()), "--device", "cuda" if case.gpus else "cpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(case.gpus)))}
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryFile("w+") as log:
        # The new process inherits the cores of the thread that starts it.
        os.sched_setaffinity(0, by_core(before)[: case.cores or None])
        try:
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        finally:
            os.sched_setaffinity(0, before)
        with watched(process.pid, log_path(output), case.gpus) as watch:
            try:
                why = f"ended with status {process.wait(arguments.limit_s)}"
            except subprocess.TimeoutExpired:
                why = f"took longer than {arguments.limit_s:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        end = " ".join(log.read().split())[-600:]
    if process.returncode != 0:
        raise EngineError(f"{arguments.module} {why}: {end}")
    return json.loads(output.read_text()), watch


@contextlib.contextmanager
def watched(pid: int, log: Path, gpus: int) -> Iterator[Watch]:
    """Watch a command, its episode log and the machine until the block ends."""
    watch, over, began, handles = Watch(), threading.Event(), time.monotonic(), _gpu_handles(gpus)

    def main() -> None:
        watch.look(began, pid, log, handles)
        while not over.wait(_EVERY_S):
            watch.look(began, pid, log, handles)

    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def by_core(cores: Iterable[int], cpus: Path = CPUS) -> list[int]:
    """CPUs in an order in which the threads of one core are neighbours, so that a share of the list has whole cores;
    by number if the system does not list them."""

    def first(core: int) -> int:
        with contextlib.suppress(OSError):
            if number := re.match(r"\d+", (cpus / f"cpu{core}/topology/thread_siblings_list").read_text()):
                return int(number[0])
        return core

    return sorted(cores, key=lambda core: (first(core), core))


def _gpu_handles(count: int) -> list[Any]:
    if not count:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EngineError(f"gpus: expected {count}, found no NVIDIA driver ({error})") from error
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]


def _gpu_busy(handle: Any) -> float:
    import pynvml

    return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100


def _policies_s(pid: int) -> dict[int, float]:
    """CPU seconds of the command's own process and of Ray's processes that hold a policy."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if int(folder.name) == pid or (folder / "cmdline").read_bytes().startswith(b"ray::Replica"):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return found


def command_line(arguments: Arguments) -> str:
    """The command line, without the paths of its files."""
    # Joined by "=": a value that begins with "--" would be taken for another option.
    options = f' --options="{arguments.options}"' if arguments.options else ""
    return f"python -m eval.throughput --steps {arguments.steps} --case {','.join(arguments.case)}{options}"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 all cases played, 1 one failed or a case cannot be understood."""
    return run_script("eval.throughput", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
