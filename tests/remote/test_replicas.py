"""Replicas in processes: no client waits needlessly, and a replica that dies loses no answer."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.server_support import (
    Loading,
    ProcessPolicy,
    RawClient,
    Unloadable,
    expected_actions,
    local,
    metric,
    observation,
    send_in_order,
)
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ServerError
from vla_accel.machine import devices, resolve_devices
from vla_accel.remote import wire
from vla_accel.server import PolicyServer, Replicas, background, serve
from vla_accel.server.limits import BatchLimits
from vla_accel.server.replica import ProcessReplica, _end


class Looking(ProcessPolicy):
    """Returns the first pixel of the image, as it is when the answer is made."""

    def infer(self, observation: Any) -> dict[str, Any]:
        answer = super().infer(observation)
        image = observation.get("observation/image")
        return answer if image is None else {**answer, "pixel": int(image[0, 0, 0])}


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with background(Replicas(ProcessPolicy, ("cpu", "cpu")), local()) as server:
        yield server


@pytest.fixture(scope="module")
def single() -> Iterator[PolicyServer]:
    with background(Replicas(Looking, ("cpu",)), local()) as server:
        yield server


@pytest.fixture(autouse=True)
def _both_are_there(server: PolicyServer) -> Iterator[None]:
    yield
    eventually(lambda: metric(server.address, "vla_accel_replicas") == 2)


def pids(server: PolicyServer) -> list[int]:
    return [replica.pid for replica in server.dispatcher.replicas]  # type: ignore[attr-defined]


def until(file: Path) -> dict[str, Any]:
    """An observation that the policy works on until a file exists."""
    return {**observation(7), "prompt": f"wait {file}"}


def test_a_second_client_does_not_wait_behind_a_slow_one(server: PolicyServer, tmp_path: Path) -> None:
    with PolicyClient(server.address) as slow, PolicyClient(server.address) as quick, ThreadPoolExecutor(1) as pool:
        (blocked,) = send_in_order(pool, server, [lambda: slow.infer(until(tmp_path / "go"))])
        processes = set()
        for index in range(20):
            answer = quick.infer(observation(index))
            np.testing.assert_array_equal(answer["actions"], expected_actions(observation(index)["observation/state"]))
            processes.add(answer["pid"])
        assert not blocked.done()
        (tmp_path / "go").touch()
        assert {blocked.result(PATIENCE_S)["pid"]} | processes == set(pids(server)) and len(processes) == 1
        used = [quick.infer(observation(i))["pid"] for i in range(4)]
    assert used[:2] == used[2:] and set(used) == set(pids(server)), "idle replicas take turns"


def test_requests_of_one_connection_are_answered_in_order(server: PolicyServer, tmp_path: Path) -> None:
    """All are sent before the first is answered, which waits while the other replica is idle."""
    with contextlib.closing(RawClient(server.address)) as client:
        client.send(wire.pack(until(tmp_path / "go")))
        for index in range(1, 6):
            client.send(wire.pack(observation(index)))
        eventually(lambda: metric(server.address, "vla_accel_running_requests") == 1)
        (tmp_path / "go").touch()
        answers = [wire.unpack_map(client.frame()[1]) for _ in range(6)]
    assert [answer["actions"][0, 0] for answer in answers] == [7, 1, 2, 3, 4, 5]
    assert {answer["pid"] for answer in answers} == set(pids(server))


@pytest.mark.slow
def test_a_killed_replica_loses_no_answer(
    server: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests run and two wait when one process is killed. Its first close fails, too."""

    def shared_memory() -> int:
        return sum("pym-" in line for line in Path("/proc/self/maps").read_text().splitlines())

    async def close() -> None:
        monkeypatch.undo()
        raise OSError("no")

    monkeypatch.setattr(server.dispatcher.replicas[0], "close", close)
    before, memory = metric(server.address, "vla_accel_retried_total"), shared_memory()
    with ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(PolicyClient(server.address)) for _ in range(4)]
        futures = [pool.submit(c.infer, until(tmp_path / "go")) for c in clients[:2]]
        eventually(lambda: metric(server.address, "vla_accel_running_requests") == 2)
        futures += [pool.submit(c.infer, until(tmp_path / "go")) for c in clients[2:]]
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 2)
        victim, other = pids(server)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: metric(server.address, "vla_accel_retried_total") == before + 1)
        (tmp_path / "go").touch()
        answers = [future.result(PATIENCE_S) for future in futures]
    assert {a["actions"][0, 0] for a in answers} == {7.0} and victim not in {a["pid"] for a in answers}
    eventually(lambda: metric(server.address, "vla_accel_replicas") == 2)
    assert victim not in pids(server) and other in pids(server)
    assert shared_memory() <= memory, "the memory of the dead replica is released"


