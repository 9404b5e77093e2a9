"""Play episodes in this process, or in several processes of this machine. `eval.harness.cluster` plays on Ray.

Each worker process has its own simulator and, on a CPU, its own policy. On a GPU the parent holds one policy: workers
send it observations through their pipes, and requests that wait at the same time are answered together.

Results do not depend on who plays an episode or in which order: every episode starts from its initial state, and its
key seeds both the simulator and the noise of the policy. (The rounding of a policy may depend on its number of threads
and on its batches.) A worker that dies makes its episode an error and is replaced. A policy or an environment that
cannot be built ends the run.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from eval.harness.benchmark import Benchmark
from eval.harness.policies import PolicyBySteps, PolicySource, identity, make_actor
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult, describe
from eval.harness.runner import Runner, Setup
from eval.harness.sharing import Request, Schedule, answer, unwrap
from vla_accel import machine
from vla_accel.errors import EngineError, VlaAccelError
from vla_accel.remote.metadata import supports_prev_chunk
from vla_accel.remote.processes import start

JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Loaded:
    """What a run must know of its policy.

    Attributes:
        metadata: the policy's own; None for the expert.
        identity: what must not change when a run is resumed (JSON types).
        hardware: what the policy runs on (JSON types).
        supports_prev_chunk: the policy can be guided by the rest of its last chunk.
    """

    metadata: Mapping[str, Any] | None
    identity: dict[str, Any]
    hardware: dict[str, Any]
    supports_prev_chunk: bool


class LocalWorkers:
    """Simulators on this machine and a loaded policy, which they share on a GPU, or have one each.

    Args:
        count: worker processes; 1 plays in this process.
    """

    def __init__(self, source: PolicySource, benchmark: Benchmark, count: int) -> None:
        import torch

        policy = None if source.kind == "expert" else source.load()
        self._source, self._benchmark, self.size = source, benchmark, count
        self._policies = None if policy is None else PolicyBySteps(policy)
        device = policy.device if policy is not None and source.kind != "remote" else torch.device("cpu")
        self._on_gpu = device.type == "cuda"
        hardware = {**machine.hardware(device), "cores": available_cores()}
        if source.kind == "remote":
            hardware["device"] = f"remote ({source.where}); cpu and threads are the client's"
        guided = policy is not None and supports_prev_chunk(policy)
        metadata = None if policy is None else policy.metadata
        self.loaded = Loaded(metadata, identity(source, policy, benchmark), hardware, guided)

    def metadata_at(self, steps: int | None) -> Mapping[str, Any]:
        """The policy's metadata at a step count, with the engines that really ran."""
        return {} if self._policies is None else self._policies(steps).metadata

    def warm_up(self, protocol: Protocol, instruction: str) -> None:
        """Build every engine before the first episode, so that a failure shows here."""
        if self._policies is not None:
            make_actor(self._source, self._policies, self._benchmark, protocol).warm_up(instruction)

    def play(self, setup: Setup, episodes: Sequence[EpisodeKey]) -> Generator[EpisodeResult, None, None]:
        """Play each of `episodes` once, yielding each result as it comes."""
        shared = self._policies if self.size <= 1 or self._on_gpu else None
        return play(setup, episodes, shared, workers=self.size)

    def nodes(self) -> Mapping[str, tuple[int, int]]:
        """Simulators and finished episodes of each machine by name; empty for this machine only."""
        return {}

    def close(self) -> None:
        """Free everything."""


