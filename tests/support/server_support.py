"""Policies without a model, clients that misbehave, and servers for tests.

`python -m tests.support.server_support` serves an `EchoPolicy`. Importing this module skips a test module where the
server's packages are missing.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")
pytest.importorskip("prometheus_client", reason="the server needs prometheus_client")

from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import CheckpointError, ObservationError
from vla_accel.server import PolicyServer, ServerConfig, background, serve

ROOT = Path(__file__).parents[2]
HORIZON, DIM = 10, 7
T = TypeVar("T")


def expected_actions(state: np.ndarray) -> np.ndarray:
    """What `EchoPolicy` answers to a state (8,): no two states share an answer."""
    return np.outer(np.arange(1, HORIZON + 1), state[:DIM]) + state[DIM]


class EchoPolicy:
    """Answers with numbers that belong to the observation alone; raises for what a real policy would refuse.

    Attributes:
        gate: each call waits for it.
        entered: released by each call before it waits.
        batches: for each call, the first number of each observation's state (NaN without a state).
    """

    def __init__(self, *, held: bool = False, **metadata: Any) -> None:
        self.metadata = {"policy": "echo", "action_horizon": HORIZON, "action_dim": DIM, **metadata}
        self.batches: list[list[float]] = []
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)
        if not held:
            self.gate.set()

    @property
    def sizes(self) -> list[int]:
        """The size of each call."""
        return [len(batch) for batch in self.batches]

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        return self.infer_batch([observation])[0]

    def infer_batch(self, observations: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        states = [np.ravel(one.get("observation/state", np.nan)) for one in observations]
        self.batches.append([float(state[0]) if state.dtype.kind == "f" else np.nan for state in states])
        self.entered.release()
        assert self.gate.wait(PATIENCE_S)
        results = []
        for observation in observations:
            if "observation/state" not in observation:
                raise ObservationError(f"observation: missing observation/state; got {', '.join(observation)}")
            state = np.asarray(observation["observation/state"])
            if state.dtype.kind != "f" or state.shape != (8,):
                raise ObservationError(f"observation/state: expected 8 floats, got {state.dtype} {state.shape}")
            if observation.get("prompt") == "crash":
                raise RuntimeError("a policy's own mistake")
            timing = {"infer_ms": 3.0, "vision_ms": 1.0, "denoise_ms": 2.0}
            results.append({"actions": expected_actions(state), "state": state, "policy_timing": timing})
        return results


class GuidedPolicy(EchoPolicy):
    """An echo policy with real-time chunking; `options` holds the chunk and delay of each observation."""

    supports_prev_chunk = True

    def __init__(self, *, held: bool = False) -> None:
        super().__init__(held=held)
        self.options: list[tuple[Any, Any]] = []

    def infer(
        self, observation: Mapping[str, Any], *, prev_chunk: Any = None, inference_delay: Any = None
    ) -> dict[str, Any]:
        self.options.append((prev_chunk, inference_delay))
        return super().infer(observation)


class MixingPolicy(GuidedPolicy):
    """A guided policy whose batches may hold guided and plain observations."""

    batches_prev_chunks = True

    def infer_batch(
        self, observations: list[Mapping[str, Any]], *, prev_chunks: Any = None, inference_delays: Any = None
    ) -> list[dict[str, Any]]:
        self.options += zip(prev_chunks or [], inference_delays or [], strict=True)
        return super().infer_batch(observations)


class ProcessPolicy(EchoPolicy):
    """Says which process it is in. A prompt `wait FILE` waits until the file is there, `die` ends the process."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.metadata["device"] = device

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        what, _, file = str(observation.get("prompt", "")).partition(" ")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while what == "wait" and not Path(file).exists():
            time.sleep(0.002)
        return {**super().infer(observation), "pid": os.getpid()}


