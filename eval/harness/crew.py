"""Who plays a run's episodes, and answers their observations: the processes of this machine, or a Ray cluster
(`eval.harness.cluster_crew`)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from eval.harness import workers as playing
from eval.harness.benchmark import Benchmark
from eval.harness.policies import PolicyBySteps, PolicySource, identity, make_actor
from eval.harness.protocol import EpisodeKey
from eval.harness.protocol import Protocol as EvaluationProtocol
from eval.harness.rollout import EpisodeResult
from eval.harness.runner import Setup
from vla_accel import machine
from vla_accel.remote.metadata import supports_prev_chunk


class Crew(Protocol):
    """Simulators and a loaded policy.

    Attributes:
        metadata: the policy's own; None for the expert.
        identity: what must not change when a run is resumed (JSON types).
        hardware: what the policy runs on (JSON types).
        supports_prev_chunk: the policy can be guided by what is left of its last chunk.
        size: simulators that play at once, if there are as many episodes.
    """

    metadata: Mapping[str, Any] | None
    identity: dict[str, Any]
    hardware: dict[str, Any]
    supports_prev_chunk: bool
    size: int

    def metadata_at(self, steps: int | None) -> Mapping[str, Any]:
        """The policy's metadata at a step count, with the engines that really ran."""
        ...

    def warm_up(self, protocol: EvaluationProtocol, instruction: str) -> None:
        """Build every engine before the first episode, so that what cannot run fails here."""
        ...

    def play(self, setup: Setup, episodes: Sequence[EpisodeKey]) -> Generator[EpisodeResult, None, None]:
        """Play `episodes`, each once, yielding each result as it comes."""
        ...

    def nodes(self) -> Mapping[str, tuple[int, int]]:
        """Simulators of, and episodes played by, each machine's name; empty where there is only this one."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class LocalCrew:
    """This machine: one policy on a GPU, shared by the worker processes, or one in each process. `Crew` says the rest.

    Args:
        workers: processes; 1 plays in this one.
    """

    def __init__(self, source: PolicySource, benchmark: Benchmark, workers: int) -> None:
        import torch

        policy = None if source.kind == "expert" else source.load()
        self._source, self._benchmark, self.size = source, benchmark, workers
        self._policies = None if policy is None else PolicyBySteps(policy)
        self.metadata = None if policy is None else policy.metadata
        self.supports_prev_chunk = policy is not None and supports_prev_chunk(policy)
        self.identity = identity(source, policy, benchmark)
        device = policy.device if policy is not None and source.kind == "local" else torch.device("cpu")
        self._on_gpu = device.type == "cuda"
        self.hardware = {**machine.hardware(device), "cores": playing.available_cores()}
        if source.kind == "remote":
            self.hardware["device"] = f"remote ({source.where}); cpu and threads are the client's"

    def metadata_at(self, steps: int | None) -> Mapping[str, Any]:
        return {} if self._policies is None else self._policies(steps).metadata

    def warm_up(self, protocol: EvaluationProtocol, instruction: str) -> None:
        if self._policies is not None:
            make_actor(self._source, self._policies, self._benchmark, protocol).warm_up(instruction)

    def play(self, setup: Setup, episodes: Sequence[EpisodeKey]) -> Generator[EpisodeResult, None, None]:
        shared = self._policies if self.size <= 1 or self._on_gpu else None
        return playing.play(setup, episodes, shared, workers=self.size)

    def nodes(self) -> Mapping[str, tuple[int, int]]:
        return {}

    def close(self) -> None:
        pass
