"""An instruction under an unknown key is not replaced by the configuration's default one without an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.errors import ObservationError
from vla_accel.transforms.observations import Reader
from vla_accel.transforms.robots import LIBERO, preset_from

OTHER = "open the drawer"


def observation(**changes: Any) -> dict[str, Any]:
    given = tiny_observation()
    del given["prompt"]
    return given | changes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", OTHER),
        ("Prompt", OTHER),
        ("promt", OTHER),
        ("prompts", [OTHER]),
        ("instruction", OTHER.encode()),
        ("observation/language_instruction", np.array([OTHER])),
        ("annotation.human.task_description", [OTHER]),
        ("observation", {"task": OTHER}),
    ],
)
def test_another_instruction_under_an_unknown_key_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ObservationError) as refused:
        Reader(LIBERO, "pick up the bowl").read(observation(**{key: value}))
    told = str(refused.value)
    assert key in told and OTHER in told and "pick up the bowl" in told and "prompt" in told


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"task": ""},
        {"task": "pick up the bowl"},
        {"task": 3, "task_index": np.array([3])},
        {"session": "open the drawer", "robot_type": "arm"},
        {"language": np.zeros(4)},
    ],
)
def test_the_default_instruction_is_for_robots_that_send_none(extra: dict[str, Any]) -> None:
    assert Reader(LIBERO, "pick up the bowl").read(observation(**extra)).prompt == "pick up the bowl"


def test_other_texts_do_not_matter_next_to_the_instruction() -> None:
    assert Reader(LIBERO, "pick up the bowl").read(observation(prompt="push it", task=OTHER)).prompt == "push it"


def test_the_instruction_may_be_nested_as_images_and_state_may(tmp_path: Path) -> None:
    """It changes the actions, whether or not there is a default one."""
    write_tiny_checkpoint(tmp_path)
    robot = tmp_path / "robot.yaml"
    robot.write_text("base: libero\nprompt: language/instruction\n")
    policy = OptimizedPolicy.from_pretrained(
        tmp_path, {"preset": str(robot), "default_prompt": "pick up the bowl"}, device="cpu"
    )
    noise = np.zeros(policy.action_shape, np.float32)

    def actions(given: dict[str, Any]) -> np.ndarray:
        return policy.infer(given, noise=noise)["actions"]

    nested, flat = (
        actions(observation(**one)) for one in ({"language": {"instruction": OTHER}}, {"language/instruction": OTHER})
    )
    np.testing.assert_array_equal(nested, flat)
    assert abs(nested - actions(observation())).max() > 1e-3
    with pytest.raises(ObservationError, match="missing language/instruction"):
        Reader(preset_from({"base": "libero", "prompt": "language/instruction"})).read(observation())
