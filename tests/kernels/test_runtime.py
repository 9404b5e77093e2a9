"""The CUDA runtime layer (`ops/cuda/runtime.py`) with a driver that records: which device and stream a launch goes to,
what a failed wait is called; and that no source waits without a bound."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vla_accel.errors import EngineError
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import Runtime

FIRST, SECOND = (torch.device("cuda", i) for i in range(2))
SOURCES = sorted(Path(nvrtc.__file__).parent.rglob("*.cu*"))


class Machine:
    """Two GPUs: which is current, and the launches as (device current at the launch, stream)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.switches = 0, 0
        self.launches: list[tuple[int, int]] = []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "current_stream", self.stream)
        monkeypatch.setattr(nvrtc, "driver", lambda: self)
        monkeypatch.setattr(nvrtc, "compiled", lambda *_: b"")

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        self.switches += 1
        yield
        self.current = before

    def stream(self, device: torch.device | None = None) -> SimpleNamespace:
        index = self.current if device is None else device.index
        return SimpleNamespace(cuda_stream=100 + index)

    def cuLaunchKernelEx(self, config: Any, *_: Any) -> int:
        self.launches.append((self.current, ctypes.cast(config, ctypes.POINTER(nvrtc._Config)).contents.stream))
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


@pytest.mark.parametrize("device", [FIRST, SECOND])
@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_goes_to_its_module_s_device(
    device: torch.device, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    module = nvrtc.Module("", {"f": 0}, "sm_90a", device)
    machine.current, machine.switches = current, 0
    module.launch("f", 1, 32, ())
    assert machine.launches == [(device.index, 100 + device.index)] and machine.current == current
    # Nothing is switched where the device is the current one.
    assert machine.switches == (device.index != current)


@pytest.mark.parametrize(("architecture", "attributes"), [("sm_80", [8]), ("sm_89", [8]), ("sm_90a", [8, 14])])
def test_only_gpus_with_clusters_are_set_up_for_large_ones(
    architecture: str, attributes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, found = Machine(monkeypatch), list[int]()
    monkeypatch.setattr(machine, "cuFuncSetAttribute", lambda _, kind, __: found.append(kind) or 0, raising=False)
    nvrtc.Module("", {"f": 0}, architecture, FIRST)
    assert found == attributes


def test_a_kernel_that_gave_up_waiting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream_that_fails(text: str) -> Any:
        def synchronize() -> None:
            raise RuntimeError(text)

        return lambda _: SimpleNamespace(synchronize=synchronize)

    monkeypatch.setattr(torch.cuda, "current_stream", stream_that_fails("CUDA error: unspecified launch failure\n…"))
    with pytest.raises(EngineError, match=r"cuda:0: a kernel stopped itself.*native: {kernels: triton}"):
        nvrtc.synchronize(FIRST)
    monkeypatch.setattr(torch.cuda, "current_stream", stream_that_fails("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        nvrtc.synchronize(FIRST)


def statements_of(text: str) -> list[str]:
    """The assembly statements of a source, comments left out, strings joined."""
    bodies = re.findall(r"asm(?:\s+volatile)?\((.*?)\);", re.sub(r"//[^\n]*", "", text), re.DOTALL)
    return ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', body)) for body in bodies]


def test_no_wait_is_without_a_bound() -> None:
    """Every poll gives up: barriers, counters, and numbers that others store, are polled in loops that end in a trap,
    and nowhere else."""
    polls = [s for path in SOURCES for s in statements_of(path.read_text()) if re.search(r"try_wait|test_wait", s)]
    assert len(polls) == 1
    for statement in polls:
        loop = statement[statement.index("again:") :]
        assert re.search(r"setp\.lt\.u32 p, \w+, .*@p bra again;\\ntrap;\\ndone:", loop), statement
    loops = [
        m
        for path in SOURCES
        for m in re.findall(r"(?:for|while) \([^{}]*?(?:ld_relaxed_v4|ld_acquire)\([^{}]*", path.read_text())
    ]
    assert len(loops) == 2
    for text in loops:
        assert 'if (++polls > WAIT_POLLS) asm volatile("trap;");' in text, text


def test_cluster_barriers_follow_a_warp_s_meeting() -> None:
    """`.aligned` barriers of a cluster need whole warps: each stands in a helper right behind __syncwarp()."""
    found = 0
    for path in SOURCES:
        for match in re.finditer(r"([^\n]*)\n[^\n]*barrier\.cluster\.\w+\.\w+\.aligned", path.read_text()):
            assert match[1].strip() == "__syncwarp();", f"{path.name}: {match[0]}"
            found += 1
    assert found == 3


def test_compiled_kernels_are_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    """By source, architecture and compiler; a damaged one is compiled again, one of others is refused."""
    made: list[tuple[str, str]] = []

    class Nvrtc:
        minor = 0

        def nvrtcVersion(self, major: Any, minor: Any) -> int:
            major._obj.value, minor._obj.value = 13, self.minor
            return 0

    def compile_source(source: str, architecture: str) -> bytes:
        made.append((source, architecture))
        return f"{source} for {architecture}".encode()

    def found(source: str, architecture: str = "sm_90a") -> bytes:
        nvrtc.compiled.cache_clear()  # as in another process
        return nvrtc.compiled(source, architecture)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", Nvrtc)
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for _ in range(2):
        assert found("a") == b"a for sm_90a" and found("b") == b"b for sm_90a" and found("a", "sm_80") == b"a for sm_80"
    assert made == [("a", "sm_90a"), ("b", "sm_90a"), ("a", "sm_80")]
    Nvrtc.minor = 1
    assert found("a") == b"a for sm_90a" and len(made) == 4
    for file in nvrtc.compiled_folder().iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert found("a") == b"a for sm_90a" and len(made) == 5 and "the file is damaged" in caplog.text
    nvrtc.compiled_folder().chmod(0o777)
    with pytest.raises(EngineError, match="may be written to by others"):
        found("a")
    nvrtc.compiled.cache_clear()


def test_kernels_are_compiled_side_by_side_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, here = Machine(monkeypatch), threading.get_ident()
    monkeypatch.setattr(nvrtc, "_LOADED", {})
    beside: list[tuple[str, bool]] = []

    def compiled(source: str, _: str) -> bytes:
        beside.append((source, threading.get_ident() != here))
        if source == "broken":
            raise EngineError("does not compile")
        return b""

    monkeypatch.setattr(nvrtc, "compiled", compiled)

    monkeypatch.setattr(Gpu, "of", lambda _: None)

    def launch(source: str) -> None:
        nvrtc.load_module(source, {"f": 0}, "sm_90a", FIRST).launch("f", 1, 32, ())

    launch("old")
    with nvrtc.submitting() as submit, Runtime(FIRST, None, "cuda", submit=submit).open():
        for source in ("old", "new", "broken", "new"):
            launch(source)
    assert len(machine.launches) == 2, "what is loaded is launched, what was sent is not sent again"
    assert sorted(beside) == [("broken", True), ("new", True), ("old", False)]
    launch("new")
    assert len(machine.launches) == 3 and beside[3:] == [("new", False)]
    with pytest.raises(EngineError, match="does not compile"):
        launch("broken")
