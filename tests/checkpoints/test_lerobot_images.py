"""Pixels and prompts of lerobot's folders: what the model reads is what the release that saved the folder computes. The
expected values follow lerobot's formulas, in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.lerobot_folders import KINDS, OBSERVATIONS, cameras, edit_statistics, write
from tests.support.lerobot_saved import configure, step
from tests.support.published_folders import write_openpi
from tests.support.spy_tokenizer import Spy
from tests.support.tiny import tiny_observation, write_robot
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.loading import load
from vla_accel.kernels.image import resize

NORMALIZE = "normalizer_processor"
STATISTICS = {
    "MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"),
}  # fmt: skip


def write_images(
    folder: Path, kind: str, release: str, mode: str = "IDENTITY", known: tuple[int, ...] = (0, 1)
) -> None:
    """A folder with statistics for these cameras, whose normalizer names VISUAL's `mode`."""
    write(folder, kind, lambda files: step(files, NORMALIZE)["config"]["norm_map"].update(VISUAL=mode), release=release)
    table = {f"{cameras(kind)[camera]}.{name}": value.float().reshape(3, 1, 1)
             for camera in known for name, value in statistics_of(camera).items()}  # fmt: skip
    edit_statistics(folder, table, both=False)


def statistics_of(camera: int) -> dict[str, Tensor]:
    """Another value for each camera and channel; some pixels lie outside of every range."""
    return {
        name: torch.tensor([low, low + 0.05, low + 0.1], dtype=torch.float64) + 0.02 * camera
        for name, low in {"mean": 0.4, "std": 0.2, "min": 0.1, "max": 0.7, "q01": 0.15, "q99": 0.6}.items()
    }


