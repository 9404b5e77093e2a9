"""Robots' conventions: DROID and ALOHA by hand, cameras that are missing, delta actions, presets from YAML."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import TOKENIZER
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Inputs, Processor
from vla_accel.transforms.robots import BY_ASSET, OPENPI_CONFIGS, PRESETS, Preset, load_preset, preset_from


def processor_of(preset: Preset, **changes: Any) -> Processor:
    """No normalisation, so that the numbers of a preset show."""
    processor = Processor(
        tokenizer=TOKENIZER,
        state=Normaliser.identity(preset.state_dim),
        actions=Normaliser.identity(preset.action_dim),
        image_size=28,
        action_dim=32,
        max_token_len=64,
        discrete_state=False,
        preset=preset,
    )
    return replace(processor, **changes)


def image(value: int, first: bool = False) -> np.ndarray:
    return np.full((3, 28, 28) if first else (28, 28, 3), value, np.uint8)


def droid(**changes: Any) -> dict[str, Any]:
    observation: dict[str, Any] = {
        "observation/exterior_image_1_left": image(1),
        "observation/wrist_image_left": image(2),
        "observation/joint_position": np.arange(7) / 10,
        "observation/gripper_position": np.array([0.9]),
        "prompt": "pick up the bowl",
    }
    return {**observation, **changes}


def aloha(*cameras: str, **changes: Any) -> dict[str, Any]:
    given = {c: image(i + 1, first=True) for i, c in enumerate(cameras)}
    return {"images": given, "state": np.linspace(0.1, 1.4, 14), "prompt": "pick up the bowl", **changes}


ALL = ("cam_high", "cam_left_wrist", "cam_right_wrist")


def inputs_of(raw: np.ndarray) -> Inputs:
    return Inputs((np.zeros((28, 28, 3), np.uint8),), np.zeros(1, np.int64), np.zeros(32, np.float32), raw)


# -- DROID --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gripper", [np.array([0.9]), 0.9, np.float32(0.9), [0.9]])
def test_droids_state_is_joints_and_gripper(gripper: Any) -> None:
    inputs = processor_of(PRESETS["droid"]).prepare(droid(**{"observation/gripper_position": gripper}))
    np.testing.assert_allclose(inputs.raw_state, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9], atol=1e-6)
    assert [v[0, 0, 0] for v in inputs.images] == [1, 2]


def test_droids_actions() -> None:
    actions = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    raw = np.arange(8.0)
    velocity = processor_of(PRESETS["droid"]).unnormalize_actions(actions, inputs_of(raw))
    np.testing.assert_array_equal(velocity, actions[:, :8].astype(np.float64))
    position = processor_of(PRESETS["droid_joint_position"]).unnormalize_actions(actions, inputs_of(raw))
    np.testing.assert_allclose(position, velocity + np.array([0, 1, 2, 3, 4, 5, 6, 0]), atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation/joint_position": np.zeros(6)}, r"joint_position and .*: expected shape \(8,\), got \(7,\)"),
        ({"observation/joint_position": np.zeros((1, 7))}, r"expected one axis each, got shapes \(1, 7\), \(1,\)"),
        ({"observation/gripper_position": np.nan}, "expected finite numbers"),
        ({"observation/gripper_position": "open"}, "observation/gripper_position: expected numbers, got dtype <U4"),
    ],
)
def test_a_bad_droid_state_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        processor_of(PRESETS["droid"]).prepare(droid(**changes))


# -- ALOHA --------------------------------------------------------------------------------------------------------


def angle(opening: float) -> float:
    """The crank's angle from the law of cosines in another form, scaled as π0's data are."""
    linear = 0.01844 + opening * (0.05800 - 0.01844)
    radians = math.asin((linear**2 + 0.022**2 - 0.036**2) / (2 * 0.022 * linear))
    return (radians - 0.5476) / (1.6296 - 0.5476)


def test_alohas_state() -> None:
    raw = np.linspace(0.1, 1.4, 14)
    raw[[6, 13]] = 0.3, 0.8
    inputs = processor_of(PRESETS["aloha"]).prepare(aloha(*ALL, state=raw))
    expected = raw * [1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1]
    expected[6], expected[13] = angle(0.3), angle(0.8)
    np.testing.assert_array_equal(inputs.raw_state, raw)
    np.testing.assert_allclose(inputs.state[:14], expected, atol=1e-6)
    assert not inputs.state[14:].any()


def test_alohas_actions() -> None:
    actions = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    model = actions[:, :14].astype(np.float64)
    raw = np.linspace(0.1, 1.4, 14)
    sign = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
    expected = model * sign
    expected[:, [6, 13]] = (model[:, [6, 13]] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    plain = processor_of(PRESETS["aloha_sim"]).unnormalize_actions(actions, inputs_of(raw))
    np.testing.assert_allclose(plain, expected, atol=1e-12)
    # The model's joints are relative to the state in the model's own signs: after the flip, to the robot's.
    arms = [i for i in range(14) if i not in (6, 13)]
    expected[:, arms] += raw[arms]
    delta = processor_of(PRESETS["aloha"]).unnormalize_actions(actions, inputs_of(raw))
    np.testing.assert_allclose(delta, expected, atol=1e-12)


@pytest.mark.parametrize(
    "cameras", [ALL, ("cam_high", "cam_right_wrist"), ("cam_high",), ("cam_right_wrist", "cam_high")]
)
def test_missing_wrist_cameras_are_dropped_in_the_models_order(cameras: tuple[str, ...]) -> None:
    inputs = processor_of(PRESETS["aloha"]).prepare(aloha(*cameras))
    present = [c for c in ALL if c in cameras]
    assert [v.shape for v in inputs.images] == [(28, 28, 3)] * len(present)
    assert [v[0, 0, 0] for v in inputs.images] == [cameras.index(c) + 1 for c in present]


def test_cameras_that_aloha_has_not() -> None:
    processor = processor_of(PRESETS["aloha"])
    ignored = processor.prepare(aloha(*ALL, "cam_low"))
    np.testing.assert_array_equal(ignored.images, processor.prepare(aloha(*ALL)).images)
    with pytest.raises(ObservationError, match=r"expected an image at images/cam_left_wrist.*got one at .*/cam_left;"):
        processor.prepare(aloha("cam_high", "cam_left"))
    with pytest.raises(ObservationError, match="observation: missing images/cam_high; got images, state, prompt"):
        processor.prepare(aloha("cam_left_wrist"))
    with pytest.raises(ObservationError, match=r"^prompt: expected a str, got NoneType$"):
        processor.prepare({**aloha(*ALL), "prompt": None})
    with pytest.raises(ObservationError, match="missing images/cam_high"):
        processor.prepare(aloha(*ALL, images=None))


def test_keys_may_be_nested_or_joined() -> None:
    processor = processor_of(PRESETS["droid"])
    nested = {"observation": {k.removeprefix("observation/"): v for k, v in droid().items() if "/" in k}}
    one, other = processor.prepare({**nested, "prompt": "pick"}), processor.prepare(droid(prompt="pick"))
    np.testing.assert_array_equal(one.images, other.images)
    np.testing.assert_array_equal(one.state, other.state)


# -- LIBERO -------------------------------------------------------------------------------------------------------


def test_pi0_liberos_actions_are_relative_to_the_state() -> None:
    actions = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    raw = np.arange(1.0, 9.0)
    plain = processor_of(PRESETS["libero"]).unnormalize_actions(actions, inputs_of(raw))
    np.testing.assert_array_equal(plain, actions[:, :7].astype(np.float64))
    delta = processor_of(PRESETS["pi0_libero"]).unnormalize_actions(actions, inputs_of(raw))
    np.testing.assert_allclose(delta - plain, np.tile([1, 2, 3, 4, 5, 6, 0.0], (4, 1)), atol=1e-12)


# -- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.pose == "model"])
def test_every_preset_has_an_example(name: str) -> None:
    processor = processor_of(PRESETS[name])
    inputs = processor.prepare(processor.example())
    assert len(inputs.images) == len(PRESETS[name].images)
    assert processor.unnormalize_actions(np.zeros((3, 32), np.float32), inputs).shape == (3, PRESETS[name].action_dim)


def test_the_tables_name_presets() -> None:
    assert set(BY_ASSET.values()) <= PRESETS.keys()
    assert {c.preset for c in OPENPI_CONFIGS.values()} <= PRESETS.keys()


def test_a_preset_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: droid\nimages: [cams/front]\ndelta_actions: [0, 1]\nprompt: task\n")
    assert load_preset(str(path)) == replace(
        PRESETS["droid"], images=("cams/front",), delta_actions=(0, 1), motion_dims=None, prompt="task"
    )
    path.write_text("images: [front, side]\noptional_images: [side]\nstate: [pose]\nstate_dim: 3\naction_dim: 2\n")
    preset = load_preset(str(path))
    observation = {"front": image(5), "pose": [1, 2, 3], "prompt": "pick"}
    inputs = processor_of(preset).prepare(observation)
    assert [v.shape for v in inputs.images] == [(28, 28, 3)] and inputs.raw_state.tolist() == [1, 2, 3]


def test_at_least_one_camera_is_needed() -> None:
    every = preset_from(
        {"images": ["a", "b"], "optional_images": ["a", "b"], "state": ["s"], "state_dim": 1, "action_dim": 1}
    )
    with pytest.raises(
        ObservationError,
        match=r"missing a or b, s, prompt; got nothing; prompt may also be the configuration's default_prompt$",
    ):
        processor_of(every).prepare({})
    with pytest.raises(ObservationError, match="missing a or b; got s, prompt"):
        processor_of(every).prepare({"s": [0.0], "prompt": "pick"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"base": "libro"}, r"base: expected one of libero, .* got 'libro': did you mean libero\?"),
        ({"base": ["libero"]}, r"base: expected one of libero, .* got \['libero'\]"),
        ({"base": "libero", "imges": []}, r"unknown key imges: did you mean images\?"),
        ({"base": "libero", "images": []}, "images: expected at least one key"),
        ({"base": "libero", "images": ["a", "a"]}, "images: expected at least one key, each once"),
        (
            {"base": "libero", "ignored_images": ["observation/image"]},
            r"ignored_images: expected keys that are not in images, got \['observation/image'\]",
        ),
        ({"base": "libero", "optional_images": ["c"]}, r"optional_images: expected some of .* got \['c'\]"),
        ({"base": "libero", "delta_actions": [7]}, r"delta_actions: expected dimensions 0 to 6, got \[7\]"),
        ({"base": "libero", "flipped": [-1]}, r"flipped: expected dimensions 0 to 6, got \[-1\]"),
        ({"base": "libero", "gripper": "aloha"}, "gripper 'aloha' and gripper_dims"),
        ({"base": "libero", "gripper_dims": [1]}, "gripper 'none' and gripper_dims"),
        ({"base": "libero", "action_dim": 0}, "action_dim: expected 1 to 4096, got 0"),
        ({"base": "libero", "state_dim": 10**9}, "state_dim: expected 1 to 4096, got 1000000000"),
        ({"base": "libero", "resize": "nearest"}, "resize: expected one of antialias, bilinear"),
        ({"images": ["a"], "state": ["s"]}, "preset: expected state_dim, action_dim, found images, state"),
        ({}, "preset: expected images, state, state_dim, action_dim, found nothing; or base: one of "),
    ],
)
def test_a_bad_preset_is_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset_from(content)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"preset: expected a YAML file or .*, got 'alhoa': did you mean aloha\?"):
        load_preset("alhoa")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: expected a readable YAML"):
        load_preset("nowhere.yaml")
