"""The quickest of some ways to compute the same thing, measured on the machine at hand, as it will run: in a graph.

What was found can be remembered in the user's cache folder, by GPU, versions and this package's kernels. Nothing is
measured in a deterministic runtime: candidates differ in the order of their sums, and the fastest one from start to
start.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vla_accel.errors import VlaAccelError
from vla_accel.files import cache_folder, write_json
from vla_accel.kernels.dispatch import kernels
from vla_accel.kernels.nvrtc import submitting
from vla_accel.kernels.phases import phase
from vla_accel.runtime import Runtime

log = logging.getLogger("vla_accel")

ROUNDS = 5
"""Replays of a graph that count; the best of them is a way's time."""


@dataclass(frozen=True)
class Fastest:
    """The way taken, milliseconds a call of every way that was measured, and why the others are out.

    On a CPU, where these choices do not matter, and in a deterministic runtime, nothing is measured: `times` is empty.
    """

    way: str
    times: Mapping[str, float] = field(default_factory=dict)
    out: Mapping[str, str] = field(default_factory=dict)


def fastest(candidates: Mapping[str, Callable[[], object]], runtime: Runtime, repeats: int = 5) -> Fastest:
    """Measure every candidate on a GPU, `repeats` calls to a graph. One that cannot run here (an unsupported shape, too
    little memory) is out; none left is an error. While a graph is captured, the first is taken unmeasured; in a
    deterministic runtime the first that runs, and there too little memory is an error, as it may come and go."""
    device = runtime.device
    if not _counts(runtime):
        return Fastest(next(iter(candidates)))
    times: dict[str, float] = {}
    out: dict[str, str] = {}
    if runtime.deterministic:
        for name, run in candidates.items():
            try:
                run_once(run, device)
                return Fastest(name, out=out)
            except torch.OutOfMemoryError:
                raise
            except unfit() as error:
                out[name] = str(error).splitlines()[0]
        raise _none_runs(out)
    with phase("compile"):
        compile_all(candidates.values(), runtime)
    for name, run in candidates.items():
        try:
            with phase("tune"):
                times[name] = milliseconds(run, device, repeats)
        except unfit() as error:
            out[name] = str(error).splitlines()[0]
    if not times:
        raise _none_runs(out)
    return Fastest(min(times, key=lambda n: times[n]), times, out)


def _counts(runtime: Runtime) -> bool:
    """Whether it matters which way is taken, and can be measured: not where every way is the torch reference."""
    on_gpu = runtime.device.type == "cuda" and runtime.backend != "reference"
    return on_gpu and not torch.cuda.is_current_stream_capturing()


def _none_runs(out: Mapping[str, str]) -> RuntimeError:
    return RuntimeError(f"no way to compute this runs here ({'; '.join(f'{n}: {r}' for n, r in out.items())})")


def remembered(
    what: str, candidates: Mapping[str, Callable[[], object]], runtime: Runtime, repeats: int = 5
) -> Fastest:
    """`fastest`, but found again where the same was measured before: of the same name `what`, among the same ways, on
    the same GPU, with the same versions of torch, triton and this package's kernels.

    Kept in `tunings.json` in the user's cache folder. A file that cannot be read is written anew, and the log says so.
    In a deterministic runtime it is neither read nor written.
    """
    if runtime.deterministic or not _counts(runtime):
        return fastest(candidates, runtime, repeats)
    path = cache_folder() / "tunings.json"
    said = json.dumps([what, sorted(candidates), str(runtime.gpu), _versions()])
    key = hashlib.sha256(said.encode()).hexdigest()
    known = _read(path).get(key)
    if known is not None and known.get("way") in candidates:
        return Fastest(known["way"], known["times"], known["out"])
    found = fastest(candidates, runtime, repeats)
    entry = {"what": what, "way": found.way, "times": dict(found.times), "out": dict(found.out)}
    try:
        write_json(path, {**_read(path), key: entry})
    except OSError as error:
        log.warning("%s: what was measured cannot be kept, and is measured at every start: %s", path, error)
    return found


def _read(path: Path) -> dict[str, dict]:
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text())
        return {key: entry for key, entry in known.items() if {"way", "times", "out"} <= entry.keys()}
    except (ValueError, AttributeError) as error:
        log.warning("%s: it holds no tunings (%s); they are measured and written again", path, error)
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
    """What is raised where a way cannot run on the GPU at hand."""
    plain = (RuntimeError, NotImplementedError, ValueError, VlaAccelError)
    if importlib.util.find_spec("triton") is None:
        return plain
    # Triton's words for a kernel that needs more registers or shared memory than there is, or other instructions.
    from triton.runtime.errors import OutOfResources, PTXASError

    return (*plain, OutOfResources, PTXASError)


def compile_all(calls: Collection[Callable[[], object]], runtime: Runtime) -> None:
    """Compile what calls on a GPU launch of Triton's kernels and of CUDA C++, side by side."""
    if len(calls) > 1 and importlib.util.find_spec("triton") is not None:
        with torch.inference_mode(), torch.cuda.device(runtime.device), submitting() as submit:
            compiling = replace(runtime, submit=submit)
            with compiling.open():
                kernels("compiling").compile_side_by_side(calls, unfit())


def run_once(run: Callable[[], object], device: torch.device) -> None:
    """One call on a GPU, to see whether it can be made."""
    with torch.inference_mode(), torch.cuda.device(device):
        run()


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call on a GPU. Through a graph: small kernels would otherwise be judged by how fast the CPU launches."""
    with torch.inference_mode(), torch.cuda.device(device):
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on with what a capture forbids.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
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
        return min(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / repeats


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all measurements of a device: cuBLAS keeps a workspace for every stream it has ever seen."""
    return torch.cuda.Stream(device)
