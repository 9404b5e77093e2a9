"""One endpoint over several processes: nobody waits needlessly, and a replica that dies costs no answer."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.server_support import (
    Loading,
    LoadingBesideADamaged,
    ProcessPolicy,
    RawClient,
    Unloadable,
    expected_actions,
    local,
    metric,
    observation,
)
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ServerError
from vla_accel.machine import devices, resolve_devices
from vla_accel.remote import wire
from vla_accel.server import PolicyServer, Replicas, background, serve
from vla_accel.server.dispatch import Dispatcher
from vla_accel.server.limits import BatchLimits
from vla_accel.server.metrics import Metrics
from vla_accel.server.replica import ProcessReplica, _end

LOCAL = local()


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with background(Replicas(ProcessPolicy, ("cpu", "cpu")), LOCAL) as server:
        yield server


@pytest.fixture(autouse=True)
def _both_are_there(server: PolicyServer) -> Iterator[None]:
    yield
    eventually(lambda: metric(server.address, "vla_accel_replicas") == 2)


def pids(server: PolicyServer) -> list[int]:
    return [replica.pid for replica in server.dispatcher.replicas]  # type: ignore[attr-defined]


def waiting(file: Path) -> dict[str, Any]:
    """An observation that the policy works on until a file is there."""
    return {**observation(7), "prompt": f"wait {file}"}


def test_a_second_client_does_not_wait_behind_a_slow_one(server: PolicyServer, tmp_path: Path) -> None:
    with PolicyClient(server.address) as slow, PolicyClient(server.address) as quick, ThreadPoolExecutor(1) as pool:
        assert slow.metadata["device"] == "cpu"
        blocked = pool.submit(slow.infer, waiting(tmp_path / "go"))
        eventually(lambda: metric(server.address, "vla_accel_running_requests") == 1)
        processes = set()
        for index in range(20):
            answer = quick.infer(observation(index))
            np.testing.assert_array_equal(answer["actions"], expected_actions(observation(index)["observation/state"]))
            processes.add(answer["pid"])
        assert not blocked.done()
        (tmp_path / "go").touch()
        assert {blocked.result(PATIENCE_S)["pid"]} | processes == set(pids(server)) and len(processes) == 1


def test_idle_replicas_take_turns(server: PolicyServer) -> None:
    with PolicyClient(server.address) as client:
        used = [client.infer(observation(i))["pid"] for i in range(4)]
    assert used[:2] == used[2:] and set(used) == set(pids(server))


def test_requests_of_one_connection_are_answered_in_order(server: PolicyServer, tmp_path: Path) -> None:
    """All are sent before the first is answered, which waits while the other replica has nothing to do."""
    with contextlib.closing(RawClient(server.address)) as client:
        client.send(wire.pack(waiting(tmp_path / "go")))
        for index in range(1, 6):
            client.send(wire.pack(observation(index)))
        eventually(lambda: metric(server.address, "vla_accel_running_requests") == 1)
        (tmp_path / "go").touch()
        answers = [wire.unpack_map(client.frame()[1]) for _ in range(6)]
    assert [answer["actions"][0, 0] for answer in answers] == [7, 1, 2, 3, 4, 5]
    assert {answer["pid"] for answer in answers} == set(pids(server))


def test_killing_a_replica_in_mid_load_loses_no_answer(server: PolicyServer, tmp_path: Path) -> None:
    """Two requests are under way and two wait when one process is killed; another dies idle. All are answered."""
    before = metric(server.address, "vla_accel_retried_total")
    clients = [PolicyClient(server.address) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(c.infer, waiting(tmp_path / "go")) for c in clients[:2]]
        eventually(lambda: metric(server.address, "vla_accel_running_requests") == 2)
        asked += [pool.submit(c.infer, waiting(tmp_path / "go")) for c in clients[2:]]
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 2)
        victim, other = pids(server)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: metric(server.address, "vla_accel_retried_total") == before + 1)
        (tmp_path / "go").touch()
        answers = [future.result(PATIENCE_S) for future in asked]
    assert {a["actions"][0, 0] for a in answers} == {7.0} and victim not in {a["pid"] for a in answers}
    eventually(lambda: metric(server.address, "vla_accel_replicas") == 2)
    assert victim not in pids(server) and other in pids(server)
    for client in clients:
        client.close()


def test_a_replica_that_dies_idle_is_started_again(server: PolicyServer) -> None:
    deaths = 'vla_accel_replica_deaths_total{replica="1 cpu"}'
    before, (other, victim) = metric(server.address, deaths), pids(server)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: metric(server.address, deaths) == before + 1)
    with PolicyClient(server.address) as client:
        answered = {client.infer(observation(index))["pid"] for index in range(4)}
    assert other in answered and victim not in answered, "a new one may be there already"


def test_what_kills_two_replicas_is_answered_with_an_error(server: PolicyServer) -> None:
    with PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match="EngineError: policy: its process died twice while it computed this"):
            client.infer({**observation(1), "prompt": "die"})
        assert client.infer(observation(3))["actions"][0, 0] == 3, "it waits for the first that is back"


def shared_memory() -> int:
    """Replicas whose memory this process sees."""
    return Path("/proc/self/maps").read_text().count("memfd:replica")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is on disk here")
def test_a_dead_replicas_memory_goes_with_it(server: PolicyServer) -> None:
    assert shared_memory() == 2
    for _ in range(2):
        before = pids(server)[0]
        os.kill(before, signal.SIGKILL)
        eventually(lambda before=before: pids(server)[0] != before)
        eventually(lambda: metric(server.address, "vla_accel_replicas") == 2)
    assert shared_memory() == 2


def test_frames_that_have_no_room_in_the_memory_arrive_as_well(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for replica in server.dispatcher.replicas:
        monkeypatch.setattr(replica, "_frames", bytearray(1000))
    with PolicyClient(server.address) as client:
        for index in range(4):
            large = {**observation(index), "more": np.zeros(100_000, np.uint8)}
            np.testing.assert_array_equal(client.infer(large)["actions"], expected_actions(large["observation/state"]))


def test_a_replica_whose_end_fails_is_started_again(server: PolicyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = server.dispatcher.replicas[0]

    async def close() -> None:
        monkeypatch.undo()
        raise OSError("no")

    monkeypatch.setattr(victim, "close", close)
    before = victim.pid  # type: ignore[attr-defined]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: victim.pid != before)  # type: ignore[attr-defined]


def test_an_end_that_somebody_else_was_told_of_is_an_end() -> None:
    """Two replicas die at once: the start of the first hears of the second's end before whoever waits for it does."""
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, 0)
    _end(process)
    # As that start would note it: else multiprocessing counts it as alive for ever.
    process._popen.returncode = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_start_that_is_given_up_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server stops while a replica comes back."""
    started, given_up = threading.Event(), threading.Event()
    made: list[BaseProcess] = []

    def start(self: BaseProcess) -> None:
        original(self)
        made.append(self)
        started.set()
        assert given_up.wait(PATIENCE_S)

    original = BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", start)

    async def main() -> None:
        replica = ProcessReplica("0 cpu", ProcessPolicy, "cpu", BatchLimits())
        starting = asyncio.create_task(replica.start(lambda: None))
        assert await asyncio.to_thread(started.wait, PATIENCE_S)
        starting.cancel()
        asyncio.get_running_loop().call_later(0.1, given_up.set)
        with pytest.raises(asyncio.CancelledError):
            await starting
        await replica.close()
        assert not made[0].is_alive()

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_replicas_load_ends_them_at_once(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_accel.server.replica._END_S", PATIENCE_S)  # nobody waits for it to end by itself
    began = tmp_path / "began"

    def interrupt() -> None:
        eventually(began.exists)
        os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            serve(Replicas(Loading(began), ("cpu",)), LOCAL)
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)


def test_what_dies_while_all_end_is_not_started_again() -> None:
    class Pair:
        """Ends the other one's process, too, as it is closed."""

        hellos: dict[str, bytes] = {}  # noqa: RUF012
        batches = False

        def __init__(self, name: str) -> None:
            self.name, self.starts, self.others = name, 0, list[Any]()

        async def start(self, on_death: Any) -> None:
            self.starts, self.on_death = self.starts + 1, on_death

        async def close(self) -> None:
            for other in self.others:
                other.on_death()
            await asyncio.sleep(0)

    pair: list[Any] = [Pair("0"), Pair("1")]
    pair[0].others = pair[1:]

    async def main() -> None:
        metrics = Metrics(clients=int, waiting=int, running=int, replicas=int)
        dispatcher = Dispatcher(pair, LOCAL, metrics)
        await dispatcher.start()
        await dispatcher.close()
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert [one.starts for one in pair] == [1, 1]


