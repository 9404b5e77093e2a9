"""Where a policy runs: in a thread of this process, or in a process of its own for each device.

A replica takes some calls and delivers their answers to the event loop; meanwhile it can be given one turn more, or
none (`takes_ahead`). Knows nothing about clients or what a call says.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import IO, Any, Protocol

from vla_accel import errors
from vla_accel.errors import EngineError, VlaAccelError
from vla_accel.remote.processes import start
from vla_accel.server.limits import BatchLimits
from vla_accel.server.loop import tune_process
from vla_accel.server.runner import Answer, Call, Deliver, Runner
from vla_accel.server.shelf import Shelf

logger = logging.getLogger("vla_accel.server")

_LENGTH = struct.Struct(">Q")
_SHARED_BYTES = 2**25
"""For the frames of two turns, half of it each; what has no room goes through the socket. Only what is used takes
memory."""
_END_S = 5.0
"""How long a process or a load may take to end before it is left to its fate."""


@dataclass(frozen=True)
class Replicas:
    """A policy in several processes, one for each of `devices` (a device may stand in it more than once).

    `load` makes the policy, or the `Shelf`, for a device's name; it is pickled, and called in the replica's process.
    """

    load: Callable[[str], Any]
    devices: tuple[str, ...]


class Replica(Protocol):
    """One copy of the policies. `hellos` (`Shelf.hellos`) and `batches` are known once it has started; `takes_ahead`:
    whether it can be given a turn while it works on another."""

    takes_ahead: bool
    name: str
    hellos: dict[str, bytes]
    batches: bool

    async def start(self, on_death: Callable[[], None]) -> None:
        """Load the policy. Raises what loading raised. `on_death` is told once when the replica ends unasked."""
        ...

    def run(self, calls: Sequence[Call], deliver: Deliver) -> None:
        """Begin to answer; `deliver` gets every answer on the event loop, unless the replica dies."""
        ...

    async def close(self) -> None:
        """End it; a call under way may be lost."""
        ...


class ThreadReplica:
    """A policy in a daemon thread of this process: one that hangs cannot keep the process from ending."""

    name = "here"
    takes_ahead = True

    def __init__(self, policy: Any, limits: BatchLimits) -> None:
        self._runner = Runner(Shelf.of(policy), limits)
        self._calls: queue.SimpleQueue[tuple[Sequence[Call], Deliver] | None] = queue.SimpleQueue()
        self.hellos, self.batches = {}, False

    async def start(self, on_death: Callable[[], None]) -> None:
        self._loop, loaded = asyncio.get_running_loop(), Future[None]()
        loaded.set_running_or_notify_cancel()  # it goes on where nobody waits any more
        thread = threading.Thread(target=self._work, args=(loaded,), name="policy", daemon=True)
        thread.start()
        try:
            await asyncio.wrap_future(loaded)
        except asyncio.CancelledError:  # a process that ends while torch computes is aborted
            interrupt, ident = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(thread.ident or 0)
            interrupt(ident, ctypes.py_object(KeyboardInterrupt))
            await self._loop.run_in_executor(None, thread.join, _END_S)
            raise
        self.hellos, self.batches = self._runner.shelf.hellos, self._runner.shelf.batches

    def run(self, calls: Sequence[Call], deliver: Deliver) -> None:
        self._calls.put((calls, deliver))

    async def close(self) -> None:
        self._calls.put(None)

    def _work(self, loaded: Future[None]) -> None:
        # Loaded where it runs: on a CPU torch keeps threads for each thread that computes, and more threads than cores
        # wait for each other in every small operation.
        try:
            self._runner.shelf.start()
        except BaseException as error:
            return loaded.set_exception(error)
        loaded.set_result(None)
        while (item := self._calls.get()) is not None:
            calls, deliver = item
            self._runner.run(calls, lambda answers, to=deliver: self._tell(to, answers))

    def _tell(self, deliver: Deliver, answers: list[tuple[int, Answer]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(deliver, answers)


@dataclass
class _Sent:
    """A turn of another process, and how many of its answers are still to come."""

    deliver: Deliver
    left: int


class ProcessReplica:
    """A policy in a process of its own. What it is sent and what it answers are pickles over a pair of sockets; frames
    stand in memory that both processes see."""

    takes_ahead = True

    def __init__(self, name: str, load: Callable[[str], Any], device: str, limits: BatchLimits) -> None:
        self.name, self._load, self._device, self._limits = name, load, device, limits
        self.hellos, self.batches = {}, False
        self.pid = 0
        self._process: Any = None
        self._pipe: _Pipe | None = None
        self._frames: mmap.mmap | None = None
        self._turns: deque[_Sent] = deque()
        self._half = 0

    async def start(self, on_death: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs, _nameless(f"replica {self.name}") as file:
            file.truncate(_SHARED_BYTES)
            self._frames = mmap.mmap(file.fileno(), _SHARED_BYTES)
            socket.send_fds(ours, [b"m"], [file.fileno()])
            # Not forked: a process that has used CUDA or threads cannot be.
            words = theirs, self._load, self._device, self.name, self._limits
            process = multiprocessing.get_context("spawn").Process(
                target=_replica_main, args=words, name=self.name, daemon=True
            )
            starting = loop.run_in_executor(None, start, process)
            try:
                await asyncio.shield(starting)
            finally:  # a process that nobody waits for any longer is there for `close`
                await asyncio.wait([starting])
                if process.pid is not None:
                    self._process, self.pid = process, process.pid
        ready: asyncio.Future[Any] = loop.create_future()

        def received(message: Any) -> None:
            if not ready.done():
                ready.set_result(message)
            else:
                self._answered(message)

        def lost() -> None:
            if ready.done():
                on_death()
            else:
                ready.set_result(EngineError("its process ended while it loaded"))

        _, self._pipe = await loop.create_connection(lambda: _Pipe(received, lost), sock=ours)
        told = await ready
        if isinstance(told, Exception):
            await self.close()
            raise type(told)(f"replica {self.name}: {told}")
        self.hellos, self.batches = told

    def run(self, calls: Sequence[Call], deliver: Deliver) -> None:
        assert self._pipe is not None and self._frames is not None
        # The turn before may be read, or at work, in the other half; the one before that is answered.
        frames, start = self._frames, self._half * (len(self._frames) // 2)
        taken, end = start, start + len(self._frames) // 2
        self._half = 1 - self._half
        sizes: list[int] = []
        self._turns.append(_Sent(deliver, len(calls)))

        def left(buffer: pickle.PickleBuffer) -> bool:
            """Copy a frame to the memory; True, which leaves it to the pickle, where there is no room."""
            nonlocal taken
            raw = buffer.raw()
            if taken + len(raw) > end:
                return True
            frames[taken : taken + len(raw)] = raw
            taken += len(raw)
            sizes.append(len(raw))
            return False

        shared = [replace(c, frame=pickle.PickleBuffer(c.frame)) if isinstance(c.frame, bytes) else c for c in calls]
        self._pipe.send((start, sizes, pickle.dumps(shared, protocol=5, buffer_callback=left)))

    def _answered(self, answers: list[tuple[int, Answer]]) -> None:
        turn = self._turns[0]
        turn.left -= len(answers)
        if not turn.left:
            self._turns.popleft()
        turn.deliver(answers)

    async def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._frames = None
        self._turns.clear()
        process, self._process = self._process, None
        if process is not None:
            if not self.hellos:  # it loads, and would not hear of the end before it has
                process.kill()
            await asyncio.get_running_loop().run_in_executor(None, _end, process)


class _Pipe(asyncio.Protocol):
    """The server's end of a replica's socket: messages out, messages in."""

    def __init__(self, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._received, self._lost = received, lost
        self._transport: Any = None
        self._buffer = bytearray()
        self._closed = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = pickle.loads(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._lost()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()


def _nameless(title: str) -> IO[bytes]:
    """A file in memory, or on disk where the system has no such, that is gone once nobody has it open: whoever dies,
    nothing of it stays."""
    return open(os.memfd_create(title), "r+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _end(process: Any) -> None:
    """A process whose socket is closed ends by itself, unless it is in a call that does not.

    It is not `close`d: a start of another replica asks after every process, and where that is told of this one's end
    first, this one counts as alive for a moment longer.
    """
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()


# -- in the replica's process ------------------------------------------------------------------------------------------


def _replica_main(pipe: socket.socket, load: Callable[[str], Any], device: str, name: str, limits: BatchLimits) -> None:
    """Load the policy, then answer until the server closes its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd tells the whole group: the server decides
    tune_process()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s [{name}]: %(message)s")
    with pipe, contextlib.suppress(ConnectionError):  # the server has closed its end
        _, (memory, *_), _, _ = socket.recv_fds(pipe, 1, 1)
        frames = memoryview(mmap.mmap(memory, _SHARED_BYTES))
        os.close(memory)
        try:
            shelf = Shelf.of(load(device))
            shelf.start()
        except Exception as error:
            known = isinstance(error, VlaAccelError) and type(error).__module__ == errors.__name__
            if not known:
                logger.exception("the policy cannot be loaded")
            told = str(error) if known else f"{type(error).__name__}: {error}"
            _send(pipe, (type(error) if known else EngineError)(told))
            return
        runner = Runner(shelf, limits)
        _send(pipe, (shelf.hellos, shelf.batches))
        while True:
            sent = pickle.loads(_exactly(pipe, _LENGTH.unpack(_exactly(pipe, _LENGTH.size))[0]))
            runner.run(_calls(sent, frames), lambda answers: _send(pipe, answers))


def _calls(sent: tuple[int, list[int], bytes], frames: memoryview) -> list[Call]:
    """What `ProcessReplica.run` was given; the frames are views of the shared memory."""
    start, sizes, data = sent
    edges = itertools.accumulate(sizes, initial=start)
    return pickle.loads(data, buffers=[frames[a:b] for a, b in itertools.pairwise(edges)])


def _send(pipe: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    pipe.sendall(_LENGTH.pack(len(data)) + data)


def _exactly(pipe: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        got = pipe.recv_into(rest)
        if not got:
            raise ConnectionResetError("the server has closed its end")
        rest = rest[got:]
    return data
