"""The one way to find the quickest of several: what is measured, what is out and why. Times are not tested."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vla_accel.errors import EngineError
from vla_accel.ops import autotune
from vla_accel.ops.autotune import Fastest, fastest

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Milliseconds that a way is found to take, which is run once."""
    found: dict[Any, float] = {}

    def milliseconds(run: Any, device: torch.device, repeats: int) -> float:
        assert device == GPU and repeats == 7
        return found[run()]

    monkeypatch.setattr(autotune, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_the_first_is_taken_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"a": lambda: 1 / 0, "b": lambda: None}
    assert fastest(ways, CPU) == Fastest("a")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fastest(ways, GPU) == Fastest("a")


def test_the_quickest_is_taken_and_who_cannot_is_out(times: dict[Any, float]) -> None:
    def broken(error: Exception) -> Any:
        def run() -> None:
            raise error

        return run

    times.update(slow=3.0, quick=1.0)
    ways = {
        "slow": lambda: "slow",
        "memory": broken(torch.OutOfMemoryError("CUDA out of memory.\nmore")),
        "quick": lambda: "quick",
        "engine": broken(EngineError("it cannot run this")),
        "shape": broken(NotImplementedError("only 64")),
    }
    assert fastest(ways, GPU, 7) == Fastest(
        "quick",
        {"slow": 3.0, "quick": 1.0},
        {"memory": "CUDA out of memory.", "engine": "it cannot run this", "shape": "only 64"},
    )
    with pytest.raises(RuntimeError, match=r"no way to compute this runs here \(shape: only 64\)"):
        fastest({"shape": ways["shape"]}, GPU, 7)
    # A mistake is not a way that cannot run.
    with pytest.raises(ZeroDivisionError):
        fastest({"mistake": lambda: 1 / 0}, GPU, 7)


@pytest.mark.gpu
def test_a_way_is_measured_in_a_graph() -> None:
    x = torch.zeros(1024, device=GPU)
    calls = [0]

    def run() -> None:
        calls[0] += 1
        x.add_(1)

    found = fastest({"add": run, "refused": lambda: torch.empty(3, device=GPU).item()}, GPU, repeats=4)
    assert found.way == "add" and set(found.times) == {"add"} and set(found.out) == {"refused"}
    # Three to warm up and four recorded by the host; a replay for each round and one before, on the device.
    assert calls == [3 + 4] and x[0].item() == 3 + 4 * (autotune.ROUNDS + 1)
