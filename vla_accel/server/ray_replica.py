"""Replicas of a policy on the machines of a Ray cluster, each in an actor. Knows nothing about clients, turns or what a
call says."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vla_accel.errors import EngineError, VlaAccelError
from vla_accel.remote import cluster
from vla_accel.server.limits import BatchLimits
from vla_accel.server.loop import tune_process
from vla_accel.server.runner import Answer, Call, Deliver, Runner
from vla_accel.server.shelf import Shelf

PLACE_TIMEOUT_S = 60.0
"""How long a replica waits for room on the cluster."""


@dataclass(frozen=True)
class RayReplicas:
    """A policy on each GPU of a Ray cluster, or on each node where there is none.

    Args:
        load: makes the policy, or the `Shelf`, for a device's name; it is pickled, and called in the actor's process.
        address: `auto`, `local` or HOST:PORT.
        device: cpu, cuda, or auto for GPUs where there are some.
        software: tells the versions that decide results, here and on every node.
    """

    load: Callable[[str], Any]
    address: str
    device: str
    software: Callable[[], Mapping[str, str]]

    def made(self, limits: BatchLimits) -> list[RayReplica]:
        """The replicas, not started. Raises ConfigError for an address where no cluster is and for a GPU that no node
        has, EngineError for a node with other versions."""
        ray = cluster.connect(self.address)
        nodes = cluster.nodes(ray)
        for node in nodes:
            cluster.check_node(ray, node, self.software)
        places = cluster.places(nodes, self.device)
        if not places:
            raise EngineError("ray: expected a node that lends a core or a GPU, got none")
        return [RayReplica(f"{i} {place.node.name}", ray, self.load, place, limits) for i, place in enumerate(places)]


class RayReplica:
    """A policy in an actor; `vla_accel.server.replica.Replica` says the rest.

    An actor whose node is gone is started elsewhere, if there is room.
    """

    takes_ahead = False  # over a network: frames of two turns would be on their way at once

    def __init__(
        self, name: str, ray: Any, load: Callable[[str], Any], place: cluster.Place, limits: BatchLimits
    ) -> None:
        self.name, self._ray, self._load, self._place, self._limits = name, ray, load, place, limits
        self.hellos, self.batches = {}, False
        self._actor: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, on_death: Callable[[], None]) -> None:
        make = self._ray.remote(max_concurrency=4, **self._place.options(self._ray))(Actor)
        self._actor = actor = make.remote(self._load, "cuda:0" if self._place.gpu else "cpu", self._limits)
        try:
            await asyncio.wait_for(self._value(actor.ready), PLACE_TIMEOUT_S)
            self.hellos, self.batches = await self._value(actor.start)
        except asyncio.TimeoutError:
            await self.close()
            what = "a GPU" if self._place.gpu else "a policy"
            raise EngineError(
                f"replica {self.name}: expected room for {what} on the cluster, got none for {PLACE_TIMEOUT_S:.0f} s"
            ) from None
        except self._ray.exceptions.RayTaskError as error:
            await self.close()
            known = isinstance(error.cause, VlaAccelError)
            said = str(error.cause) if known else cluster.cause(error)
            raise (type(error.cause) if known else EngineError)(f"replica {self.name}: {said}") from error
        except self._ray.exceptions.RayError as error:
            await self.close()
            raise EngineError(
                f"replica {self.name}: its process ended while it loaded ({cluster.last_line(error)})"
            ) from error
        self._spawn(self._wait_for_death(actor, on_death))

    def run(self, calls: Sequence[Call], deliver: Deliver) -> None:
        self._spawn(self._run(self._actor, list(calls), deliver))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        actor, self._actor = self._actor, None
        if actor is not None:
            self._ray.kill(actor)

    async def _run(self, actor: Any, calls: list[Call], deliver: Deliver) -> None:
        try:
            answers = await self._value(actor.run, calls)
        except self._ray.exceptions.RayError:
            self._ray.kill(actor)  # if it has not ended: `_wait_for_death` tells, and the calls are tried again
            return
        if actor is self._actor:
            deliver(answers)

    async def _wait_for_death(self, actor: Any, on_death: Callable[[], None]) -> None:
        try:
            await self._value(actor.for_ever)
        except self._ray.exceptions.RayError:
            if actor is self._actor:
                self._actor = None  # an answer that is still on its way comes too late
                on_death()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _value(method: Any, *arguments: Any) -> Any:
        """What a method of the actor returns."""
        return await asyncio.wrap_future(method.remote(*arguments).future())


class Actor:
    """What runs on the node."""

    def __init__(self, load: Callable[[str], Any], device: str, limits: BatchLimits) -> None:
        self._load, self._device, self._limits = load, device, limits
        self._thread = ThreadPoolExecutor(1)  # the policy's only one
        self._runner: Runner | None = None

    async def ready(self) -> None:
        """It has found a place."""

    async def for_ever(self) -> None:
        """Ends when the process does."""
        await asyncio.Event().wait()

    async def start(self) -> tuple[dict[str, bytes], bool]:
        """Load the policy; the `hellos` and `batches` of a replica. Raises what loading raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._start)

    async def run(self, calls: Sequence[Call]) -> list[tuple[int, Answer]]:
        """Every call's answer."""
        now = time.monotonic()
        for call in calls:
            call.sent_s = now  # machines do not share that clock
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, calls)

    def _start(self) -> tuple[dict[str, bytes], bool]:
        tune_process()
        if self._device == "cpu":  # Ray sets one thread for a process that asks for no core of its own
            import torch

            torch.set_num_threads(len(os.sched_getaffinity(0)))
        shelf = Shelf.of(self._load(self._device))
        shelf.start()
        self._runner = Runner(shelf, self._limits)
        return shelf.hellos, shelf.batches

    def _run(self, calls: Sequence[Call]) -> list[tuple[int, Answer]]:
        assert self._runner is not None
        answers: list[tuple[int, Answer]] = []
        self._runner.run(calls, answers.extend)
        return answers