@pytest.mark.slow
def test_32_clients_and_a_replica_killed_again_and_again(server: PolicyServer) -> None:
    end = time.monotonic() + 5

    def ask(index: int) -> int:
        count = 0
        with PolicyClient(server.address) as client:
            while not count or time.monotonic() < end:
                answer = client.infer(observation(index, count))
                np.testing.assert_array_equal(answer["actions"], expected_actions(np.r_[index, count, np.zeros(6)]))
                count += 1
        return count

    with ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(ask, index) for index in range(32)]
        for victim in (0, 1, 0):
            time.sleep(1)
            eventually(lambda: metric(server.address, "vla_accel_replicas") == 2)
            os.kill(pids(server)[victim], signal.SIGKILL)
        assert all(future.result(PATIENCE_S) for future in asked)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (CheckpointError("x.safetensors: damaged"), CheckpointError, "replica 0 cpu: x.safetensors: damaged"),
        pytest.param(KeyError("layer"), EngineError, "replica 0 cpu: KeyError: 'layer'", marks=pytest.mark.slow),
        pytest.param(
            SystemExit(3),
            EngineError,
            "replica 0 cpu: its process ended while it loaded",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_policy_that_does_not_load_is_one_clear_error(error: Exception, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said), background(Replicas(Unloadable(error), ("cpu",)), LOCAL):
        raise AssertionError("it must not serve")


def test_a_replica_that_does_not_load_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_accel.server.replica._END_S", PATIENCE_S)  # nobody waits for it to end by itself
    began = tmp_path / "began"
    with pytest.raises(CheckpointError, match=r"^replica 1 cuda:1: x.safetensors: damaged$"):
        serve(Replicas(LoadingBesideADamaged(began), ("cuda:0", "cuda:1")), LOCAL)
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)  # which was still loading


def test_devices_that_are_there_and_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert devices()[-1] == "cpu" and resolve_devices("cpu, cpu") == ("cpu", "cpu")
    for count, every in ((0, ("cpu",)), (2, ("cuda:0", "cuda:1"))):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert resolve_devices("all") == every
    assert resolve_devices("cuda,cuda:1") == ("cuda:0", "cuda:1")
    for wrong in ("cuda:0,cuda:2", "cuda:2", "tpu", "", "cpu,"):
        with pytest.raises(ConfigError, match=r"devices: expected all, or a list of cuda:0, cuda:1, cpu, got '"):
            resolve_devices(wrong)
