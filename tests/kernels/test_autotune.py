"""The one way to find the quickest of several: what is measured, what is out and why. Times are not tested."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpus import H20, H200
from vla_accel.errors import EngineError
from vla_accel.kernels import autotune
from vla_accel.kernels.autotune import Fastest, fastest, remembered
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import Runtime

GPU = torch.device("cuda")
ON_CPU, ON_GPU = Runtime.of(torch.device("cpu")), Runtime(GPU, H200, "cuda")
PINNED = replace(ON_GPU, deterministic=True)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Milliseconds that a way is found to take, which is run once."""
    found: dict[Any, float] = {}

    def milliseconds(run: Any, device: torch.device, repeats: int) -> float:
        assert device == GPU and repeats == 7
        return found[run()]

    monkeypatch.setattr(autotune, "milliseconds", milliseconds)
    monkeypatch.setattr(autotune, "compile_all", lambda calls, runtime: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def broken(error: Exception) -> Any:
    def run() -> None:
        raise error

    return run


def test_the_first_is_taken_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"a": lambda: 1 / 0, "b": lambda: None}
    assert fastest(ways, ON_CPU) == Fastest("a")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fastest(ways, ON_GPU) == Fastest("a")


def test_the_quickest_is_taken_and_who_cannot_is_out(times: dict[Any, float]) -> None:
    times.update(slow=3.0, quick=1.0)
    ways = {
        "slow": lambda: "slow",
        "memory": broken(torch.OutOfMemoryError("CUDA out of memory.\nmore")),
        "quick": lambda: "quick",
        "engine": broken(EngineError("it cannot run this")),
        "shape": broken(NotImplementedError("only 64")),
    }
    assert fastest(ways, ON_GPU, 7) == Fastest(
        "quick",
        {"slow": 3.0, "quick": 1.0},
        {"memory": "CUDA out of memory.", "engine": "it cannot run this", "shape": "only 64"},
    )
    with pytest.raises(RuntimeError, match=r"no candidate can run on cuda \(shape: only 64\)"):
        fastest({"shape": ways["shape"]}, ON_GPU, 7)
    # A mistake is not a way that cannot run.
    with pytest.raises(ZeroDivisionError):
        fastest({"mistake": lambda: 1 / 0}, ON_GPU, 7)


def test_all_are_compiled_before_one_is_measured(times: dict[Any, float], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    ways = {name: lambda name=name: done.append(name) or name for name in ("a", "b")}
    times.update(a=2.0, b=1.0)
    monkeypatch.setattr(
        autotune, "compile_all", lambda calls, runtime: done.extend(f"{call()} compiled" for call in calls)
    )
    assert fastest(ways, ON_GPU, 7).candidate == "b"
    assert done == ["a", "a compiled", "b", "b compiled", "a", "b"]


def test_what_triton_cannot_fit_is_out(times: dict[Any, float]) -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="NOT RUN: needs triton")

    times.update(runs=1.0)
    ways = {
        "large": broken(errors.OutOfResources(196_608, 101_376, "shared memory")), "runs": lambda: "runs",
        "assembler": broken(errors.PTXASError("no such instruction")),
    }  # fmt: skip
    found = fastest(ways, ON_GPU, 7)
    assert (
        found.candidate == "runs"
        and set(found.rejected) == {"large", "assembler"}
        and "196608" in found.rejected["large"]
    )


def test_what_was_measured_is_found_again(
    times: dict[Any, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "vla_accel" / "tunings.json"
    measured: list[str] = []

    def ways(*names: str) -> dict[str, Any]:
        return {name: lambda name=name: measured.append(name) or name for name in names}

    def asked(*names: str, what: str = "o", gpu: Gpu = H200) -> Fastest:
        measured.clear()
        return remembered(what, ways(*names), replace(ON_GPU, gpu=gpu), 7)

    assert remembered("o", ways("a"), ON_CPU) == Fastest("a") and not file.exists()
    times.update(a=2.0, b=1.0)
    found = asked("a", "b")
    assert found == Fastest("b", {"a": 2.0, "b": 1.0}) and measured == ["a", "b"]
    times.update(b=3.0)
    assert asked("a", "b") == found and not measured
    # Another question: other ways, another name, another GPU, other kernels.
    assert asked("a").candidate == "a" and asked("a", "b", what="down").candidate == "a" and measured
    for gpu in (H20, H200.portable):
        assert asked("a", "b", gpu=gpu).candidate == "a" and measured
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "_versions", lambda: ("other",))
        assert asked("a", "b").candidate == "a" and measured
    assert asked("a", "b") == found and len(json.loads(file.read_text())) == 6
    file.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert asked("a", "b").candidate == "a" and measured
    assert "expected tuning results" in caplog.text and len(json.loads(file.read_text())) == 1


def test_pinned_takes_the_first_way_that_runs_and_no_measurement(
    times: dict[Any, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autotune, "run_once", lambda run, device: run())
    file = tmp_path / "vla_accel" / "tunings.json"
    times.update(slow=3.0, quick=1.0)

    refused = broken(EngineError("it cannot run this\nmore"))
    ways: dict[str, Any] = {"broken": refused, "slow": lambda: "slow", "quick": lambda: "quick"}
    first = Fastest("slow", {}, {"broken": "it cannot run this"})
    assert remembered("o", ways, PINNED, 7) == fastest(ways, PINNED, 7) == first and not file.exists()
    assert remembered("o", ways, ON_GPU, 7).candidate == "quick"
    before = file.read_text()
    assert remembered("o", ways, PINNED, 7) == first, "an earlier measurement does not count"
    assert file.read_text() == before

    with pytest.raises(torch.OutOfMemoryError):  # another start may have enough memory
        fastest({"large": broken(torch.OutOfMemoryError("CUDA out of memory.")), **ways}, PINNED, 7)
    with pytest.raises(RuntimeError, match=r"no candidate can run on cuda \(broken: it cannot run this\)"):
        fastest({"broken": refused}, PINNED, 7)


@pytest.mark.gpu
def test_a_way_is_measured_in_a_graph() -> None:
    x = torch.zeros(1024, device=GPU)
    calls = [0]

    def run() -> None:
        calls[0] += 1
        x.add_(1)

    found = fastest({"add": run, "refused": lambda: torch.empty(3, device=GPU).item()}, Runtime.of(GPU), repeats=4)
    assert found.candidate == "add" and set(found.times) == {"add"} and set(found.rejected) == {"refused"}
    # By the host: one to compile, three to warm up, four recorded. On the device: a replay a round and one before.
    assert calls == [1 + 3 + 4] and x[0].item() == 1 + 3 + 4 * (autotune.ROUNDS + 1)
