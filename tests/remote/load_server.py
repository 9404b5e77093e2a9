"""Load and faults on a policy server over loopback: `python -m tests.remote.load_server`. Ends with one JSON line.

Every client sends numbers of its own and checks every answer against them. Meanwhile other clients send garbage or read
no answers, and a replica is killed every few seconds. The exit status is 1 if an answer was lost. Replicas and clients
import this module again, so torch and the fuzzer are imported late.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.openpi_wire import openpi_pack
from tests.support.server_support import RawClient
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client.load import load
from vla_accel.measure.serving import Nothing, percentiles
from vla_accel.server import PolicyServer, Replicas, ServerConfig, background
from vla_accel.server.metrics import resident_bytes

SCHEMA = "vla_accel.server_faults/1"


class Loud(Nothing):
    """A policy that costs nothing; its answer to the prompt `loud` is larger than a socket's buffers."""

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        noise = {"noise": np.zeros(20_000_000, np.uint8)} if observation["prompt"] == "loud" else {}
        return super().infer(observation) | noise

    def infer_batch(self, observations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self.infer(one) for one in observations]


@dataclass(frozen=True)
class Arguments:
    """Many clients, garbage, slow readers and killed replicas at once; counts lost answers."""

    clients: int = 64
    """Well-behaved clients."""
    seconds: float = 60.0
    """Duration."""
    kill_every_s: float = 5.0
    """Time between two kills of a replica; 0 for none."""
    checkpoint: str | None = None
    """Serve its policy instead of one that costs nothing."""
    config: str | None = None
    """Configuration of the checkpoint."""
    devices: str = "cpu,cpu"
    """Devices of the replicas, as for `vla-accel serve --devices`."""
    output: Path | None = None
    """JSON file."""


