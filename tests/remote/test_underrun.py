"""The action of a tick without a computed one: a velocity is never repeated for long."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import Any

import numpy as np
import pytest

from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.remote.metadata import motion_dims
from vla_accel.remote.underrun import Hold, Underrun
from vla_accel.transforms.robots import DROID, PRESETS, preset_from

LAST = np.array([0.5, -0.25, 1.0])


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
    with pytest.raises(ConfigError, match=r"motion_dims: expected dimensions 0 to 2, got \[0, 3\]"):
        Underrun(Hold(motion_dims=(0, 3)), None, 20.0).check(LAST)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"robot": {"motion_dims": [0, 1]}}, [[0.0, 0.0, 1.0]] * 26),
        ({"robot": {"motion_dims": []}}, [LAST.tolist()] * 26),
        ({"robot": {"motion_dims": None}}, [LAST.tolist()] * 10),
        (None, [LAST.tolist()] * 10),
    ],
)
def test_a_runner_uses_the_motion_dims_that_the_policy_declares(metadata: Any, expected: list[Any]) -> None:
    """The policy answers the two calls of `start`, and no further one until the end."""
    ended, calls = threading.Event(), []

    def infer(observation: Any) -> Any:
        calls.append(1)
        assert len(calls) <= 2 or ended.wait(60)
        return {"actions": np.tile(LAST, (4, 1))}

    policy, got = types.SimpleNamespace(infer=infer, metadata=metadata), []
    with AsyncRunner(policy, 20.0, max_wait_s=0.0) as runner:
        runner.start({})
        for _ in range(30):
            with contextlib.suppress(EngineError):
                got.append(runner.step({}).tolist())
        ended.set()
    assert got == [LAST.tolist()] * 4 + expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("libero", "pi0_libero"), [0, 0, 0, 0, 0, 0, 7]),
        (("droid",), [0, 0, 0, 0, 0, 0, 0, 8]),
        (("droid_joint_position",), list(range(1, 9))),
        (("aloha", "aloha_sim"), list(range(1, 15))),
    ],
)
def test_velocity_robots_are_declared(names: tuple[str, ...], expected: list[int]) -> None:
    for preset in (PRESETS[name] for name in names):
        declared = motion_dims(types.SimpleNamespace(metadata={"robot": preset.described()}))
        action = Underrun("hold", declared, 20.0).action(np.arange(1.0, preset.action_dim + 1), 1000)
        assert action is not None and action.tolist() == expected


def test_a_preset_file_with_other_actions_does_not_take_over_the_motion_of_its_base() -> None:
    for changes, expected in (
        ({"images": ["front", "wrist"]}, DROID.motion_dims),
        ({"delta_actions": [0, 1]}, None),  # zeros would be positions here
        ({"action_dim": 4}, None),
        ({"action_dim": 4, "motion_dims": [0]}, (0,)),
        ({"motion_dims": []}, ()),
    ):
        assert preset_from({"base": "droid", **changes}).motion_dims == expected
    with pytest.raises(ConfigError, match=r"motion_dims: expected dimensions 0 to 3, got \[4\]"):
        preset_from({"base": "droid", "action_dim": 4, "motion_dims": [4]})