def pixels_of(image: np.ndarray, size: int, kind: str, release: str, mode: str, camera: int) -> tuple[Tensor, Tensor]:
    """lerobot's pixels (3, size, size) of an image, and which of them are bars."""
    x = torch.from_numpy(image).double().permute(2, 0, 1)[None] / 255
    if mode != "IDENTITY":
        low, high = (statistics_of(camera)[name].float().double()[None, :, None, None] for name in STATISTICS[mode])
        x = (x - low) / (high + 1e-8) if mode == "MEAN_STD" else 2 * (x - low) / (high - low) - 1
    outside = torch.ones(size, size, dtype=torch.bool)
    height, width = image.shape[:2]
    if (height, width) != (size, size):
        ratio = max(width / size, height / size)
        height, width = int(height / ratio), int(width / ratio)
        x = F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)
        lowest, bar = (-1.0, -1.0) if release < "0.5" else (0.0, 0.0)
        if kind == "smolvla":
            bar = 0.0
        else:
            x = x.clamp(lowest, 1.0)
    else:
        bar = 0.0
    # Only SmolVLA's bars all lie above and on the left.
    down, right = size - height, size - width
    top, left = (down, right) if kind == "smolvla" else (down // 2, right // 2)
    x = F.pad(x, (left, right - left, top, down - top), value=bar)
    outside[top : top + height, left : left + width] = False
    return x[0] * 2 - 1, outside


def seen_by(policy: OptimizedPolicy, observation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The pixels (V, 3, S, S) that the network gets."""
    seen: list[Tensor] = []
    embed: Any = policy.model.embed_images
    monkeypatch.setattr(policy.model, "embed_images", lambda pixels: (seen.append(pixels.clone()), embed(pixels))[1])
    inputs = policy.processor.prepare(observation)
    pipeline, feed = policy._feed([inputs], np.zeros((1, *policy.family.action_shape(policy.model.config))), None)
    pipeline.start(feed.inputs)
    pipeline.engine("vision").run()
    return seen[-1][0].double()


def with_images(kind: str, *sizes: tuple[int, int]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """An observation whose cameras have these sizes; blocks of one colour, some of them black or white."""
    observation, rng = OBSERVATIONS[kind](), np.random.default_rng(1)
    keys = [key for key, value in observation.items() if isinstance(value, np.ndarray) and value.ndim == 3]
    images = []
    for key, (height, width) in zip(keys, sizes, strict=True):
        levels = rng.choice([0, 40, 128, 200, 255], (-(-height // 4), -(-width // 4), 3))
        images.append(np.repeat(np.repeat(levels, 4, 0), 4, 1)[:height, :width].astype(np.uint8))
        observation[key] = images[-1]
    return observation, images


CASES = [
    *((kind, release, "IDENTITY") for kind in KINDS for release in ("0.4.4", "0.5.1", "0.6.1")),
    *((kind, release, mode) for kind in KINDS for release in ("0.4.4", "0.6.1") for mode in STATISTICS),
]


@pytest.mark.parametrize(("kind", "release", "mode"), CASES)
def test_the_model_reads_the_pixels_of_the_release(
    kind: str, release: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, kind, release, mode)
    policy = OptimizedPolicy.from_pretrained(tmp_path, load_config("eager_fp32"), device="cpu")
    size = policy.processor.image_size
    for sizes in (((36, 60), (50, 20)), ((size, size), (21, 90))):
        observation, images = with_images(kind, *sizes)
        got = seen_by(policy, observation, monkeypatch)
        for camera, (image, view) in enumerate(zip(images, got, strict=True)):
            expected, bars = pixels_of(image, size, kind, release, mode, camera)
            torch.testing.assert_close(view[:, bars], expected[:, bars], rtol=0, atol=1e-6)
            # Images are fitted to whole levels; the smallest divisor is 0.2.
            rounding = 0.0 if image.shape == (size, size, 3) else 0.5 / 127.5
            steepest = {"IDENTITY": 1.0, "MEAN_STD": 1 / 0.2}.get(mode, 2 / 0.45)
            torch.testing.assert_close(view, expected, rtol=0, atol=rounding * steepest + 1e-5)


@pytest.mark.parametrize("kind", ["pi0", "pi05", "pi0_fast"])
def test_a_training_config_of_lerobot_0_5_0_shows_its_release(kind: str, tmp_path: Path) -> None:
    """config.json and the pipelines of 0.5.0 are those of 0.4.4."""
    write_images(tmp_path, kind, "0.4.4")
    training = tmp_path / "train_config.json"
    for content, old in (({"steps": 100}, True), ({"steps": 100, "cudnn_deterministic": False}, False)):
        training.write_text(json.dumps(content))
        processor = load(tmp_path).processor
        assert (processor.pixels is not None) == old
        assert (processor.prompt_state_dim is not None) == old


def test_bars_of_lerobot_0_4_are_minus_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, "pi0", "0.4.4")
    policy = OptimizedPolicy.from_pretrained(tmp_path, load_config("eager_fp32"), device="cpu")
    observation, _ = with_images("pi0", (36, 60), (28, 28))
    wide, square = seen_by(policy, observation, monkeypatch)
    assert (wide[:, 0] == -3).all() and (wide[:, -1] == -3).all() and square.min() >= -1


@pytest.mark.parametrize(("kind", "release", "mode"), [
    ("pi0", "0.4.4", "IDENTITY"), ("pi05", "0.4.4", "IDENTITY"), ("smolvla", "0.6.1", "MEAN_STD"),
    ("pi0", "0.6.1", "QUANTILES"), ("pi05", "0.4.4", "MIN_MAX"),
])  # fmt: skip
def test_the_native_engine_reads_the_same_pixels(kind: str, release: str, mode: str, tmp_path: Path) -> None:
    write_images(tmp_path, kind, release, mode)
    observation, _ = with_images(kind, (36, 60), (50, 20))
    answers = {}
    for engine in ("eager_fp32", "native"):
        policy = OptimizedPolicy.from_pretrained(tmp_path, load_config(engine), device="cpu", num_steps=2)
        assert {entry.used for entry in policy.ledger.entries.values()} == {engine.partition("_")[0]}
        noise = np.random.default_rng(0).normal(size=policy.family.action_shape(policy.model.config))
        answers[engine] = policy.infer(observation, noise=noise.astype(np.float32))["actions"]
    np.testing.assert_allclose(answers["native"], answers["eager_fp32"], atol=2e-4)
    policy.processor = replace(policy.processor, pixels=None)
    usual = policy.infer(observation, noise=noise.astype(np.float32))["actions"]
    assert abs(usual - answers["native"]).max() > 1e-2, "the pixels change the answer"


def test_a_device_that_fits_images_gets_the_same_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gets images in the cameras' sizes, with the pixel maps of the fitted ones."""
    write_images(tmp_path, "pi0", "0.4.4", "MEAN_STD")
    policy = OptimizedPolicy.from_pretrained(tmp_path, load_config("native"), device="cpu", num_steps=2)
    observation, images = with_images("pi0", (36, 60), (28, 28))
    noise = np.zeros(policy.family.action_shape(policy.model.config), np.float32)
    fitted_here = policy.infer(observation, noise=noise)["actions"]
    seen, fitted = policy.processor.observe(observation), policy.processor.prepare(observation)
    assert seen.images[0] is images[0] and seen.pixel_maps is not None and fitted.pixel_maps is not None
    np.testing.assert_array_equal(seen.pixel_maps, fitted.pixel_maps)
    monkeypatch.setattr(resize, "fits_on", lambda _: True)
    np.testing.assert_array_equal(policy.infer(observation, noise=noise)["actions"], fitted_here)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("release", ["0.4.4", "0.6.1"])
def test_a_policy_with_the_usual_pixels_has_no_further_input(kind: str, release: str, tmp_path: Path) -> None:
    write_images(tmp_path, kind, release)
    policy = OptimizedPolicy.from_pretrained(tmp_path, load_config("eager_fp32"), device="cpu")
    mapped = release == "0.4.4" and kind != "smolvla"
    policy.warm_up()
    names = set(policy.pipelines.newest.engine("vision").inputs)
    assert names == ({"images", "pixel_maps"} if mapped else {"images"})


@pytest.mark.parametrize("release", ["0.4.4", "0.6.1"])
def test_cameras_without_statistics_are_left_as_they_are(release: str, tmp_path: Path) -> None:
    """As are those that the normalizer's features do not name."""
    write_images(tmp_path / "none", "smolvla", release, "MEAN_STD", known=())
    assert load(tmp_path / "none").processor.pixels is None
    write_images(tmp_path / "one", "smolvla", release, "MEAN_STD", known=(1,))
    one = load(tmp_path / "one").processor.pixels
    assert one is not None and one.cameras[0].scale == (1, 1, 1) and one.cameras[1].scale != (1, 1, 1)

    def unnamed(files: dict[str, Any]) -> None:
        config = step(files, NORMALIZE)["config"]
        config["norm_map"]["VISUAL"] = "MEAN_STD"
        config["features"] = {k: f for k, f in config["features"].items() if f["type"] != "VISUAL"}

    write_images(tmp_path / "unnamed", "smolvla", release)
    write(tmp_path / "unnamed", "smolvla", unnamed, release=release)
    assert load(tmp_path / "unnamed").processor.pixels is None


@pytest.mark.parametrize("kind", ["pi0", "pi05", "pi0_fast"])
def test_a_folder_of_lerobot_0_5_0_can_be_marked_as_such(kind: str, tmp_path: Path) -> None:
    """Its files are those of 0.4, and its values those of later releases."""
    write(tmp_path, kind, configure(use_relative_actions=False), release="0.4.4")
    processor = load(tmp_path).processor
    assert (processor.pixels, processor.prompt_state_dim) == (None, None)


def test_a_missing_camera_leaves_the_other_its_own_pixels(tmp_path: Path) -> None:
    write_images(tmp_path, "smolvla", "0.6.1", "MEAN_STD")
    processor = load(tmp_path).processor
    observation, _ = with_images("smolvla", (36, 60), (50, 20))
    both = processor.prepare(observation)
    del observation[cameras("smolvla")[0]]
    one = processor.prepare(observation)
    assert both.pixel_maps is not None and not np.array_equal(both.pixel_maps[0], both.pixel_maps[1])
    np.testing.assert_array_equal(one.pixel_maps, both.pixel_maps[1:])


def test_a_robot_with_other_cameras_is_refused_where_they_are_scaled(tmp_path: Path) -> None:
    write_images(tmp_path, "pi0", "0.6.1", "MEAN_STD")
    one = write_robot(tmp_path / "one.yaml")
    one.write_text(one.read_text().replace("[front, wrist]", "[front]"))
    with pytest.raises(ConfigError, match=r"preset: expected 2 cameras, .* got 1"):
        load(tmp_path, PolicyConfig(preset=str(one)))


def test_statistics_of_other_than_three_channels_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path, "smolvla", "0.6.1", "MEAN_STD")
    edit_statistics(tmp_path, {f"{cameras('smolvla')[1]}.{name}": torch.ones(4) for name in ("mean", "std")})
    with pytest.raises(CheckpointError, match=r"observation\.images\.wrist: expected .*3 channels, got 4"):
        load(tmp_path)


# -- prompts ------------------------------------------------------------------------------------------------------


def texts_of(folder: Path, observation: dict[str, Any], prompt: str) -> list[str]:
    spy = Spy()
    processor = replace(load(folder).processor, tokenizer=spy)
    processor.prepare({**observation, processor.preset.prompt: prompt})
    return spy.texts


@pytest.mark.parametrize("release", ["0.4.4", "0.5.1", "0.6.1"])
@pytest.mark.parametrize(("prompt", "expected"), [
    ("pick_up\nthe  bowl ", "pick_up\nthe  bowl \n"), ("pick up the bowl\n", "pick up the bowl\n"),
])  # fmt: skip
def test_lerobots_pi0_only_ends_the_instruction_by_a_newline(
    release: str, prompt: str, expected: str, tmp_path: Path
) -> None:
    write_images(tmp_path, "pi0", release)
    assert texts_of(tmp_path, tiny_observation(), prompt) == [expected]


@pytest.mark.parametrize("kind", ["pi05", "pi0_fast"])
def test_lerobots_models_with_the_state_in_the_prompt_clean_the_instruction(kind: str, tmp_path: Path) -> None:
    write_images(tmp_path, kind, "0.6.1")
    assert texts_of(tmp_path, OBSERVATIONS[kind](), " pick_up\nit ")[0].startswith("Task: pick up it, State: ")


def test_openpis_pi0_cleans_the_instruction(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi0")
    assert texts_of(tmp_path, tiny_observation(), " pick_up\nit ") == ["pick up it", "\n"]


@pytest.mark.parametrize(("release", "numbers"), [("0.4.4", 6), ("0.5.1", 4), ("0.6.1", 4)])
def test_pi0_fast_of_lerobot_0_4_fills_the_state_in_the_prompt(release: str, numbers: int, tmp_path: Path) -> None:
    """Zeros are bin 128."""
    write_images(tmp_path, "pi0_fast", release)
    text = texts_of(tmp_path, OBSERVATIONS["pi0_fast"](), "pick it up")[0]
    state = text.partition("State: ")[2].removesuffix(";\n").split()
    assert len(state) == numbers and state[4:] == ["128"] * (numbers - 4)
