"""One episode is openpi's loop: who acts when, what is rendered, and what counts as what."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eval.harness.policies import ExpertActor, PolicyActor, PolicyBySteps
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult, run_episode
from eval.libero.benchmark import LIBERO
from tests.support.eval_support import OBSERVATION, TASK, FakeEnv, FakePolicy

KEY = EpisodeKey(3, 4, 1)
PROTOCOL = Protocol("libero_spatial", tasks=(4,), trials=2, steps=(3,), max_steps=12)


def play(env: FakeEnv, policy: FakePolicy, key: EpisodeKey = KEY, **options: Any) -> tuple[EpisodeResult, FakePolicy]:
    """One episode; returns its result and the policy that acted (at the key's step count)."""
    policies = PolicyBySteps(policy)
    actor = PolicyActor(policies, LIBERO, PROTOCOL, **options.pop("actor", {}))
    result = run_episode(env, TASK, actor, key, PROTOCOL, **options)
    return result, policies(key.steps)


def test_a_lost_episode_takes_every_action_and_replans_every_five() -> None:
    env = FakeEnv()
    result, policy = play(env, FakePolicy())
    assert (result.outcome, result.env_steps, result.error) == ("failure", 12, None)
    assert len(env.steps) == 12
    assert policy.calls == result.infer_count == 3  # after 0, 5 and 10 actions
    assert set(policy.prompts) == {"do it"}
    assert policy.steps == 3


@pytest.mark.parametrize(("max_steps", "looked"), [(12, [5, 10]), (10, [5])])
def test_only_the_steps_that_the_policy_looks_after_are_rendered(max_steps: int, looked: list[int]) -> None:
    # The policy acts on the reset's frame, then on those after 5 and 10 actions; not after the last one.
    env, protocol = FakeEnv(), dataclasses.replace(PROTOCOL, max_steps=max_steps)
    run_episode(env, TASK, PolicyActor(PolicyBySteps(FakePolicy()), LIBERO, protocol), KEY, protocol)
    assert [i for i, (_, look) in enumerate(env.steps, 1) if look] == looked and env.shown == 1 + len(looked)


@pytest.mark.parametrize("after", [1, 5, 12])
def test_success_ends_the_episode(after: int) -> None:
    env = FakeEnv(succeed_after=after)
    result, _ = play(env, FakePolicy())
    assert (result.outcome, result.env_steps, len(env.steps)) == ("success", after, after)


def test_a_video_gets_the_first_frame_and_every_second() -> None:
    env, films = FakeEnv(), []
    play(env, FakePolicy(), recorder=SimpleNamespace(every=2, add=films.append))
    assert len(films) == 1 + 6 and all(film is OBSERVATION for film in films)
    assert [i for i, (_, look) in enumerate(env.steps, 1) if look] == [2, 4, 5, 6, 8, 10, 12]


@pytest.mark.parametrize("crash_at", [0, 7])
def test_a_crash_of_the_simulator_is_an_error_not_a_failure(crash_at: int) -> None:
    result, _ = play(FakeEnv(crash_at=crash_at), FakePolicy())
    assert result.outcome == "error"
    assert result.error == "RuntimeError: the simulation is unstable"  # on one line
    assert result.env_steps == crash_at
    assert not result.success


def test_a_crash_of_the_policy_is_an_error_and_an_interrupt_is_not() -> None:
    def fail(call: int) -> None:
        if call == 2:
            raise error

    error: BaseException = ValueError("no such token")
    result, _ = play(FakeEnv(), FakePolicy(fail=fail))
    assert (result.error, result.env_steps, result.infer_count) == ("ValueError: no such token", 5, 1)
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        play(FakeEnv(), FakePolicy(fail=fail))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros((4, 7)), r"got \(4, 7\)"),
        (np.zeros((10, 32)), r"got \(10, 32\)"),
        (np.zeros(7), r"got \(7,\)"),
        (np.full((10, 7), np.nan), "expected finite numbers"),
    ],
)
def test_actions_that_cannot_be_executed_are_an_error(actions: np.ndarray, message: str) -> None:
    class Policy(FakePolicy):
        def with_steps(self, steps: int) -> FakePolicy:
            return self

        def infer(self, obs: Any, *, noise: Any = None) -> dict[str, Any]:
            return {**super().infer(obs, noise=noise), "actions": actions}

    env = FakeEnv()
    result, _ = play(env, Policy())
    assert result.error is not None and re.search(message, result.error)
    assert env.steps == []


def noises(key: EpisodeKey, **options: Any) -> list[Any]:
    return play(FakeEnv(), FakePolicy(), key, **options)[1].noises


def test_noise_depends_on_task_trial_and_call_only() -> None:
    first = noises(KEY)
    assert first[0].shape == (10, 8) and first[0].dtype == np.float32
    for again in (noises(KEY), noises(EpisodeKey(1, 4, 1))):  # repeated; at another step count
        np.testing.assert_array_equal(np.stack(first), np.stack(again))
    others = [first[1], noises(EpisodeKey(3, 4, 0))[0], noises(EpisodeKey(3, 3, 1))[0]]
    assert all(not np.array_equal(first[0], other) for other in others)
    assert noises(KEY, actor={"send_noise": False}) == [None] * 3, "a server draws its own"


def test_timings_have_one_value_per_call_and_survive_the_log() -> None:
    result, _ = play(FakeEnv(), FakePolicy())
    assert set(result.timings) >= {"vision", "kv_cache", "denoise", "total", "wall"}
    assert {len(values) for values in result.timings.values()} == {3}
    assert result.timings["denoise"] == [11.0] * 3
    back = EpisodeResult.from_json(result.to_json())
    assert (back.key, back.outcome, back.env_steps) == (result.key, "failure", 12)
    assert back.timings["denoise"] == [11.0] * 3


def test_the_expert_acts_every_step_without_cameras() -> None:
    expert: Any = SimpleNamespace(act=lambda env: np.full(7, len(env.steps) / 100, np.float32))
    env = FakeEnv()
    result = run_episode(env, TASK, ExpertActor(expert), KEY, PROTOCOL)
    assert (result.env_steps, result.infer_count, result.timings) == (12, 0, {})
    np.testing.assert_allclose([action[0] for action, _ in env.steps], np.arange(12) / 100)
    assert not any(look for _, look in env.steps)