class Unloadable:
    """A policy whose loading raises `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, device: str) -> Any:
        raise self.error


class Loading:
    """A policy whose loading takes longer than a test; the file `began` then holds the process's id.

    `damaged`: on this device, loading fails once it has begun elsewhere.
    """

    def __init__(self, began: Path, damaged: str = "") -> None:
        self.began, self.damaged = began, damaged

    def __call__(self, device: str) -> Any:
        if device == self.damaged:
            eventually(self.began.exists)
            raise CheckpointError("x.safetensors: damaged")
        self.began.with_suffix(".part").write_text(str(os.getpid()))
        self.began.with_suffix(".part").rename(self.began)
        time.sleep(PATIENCE_S / 6)
        self.began.write_text("loaded")
        return EchoPolicy()


def observation(*numbers: float, image: bool = False) -> dict[str, Any]:
    """An observation with up to eight numbers as its state."""
    state = np.zeros(8)
    state[: len(numbers)] = numbers
    result: dict[str, Any] = {"observation/state": state, "prompt": "do it"}
    if image:
        result["observation/image"] = np.zeros((224, 224, 3), np.uint8)
    return result


def local(**changes: Any) -> ServerConfig:
    """A configuration with a free port and timeouts that a busy machine does not reach."""
    timeouts = {f"{name}_timeout_s": PATIENCE_S for name in ("request", "message", "handshake", "send")}
    return ServerConfig(**{"port": 0, **timeouts, **changes})


@contextlib.contextmanager
def served(policy: Any, **limits: Any) -> Iterator[tuple[PolicyServer, PolicyClient]]:
    """A server of `policy`, and a client of it."""
    with background(policy, local(**limits)) as server, PolicyClient(server.address) as client:
        yield server, client


def actions_of(server: PolicyServer, request: Mapping[str, Any], **options: Any) -> float:
    """The first action that a new client gets for a request."""
    with PolicyClient(server.address) as client:
        return client.infer(request, **options)["actions"][0, 0]


def send_in_order(pool: ThreadPoolExecutor, server: PolicyServer, calls: Iterable[Callable[[], T]]) -> list[Future[T]]:
    """Run calls in threads, each once the one before has arrived: the first runs, the others wait behind it."""
    futures = []
    for index, call in enumerate(calls):
        futures.append(pool.submit(call))
        name = "vla_accel_queue_depth" if index else "vla_accel_running_requests"
        eventually(lambda name=name, index=index: metric(server.address, name) == max(index, 1))
    return futures


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def get(address: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Status, content type and text of a plain GET."""
    request = urllib.request.Request(f"http://127.0.0.1:{port_of(address)}{path}", headers=dict(headers or {}))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PATIENCE_S) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("Content-Type", ""), error.read().decode()


def metric(address: str, name: str) -> float:
    """One value of the metrics page; 0 for a label without a count."""
    for line in get(address, "/metrics")[2].splitlines():
        if line.startswith(f"{name} "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


class RawClient:
    """A websocket client that sends any bytes."""

    def __init__(self, address: str, *, handshake: bool = True, headers: str = "") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port_of(address)), timeout=PATIENCE_S)
        self.head = b""
        if handshake:
            key = base64.b64encode(os.urandom(16)).decode()
            self.socket.sendall(
                f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{headers}\r\n".encode()
            )
            while b"\r\n\r\n" not in self.head:
                self.head += self._some()
            self.head, _, self._rest = self.head.partition(b"\r\n\r\n")
            if b" 101 " in self.head:
                assert self.frame()[0] == 2, "the metadata comes first"

    def send(self, payload: bytes, *, opcode: int = 2, announced: int | None = None, fin: bool = True) -> None:
        """One frame; `announced` is the length it claims."""
        self.socket.sendall(frame_bytes(payload, opcode=opcode, announced=announced, fin=fin))

    def frame(self) -> tuple[int, bytes]:
        """(opcode, payload) of the next frame; a closing frame's payload is its code and reason."""
        head = self._exactly(2)
        length = head[1] & 127
        if length == 126:
            length = struct.unpack(">H", self._exactly(2))[0]
        elif length == 127:
            length = struct.unpack(">Q", self._exactly(8))[0]
        return head[0] & 15, self._exactly(length)

    def close_code(self) -> int:
        """The code of the closing frame that comes next; other frames in between are a failure."""
        opcode, payload = self.frame()
        assert opcode == 8, (opcode, payload)
        return struct.unpack(">H", payload[:2])[0]

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, count: int) -> bytes:
        while len(self._rest) < count:
            self._rest += self._some()
        got, self._rest = self._rest[:count], self._rest[count:]
        return got

    def _some(self) -> bytes:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data


def frame_bytes(
    payload: bytes, *, opcode: int = 2, announced: int | None = None, fin: bool = True, key: bytes = bytes(4)
) -> bytes:
    """A client's frame, masked with `key`."""
    length = len(payload) if announced is None else announced
    first = bytes([(128 if fin else 0) | opcode])
    if length < 126:
        head = first + bytes([128 | length])
    elif length < 65536:
        head = first + bytes([128 | 126]) + struct.pack(">H", length)
    else:
        head = first + bytes([128 | 127]) + struct.pack(">Q", length)
    mask = np.resize(np.frombuffer(key, np.uint8), len(payload))
    return head + key + (np.frombuffer(payload, np.uint8) ^ mask).tobytes()


@contextlib.contextmanager
def _process(*words: str) -> Iterator[str]:
    """The address of a server in a process of its own; afterwards it must stop cleanly."""
    with subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"serving on (ws://\S+)", line):
                break
        else:
            raise AssertionError(said)
        try:
            yield found.group(1)
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(PATIENCE_S) == 0, rest
    assert re.search(r"stopped after \d+ requests", rest)


def serve_command(*words: str) -> contextlib.AbstractContextManager[str]:
    """The address of `vla-accel serve …`."""
    return _process("vla_accel", "serve", *words, "--port", "0")


def echo_process() -> contextlib.AbstractContextManager[str]:
    """The address of an `EchoPolicy`, served by a process of its own."""
    return _process("tests.support.server_support")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("vla_accel.server").addFilter(lambda record: "WireError" not in record.getMessage())
    serve(EchoPolicy(), local())
