"""The processes on the nodes of a Ray cluster: replicas of the policy, and simulators. `eval.harness.cluster` drives
them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.harness.benchmark import Benchmark
from eval.harness.policies import PolicyBySteps, PolicySource, identity, make_actor
from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import EpisodeResult
from eval.harness.runner import Runner, Setup
from eval.harness.sharing import Answer, Request, answer, unwrap
from eval.harness.workers import Loaded, SharedPolicy, available_cores
from vla_accel.errors import EngineError
from vla_accel.remote.metadata import supports_prev_chunk


class Replica:
    """A copy of the policy. Requests that wait while it computes are answered together.

    Args:
        gpu: Ray assigns a GPU to this process.
    """

    def __init__(self, source: PolicySource, benchmark: Benchmark, gpu: bool) -> None:
        self._source, self._benchmark, self._gpu = source, benchmark, gpu
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        self._answering: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1)  # runs the policy, so that `answer` can always take requests
        self._policies: PolicyBySteps | None = None

    async def place(self) -> str:
        """The id of this node."""
        return _node_id()

    async def load(self) -> Loaded:
        """Load the policy; raises what loading raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def metadata_at(self, steps: int | None) -> Mapping[str, Any]:
        assert self._policies is not None
        return self._policies(steps).metadata

    async def answer(self, request: Request) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, future))
        if self._answering is None:
            self._answering = loop.create_task(self._answer_waiting())
        return await future

    async def _answer_waiting(self) -> None:
        assert self._policies is not None
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken, self._waiting = self._waiting, []
            answers = await loop.run_in_executor(
                self._thread, answer, self._policies, [request for request, _ in taken]
            )
            for (_, future), one in zip(taken, answers, strict=True):
                if not future.done():  # else the simulator is gone
                    future.set_result(one)
        self._answering = None

    def _load(self) -> Loaded:
        import torch

        from vla_accel import machine

        if self._gpu and not torch.cuda.is_available():
            raise EngineError(f"Ray assigns a GPU to this process, but torch {torch.__version__} sees none")
        if not self._gpu:  # Ray sets one thread for a process that requests no core
            torch.set_num_threads(available_cores())
        policy = self._source.load()
        self._policies = PolicyBySteps(policy)
        who = identity(self._source, policy, self._benchmark)
        return Loaded(policy.metadata, who, machine.hardware(policy.device), supports_prev_chunk(policy))


@dataclass(frozen=True)
class Played:
    """An episode's result, and the content of its video, if there is one."""

    result: EpisodeResult
    video: bytes | None


class Simulator:
    """Plays one episode after the other.

    Args:
        setup: what is played, and the rules.
        metadata: of the policy that replicas hold; None without replicas.
    """

    def __init__(self, setup: Setup, metadata: Mapping[str, Any] | None) -> None:
        self._replica: Any = None
        self._lost = False
        """The process of the replica ended during a request."""
        self._folder = Path(tempfile.mkdtemp()) if setup.video_folder is not None else None
        setup = replace(setup, video_folder=self._folder)
        if setup.source.kind == "expert":
            policies = None
        else:
            policies = PolicyBySteps(setup.source.load() if metadata is None else SharedPolicy(self._ask, metadata))
        self._runner = Runner(setup, make_actor(setup.source, policies, setup.benchmark, setup.protocol))

    def place(self) -> str:
        """The id of this node."""
        return _node_id()

    def play(self, key: EpisodeKey, replica: Any) -> Played | None:
        """Play one episode with the answers of a replica (a Ray handle); None if the replica died."""
        self._replica, self._lost = replica, False
        try:
            result = self._runner.run(key)
        except EngineError:
            if not self._lost:
                raise
        if self._lost:
            return None
        if result.video is None:
            return Played(result, None)
        assert self._folder is not None
        video = self._folder / result.video
        content = video.read_bytes()
        video.unlink()
        return Played(result, content)

    def _ask(self, request: Request) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayActorError

        try:
            answered: Any = ray.get(self._replica.answer.remote(request))
        except RayActorError as error:
            self._lost = True
            raise EngineError(f"the policy's process ended: {error}") from error
        return unwrap(answered)


def _node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