def play(
    setup: Setup, episodes: Sequence[EpisodeKey], policies: PolicyBySteps | None, *, workers: int
) -> Generator[EpisodeResult, None, None]:
    """Play `episodes`, yielding each result as it comes.

    Args:
        policies: the policy in this process, which workers share; None if each loads its own, or for the expert.
        workers: processes; 0 and 1 play in this one.
    """
    if workers > 1:
        setup = replace(setup, threads=max(1, available_cores() // workers))
        yield from _Pool(setup, episodes, policies, workers).results()
        return
    runner = Runner(setup, make_actor(setup.source, policies, setup.benchmark, setup.protocol))
    try:
        for key in episodes:
            yield runner.run(key)
    finally:
        runner.close()


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    episode: EpisodeKey | None = None
    task: tuple[str, int] | None = None


class _Pool:
    """The parent's side: hands out episodes, answers requests, collects results."""

    def __init__(
        self, setup: Setup, episodes: Sequence[EpisodeKey], policies: PolicyBySteps | None, workers: int
    ) -> None:
        self._setup, self._policies = setup, policies
        self._schedule = Schedule(episodes)
        self._metadata = dict(policies.policy.metadata) if policies is not None else None
        self._size = min(workers, len(episodes))
        self._workers: dict[Connection, _Worker] = {}
        self._retired: list[_Worker] = []
        self._context = multiprocessing.get_context("spawn")

    def results(self) -> Generator[EpisodeResult, None, None]:
        try:
            for _ in range(self._size):
                self._start()
            while self._workers:
                requests: list[tuple[_Worker, Request]] = []
                for pipe in wait(list(self._workers)):
                    assert isinstance(pipe, Connection)
                    result = self._receive(self._workers[pipe], requests)
                    if result is not None:
                        yield result
                if requests:
                    self._answer(requests)
        finally:
            self._stop()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_worker_main, args=(theirs, self._setup, self._metadata), daemon=True)
        start(process)
        theirs.close()  # with one end each, the pipe ends when the worker does
        self._workers[ours] = _Worker(process, ours)

    def _receive(self, worker: _Worker, requests: list[tuple[_Worker, Request]]) -> EpisodeResult | None:
        """Handle one message; returns a result if it was one."""
        try:
            kind, *content = worker.pipe.recv()
        except (EOFError, OSError):  # the worker died between two messages, or in the middle of one
            return self._replace(worker)
        if kind == "infer":
            requests.append((worker, (content[0], content[1], content[2])))
            return None
        if kind == "fatal":
            raise content[0]
        worker.episode = None
        self._assign(worker)  # before the result is handled, so that the worker does not wait
        return content[0] if kind == "result" else None

    def _assign(self, worker: _Worker) -> None:
        busy = {other.task for other in self._workers.values() if other is not worker}
        worker.episode = self._schedule.next(worker.task, busy)
        # A send fails if the worker just died; then its pipe reports the end, and _replace follows.
        with suppress(OSError):
            worker.pipe.send(("stop",) if worker.episode is None else ("play", worker.episode))
        if worker.episode is None:
            self._retired.append(self._workers.pop(worker.pipe))
        else:
            worker.task = worker.episode.task

    def _replace(self, worker: _Worker) -> EpisodeResult:
        """Make the episode of a dead worker an error, and start another worker."""
        del self._workers[worker.pipe]
        worker.pipe.close()
        worker.process.join(JOIN_TIMEOUT_S)
        end = f"worker process ended with code {worker.process.exitcode}"
        if worker.episode is None:
            raise EngineError(f"{end} before its first episode")
        if len(self._schedule):
            self._start()
        return EpisodeResult(worker.episode, False, 0, f"WorkerDied: {end}", 0.0, 0)

    def _answer(self, requests: list[tuple[_Worker, Request]]) -> None:
        assert self._policies is not None
        answers = answer(self._policies, [request for _, request in requests])
        for (worker, _), one in zip(requests, answers, strict=True):
            with suppress(OSError):  # it died meanwhile: its pipe reports the end
                worker.pipe.send(one)

    def _stop(self) -> None:
        for worker in self._workers.values():
            worker.process.terminate()
        for worker in (*self._workers.values(), *self._retired):
            worker.process.join(JOIN_TIMEOUT_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers.clear()


class SharedPolicy:
    """A simulator's view of a policy in another process.

    Args:
        ask: sends one request and returns the result of `infer`; raises EngineError.
    """

    def __init__(self, ask: Any, metadata: Mapping[str, Any], steps: int | None = None) -> None:
        self._ask, self.metadata, self._steps = ask, dict(metadata), steps

    def with_steps(self, steps: int) -> SharedPolicy:
        return SharedPolicy(self._ask, self.metadata, steps)

    def infer(self, obs: dict[str, Any], **options: Any) -> dict[str, Any]:
        return self._ask((self._steps, obs, options))

    def reset(self) -> None:
        """Nothing to do: a shared policy keeps no state between calls."""


def _worker_main(pipe: Connection, setup: Setup, metadata: Mapping[str, Any] | None) -> None:
    """A worker process: plays the episodes that come through the pipe, until it says stop or closes."""
    try:
        policies = _worker_policies(pipe, setup, metadata)
        runner = Runner(setup, make_actor(setup.source, policies, setup.benchmark, setup.protocol))
        pipe.send(("ready",))
        while (message := pipe.recv())[0] == "play":
            pipe.send(("result", runner.run(message[1])))
        runner.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except VlaAccelError as error:
        pipe.send(("fatal", error))
    except Exception as error:
        traceback.print_exc()  # a bug, not bad input: the parent can only name it
        pipe.send(("fatal", EngineError(f"worker process: {describe(error)}")))


def _worker_policies(pipe: Connection, setup: Setup, metadata: Mapping[str, Any] | None) -> PolicyBySteps | None:
    if setup.source.kind == "expert":
        return None
    if metadata is not None:

        def ask(request: Request) -> dict[str, Any]:
            pipe.send(("infer", *request))
            return unwrap(pipe.recv())

        return PolicyBySteps(SharedPolicy(ask, metadata))
    if setup.source.kind != "remote" and setup.threads is not None:
        import torch

        torch.set_num_threads(setup.threads)
    log = logging.getLogger("vla_accel")
    level = log.level
    log.setLevel(logging.ERROR)  # the parent loaded the same policy and has logged its warnings
    try:
        return PolicyBySteps(setup.source.load())
    finally:
        log.setLevel(level)
