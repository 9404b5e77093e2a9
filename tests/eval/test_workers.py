"""Several processes play what one would: scheduling, a shared policy, and a worker that dies."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import struct
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from eval.harness.cluster_actors import Replica
from eval.harness.policies import PolicyBySteps, PolicySource
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.runner import Setup
from eval.harness.sharing import Schedule, answer
from eval.harness.workers import _Pool, _Worker, _worker_policies, play
from tests.support.eval_support import OBS, FakePolicy
from tests.support.toy_benchmark import TOY
from tests.support.waiting import PATIENCE_S

# The stand-in policy's seven numbers; the point takes the first.
BENCHMARK = replace(TOY, action_dim=7)
PROTOCOL = Protocol("line", tasks=(0, 1), trials=2, steps=(3,), max_steps=6, settings=TOY.settings)
SETUP = Setup(BENCHMARK, PROTOCOL, PolicySource("local", "unused"))


def key(task: int, trial: int) -> EpisodeKey:
    return EpisodeKey(3, task, trial)


def test_a_worker_keeps_its_task_then_takes_a_free_one_then_helps() -> None:
    schedule = Schedule([key(0, 0), key(0, 1), key(1, 0), key(1, 1), key(1, 2), key(2, 0)])
    assert schedule.next(None, {None}) == key(0, 0)
    assert schedule.next(None, {("", 0)}) == key(1, 0)
    assert schedule.next(("", 0), {("", 1)}) == key(0, 1)
    assert schedule.next(("", 0), {("", 1)}) == key(2, 0), "task 1 has a worker already"
    assert schedule.next(("", 2), {("", 1)}) == key(1, 1), "nothing else is left: help with task 1"
    assert len(schedule) == 1
    assert schedule.next(("", 1), {("", 1)}) == key(1, 2)
    assert schedule.next(("", 1), set()) is None
    schedule.give_back(key(1, 1))
    assert (len(schedule), schedule.next(("", 0), {("", 1)})) == (1, key(1, 1)), "nobody finished it"


class BatchPolicy(FakePolicy):
    """Answers batches, and notes the noise of every episode's first call."""

    batches: list[int]
    first: dict[bytes, int]

    def __init__(self, steps: int = 10) -> None:
        super().__init__(steps)
        self.batches, self.first = [], {}

    def with_steps(self, steps: int) -> BatchPolicy:
        self.steps = steps
        return self

    def infer_batch(self, observations: Any, *, noise: Any = None) -> list[dict[str, Any]]:
        self.batches.append(len(observations))
        assert noise is None or noise.shape == (len(observations), 10, 8)
        rows = [None] * len(observations) if noise is None else noise
        return [FakePolicy.infer(self, o, noise=n) for o, n in zip(observations, rows, strict=True)]


@pytest.mark.slow
def test_workers_share_a_policy_and_meet_the_same_noise_as_one_process() -> None:
    policy = BatchPolicy()
    results = list(play(SETUP, PROTOCOL.plan(), PolicyBySteps(policy), workers=2))
    assert Counter(result.key for result in results) == Counter(PROTOCOL.plan())
    assert [(r.outcome, r.env_steps, r.infer_count) for r in results] == [("failure", 6, 2)] * 4
    assert set(policy.prompts) == {"go to 0.5", "go to -0.7"}, "the task's own words"

    given = {noise.tobytes() for noise in policy.noises if noise is not None}
    expected = {
        np.random.default_rng([7, task, trial, call]).standard_normal((10, 8)).astype(np.float32).tobytes()
        for task in (0, 1)
        for trial in (0, 1)
        for call in (0, 1)
    }
    assert given == expected


def test_batches_have_few_sizes_and_every_answer_its_own_noise() -> None:
    policy = BatchPolicy()
    options: list[dict[str, Any]] = [{"noise": np.full((10, 8), float(value))} for value in range(7)]
    options.insert(3, {})  # a warm-up
    answers = answer(PolicyBySteps(policy), [(None, {"prompt": "p"}, one) for one in options])
    assert [kind for kind, _ in answers] == ["answer"] * 8 and policy.batches == [4, 2]
    assert [noise[0, 0] for noise in policy.noises if noise is not None] == list(range(7))


class DeadlyPolicy(FakePolicy):
    """Kills the worker that asks for its first episode's first actions (a warm-up comes without noise)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.killed = set(multiprocessing.active_children()), False

    def with_steps(self, steps: int) -> DeadlyPolicy:
        return self

    def infer(self, obs: dict[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        if noise is not None and not self.killed:
            self.killed = True
            (worker,) = set(multiprocessing.active_children()) - self.before
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        return super().infer(obs, noise=noise)


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_of_its_episode_only() -> None:
    # `play` would not start a pool of one; with one there is no doubt which worker asked.
    plan = [key(0, 0), key(0, 1)]
    policy = DeadlyPolicy()
    results = {r.key: r for r in _Pool(SETUP, plan, PolicyBySteps(policy), workers=1).results()}
    assert set(results) == set(plan)
    assert results[key(0, 0)].error == "WorkerDied: worker process ended with code -9"
    assert results[key(0, 1)].outcome == "failure", "a new worker took over"
    assert set(multiprocessing.active_children()) <= policy.before


def test_a_worker_that_dies_in_the_middle_of_a_message_is_an_error_of_its_episode_only() -> None:
    pool, (ours, theirs) = _Pool(SETUP, [], None, workers=1), multiprocessing.Pipe()
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the beginning of 1000 bytes")
    theirs.close()
    process = multiprocessing.get_context("spawn").Process(target=os._exit, args=(3,))
    process.start()
    pool._workers[ours] = worker = _Worker(process, ours, key(0, 0))
    process.join()
    result = pool._receive(worker, [])
    assert result is not None and result.error == "WorkerDied: worker process ended with code 3"


def test_a_replica_whose_policy_fails_for_all_answers_all_and_the_next_one() -> None:
    class Failing(FakePolicy):
        def with_steps(self, steps: int) -> FakePolicy:
            raise MemoryError(f"no room for {steps} steps")

    async def ask() -> list[tuple[str, Any]]:
        replica = Replica(SETUP.source, BENCHMARK, gpu=False)
        replica._policies = PolicyBySteps(Failing())
        return [await asyncio.wait_for(replica.answer((steps, OBS, {})), PATIENCE_S) for steps in (3, None)]

    (kind, why), (other, _) = asyncio.run(ask())
    assert (kind, why, other) == ("failed", "MemoryError: no room for 3 steps", "answer")


@pytest.mark.parametrize("kind", ["local", "lerobot"])
def test_a_worker_with_its_own_policy_uses_its_share_of_the_cores(
    kind: Literal["local", "lerobot"], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = multiprocessing.Pipe()
    limits: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", limits.append)
    monkeypatch.setattr(PolicySource, "load", lambda self: FakePolicy())
    _worker_policies(theirs, replace(SETUP, source=PolicySource(kind), threads=3), None)
    assert limits == [3]
    ours.close()
    theirs.close()


def test_a_worker_does_not_repeat_what_the_parent_said_when_it_loaded(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = multiprocessing.Pipe()
    log = logging.getLogger("vla_accel")

    class Talkative(PolicySource):
        def load(self) -> FakePolicy:
            log.warning("auto chose eager")
            return FakePolicy()

    setup = replace(SETUP, source=Talkative("local"))
    assert _worker_policies(theirs, setup, None) is not None and caplog.messages == []
    log.warning("fell back")
    assert caplog.messages == ["fell back"]
    ours.close()
    theirs.close()
