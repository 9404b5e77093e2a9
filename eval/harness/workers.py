"""Plays the planned episodes, in this process or spread over several.

Each worker process has its own simulator and, on a CPU, its own policy. On a GPU there is one
policy, in the parent: workers send it observations through their pipes, and requests that wait
together are answered together (in one batch where the policy offers `infer_batch`).

Episodes are handed out one at a time. A worker stays with its task while that has episodes left,
because changing the task means building another environment (seconds). Results do not depend on
who plays what or in which order: every episode starts from its initial state, and its key seeds both
the simulator and the policy's noise. (The policy's own rounding may depend on its number of threads
and on its batches.)

A worker that dies makes its episode an error and is replaced. A policy or an environment that
cannot be built ends the run. Nothing here writes results.
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

from eval.harness.policies import PolicyBySteps, make_actor
from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import EpisodeResult, describe
from eval.harness.runner import Runner, Setup
from eval.harness.schedule import Schedule
from eval.harness.sharing import answer, unwrap
from vla_accel.errors import EngineError, VlaAccelError
from vla_accel.remote.processes import start

JOIN_TIMEOUT_S = 5.0


def play(
    setup: Setup,
    episodes: Sequence[EpisodeKey],
    policies: PolicyBySteps | None,
    *,
    workers: int,
) -> Generator[EpisodeResult, None, None]:
    """Play `episodes`, yielding each result as it comes.

    Args:
        policies: the policy in this process. Several workers share it; None lets each load its own
            (or is the expert, which needs none).
        workers: processes; 0 and 1 play in this one.
    """
    if workers <= 1:
        return _play_here(setup, episodes, policies)
    setup = replace(setup, threads=max(1, available_cores() // workers))
    return _Pool(setup, episodes, policies, workers).results()


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _play_here(
    setup: Setup, episodes: Sequence[EpisodeKey], policies: PolicyBySteps | None
) -> Generator[EpisodeResult, None, None]:
    runner = Runner(setup, make_actor(setup.source, policies, setup.benchmark, setup.protocol))
    try:
        for key in episodes:
            yield runner.run(key)
    finally:
        runner.close()


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    episode: EpisodeKey | None = None
    task: tuple[str, int] | None = None


class _Pool:
    """The parent's side: hands out episodes, answers inference requests, collects results."""

    def __init__(
        self,
        setup: Setup,
        episodes: Sequence[EpisodeKey],
        policies: PolicyBySteps | None,
        workers: int,
    ) -> None:
        self._setup = setup
        self._schedule = Schedule(episodes)
        self._policies = policies
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
                requests: list[tuple[_Worker, tuple[Any, ...]]] = []
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
        theirs.close()  # ours alone: the pipe then ends when the worker does
        self._workers[ours] = _Worker(process, ours)

    def _receive(self, worker: _Worker, requests: list[tuple[_Worker, tuple[Any, ...]]]) -> EpisodeResult | None:
        """Handle one message; returns a result if it was one."""
        try:
            kind, *content = worker.pipe.recv()
        except (EOFError, OSError):  # between two messages, or in the middle of one
            return self._bury(worker)
        if kind == "infer":
            requests.append((worker, tuple(content)))
            return None
        if kind == "fatal":
            raise content[0]
        worker.episode = None
        self._assign(worker)  # before the result is handled, so that the worker does not wait
        return content[0] if kind == "result" else None

    def _assign(self, worker: _Worker) -> None:
        busy = {other.task for other in self._workers.values() if other is not worker}
        worker.episode = self._schedule.next(worker.task, busy)
        # A send fails if the worker just died: its pipe then reports the end, and _bury follows.
        with suppress(OSError):
            worker.pipe.send(("stop",) if worker.episode is None else ("play", worker.episode))
        if worker.episode is None:
            self._retired.append(self._workers.pop(worker.pipe))
        else:
            worker.task = worker.episode.task

    def _bury(self, worker: _Worker) -> EpisodeResult:
        """A worker ended unasked: its episode is an error, and a new worker takes its place."""
        del self._workers[worker.pipe]
        worker.pipe.close()
        worker.process.join(JOIN_TIMEOUT_S)
        end = f"worker process ended with code {worker.process.exitcode}"
        if worker.episode is None:
            raise EngineError(f"{end} before its first episode")
        if len(self._schedule):
            self._start()
        return EpisodeResult(worker.episode, False, 0, f"WorkerDied: {end}", 0.0, 0)

    def _answer(self, requests: list[tuple[_Worker, tuple[Any, ...]]]) -> None:
        """Answer all waiting requests with the shared policy."""
        assert self._policies is not None
        answers = answer(self._policies, [(steps, obs, options) for _, (steps, obs, options) in requests])
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


class PipePolicy:
    """A worker's view of the policy in the parent process."""

    def __init__(self, pipe: Connection, metadata: Mapping[str, Any]) -> None:
        self._pipe = pipe
        self.metadata = dict(metadata)
        self._steps: int | None = None

    def with_steps(self, steps: int) -> PipePolicy:
        """The same policy at another step count."""
        other = PipePolicy(self._pipe, self.metadata)
        other._steps = steps
        return other

    def infer(self, obs: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Ask the parent; its error, if any, becomes an `EngineError` here. `options`: of the parent's `infer`."""
        self._pipe.send(("infer", self._steps, obs, options))
        return unwrap(self._pipe.recv())

    def reset(self) -> None:
        """Nothing to forget: a shared policy keeps no state between calls."""


def _worker_main(pipe: Connection, setup: Setup, metadata: Mapping[str, Any] | None) -> None:
    """A worker process: plays what the pipe says until it is told to stop, or the pipe closes."""
    try:
        policies = _worker_policies(pipe, setup, metadata)
        runner = Runner(setup, make_actor(setup.source, policies, setup.benchmark, setup.protocol))
        pipe.send(("ready",))
        while (message := pipe.recv())[0] == "play":
            pipe.send(("result", runner.run(message[1])))
        runner.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone: nobody wants the result
    except VlaAccelError as error:
        pipe.send(("fatal", error))
    except Exception as error:
        traceback.print_exc()  # a bug, not bad input: the parent can only name it
        pipe.send(("fatal", EngineError(f"worker process: {describe(error)}")))


def _worker_policies(pipe: Connection, setup: Setup, metadata: Mapping[str, Any] | None) -> PolicyBySteps | None:
    if setup.source.kind == "expert":
        return None
    if metadata is not None:
        return PolicyBySteps(PipePolicy(pipe, metadata))
    if setup.source.kind == "local" and setup.threads is not None:
        import torch

        torch.set_num_threads(setup.threads)
    log = logging.getLogger("vla_accel")
    level = log.level
    log.setLevel(logging.ERROR)  # the parent has loaded the same policy, and said what there was to say
    try:
        return PolicyBySteps(setup.source.load())
    finally:
        log.setLevel(level)
