"""The action of a tick without a computed one: a velocity is never repeated for long."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.remote.metadata import motion_dims
from vla_accel.remote.underrun import Hold, Underrun
from vla_accel.transforms.robots import DROID, PRESETS, preset_from

LAST = np.array([0.5, -0.25, 1.0])


def held(choice: Any, declared: tuple[int, ...] | None, missed: int, hz: float = 20.0) -> Any:
    action = Underrun(choice, declared, hz).action(LAST, missed)
    return None if action is None else action.tolist()


@pytest.mark.parametrize(
    ("choice", "declared", "expected"),
    [
        ("hold", (0, 1), {1: [0, 0, 1], 1000: [0, 0, 1]}),  # the gripper keeps its command
        ("hold", (), {1: LAST, 1000: LAST}),
        ("hold", None, {1: LAST, 10: LAST, 11: None}),  # it may be a velocity: half a second
        (Hold(motion_dims=[1]), None, {1000: [0.5, 0, 1]}),  # type: ignore[arg-type]
        (Hold(motion_dims=()), (0, 1), {1000: LAST}),
        (Hold(limit_ticks=2), (0,), {2: [0, -0.25, 1], 3: None}),
        (Hold(limit_ticks=np.int64(100)), None, {100: LAST, 101: None}),  # type: ignore[arg-type]
        (np.zeros(3), (0,), {1000: [0, 0, 0]}),
        ("raise", (0,), {1: None}),
    ],
)
def test_the_held_action(choice: Any, declared: tuple[int, ...] | None, expected: dict[int, Any]) -> None:
    underrun, last = Underrun(choice, declared, 20.0), LAST.copy()
    for missed, want in expected.items():
        action = underrun.action(last, missed)
        assert action is None if want is None else np.array_equal(action, want)  # type: ignore[arg-type]
    np.testing.assert_array_equal(last, LAST)
    assert Underrun("hold", (), 20.0).action(None, 1) is None, "there is nothing to repeat"


@pytest.mark.parametrize("wrong", [3, (-1,), ("x",), (0.5,)])
def test_invalid_motion_dims_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="motion_dims: expected"):
        Hold(motion_dims=wrong)


def test_motion_dims_beyond_the_action_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"motion_dims: expected dimensions 0 to 2, got \[0, 3\]"):
        Underrun(Hold(motion_dims=(0, 3)), None, 20.0).check(LAST)


ENDED = threading.Event()


class Once:
    """A policy that answers the two calls of `start`, and never again."""

    def __init__(self, metadata: Any) -> None:
        self.metadata, self._calls = metadata, 0

    def infer(self, observation: Any) -> Any:
        self._calls += 1
        if self._calls > 2:
            ENDED.wait()
        return {"actions": np.tile(LAST, (4, 1))}


def test_a_runner_uses_the_motion_dims_that_the_policy_declares() -> None:
    ENDED.clear()
    robots: list[tuple[Any, list[Any]]] = [
        ({"robot": {"motion_dims": [0, 1]}}, [[0.0, 0.0, 1.0]] * 26),
        ({"robot": {"motion_dims": []}}, [LAST.tolist()] * 26),
        ({"robot": {"motion_dims": None}}, [LAST.tolist()] * 10 + ["error"] * 16),
        ({}, [LAST.tolist()] * 10 + ["error"] * 16),
        (None, [LAST.tolist()] * 10 + ["error"] * 16),
    ]
    runners = []
    for metadata, expected in robots:
        runner = AsyncRunner(Once(metadata), 20.0, max_wait_s=0.0)
        runners.append(runner)
        runner.start({})
        got: list[Any] = []
        for _ in range(30):
            try:
                got.append(runner.step({}).tolist())
            except EngineError:
                got.append("error")
        assert got == [LAST.tolist()] * 4 + expected
    ENDED.set()
    for runner in runners:
        runner.close()


def test_velocity_robots_are_declared() -> None:
    def kept(name: str) -> list[float]:
        preset = PRESETS[name]
        runner_says = motion_dims(type("P", (), {"metadata": {"robot": preset.described()}}))
        last = np.arange(1.0, preset.action_dim + 1)
        action = Underrun("hold", runner_says, 20.0).action(last, 1000)
        assert action is not None
        return action.tolist()

    assert kept("libero") == kept("pi0_libero") == [0, 0, 0, 0, 0, 0, 7]
    assert kept("droid") == [0, 0, 0, 0, 0, 0, 0, 8]
    assert kept("droid_joint_position") == list(range(1, 9))
    assert kept("aloha") == kept("aloha_sim") == list(range(1, 15))


def test_a_preset_file_with_other_actions_does_not_take_over_the_motion_of_its_base() -> None:
    same = preset_from({"base": "droid", "images": ["front", "wrist"]})
    assert same.motion_dims == DROID.motion_dims
    # Zeros would be positions here.
    assert preset_from({"base": "droid", "delta_actions": [0, 1]}).motion_dims is None
    assert preset_from({"base": "droid", "action_dim": 4}).motion_dims is None
    assert preset_from({"base": "droid", "action_dim": 4, "motion_dims": [0]}).motion_dims == (0,)
    assert preset_from({"base": "droid", "motion_dims": []}).motion_dims == ()
    with pytest.raises(ConfigError, match=r"motion_dims: expected dimensions 0 to 3, got \[4\]"):
        preset_from({"base": "droid", "action_dim": 4, "motion_dims": [4]})
