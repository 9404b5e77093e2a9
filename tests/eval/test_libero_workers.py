"""Several processes play what one would: scheduling, a shared policy, and a worker that dies.

Uses the real simulator, with episodes of a few steps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest

from eval.libero.policies import PolicyBySteps, PolicySource
from eval.libero.protocol import EpisodeKey, Protocol
from eval.libero.rollout import PolicyActor
from eval.libero.workers import Runner, Schedule, Setup, _Pool, play
from tests.support.libero_support import FakePolicy

PROTOCOL = Protocol("libero_spatial", tasks=(0, 1), trials=2, steps=(3,), max_steps=6)


def key(task: int, trial: int) -> EpisodeKey:
    return EpisodeKey(3, task, trial)


def test_a_worker_keeps_its_task_then_takes_a_free_one_then_helps() -> None:
    schedule = Schedule([key(0, 0), key(0, 1), key(1, 0), key(1, 1), key(1, 2), key(2, 0)])
    assert schedule.next(None, {None}) == key(0, 0)
    assert schedule.next(None, {0}) == key(1, 0)
    assert schedule.next(0, {1}) == key(0, 1)
    assert schedule.next(0, {1}) == key(2, 0), "task 1 has a worker already"
    assert schedule.next(2, {1}) == key(1, 1), "nothing else is left: help with task 1"
    assert len(schedule) == 1
    assert schedule.next(1, {1}) == key(1, 2)
    assert schedule.next(1, set()) is None


class Witness(FakePolicy):
    """Notes everything it sees, and leaves the gripper closing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def with_steps(self, steps: int) -> Witness:
        return self

    def infer(self, obs: dict[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        parts = (obs["observation/image"], obs["observation/wrist_image"], obs["observation/state"])
        self.seen.append(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
        return super().infer(obs, noise=noise)


def test_an_episode_does_not_depend_on_those_before_it() -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    setup = Setup(PROTOCOL, PolicySource("local", "unused"))

    def seen(*episodes: EpisodeKey) -> list[list[bytes]]:
        witness = Witness()
        runner = Runner(setup, PolicyActor(PolicyBySteps(witness), PROTOCOL))
        found = []
        for episode in episodes:
            start = len(witness.seen)
            assert runner.run(episode).error is None
            found.append(witness.seen[start:][-2:])  # the two calls of the episode, without the warm-up's
        runner.close()
        return found

    first, other, again = seen(key(0, 0), key(0, 1), key(0, 0))
    assert first == again, "bit for bit, images included"
    assert first != other
    assert seen(key(0, 1)) == [other]


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


def test_workers_share_a_policy_and_meet_the_same_noise_as_one_process() -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    setup = Setup(PROTOCOL, PolicySource("local", "unused"))
    policy = BatchPolicy()
    results = list(play(setup, PROTOCOL.plan(), PolicyBySteps(policy), workers=2))
    assert Counter(result.key for result in results) == Counter(PROTOCOL.plan())
    assert [(r.outcome, r.env_steps, r.infer_count) for r in results] == [("failure", 6, 2)] * 4
    assert policy.prompts[0].startswith("pick up the black bowl"), "the task's own words"

    given = {noise.tobytes() for noise in policy.noises if noise is not None}
    expected = {
        np.random.default_rng([7, task, trial, call]).standard_normal((10, 8)).astype(np.float32).tobytes()
        for task in (0, 1)
        for trial in (0, 1)
        for call in (0, 1)
    }
    assert given == expected


class DeadlyPolicy(FakePolicy):
    """Kills the worker that asks for its first episode's first actions (a warm-up comes without noise)."""

    killed = False

    def with_steps(self, steps: int) -> DeadlyPolicy:
        return self

    def infer(self, obs: dict[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        if noise is not None and not DeadlyPolicy.killed:
            DeadlyPolicy.killed = True
            (worker,) = multiprocessing.active_children()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        return super().infer(obs, noise=noise)


def test_a_worker_that_dies_is_an_error_of_its_episode_only() -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    # `play` would not start a pool of one; with one there is no doubt which worker asked.
    setup = Setup(PROTOCOL, PolicySource("local", "unused"))
    plan = [key(0, 0), key(0, 1)]
    policies = PolicyBySteps(DeadlyPolicy())
    results = {r.key: r for r in _Pool(setup, plan, policies, workers=1).results()}
    assert set(results) == set(plan)
    assert results[key(0, 0)].error == "WorkerDied: worker process ended with code -9"
    assert results[key(0, 1)].outcome == "failure", "a new worker took over"
    assert multiprocessing.active_children() == []
