"""What a policy server adds to a call, and where, for `vla-accel bench-server`. Server and clients run in processes of
their own; the parts of a request and the policy's time add up to the client's wait."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vla_accel.client.client import PolicyClient
from vla_accel.client.load import COLUMNS, load, packing_ms
from vla_accel.errors import EngineError, VlaAccelError
from vla_accel.remote import wire
from vla_accel.remote.processes import start
from vla_accel.server import PolicyRegistry, Replicas, ServerConfig, background

SCHEMA = "vla_accel.bench_server/1"
PAUSE_S = 0.002
WARM_UP = 20
"""Requests that are not counted, of all clients, each of which makes two at least."""


class Nothing:
    """A policy that costs nothing, with an answer as large as π0.5's for LIBERO."""

    def __init__(self, device: str | None = None) -> None:
        self.metadata = {"policy": "nothing"}
        entry = {"component": "", "requested": "auto", "used": "eager", "reason": "", "detail": "", "fell_back": False}
        self._engines = [{**entry, "component": name} for name in ("vision", "kv_cache", "denoise")]

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        timing = {f"{name}_ms": 0.0 for name in ("infer", "total", "preprocess", "vision", "kv_cache", "denoise")}
        state = observation["observation/state"]
        return {"actions": np.zeros((10, 7)), "state": state, "policy_timing": timing, "engines": self._engines}

    @staticmethod
    def example() -> dict[str, Any]:
        """Two images of 150 KB, as in LIBERO."""
        image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        return {
            "observation/image": image,
            "observation/wrist_image": image[::-1].copy(),
            "observation/state": np.zeros(8),
            "prompt": "pick up the black bowl on the stove and place it on the plate",
        }


def measure(
    address: str, observation: dict[str, Any], clients: int, seconds: float, advance: Callable[[int, int], object]
) -> dict[str, Any]:
    """One row: `clients` at once for `seconds`, after warm-up requests, which `advance` counts. In milliseconds;
    `added`: what a call takes beyond the policy and the queue; `parts`: medians, which need not add up to the
    whole's."""
    seen = load(address, clients, seconds, observation, warm_up=max(2, WARM_UP // clients), advance=advance)
    if not len(seen.samples):
        raise EngineError(f"bench-server: expected answers, got none; {'; '.join(seen.problems[:3])}")
    column = dict(zip(COLUMNS, seen.samples.T, strict=True))
    added = column["round_trip"] - column["infer"] - column["queue"]
    known = column["queue"] + column["handover"] + column["decode"] + column["infer"]
    parts = {
        "client and sockets": column["round_trip"] - column["server"],
        "to the policy's thread": column["handover"],
        "decode": column["decode"],
        "encode, back and send": column["server"] - known,
    }
    return {
        "clients": clients,
        "seconds": round(seen.seconds, 2),
        "requests": len(seen.samples),
        "per_second": round(len(seen.samples) / seen.seconds, 1),
        "fewest_and_most_of_a_client": [min(seen.counts), max(seen.counts)],
        "round_trip_ms": percentiles(column["round_trip"]),
        "added_ms": percentiles(added),
        "queue_ms": percentiles(column["queue"]),
        "infer_ms": percentiles(column["infer"]),
        "parts_ms": {name: round(float(np.nanmedian(values)), 4) for name, values in parts.items()},
        "problems": seen.problems[:5],
    }


def costs(address: str, observation: dict[str, Any]) -> dict[str, Any]:
    """The unavoidable part of `client and sockets`, as median milliseconds: the client's encoding and decoding, and the
    bytes over a bare socket and back, also after a pause of `PAUSE_S`, in which processors sleep and caches cool."""
    with PolicyClient(address) as policy:
        answer = policy.infer(observation)
    sizes = len(wire.pack(observation)), len(wire.pack(answer))
    return {
        "bytes": dict(zip(("request", "answer"), sizes, strict=True)),
        "client_ms": {name: round(value, 4) for name, value in packing_ms(observation, answer).items()},
        "bare_socket_ms": round(socket_ms(*sizes), 4),
        "bare_socket_woken_ms": round(socket_ms(*sizes, pause_s=PAUSE_S), 4),
    }


def socket_ms(there: int, back: int, times: int = 200, pause_s: float = 0.0) -> float:
    """Median milliseconds for bytes over local TCP and back, between two threads, each time after a pause."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as ours,
        listening.accept()[0] as theirs,
    ):
        for one in (ours, theirs):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def read(one: socket.socket, count: int) -> None:
            buffer = memoryview(bytearray(count))
            while buffer:
                buffer = buffer[one.recv_into(buffer) :]

        def answer() -> None:
            with contextlib.suppress(OSError):  # the sockets are closed where this was interrupted
                for _ in range(times):
                    read(theirs, there)
                    theirs.sendall(bytes(back))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        took, data = [], bytes(there)
        for _ in range(times):
            if pause_s:
                time.sleep(pause_s)
            start = time.monotonic()
            ours.sendall(data)
            read(ours, back)
            took.append((time.monotonic() - start) * 1e3)
        thread.join()
    return float(np.median(took))


def percentiles(values: np.ndarray) -> dict[str, float]:
    """Median and 99th percentile."""
    return {f"p{q}": round(float(np.nanpercentile(values, q)), 4) for q in (50, 99)}


@contextlib.contextmanager
def served(
    load_policy: Callable[[str | None], Any],
    devices: tuple[str, ...] | None = None,
    *,
    device: str | None = None,
    **limits: Any,
) -> Iterator[str]:
    """The address of a server in a process of its own. `devices`: of replicas; None: a policy in the server's
    process, on `device`. `limits`: of `ServerConfig`. Raises the error of a failed start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # No daemon: a daemon may have no processes of its own, which replicas are.
    process = context.Process(target=_serve, args=(theirs, load_policy, devices, device, limits))
    start(process)
    theirs.close()
    try:
        try:
            address = ours.recv()
        except EOFError:
            raise EngineError("bench-server: the server's process ended while it started") from None
        if isinstance(address, Exception):
            raise address
        yield address
    finally:
        ours.close()  # a server of replicas ends when it sees that; one that loads or calls a policy would not see it
        if devices is None:
            process.kill()
        process.join()


def _serve(
    pipe: Any,
    load_policy: Callable[[str | None], Any],
    devices: tuple[str, ...] | None,
    device: str | None,
    limits: dict[str, Any],
) -> None:
    with contextlib.suppress(ConnectionError):  # the parent process was interrupted
        try:
            later = PolicyRegistry.single(lambda: load_policy(device))
            policy = later if devices is None else Replicas(load_policy, devices)
            with background(policy, ServerConfig(port=0, **limits)) as server:
                pipe.send(server.address)
                with contextlib.suppress(EOFError):
                    pipe.recv()
        except Exception as error:
            ours = isinstance(error, VlaAccelError)
            pipe.send(error if ours else EngineError(f"{type(error).__name__}: {error}"))
