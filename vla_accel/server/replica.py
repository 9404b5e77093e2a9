"""Copies of the policies that answer batches: in a thread of this process, or in a process for each device."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import queue
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from vla_accel import errors
from vla_accel.errors import EngineError, VlaAccelError
from vla_accel.remote.processes import start
from vla_accel.server.limits import BatchLimits
from vla_accel.server.loop import tune_process
from vla_accel.server.requests import Answers, Batch
from vla_accel.server.runner import PolicyRegistry, Runner
from vla_accel.view import OFF, View

logger = logging.getLogger("vla_accel.server")

_BATCH_BYTES = 2**23
"""Shared memory for the frames of one batch; frames beyond it are copied through the connection."""
_END_S = 5.0
"""How long a process or a load may take to end before it is killed or abandoned."""


@dataclass(frozen=True)
class Replicas:
    """Copies of a policy, each in a process of its own, on these devices; a device may occur more than once.

    `load` makes the policy, or a `PolicyRegistry`, for a device's name. It is pickled and called in the process.
    """

    load: Callable[[str], Any]
    devices: tuple[str, ...]


class Replica(Protocol):
    """One copy of the policies. `capacity`: batches that it holds at once, the running one and those behind it.
    `metadata_frames` and `batches` (see `PolicyRegistry`) are valid once it has started."""

    name: str
    capacity: int
    metadata_frames: dict[str, bytes]
    batches: bool

    async def start(self, on_death: Callable[[], None]) -> None:
        """Load the policies; raises what loading raised. `on_death` is called once if the replica ends by itself."""

    def run(self, batch: Batch) -> None:
        """Begin to answer a batch. Every call gets its answer on the event loop, unless the replica dies."""

    async def close(self) -> None:
        """End the replica; its batches may be lost."""


class ThreadReplica:
    """Policies in a daemon thread of this process, so that a call that hangs does not keep the process alive."""

    name, capacity = "here", 2

    def __init__(self, policy: Any, limits: BatchLimits, view: View = OFF) -> None:
        self._registry, self._limits, self._view = PolicyRegistry.containing(policy), limits, view
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self.metadata_frames, self.batches = {}, False

    async def start(self, on_death: Callable[[], None]) -> None:
        self._loop, loaded = asyncio.get_running_loop(), Future[None]()
        loaded.set_running_or_notify_cancel()  # loading continues if this start is cancelled
        thread = threading.Thread(target=self._main, args=(loaded,), name="policy", daemon=True)
        thread.start()
        try:
            await asyncio.wrap_future(loaded)
        except asyncio.CancelledError:  # a process that exits while torch computes is aborted: stop the load first
            interrupt, ident = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(thread.ident or 0)
            interrupt(ident, ctypes.py_object(KeyboardInterrupt))
            await self._loop.run_in_executor(None, thread.join, _END_S)
            raise
        self.metadata_frames, self.batches = self._registry.metadata_frames, self._registry.batches

    def run(self, batch: Batch) -> None:
        self._queue.put(batch)

    async def close(self) -> None:
        self._queue.put(None)

    def _main(self, loaded: Future[None]) -> None:
        # Loaded in the thread that computes: torch keeps CPU threads for each thread that computes, and more of them
        # than cores slow down every small operation.
        try:
            self._registry.start()
        except BaseException as error:
            return loaded.set_exception(error)
        loaded.set_result(None)
        runner = Runner(self._registry, self._limits, self._view)
        while (batch := self._queue.get()) is not None:
            runner.run(batch.calls, lambda answers, batch=batch: _on_loop(self._loop, batch.deliver, answers))


class ProcessReplica:
    """Policies in a process of its own. Calls and answers travel through a `multiprocessing` connection, frames through
    shared memory. A thread receives, and another sends large messages, so that a process that hangs never blocks the
    event loop."""

    capacity = 2

    def __init__(self, name: str, load: Callable[[str], Any], device: str, limits: BatchLimits) -> None:
        self.name, self._arguments = name, (load, device, name, limits)
        self.metadata_frames, self.batches, self.pid = {}, False, 0
        self._process: Any = None
        self._connection: Any = None
        self._running: deque[Batch] = deque()
        self._half = 0

    async def start(self, on_death: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")  # a process with threads or CUDA must not fork
        memory = context.RawArray(ctypes.c_char, 2 * _BATCH_BYTES)
        self._frames = memoryview(memory).cast("B")
        ours, theirs = context.Pipe()
        arguments = theirs, memory, *self._arguments
        process = context.Process(target=_replica_main, args=arguments, name=self.name, daemon=True)
        starting = loop.run_in_executor(None, start, process)
        try:
            await asyncio.shield(starting)
        finally:  # if this start is cancelled, `close` still ends the process
            await asyncio.wait([starting])
            theirs.close()
            if process.pid is not None:
                self._process, self.pid = process, process.pid
        loaded: asyncio.Future[Any] = loop.create_future()
        sender = ThreadPoolExecutor(1)

        def received(message: Any) -> None:
            if message is None:
                sender.submit(ours.close)  # the sender may still be writing to it
                sender.shutdown(wait=False)
            if self._connection is not ours:
                return
            if not loaded.done():
                loaded.set_result(message or EngineError("its process ended while it loaded"))
            elif message is None:
                on_death()
            else:
                self._answered(message)

        def receive() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    _on_loop(loop, received, ours.recv())
            _on_loop(loop, received, None)

        self._connection, self._sender, self._sending = ours, sender, Future[None]()
        self._sending.set_result(None)
        threading.Thread(target=receive, name=f"replica {self.name}", daemon=True).start()
        result = await loaded
        if isinstance(result, Exception):
            await self.close()
            raise type(result)(f"replica {self.name}: {result}")
        self.metadata_frames, self.batches = result

    def run(self, batch: Batch) -> None:
        # The process may still read the frames of the batch before, in the other half.
        position = self._half * _BATCH_BYTES
        end, self._half = position + _BATCH_BYTES, 1 - self._half
        calls, small = [], self._sending.done()
        for call in batch.calls:
            frame, stop = call.frame, position + len(call.frame)
            if isinstance(frame, bytes) and stop <= end:
                self._frames[position:stop] = frame
                frame, position = slice(position, stop), stop
            else:
                small = False
            calls.append(call.portable(frame))
        self._running.append(batch)
        if small:  # it fits into the connection's buffer, so this does not wait
            with contextlib.suppress(OSError):  # the process has just died: `on_death` follows
                self._connection.send(calls)
        else:
            self._sending = self._sender.submit(self._connection.send, calls)

    def _answered(self, answers: Answers) -> None:
        batch = self._running[0]
        if len(batch.pending) == len(answers):
            self._running.popleft()
        batch.deliver(answers)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):  # the process has ended, and the connection is closed
                end = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
                with end:
                    end.shutdown(socket.SHUT_RDWR)  # wakes every thread that waits for the connection
        self._running.clear()
        process, self._process = self._process, None
        if process is not None:
            if not self.metadata_frames:  # it is still loading, and would not notice the end of its connection
                process.kill()
            await asyncio.get_running_loop().run_in_executor(None, _end, process)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], argument: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waited
        loop.call_soon_threadsafe(function, argument)


def _end(process: Any) -> None:
    """Wait for a process whose connection is closed; kill it if it does not end.

    NOTE: `process.close` would fail where the start of another replica has already collected this process's exit
    status: multiprocessing then counts it as alive for a moment longer.
    """
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()


def _replica_main(
    connection: Any, memory: Any, load: Callable[[str], Any], device: str, name: str, limits: BatchLimits
) -> None:
    """The replica's process: load the policies, then answer batches until the server closes the connection."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd signals the whole group; the server decides
    tune_process()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s [{name}]: %(message)s")
    frames = memoryview(memory).cast("B")
    with connection, contextlib.suppress(EOFError, ConnectionError):
        try:
            registry = PolicyRegistry.containing(load(device))
            registry.start()
        except Exception as error:
            known = isinstance(error, VlaAccelError) and type(error).__module__ == errors.__name__
            if not known:
                logger.exception("the policy cannot be loaded")
            text = str(error) if known else f"{type(error).__name__}: {error}"
            connection.send((type(error) if known else EngineError)(text))
            return
        runner = Runner(registry, limits)
        connection.send((registry.metadata_frames, registry.batches))
        while True:
            calls = connection.recv()
            for call in calls:
                if isinstance(call.frame, slice):
                    call.frame = frames[call.frame]
            runner.run(calls, connection.send)
