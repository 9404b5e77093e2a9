"""`vla-accel bench-server`: what is reported adds up, and a wrong answer does not go unnoticed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.server_support import local
from tests.support.tiny import write_robot, write_tiny_checkpoint
from tests.support.waiting import silent_port
from vla_accel.cli import main
from vla_accel.cli.bench_server import LoadRandom
from vla_accel.cli.options import StepOptions
from vla_accel.client import load
from vla_accel.errors import DependencyError, EngineError
from vla_accel.families.family import FAMILIES
from vla_accel.measure import serving
from vla_accel.measure.random_policy import random_observation
from vla_accel.measure.serving import Nothing, served
from vla_accel.remote.processes import start
from vla_accel.server import background


@pytest.mark.slow
def test_the_bench_runs_and_its_report_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    words = ["bench-server", "--clients", "1,3", "--seconds", "0.5", "--devices", "cpu,cpu", "--output", str(file)]
    assert main(words) == 0
    report = json.loads(file.read_text())
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == report
    said = [line.partition(",")[0] for line in err.splitlines()]
    assert said == ["starting a server of nothing", *(f"clients: {n}" for n in (1, 1, 3, 3))], "before and after"
    assert [row["clients"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["problems"] == [] and row["requests"] == pytest.approx(row["per_second"] * row["seconds"], rel=0.02)
        assert 0 < row["added_ms"]["p50"] <= row["round_trip_ms"]["p50"] <= row["round_trip_ms"]["p99"]
        assert all(value > 0 for value in row["parts_ms"].values())
    assert report["costs"]["bytes"]["request"] > 300_000 and report["costs"]["bare_socket_ms"] > 0
    assert report["costs"]["bare_socket_woken_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("own_robot", [False, True])
def test_a_checkpoints_policy_is_timed_with_what_its_robot_sends(tmp_path: Path, own_robot: bool) -> None:
    write_tiny_checkpoint(tmp_path / "tiny")
    file, config = tmp_path / "report.json", "eager_fp32"
    if own_robot:
        config = str(tmp_path / "config.yaml")
        Path(config).write_text(f"preset: {write_robot(tmp_path / 'robot.yaml')}\n")
    words = [str(tmp_path / "tiny"), "--config", config, "--device", "cpu", "--clients", "1"]
    assert main(["bench-server", *words, "--seconds", "0.5", "--output", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["problems"] == [] and 0 < row["infer_ms"]["p50"] < row["round_trip_ms"]["p50"]


def test_a_server_whose_starter_was_interrupted_ends_quietly() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    serving._serve(theirs, Nothing, None, None, {})
    serving._serve(theirs, lambda device: 1 // 0, None, None, {})


def endless(device: str | None) -> Any:
    """Loads for long, and has its starter interrupted meanwhile."""
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(10)


@pytest.mark.slow
def test_a_server_that_loads_ends_with_its_interrupted_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[BaseProcess] = []
    monkeypatch.setattr(serving, "start", lambda process: (begun.append(process), start(process)))
    # Other tests of this process, and a script in whose background it runs, may have Ctrl-C do something else.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), served(endless):
            pass
    finally:
        signal.signal(signal.SIGINT, found)
    assert [process.exitcode for process in begun] == [-signal.SIGKILL]


def test_random_weights_are_the_same_in_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", "tests.support.toy_family.family:TOY")
    make, observation = LoadRandom("toy", "auto", StepOptions(2)), random_observation("toy")
    answers = [make("cpu").infer(observation) for _ in range(2)]
    assert answers[0]["actions"].shape == (3, 2) and make("cpu").num_steps == 2
    np.testing.assert_array_equal(answers[0]["actions"], answers[1]["actions"])


class Pipe:
    """A process's end of the pipe to a load test: the common start is now; `sent` holds what the process sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.send = self.sent.append

    def recv(self) -> float:
        return time.monotonic()


def clients_of(address: str, clients: int = 1) -> load.Load:
    """What the clients of one process measure."""
    pipe = Pipe()
    load._process(pipe, load._Plan(address, clients, 0, 0.05, Nothing.example(), 1, None))
    return pipe.sent[-1]


def ask(policy: Any) -> load.Load:
    """What one client measures of a policy."""
    with background(policy, local()) as server:
        return clients_of(server.address)


def test_every_request_is_seen_with_its_parts() -> None:
    seen = ask(Nothing())
    assert seen.problems == [] and seen.counts == [len(seen.samples)] and len(seen.samples) > 0
    column = dict(zip(load.COLUMNS, seen.samples.T, strict=True))
    assert np.isnan(column["server"][-1]), "the last is told with an answer that never came"
    inside = column["queue"] + column["handover"] + column["decode"] + column["infer"]
    assert (inside[:-1] < column["server"][:-1]).all() and (inside < column["round_trip"]).all()


def test_a_client_that_cannot_begin_or_read_says_so() -> None:
    with silent_port() as port:
        seen = clients_of(f"ws://127.0.0.1:{port}", 2)
    assert seen.counts == [0, 0] and all("cannot connect" in one for one in seen.problems) and len(seen.problems) == 2

    class Silent(Nothing):
        def infer(self, observation: Any) -> Any:
            return {"actions": np.zeros((1, 7))}

    assert ask(Silent()).problems == ["client 0: KeyError: 'state'"]


def test_a_crossed_answer_is_noticed() -> None:
    class Crossing(Nothing):
        def infer(self, observation: Any) -> Any:
            return super().infer({**observation, "observation/state": np.zeros(8)})

    assert any("got the answer to another request" in problem for problem in ask(Crossing()).problems)


def test_how_far_the_warm_up_is_is_told_and_an_answer_must_come(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    with background(Nothing(), local()) as server:
        words: Any = server.address, 3, 0.05, Nothing.example()
        seen = load.load(*words, warm_up=4, advance=lambda *one: told.append(one))
        assert told == [(1, 12)] * 12 and min(seen.counts) > 0

    class Stuck(Nothing):
        def infer(self, observation: Any) -> Any:
            time.sleep(3)
            return super().infer(observation)

    monkeypatch.setattr(load, "_WARM_UP_S", 0.2)
    with (
        background(Stuck(), local()) as server,
        pytest.raises(EngineError, match=r"clients: expected an answer within 0\.2 s, got none"),
    ):
        load.load(server.address, 1, 0.05, Nothing.example(), warm_up=1)


@pytest.mark.parametrize(("clients", "each"), [(1, 20), (8, 2), (64, 2)])
def test_many_clients_warm_up_no_longer_than_one(clients: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 each, 64 clients of a policy that takes 0.14 s warmed up for three minutes."""
    asked: dict[str, Any] = {}

    def seen(*_: Any, **options: Any) -> load.Load:
        asked.update(options)
        return load.Load(np.ones((3, len(load.COLUMNS))), [3], seconds=1.0)

    monkeypatch.setattr(serving, "load", seen)
    assert serving.measure("ws://nowhere", {}, clients, 1.0, print)["requests"] == 3 and asked["warm_up"] == each


def refused(device: str | None) -> Any:
    raise DependencyError("a package is missing: pip install it")


@pytest.mark.slow
def test_what_a_servers_process_lacks_is_said_without_the_errors_class() -> None:
    with pytest.raises(DependencyError, match=r"^a package is missing: pip install it$"), served(refused):
        pass
