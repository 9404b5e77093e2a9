"""Replicas of a policy on the machines of a Ray cluster, each in an actor."""

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
from vla_accel.server.requests import Answers, Batch, Call
from vla_accel.server.runner import PolicyRegistry, Runner

PLACEMENT_TIMEOUT_S = 60.0
"""How long a replica waits for a free GPU or node."""


@dataclass(frozen=True)
class RayReplicas:
    """Copies of a policy on each GPU of a Ray cluster, or on each node of a cluster without GPUs."""

    load: Callable[[str], Any]  # makes the policy, or a `PolicyRegistry`, for a device's name; called in the actor
    address: str  # `auto`, `local` or HOST:PORT
    device: str  # cpu, cuda, or auto for GPUs if there are any
    software: Callable[[], Mapping[str, str]]  # the versions that decide results; called here and on every node

    def replicas(self, limits: BatchLimits) -> list[RayReplica]:
        """The replicas, not started. Raises ConfigError without a cluster at the address or a GPU that `device`
        requires, and EngineError for a node with other versions."""
        ray = cluster.connect(self.address)
        nodes = cluster.nodes(ray)
        for node in nodes:
            cluster.check_node(ray, node, self.software)
        placements = cluster.placements(nodes, self.device)
        if not placements:
            raise EngineError("ray: expected a node with a free core or GPU, got none")
        return [RayReplica(f"{i} {p.node.name}", ray, self.load, p, limits) for i, p in enumerate(placements)]


class RayReplica:
    """Policies in an actor (see `vla_accel.server.replica.Replica`). If its node fails, it starts on another one."""

    capacity = 1  # frames of a second batch would compete for the network

    def __init__(
        self, name: str, ray: Any, load: Callable[[str], Any], placement: cluster.Placement, limits: BatchLimits
    ) -> None:
        self.name, self._ray, self._load, self._placement, self._limits = name, ray, load, placement, limits
        self.metadata_frames, self.batches = {}, False
        self._actor: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, on_death: Callable[[], None]) -> None:
        gpu, errors = self._placement.gpu, self._ray.exceptions
        make = self._ray.remote(max_concurrency=4, **self._placement.options(self._ray))(Actor)
        self._actor = actor = make.remote(self._load, "cuda:0" if gpu else "cpu", self._limits)
        try:
            await asyncio.wait_for(_result(actor.ready), PLACEMENT_TIMEOUT_S)
            self.metadata_frames, self.batches = await _result(actor.start)
        except (asyncio.TimeoutError, errors.RayError) as error:
            await self.close()
            kind = EngineError
            if isinstance(error, asyncio.TimeoutError):
                what = "a GPU" if gpu else "a node"
                text = f"expected {what} of the cluster, got none within {PLACEMENT_TIMEOUT_S:.0f} s"
            elif not isinstance(error, errors.RayTaskError):
                text = f"its process ended while it loaded ({cluster.last_line(error)})"
            elif isinstance(error.cause, VlaAccelError):
                kind, text = type(error.cause), str(error.cause)
            else:
                text = cluster.cause(error)
            raise kind(f"replica {self.name}: {text}") from error
        self._spawn(self._watch(actor, on_death))

    def run(self, batch: Batch) -> None:
        self._spawn(self._run(self._actor, batch))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        actor, self._actor = self._actor, None
        if actor is not None:
            self._ray.kill(actor)

    async def _run(self, actor: Any, batch: Batch) -> None:
        try:
            answers = await _result(actor.run, [call.portable(call.frame) for call in batch.calls])
        except self._ray.exceptions.RayError:
            self._ray.kill(actor)  # `_watch` reports the death, and the calls run again
            return
        if actor is self._actor:
            batch.deliver(answers)

    async def _watch(self, actor: Any, on_death: Callable[[], None]) -> None:
        try:
            await _result(actor.wait)
        except self._ray.exceptions.RayError:
            if actor is self._actor:
                self._actor = None  # ignore answers that are still on their way
                on_death()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _result(method: Any, *arguments: Any) -> Any:
    """Call a method of an actor."""
    return await asyncio.wrap_future(method.remote(*arguments).future())


class Actor:
    """The replica on its node. One thread loads and uses the policy."""

    def __init__(self, load: Callable[[str], Any], device: str, limits: BatchLimits) -> None:
        self._load, self._device, self._limits = load, device, limits
        self._thread = ThreadPoolExecutor(1)

    async def ready(self) -> None:
        """Return once the actor is placed."""

    async def wait(self) -> None:
        """Wait until the process ends."""
        await asyncio.Event().wait()

    async def start(self) -> tuple[dict[str, bytes], bool]:
        """Load the policies; returns `metadata_frames` and `batches`. Raises what loading raises."""
        return await asyncio.wrap_future(self._thread.submit(self._start))

    async def run(self, calls: Sequence[Call]) -> Answers:
        """Answer all calls."""
        now, answers = time.monotonic(), []
        for call in calls:
            call.sent_s = now  # the clocks of two machines differ
        await asyncio.wrap_future(self._thread.submit(self._runner.run, calls, answers.extend))
        return answers

    def _start(self) -> tuple[dict[str, bytes], bool]:
        tune_process()
        if self._device == "cpu":  # Ray limits torch to one thread in an actor that reserves no core
            import torch

            torch.set_num_threads(len(os.sched_getaffinity(0)))
        registry = PolicyRegistry.containing(self._load(self._device))
        registry.start()
        self._runner = Runner(registry, self._limits)
        return registry.metadata_frames, registry.batches
