"""lerobot's folders of Diffusion Policy: every layout that people have, and one error for each that is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_diffusion_policy import (
    CAMERAS,
    FRAME,
    STATISTICS,
    config_of,
    observation,
    tiny_model,
    write_lerobot,
)
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.diffusion_policy.checkpoint import load_folder
from vla_accel.families.loading import load

EAGER = {"precision": "fp32", "strict": True, "vision": "eager", "denoise": "eager"}


@pytest.mark.parametrize(
    "layout", [{"release": r} for r in ("0.4.4", "0.5.1", "0.6.1")] + [{"buffers": True}, {"infix": "_orig_mod."}]
)
def test_every_layout_is_the_same_policy(layout: dict[str, Any], tmp_path: Path) -> None:
    found = load(write_lerobot(tmp_path, **layout))
    sizes, expected = found.model.config, config_of()
    assert found.family.name == "diffusion_policy"
    assert dataclasses.replace(sizes, cameras=expected.cameras) == expected
    for one, other in zip(sizes.cameras, expected.cameras, strict=True):
        np.testing.assert_allclose(dataclasses.astuple(one)[2:], dataclasses.astuple(other)[2:], atol=1e-6)
    ours, theirs = found.model.state_dict(), tiny_model().state_dict()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    transforms = found.processor
    assert (transforms.history, transforms.first, transforms.preset.images) == (2, 1, CAMERAS)
    inputs = transforms.prepare(observation())
    assert len(inputs.images) == 4 and inputs.state.shape == (2, 6)
    low, high = (STATISTICS["observation.state"][name] for name in ("min", "max"))
    want = 2 * (observation()["observation.state"] - low) / (high - low) - 1
    np.testing.assert_allclose(inputs.state, np.stack((want, want)), atol=1e-5)


def config(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda files: files["config"].update(changes)


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda files: files["config"].pop(name)


@pytest.mark.parametrize(
    "name", ["use_separate_rgb_encoder_per_camera", "resize_shape", "crop_ratio", "crop_is_random"]
)
def test_settings_that_the_first_releases_lack(name: str, tmp_path: Path) -> None:
    found = load(write_lerobot(tmp_path, without(name)))
    assert found.model.config.shared_encoder and found.model.config.crop == (33, 49)


def features(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda files: files["config"]["input_features"].update(changes)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (config(horizon=12), ("horizon", "multiple of 8", "12")),
        (config(kernel_size=4), ("kernel_size", "odd", "4")),
        (config(n_groups=7), ("n_groups", "7 groups")),
        (config(n_obs_steps=9), ("n_obs_steps", "at most the horizon")),
        (config(crop_shape=[50, 50]), ("crop_shape", "at most", "(50, 50)")),
        (config(crop_shape=[32, 32]), ("pos_grid", "(1, 2)", "(32, 32)", "(4, 2)")),
        (config(crop_shape=84), ("crop_shape", "(height, width)")),
        (config(resize_shape=[64, 64], crop_ratio=1.5), ("crop_ratio", "1.5")),
        (config(noise_scheduler_type="PNDM"), ("scheduler.kind", "PNDM", "DDIM")),
        (config(beta_schedule="sigmoid"), ("scheduler.betas", "sigmoid")),
        (config(vision_backbone="resnet101"), ("vision_backbone", "resnet101", "resnet18")),
        (config(use_group_norm=False), ("missing", "running_mean")),
        (config(use_separate_rgb_encoder_per_camera=True), ("missing", "rgb_encoder.0.")),
        (config(down_dims=[16, 24]), ("left over", "misshaped")),
        (config(down_dims=[16, 24, 48]), ("misshaped", "(48")),
        (config(use_film_scale_modulation=False), ("misshaped", "cond_encoder")),
        (config(spatial_softmax_num_keypoints=4), ("misshaped", "pool.nets")),
        (without("use_group_norm"), ("use_group_norm", "None")),
        (features(**{"observation.environment_state": {"type": "ENV", "shape": [3]}}), ("environment_state",)),
        (features(**{CAMERAS[0]: {"type": "VISUAL", "shape": [3, 48, 56]}}), ("cameras", "one size")),
        (features(**{CAMERAS[0]: {"type": "VISUAL", "shape": [1, *FRAME]}}), (CAMERAS[0], "(3, height, width)")),
        (config(memory_size=3), ("memory_size", "another version")),
    ],
)  # fmt: skip
def test_what_another_policy_has_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as error:
        load(write_lerobot(tmp_path, change))
    assert all(part in str(error.value) for part in parts), error.value


def test_missing_statistics_of_a_camera_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STATISTICS, CAMERAS[1])
    with pytest.raises(CheckpointError, match=rf"{CAMERAS[1]}\.mean.*MEAN_STD"):
        load(write_lerobot(tmp_path))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"schedule": "cubic"}, "schedule"), ({"warm_start": 0.5}, "warm_start"), ({"num_steps": 101}, "num_steps"),
        ({"default_prompt": "go"}, "default_prompt"), ({"warm_up": ("go",)}, "warm_up"),
        ({"checkpoint": {"action_horizon": 4}}, "checkpoint.action_horizon"), 
        ({"rtc": {"execution_horizon": 4}}, "rtc"),
        ({"checkpoint": {"lora": "x"}}, "lora"), ({"preset": "libero"}, "preset"),
    ],
)  # fmt: skip
def test_settings_that_would_change_nothing_are_refused(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=name):
        OptimizedPolicy.from_pretrained(write_lerobot(tmp_path), {**EAGER, **settings}, device="cpu")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({CAMERAS[0]: np.zeros((56, 40, 3), np.uint8)}, (CAMERAS[0], "(40, 56, 3)", "(56, 40, 3)")),
        ({CAMERAS[0]: None}, (CAMERAS[0], "missing")),
        ({CAMERAS[0]: np.zeros((3, *FRAME, 3), np.uint8)}, (CAMERAS[0], "1 to 2 images", "3")),
        ({CAMERAS[0]: np.zeros((2, *FRAME, 3), np.uint8)}, (f"2 of {CAMERAS[0]}", f"1 of {CAMERAS[1]}")),
        ({"observation.state": np.zeros((2, 6))}, ("same number of time steps", "2 of observation.state")),
        ({"observation.state": np.zeros(5)}, ("observation.state", "(6,)", "(5,)")),
    ],
)  # fmt: skip
def test_bad_observations_are_one_error(change: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    _, transforms = load_folder(write_lerobot(tmp_path), PolicyConfig())
    given = {key: value for key, value in {**observation(), **change}.items() if value is not None}
    with pytest.raises(ObservationError) as error:
        transforms.prepare(given)
    assert all(part in str(error.value) for part in parts), error.value
