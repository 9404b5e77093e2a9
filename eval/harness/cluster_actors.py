"""What runs on a cluster's nodes: replicas of the policy, and simulators that ask them.

`eval.harness.cluster_crew` starts both as Ray actors, hands out episodes and replaces what dies.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.harness import sharing
from eval.harness.benchmark import Benchmark
from eval.harness.policies import PolicyBySteps, PolicySource, identity, make_actor
from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import EpisodeResult, describe
from eval.harness.runner import Runner, Setup
from eval.harness.workers import available_cores
from vla_accel.errors import EngineError
from vla_accel.remote.metadata import supports_prev_chunk


@dataclass(frozen=True)
class Loaded:
    """What a replica says of its policy; `Crew` has the same words."""

    metadata: Mapping[str, Any]
    identity: dict[str, Any]
    hardware: dict[str, Any]
    supports_prev_chunk: bool


class Replica:
    """One copy of the policy. Observations that wait while it computes are answered together.

    Args:
        gpu: Ray lends one to this process.
    """

    def __init__(self, source: PolicySource, benchmark: Benchmark, gpu: bool) -> None:
        self._source, self._benchmark, self._gpu = source, benchmark, gpu
        self._waiting: list[tuple[sharing.Request, asyncio.Future[sharing.Answer]]] = []
        self._answering: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1)  # the policy's only one, so that calls to answer never wait for it
        self._policies: PolicyBySteps | None = None

    async def place(self) -> str:
        """The id of the node that this one runs on."""
        return _node_id()

    async def load(self) -> Loaded:
        """Load the policy. Raises what loading raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def metadata_at(self, steps: int | None) -> Mapping[str, Any]:
        assert self._policies is not None
        return self._policies(steps).metadata

    async def answer(self, request: sharing.Request) -> sharing.Answer:
        """The answer of one request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[sharing.Answer] = loop.create_future()
        self._waiting.append((request, future))
        if self._answering is None:
            self._answering = loop.create_task(self._answer_waiting())
        return await future

    async def _answer_waiting(self) -> None:
        assert self._policies is not None
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken, self._waiting = self._waiting, []
            requests = [request for request, _ in taken]
            try:
                answers = await loop.run_in_executor(self._thread, sharing.answer, self._policies, requests)
            except Exception as error:  # simulators wait for these answers and for all that come after them
                answers = [("failed", describe(error))] * len(taken)
            for (_, future), one in zip(taken, answers, strict=True):
                if not future.done():  # else whoever asked is gone
                    future.set_result(one)
        self._answering = None

    def _load(self) -> Loaded:
        import torch

        from vla_accel import machine

        if self._gpu and not torch.cuda.is_available():
            raise EngineError(f"Ray lends a GPU here, but torch {torch.__version__} sees none")
        if not self._gpu:  # Ray sets one thread for a process that asks for no core of its own
            torch.set_num_threads(available_cores())
        policy = self._source.load()
        self._policies = PolicyBySteps(policy)
        who = identity(self._source, policy, self._benchmark)
        return Loaded(policy.metadata, who, machine.hardware(policy.device), supports_prev_chunk(policy))


@dataclass
class Line:
    """A simulator's line to the replica that answers it.

    Attributes:
        replica: the Ray handle of a `Replica`.
        lost: the replica's process ended while it was asked.
    """

    replica: Any = None
    lost: bool = False

    def ask(self, request: sharing.Request) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayActorError

        try:
            answered: Any = ray.get(self.replica.answer.remote(request))
        except RayActorError as error:
            self.lost = True
            raise EngineError(f"the policy's process ended: {error}") from error
        return sharing.unwrap(answered)


@dataclass(frozen=True)
class LinePolicy:
    """A simulator's view of the policy."""

    line: Line
    metadata: Mapping[str, Any] = field(repr=False)
    steps: int | None = None

    def with_steps(self, steps: int) -> LinePolicy:
        """The same policy at another step count."""
        return replace(self, steps=steps)

    def infer(self, obs: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Ask the replica. Raises `EngineError`, its own or because it is gone."""
        return self.line.ask((self.steps, obs, options))

    def reset(self) -> None:
        """Nothing to forget: a shared policy keeps no state between calls."""


@dataclass(frozen=True)
class Played:
    """An episode's result, and the content of its video, if one was made."""

    result: EpisodeResult
    video: bytes | None


class Simulator:
    """Plays one episode after the other.

    Args:
        setup: what is played, and the rules.
        metadata: of the policy that replicas hold; None where there are none.
    """

    def __init__(self, setup: Setup, metadata: Mapping[str, Any] | None) -> None:
        self._line = Line()
        self._folder = Path(tempfile.mkdtemp()) if setup.video_folder is not None else None
        setup = replace(setup, video_folder=self._folder)
        if setup.source.kind == "expert":
            policies = None
        elif metadata is not None:
            policies = PolicyBySteps(LinePolicy(self._line, metadata))
        else:
            policies = PolicyBySteps(setup.source.load())
        self._runner = Runner(setup, make_actor(setup.source, policies, setup.benchmark, setup.protocol))

    def place(self) -> str:
        """The id of the node that this one runs on."""
        return _node_id()

    def play(self, key: EpisodeKey, replica: Any) -> Played | None:
        """Play one episode with the answers of `replica`; None if that died, and nothing is known of the episode."""
        self._line.replica, self._line.lost = replica, False
        try:
            result = self._runner.run(key)
        except EngineError:
            if not self._line.lost:
                raise
        if self._line.lost:
            return None
        if result.video is None:
            return Played(result, None)
        assert self._folder is not None
        video = self._folder / result.video
        content = video.read_bytes()
        video.unlink()
        return Played(result, content)


def _node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