def run(
    clients: int,
    seconds: float,
    *,
    max_batch: int = 1,
    kill_every_s: float = 0.0,
    replicas: Replicas | None = None,
    observation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a load test: of one policy in the server's process; or, with `kill_every_s`, of two replicas next to garbage
    and slow readers; or of other `replicas`, whose policy takes `observation`."""
    config = ServerConfig(
        port=0, max_clients=2 * clients, max_batch=max_batch, send_timeout_s=2.0, handshake_timeout_s=PATIENCE_S
    )
    policy = replicas or Replicas(Loud, ("cpu", "cpu")) if kill_every_s else Loud()
    memory: list[float] = []
    back_s: list[float] = []
    done = {"hostile": 0, "slow_readers": 0, "kills": 0}
    with background(policy, config) as server, contextlib.ExitStack() as stack:
        stack.enter_context(repeated(1.0, lambda: memory.append(resident_bytes())))
        if kill_every_s:
            chosen = random.Random(0)
            works: list[tuple[str, float, Callable[[], object]]] = [
                ("hostile", 0.05, lambda: send_garbage(server.address, chosen)),
                ("kills", kill_every_s, lambda: kill(server, chosen, back_s)),
            ]
            if observation is None:  # a checkpoint's answers fit into a socket's buffers
                works.append(("slow_readers", 1.0, lambda: read_no_answer(server)))
            for name, every_s, work in works:
                stack.enter_context(repeated(every_s, work, done, name))
        seen = load(server.address, clients, seconds, observation or Nothing.example())
        stack.close()
        counters = server.metrics.counters
    settled = memory[len(memory) // 4 :] or memory
    return {
        "clients": clients,
        "seconds": round(seen.seconds, 1),
        "requests": len(seen.samples),
        "per_second": round(len(seen.samples) / seen.seconds, 1),
        "lost": len(seen.problems),
        "problems": seen.problems[:5],
        "fewest_and_most_of_a_client": [min(seen.counts), max(seen.counts)],
        "round_trip_ms": percentiles(seen.samples[:, 0]) | {"max": round(float(seen.samples[:, 0].max()), 1)},
        "memory_mib_settled_and_peak": [round(min(settled) / 2**20, 1), round(max(memory) / 2**20, 1)],
        "done": done,
        "back_s": {"median": round(float(np.median(back_s)), 2), "max": round(max(back_s), 2)} if back_s else None,
        "server": {
            "requests": dict(counters["requests"]),
            "refused": dict(counters["refused"]),
            "deaths": counters["replica_deaths"].total(),
            "retried": counters["retried"].total(),
        },
    }


@contextlib.contextmanager
def repeated(
    every_s: float, work: Callable[[], object], done: dict[str, int] | None = None, name: str = ""
) -> Iterator[None]:
    """Call `work` in a thread every `every_s` seconds, until the block ends, and count the calls."""
    over = threading.Event()

    def main() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(OSError):  # the server closed the connection, as it should
                work()
            if done is not None:
                done[name] += 1

    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def send_garbage(address: str, chosen: random.Random) -> None:
    """Open a connection that the server must answer with an error, or close."""
    from tests.remote.fuzz_wire import LIES, SEEDS

    kind = chosen.randrange(5)
    with contextlib.closing(RawClient(address, handshake=kind > 0)) as client:
        if kind == 0:
            client.socket.sendall(chosen.randbytes(chosen.randrange(1, 2000)))
            return
        garbage = (chosen.choice(LIES), chosen.randbytes(chosen.randrange(1, 100_000)), chosen.choice(SEEDS), b"begun")
        client.send(garbage[kind - 1], announced=10**9 if kind == 4 else None)
        client.frame()


def read_no_answer(server: PolicyServer) -> None:
    """Request a large answer and read nothing, until the server drops the connection."""
    refused = server.metrics.counters["refused"]
    with contextlib.closing(RawClient(server.address)) as client:
        before = refused["slow reader"]
        client.send(openpi_pack({"observation/state": np.zeros(8), "prompt": "loud"}))
        eventually(lambda: refused["slow reader"] > before)


def kill(server: PolicyServer, chosen: random.Random, back_s: list[float]) -> None:
    """Kill a loaded replica, and record how long it takes until it serves again."""

    def serving() -> list[Any]:
        while True:
            with contextlib.suppress(RuntimeError):  # the event loop changed it meanwhile
                return list(server.dispatcher.loaded)

    if not (loaded := serving()):
        return
    victim = chosen.choice(loaded)
    killed, pid = time.monotonic(), victim.pid
    os.kill(pid, signal.SIGKILL)

    def watch() -> None:
        while time.monotonic() < killed + 120:
            time.sleep(0.02)
            if victim.pid != pid and victim in serving():
                back_s.append(time.monotonic() - killed)
                return

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    from vla_accel import machine
    from vla_accel.cli.common import finish
    from vla_accel.cli.options import read
    from vla_accel.cli.serve import Load
    from vla_accel.config import load_config
    from vla_accel.families.loading import load as load_checkpoint

    words = sys.argv[1:]
    chosen = read(Arguments, words, "python -m tests.remote.load_server")
    # The errors are intended, hundreds of them; the report counts them.
    logging.getLogger("vla_accel.server").setLevel(logging.CRITICAL)
    devices, observation, make = machine.resolve_devices(chosen.devices), None, Loud
    if chosen.checkpoint is not None:
        make = Load(chosen.checkpoint, chosen.config)
        checkpoint = load_checkpoint(chosen.checkpoint, load_config(chosen.config), whole=False)
        observation = dict(checkpoint.processor.example())
    began = time.monotonic()
    report = {
        "schema": SCHEMA,
        "command": " ".join(["python -m tests.remote.load_server", *(Path(w).name if "/" in w else w for w in words)]),
        "policy": chosen.checkpoint or "nothing",
        "devices": devices,
        "hardware": machine.hardware(machine.resolve_device(devices[0])) | {"cores": os.cpu_count()},
        "software": machine.software(),
        **run(
            chosen.clients,
            chosen.seconds,
            kill_every_s=chosen.kill_every_s,
            replicas=Replicas(make, devices),
            observation=observation,
        ),
    }
    report["wall_seconds"] = round(time.monotonic() - began, 1)
    report["passed"] = report["lost"] == 0 and report["requests"] > 0
    return finish(report, chosen.output)


if __name__ == "__main__":
    sys.exit(main())
