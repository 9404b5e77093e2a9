"""The fastest of several candidates that compute the same, measured on this GPU as it will run: in a CUDA graph.

Results can be kept in the user's cache folder, by GPU, versions and the sources of this package's kernels. Nothing is
measured in a deterministic runtime: candidates sum in different orders, and the fastest one may differ between starts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from vla_accel.errors import VlaAccelError
from vla_accel.files import cache_folder, write_json
from vla_accel.kernels.capture import CAPTURE_LOCK, recorded
from vla_accel.kernels.dispatch import kernels
from vla_accel.kernels.nvrtc import submitting
from vla_accel.kernels.phases import phase
from vla_accel.runtime import Runtime

log = logging.getLogger("vla_accel")

ROUNDS = 5
"""Timed replays of a graph; the fastest counts."""
Candidates = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Fastest:
    """The chosen candidate, the milliseconds of a call of each measured candidate, and why others were rejected.

    Where nothing is measured, on a CPU and in a deterministic runtime, `times` is empty.
    """

    candidate: str
    times: Mapping[str, float] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)


def fastest(candidates: Candidates, runtime: Runtime, repeats: int = 5) -> Fastest:
    """Measure every candidate on a GPU and choose the fastest one.

    A candidate that cannot run (an unsupported shape, too little memory) is rejected. During graph capture the first
    candidate is chosen unmeasured. A deterministic runtime takes the first one that runs; too little memory is then an
    error, because it depends on what else runs.

    Args:
        candidates: calls by name, in order of preference.
        runtime: open where the candidates run.
        repeats: calls in a graph.

    Raises:
        RuntimeError: no candidate can run.
    """
    device = runtime.device
    if not _measurable(runtime):
        return Fastest(next(iter(candidates)))
    times: dict[str, float] = {}
    rejected: dict[str, str] = {}
    if not runtime.deterministic:
        with phase("compile"):
            compile_all(candidates.values(), runtime)
    for name, run in candidates.items():
        try:
            if runtime.deterministic:
                run_once(run, device)
                return Fastest(name, rejected=rejected)
            with phase("tune"):
                times[name] = milliseconds(run, device, repeats)
        except unfit() as error:
            if runtime.deterministic and isinstance(error, torch.OutOfMemoryError):
                raise
            rejected[name] = str(error).splitlines()[0]
    if not times:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        raise RuntimeError(f"no candidate can run on {device} ({reasons})")
    return Fastest(min(times, key=lambda name: times[name]), times, rejected)


def _measurable(runtime: Runtime) -> bool:
    """Return whether the choice matters and can be measured. All candidates are the same torch reference on a CPU."""
    on_gpu = runtime.device.type == "cuda" and runtime.backend != "reference"
    return on_gpu and not torch.cuda.is_current_stream_capturing()


def remembered(what: str, candidates: Candidates, runtime: Runtime, repeats: int = 5) -> Fastest:
    """`fastest`, or its earlier result with the same name `what`, candidates, GPU, versions and kernel sources.

    Results are kept in `tunings.json` in the user's cache folder. A file that cannot be read is logged and written
    again. A deterministic runtime neither reads nor writes it.
    """
    if runtime.deterministic or not _measurable(runtime):
        return fastest(candidates, runtime, repeats)
    path = cache_folder() / "tunings.json"
    text = json.dumps([what, sorted(candidates), str(runtime.gpu), _versions()])
    key = hashlib.sha256(text.encode()).hexdigest()
    known = _read(path).get(key)
    if known is not None and known["way"] in candidates:
        return Fastest(known["way"], known["times"], known["out"])
    found = fastest(candidates, runtime, repeats)
    entry = {"what": what, "way": found.candidate, "times": dict(found.times), "out": dict(found.rejected)}
    try:
        write_json(path, {**_read(path), key: entry})
    except OSError as error:
        log.warning("%s: cannot write tuning results, so every start measures again: %s", path, error)
    return found


def _read(path: Path) -> dict[str, dict]:
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text())
        return {key: entry for key, entry in known.items() if {"way", "times", "out"} <= entry.keys()}
    except (ValueError, AttributeError) as error:
        log.warning("%s: expected tuning results, got %s; measuring and writing them again", path, error)
        return {}


@functools.cache
def _versions() -> tuple[str, ...]:
    sources = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*")):
        if file.suffix in (".py", ".cu"):
            sources.update(file.read_bytes())
    triton = importlib.util.find_spec("triton") and importlib.metadata.version("triton")
    return torch.__version__, str(torch.version.cuda), str(triton), sources.hexdigest()


def unfit() -> tuple[type[Exception], ...]:
    """Return the errors of a candidate that cannot run on this GPU."""
    plain = (RuntimeError, NotImplementedError, ValueError, VlaAccelError)
    if importlib.util.find_spec("triton") is None:
        return plain
    # A kernel needs more registers or shared memory than there is, or other instructions.
    from triton.runtime.errors import OutOfResources, PTXASError

    return (*plain, OutOfResources, PTXASError)


def compile_all(calls: Collection[Callable[[], object]], runtime: Runtime) -> None:
    """Compile the kernels of several calls in parallel, Triton's and CUDA C++, without launching them."""
    if len(calls) > 1 and importlib.util.find_spec("triton") is not None:
        on_device = torch.cuda.device(runtime.device)
        with torch.inference_mode(), on_device, submitting() as submit, replace(runtime, submit=submit).open():
            kernels("compiling").compile_in_parallel(calls, unfit())


def run_once(run: Callable[[], object], device: torch.device) -> None:
    """Call once on a GPU, to see whether it can run."""
    with CAPTURE_LOCK, torch.inference_mode(), torch.cuda.device(device):
        run()


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the time of a call on a GPU, in a graph: otherwise the CPU's launches would dominate small kernels."""
    with CAPTURE_LOCK, torch.inference_mode(), torch.cuda.device(device):
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
            graph = torch.cuda.CUDAGraph()
            with recorded(graph, stream):
                for _ in range(repeats):
                    run()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
            graph.replay()
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairwise(events)) / repeats


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all measurements of a device: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)
