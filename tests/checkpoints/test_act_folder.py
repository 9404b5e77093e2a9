"""ACT's folders: layouts of lerobot's releases, the order of cameras, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny_act
from tests.support.lerobot_folders import edit_statistics, edit_tensors
from tests.support.lerobot_saved import Change, configure, edit, releases
from tests.support.tiny_act import CAMERAS, observation, write_lerobot
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.loading import load

FRONT, WRIST = CAMERAS


def actions(folder: Path, **settings: Any) -> np.ndarray:
    policy = OptimizedPolicy.from_pretrained(folder, {"precision": "fp32", **settings}, device="cpu")
    return policy.infer(observation())["actions"]


@pytest.mark.parametrize(("release", "buffers"), [*((r, False) for r in releases("act")), ("0.4.4", True)])
def test_every_layout_gives_the_same_actions(release: str, buffers: bool, tmp_path: Path) -> None:
    """`buffers`: as lerobot 0.3, whose divisor has the same addend."""
    loaded = load(write_lerobot(tmp_path / "folder", release=release, buffers=buffers))
    config, expected, model = loaded.model.config, tiny_act.config_of(), tiny_act.tiny_model()
    assert replace(config, cameras=()) == replace(expected, cameras=())
    for camera, wanted in zip(config.cameras, expected.cameras, strict=True):
        assert (camera.height, camera.width) == (wanted.height, wanted.width)
        np.testing.assert_allclose((camera.mean, camera.deviation), (wanted.mean, wanted.deviation), rtol=1e-6)
    for name, value in loaded.model.state_dict().items():
        assert value.equal(model.state_dict()[name])
    inputs = loaded.processor.prepare(seen := observation())
    assert [image.shape[:2] for image in inputs.images] == list(CAMERAS.values())
    np.testing.assert_allclose(inputs.state[0], (seen["observation.state"] - np.arange(6)) / np.arange(1, 7), rtol=1e-5)
    chunk = np.ones((7, 5), np.float32)
    np.testing.assert_allclose(loaded.processor.unnormalize_actions(chunk, inputs)[0], np.arange(5) + np.arange(1, 6))


def test_cameras_are_in_the_order_of_the_features_and_keep_their_statistics(tmp_path: Path) -> None:
    plain = actions(write_lerobot(tmp_path / "plain"))

    def reverse(files: dict[str, Any]) -> None:
        features = files["config"]["input_features"]
        files["config"]["input_features"] = dict(reversed(features.items()))

    turned = write_lerobot(tmp_path / "turned", reverse)
    assert load(turned).processor.preset.images == (WRIST, FRONT)
    # The order of the tokens does not matter to ACT: only the images' own statistics and sizes do.
    np.testing.assert_allclose(actions(turned), plain, atol=1e-4)
    swapped = write_lerobot(tmp_path / "swapped")
    edit_statistics(swapped, {f"{FRONT}.mean": np.full((3, 1, 1), 0.7, np.float32)})
    assert np.abs(actions(swapped) - plain).max() > 1e-2


def environment(files: dict[str, Any]) -> None:
    feature = {"type": "ENV", "shape": [3]}
    files["config"]["input_features"]["observation.environment_state"] = feature
    files["policy_preprocessor"]["steps"][3]["config"]["features"]["observation.environment_state"] = feature


def test_the_environments_state_follows_the_robots_and_is_not_scaled(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, environment)
    new = tiny_act.tiny_model(tiny_act.config_of(environment_dim=3)).state_dict()
    changed = (
        "encoder_env_state_input_proj.weight",
        "encoder_env_state_input_proj.bias",
        "encoder_1d_feature_pos_embed.weight",
    )
    edit_tensors(folder / "model.safetensors", {f"model.{name}": new[name] for name in changed})
    loaded = load(folder)
    seen = {**observation(), "observation.environment_state": np.array([100.0, -5.0, 1.0])}
    np.testing.assert_array_equal(loaded.processor.prepare(seen).state[0, 6:], [100.0, -5.0, 1.0])
    assert loaded.processor.ranges["state"].known
    assert loaded.processor.example()["observation.environment_state"].shape == (3,)
    assert np.isfinite(loaded.processor.ranges["state"].span).tolist() == [True] * 6 + [False] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (configure(pre_norm=True), ("pre_norm", "true")),
        (configure(replace_final_stride_with_dilation=1), ("replace_final_stride_with_dilation", "1")),
        (configure(feedforward_activation="glu"), ("feedforward_activation", "relu or gelu", "'glu'")),
        (configure(vision_backbone="resnet101"), ("vision_backbone", "resnet18", "'resnet101'")),
        (configure(n_obs_steps=2), ("n_obs_steps", "2")),
        (configure(n_action_steps=8), ("n_action_steps", "at most chunk_size, 7", "8")),
        (configure(chunk_size=8), ("chunk_size", "8", "7")),
        (configure(n_heads=3), ("width", "3 heads")),
        (configure(dim_feedforward=95), ("dim_feedforward", "95", "96")),
        (configure(horizon=3), ("horizon",)),
        (configure(temporal_ensemble_coeff=0.01), ("n_action_steps", "1", "7")),
        (configure(temporal_ensemble_coeff="0.01", n_action_steps=1), ("temporal_ensemble_coeff", "number", "'0.01'")),
        (edit("normalizer_processor", norm_map={"VISUAL": "NONE"}), (FRONT, "MEAN_STD", "'NONE'")),
        (lambda f: f["config"]["input_features"][FRONT].update(shape=[40, 70, 3]), (FRONT, "[3, height, width]")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_a_folder_may_not_say(change: Change, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load(write_lerobot(tmp_path, change))
    assert all(word in str(error.value) for word in words), error.value


def test_temporal_ensembling_is_in_the_metadata(tmp_path: Path, policy: OptimizedPolicy) -> None:
    folder = write_lerobot(tmp_path, configure(temporal_ensemble_coeff=0.01, n_action_steps=1))
    found = OptimizedPolicy.from_pretrained(folder, "eager_fp32", device="cpu").metadata
    assert found["temporal_ensemble"] == 0.01 and "temporal_ensemble" not in policy.metadata


@pytest.mark.parametrize("features", ["input_features", "input_shapes"])
def test_a_folder_without_a_type_says_what_is_missing(features: str, tmp_path: Path) -> None:
    """`input_shapes`: of 2024."""

    def change(files: dict[str, Any]) -> None:
        config = files["config"]
        del config["type"]
        config[features] = config.pop("input_features")

    with pytest.raises(CheckpointError) as error:
        load(write_lerobot(tmp_path, change, release="0.4.4", buffers=True))
    words = ("config.json", "expected type, input_features", f"found {features} without type")
    assert all(word in str(error.value) for word in words), error.value


def test_a_camera_without_statistics_is_refused(tmp_path: Path) -> None:
    """lerobot would leave its images as they are, without a word."""
    edit_statistics(write_lerobot(tmp_path), {f"{WRIST}.mean": None, f"{WRIST}.std": None})
    with pytest.raises(CheckpointError, match=f"{WRIST}.mean"):
        load(tmp_path)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OptimizedPolicy:
    folder = write_lerobot(tmp_path_factory.mktemp("act"))
    return OptimizedPolicy.from_pretrained(folder, "eager_fp32", device="cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({WRIST: None}, ("missing", WRIST)),
        ({WRIST: np.zeros((64, 64, 3), np.uint8)}, (WRIST, "(64, 33, 3)", "(64, 64, 3)")),
        ({"observation.state": np.zeros(7)}, ("observation.state", "(6,)", "(7,)")),
    ],
)
def test_what_an_observation_may_not_be(
    change: dict[str, Any], words: tuple[str, ...], policy: OptimizedPolicy
) -> None:
    wrong = {key: value for key, value in {**observation(), **change}.items() if value is not None}
    with pytest.raises(ObservationError) as error:
        policy.infer(wrong)
    assert all(word in str(error.value) for word in words), error.value


def test_a_prompt_is_not_needed_and_changes_nothing(policy: OptimizedPolicy) -> None:
    plain, prompted = (policy.infer(observation() | more)["actions"] for more in ({}, {"task": "pick up the bowl"}))
    np.testing.assert_array_equal(plain, prompted)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_steps": 2}, {"schedule": "cubic"}, {"warm_start": 0.5}, {"rtc": {"execution_horizon": 3}},
        {"default_prompt": "pick"}, {"warm_up": ["pick"]}, {"checkpoint": {"max_token_len": 3}}, "native_fp8",
        {"engines": {"decode": {"engine": "eager"}}}, {"kv_cache": "eager"},
    ],
)  # fmt: skip
def test_settings_of_other_models_are_refused(settings: Any, policy: OptimizedPolicy) -> None:
    folder = policy.checkpoint.folder
    assert folder is not None
    with pytest.raises(ConfigError):
        OptimizedPolicy.from_pretrained(folder, settings, device="cpu")


@pytest.mark.parametrize("name", ["eager", "eager_fp32", "native"])
def test_shipped_configurations_of_one_engine_fit(name: str, policy: OptimizedPolicy) -> None:
    specs = load_config(name).specs(policy.family.parts)
    assert {spec.engine for spec in specs.values()} == {name.partition("_")[0]}