def test_a_replica_that_dies_idle_is_restarted(server: PolicyServer) -> None:
    deaths = 'vla_accel_replica_deaths_total{replica="1 cpu"}'
    before, (other, victim) = metric(server.address, deaths), pids(server)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: metric(server.address, deaths) == before + 1)
    with PolicyClient(server.address) as client:
        answered = {client.infer(observation(index))["pid"] for index in range(4)}
    assert other in answered and victim not in answered


def test_a_request_that_kills_two_replicas_gets_an_error(server: PolicyServer) -> None:
    with PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match="EngineError: policy: its process died twice"):
            client.infer({**observation(1), "prompt": "die"})
        assert client.infer(observation(3))["actions"][0, 0] == 3, "it waits for the first restart"


def test_frames_larger_than_the_shared_memory_arrive(server: PolicyServer) -> None:
    with PolicyClient(server.address) as client:
        for index in range(4):
            large = {**observation(index), "more": np.zeros(9_000_000, np.uint8)}
            np.testing.assert_array_equal(client.infer(large)["actions"], expected_actions(large["observation/state"]))


@pytest.mark.slow
def test_a_frame_is_not_overwritten_by_the_batch_behind_it(single: PolicyServer, tmp_path: Path) -> None:
    """The process still reads the first frame when the second arrives."""
    images = [np.full((224, 224, 3), number, np.uint8) for number in (7, 1, 2)]
    requests = [{**observation(number), "observation/image": images[i]} for i, number in enumerate((7, 1, 2))]
    requests[0]["prompt"] = f"wait {tmp_path / 'go'}"

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        with PolicyClient(single.address) as client:
            return client.infer(request)

    with ThreadPoolExecutor(3) as pool:
        futures = send_in_order(pool, single, [lambda r=r: ask(r) for r in requests])
        (tmp_path / "go").touch()
        for number, future in zip((7, 1, 2), futures, strict=True):
            answer = future.result(PATIENCE_S)
            assert (answer["actions"][0, 0], answer["pixel"]) == (number, number)


def test_a_process_whose_exit_status_is_already_collected_counts_as_ended() -> None:
    """Two replicas die at once: the start of the first collects the exit status of the second."""
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, 0)
    _end(process)
    # As that start would note it: else multiprocessing counts it as alive for ever.
    process._popen.returncode = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_cancelled_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server stops while a replica restarts."""
    started, cancelled = threading.Event(), threading.Event()
    processes: list[BaseProcess] = []
    original = BaseProcess.start

    def start(self: BaseProcess) -> None:
        original(self)
        processes.append(self)
        started.set()
        assert cancelled.wait(PATIENCE_S)

    monkeypatch.setattr(BaseProcess, "start", start)

    async def main() -> None:
        replica = ProcessReplica("0 cpu", ProcessPolicy, "cpu", BatchLimits())
        starting = asyncio.create_task(replica.start(lambda: None))
        assert await asyncio.to_thread(started.wait, PATIENCE_S)
        starting.cancel()
        asyncio.get_running_loop().call_later(0.1, cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await starting
        await replica.close()
        assert not processes[0].is_alive()

    asyncio.run(main())


def test_a_signal_ends_replicas_that_are_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_accel.server.replica._END_S", PATIENCE_S)  # nobody waits for it to end by itself
    began = tmp_path / "began"

    def interrupt() -> None:
        eventually(began.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            serve(Replicas(Loading(began), ("cpu",)), local())
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)


def test_a_replica_that_does_not_load_ends_the_others_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_accel.server.replica._END_S", PATIENCE_S)
    began = tmp_path / "began"
    with pytest.raises(CheckpointError, match=r"^replica 1 cuda:1: x.safetensors: damaged$"):
        serve(Replicas(Loading(began, damaged="cuda:1"), ("cuda:0", "cuda:1")), local())
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)  # it was still loading


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CheckpointError("x.safetensors: damaged"), CheckpointError, "x.safetensors: damaged"),
        pytest.param(KeyError("layer"), EngineError, "KeyError: 'layer'", marks=pytest.mark.slow),
        pytest.param(SystemExit(3), EngineError, "its process ended while it loaded", marks=pytest.mark.slow),
    ],
)
def test_a_policy_that_does_not_load_is_one_clear_error(error: Exception, kind: type[Exception], text: str) -> None:
    with (
        pytest.raises(kind, match=f"replica 0 cpu: {text}"),
        background(Replicas(Unloadable(error), ("cpu",)), local()),
    ):
        raise AssertionError("it began to serve")


def test_unknown_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert devices()[-1] == "cpu" and resolve_devices("cpu, cpu") == ("cpu", "cpu")
    for count, every in ((0, ("cpu",)), (2, ("cuda:0", "cuda:1"))):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert resolve_devices("all") == every
    assert resolve_devices("cuda,cuda:1") == ("cuda:0", "cuda:1")
    for wrong in ("cuda:0,cuda:2", "cuda:2", "tpu", "", "cpu,"):
        with pytest.raises(ConfigError, match=r"devices: expected all, or a list of cuda:0, cuda:1, cpu, got '"):
            resolve_devices(wrong)
