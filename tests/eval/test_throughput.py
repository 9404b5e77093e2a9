"""`python -m eval.throughput`: rates and shares are those of the time in which all simulators play, and what a run says
is in its row."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures
from benchmarks.tables import registry
from benchmarks.tables.hardware import plan
from benchmarks.tables.hardware import throughput as table
from benchmarks.tables.server import server, server_gpus
from eval import throughput
from eval.throughput import Arguments, Case, Watch, command_line, figures
from tests.support.reports import cells
from vla_accel.cli.options import read
from vla_accel.errors import ConfigError


def result(count: int) -> dict[str, Any]:
    """`count` episodes of 10 s with ten calls of 200 ms, of which the policy takes 20."""
    timings = {"wall": [200.0] * 10, "total": [20.0] * 10}
    episodes = [{"error": None, "success": True, "timings_ms": timings} for _ in range(count)]
    return {"episodes": episodes, "episodes_s": 10.0 * count, "elapsed_s": 100.0}


def test_a_rate_is_that_of_the_time_in_which_all_play() -> None:
    """Start-up, and the end in which simulators have no more to do, are left out."""
    watch = Watch(
        at=[0.0, 50.0, 60.0, 80.0, 100.0],
        episodes=[0, 2, 4, 8, 10],
        busy_s=[0.0, 90.0, 110.0, 170.0, 171.0],
        policy_s=[{}, {1: 5.0}, {1: 6.0, 2: 0.0}, {1: 20.0, 2: 3.0}, {1: 20.0, 2: 3.0}],
        gpus=[[0.0], [0.5], [0.7], [0.6], [0.0]],
    )
    row = figures(result(10), watch, simulators=2)
    assert row["per_hour"] == 3600 * 6 / 30 and row["seconds"] == 30 and row["start_s"] == 50
    assert row["waiting"] == 0.2 and row["call_ms"] == 200 and row["policy_ms"] == 20
    assert row["cores_busy"] == pytest.approx(80 / 30, abs=0.01) and row["policy_core"] == 0.5
    assert row["gpu_busy"] == [pytest.approx(0.6)]


def test_a_run_with_too_few_episodes_counts_as_a_whole() -> None:
    watch = Watch([0.0, 10.0, 20.0], [0, 1, 2], [0.0, 1.0, 2.0], [{}, {}, {}], [[], [], []])
    row = figures(result(2), watch, simulators=2)
    assert row["per_hour"] == 360 and row["gpu_busy"] == [] and row["policy_core"] == 0


def test_a_case_says_how_much_of_the_machine_it_takes() -> None:
    assert Case.parse("ray:2:30:6:32") == Case(True, 2, 30, 6, 32) and Case.parse("plain:0:2:1") == Case(False, 0, 2, 1)
    for wrong in ("ray", "ray:1:2", "here:1:2:3", "plain:1:x:3", "plain:1:2:3:4:5"):
        with pytest.raises(ConfigError, match=f"case: expected ray or plain:GPUS:SIMULATORS:TRIALS.*got '{wrong}'"):
            Case.parse(wrong)
    for wrong in ("plain:0:0:1", "plain:0:1:0"):
        with pytest.raises(ConfigError, match=f"case: expected at least one simulator and one trial, got '{wrong}'"):
            Case.parse(wrong)


@pytest.mark.parametrize("options", ["", "--config native_fp8 --tasks 0"])
def test_the_command_on_record_can_be_typed_again(options: str) -> None:
    asked = Arguments(Path("x.json"), case=("plain:0:2:1", "ray:0:2:1"), steps=3, options=options)
    python, how, module, *words = shlex.split(command_line(asked))
    assert (python, how, module) == ("python", "-m", "eval.throughput")
    assert read(Arguments, ["--output", "x.json", *words], module) == asked


@pytest.mark.slow
def test_what_a_failed_run_said_is_in_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--output", str(tmp_path / "x.json"), "--case", "plain:0:1:99", "--options=--tasks 0"]
    assert throughput.main(words) == 1
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert "eval.libero ended with status 2: error: trials: expected at most 50" in row["error"]
    assert "cases that failed: plain:0:1:99" in capsys.readouterr().err
    report = {**json.loads((tmp_path / "x.json").read_text()), "hardware": CPU, "software": {"torch": "2"}}
    assert "| **failed** |" in table([report])


CPU = {"cpu": "Some CPU", "threads": 1, "cores": 4}


def bench(devices: list[str], rate: float, gpu: str = "H200", cores: int = 4) -> dict[str, Any]:
    times = {"round_trip_ms": {"p50": 2.0, "p99": 3.0}, "infer_ms": {"p50": 1.0, "p99": 1.0}}
    return {
        "policy": "demo",
        "devices": devices,
        "hardware": CPU | {"gpu": f"NVIDIA {gpu}", "cores": cores},
        "software": {"torch": "2"},
        "rows": [{"clients": clients, "per_second": rate * clients, **times} for clients in (1, 4)],
    }


def test_two_gpus_are_compared_with_one_of_their_model() -> None:
    one, two = bench(["cuda:0"], 100.0), bench(["cuda:0", "cuda:1"], 190.0)
    slower, alone = bench(["cuda:0", "cuda:1"], 90.0, "H100"), bench(["cuda:0"], 50.0, "H100")
    lines = cells(server_gpus([two, slower, one, alone]))
    assert [line[:6] for line in lines if line[3] == "4"] == [
        ["demo", "H100", "1", "4", "200", "1.00×"], ["demo", "H100", "2", "4", "360", "1.80×"],
        ["demo", "H200", "1", "4", "400", "1.00×"], ["demo", "H200", "2", "4", "760", "1.90×"],
    ]  # fmt: skip
    for elsewhere in (alone, bench(["cuda:0"], 50.0, cores=2)):
        assert server_gpus([two, elsewhere]).count("| - |") == 2, "another machine says nothing about it"
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    (axes,) = pictures._server([two, slower, one, alone]).axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["demo, 1 H100", "demo, 2 H100", "demo, 1 H200", "demo, 2 H200"]
    assert list(axes.lines[3].get_ydata()) == [190, 760] and axes.lines[0].get_color() != axes.lines[1].get_color()


def test_what_the_server_adds_is_judged_by_the_goal() -> None:
    def told(added: float) -> str:
        result = registry.load("bench_server_cpu")
        result["rows"][0]["added_ms"]["p50"] = added
        result["rows"][0]["parts_ms"] = {"first": 0.1, "second": 0.4, "third": 0.2}
        return server(result)

    assert "is missed by 0.25 ms. Most of the 0.75 is second (0.40), then third (0.20)." in told(0.75)
    assert "call is met." in told(0.5)


def test_a_plan_is_the_measured_rate_times_its_nodes() -> None:
    """The quickest case for each GPU comes first; workers without Ray, and what failed, are no plan."""
    base = {"ray": True, "simulators": 15, "start_s": 20.0}
    cases = [
        {**base, "gpus": 2, "per_hour": 7200},
        {**base, "gpus": 1, "per_hour": 5400},
        {**base, "gpus": 1, "per_hour": 9000, "ray": False},
        {**base, "gpus": 1, "error": "it fell over"},
    ]
    lines = plan([{"rows": [{"cores": 4, **case} for case in cases], "steps": 10}]).splitlines()
    assert lines[2] == "| 1, 15 | 5400 | 345,600 | 96 | 10 s | 20 s |"
    assert lines[3] == "| 2, 15 | 7200 | 460,800 | 128 | 8 s | 20 s |" and not lines[4]
