"""lerobot's π0 folders to model and transforms: what they say, and what in them is not understood."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.lerobot_folders import edit_statistics
from tests.support.lerobot_saved import saved_files, state_files, step
from tests.support.openpi_dialect import EMBED_TOKENS, LM_HEAD
from tests.support.published_folders import KINDS, same_weights, write_lerobot
from tests.support.spy_tokenizer import Spy
from tests.support.tiny import statistics, tiny_observation
from vla_accel import PolicyConfig
from vla_accel.checkpoints.weights import read_arrays
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.loading import load
from vla_accel.families.pi0.network import Kind
from vla_accel.transforms.robots import PRESETS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("embedding", ["head", "table", "both"])
def test_a_lerobot_folder(tmp_path: Path, kind: Kind, embedding: str) -> None:
    made = write_lerobot(tmp_path, kind)
    state = load_file(tmp_path / "model.safetensors")
    head, table = f"model.{LM_HEAD}", f"model.{EMBED_TOKENS}"
    if embedding != "head":
        state[table] = state[head].clone()
    if embedding == "table":
        del state[head]
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = load(tmp_path)
    model, processor = checkpoint.model, checkpoint.processor
    same_weights(model, made)
    assert processor.preset == replace(PRESETS["libero"], resize="bilinear", discrete_state_input=None)
    assert (processor.discrete_state, processor.prompt_state_dim) == (kind == "pi05", 16)


@pytest.mark.parametrize(("release", "filling"), [("0.4.4", 8), ("0.5.1", 0), ("0.6.1", 0)])
def test_lerobots_state_in_the_prompt(tmp_path: Path, release: str, filling: int) -> None:
    """Up to 0.4 the state is padded before it is put into words: zeros are bin 128."""
    write_lerobot(tmp_path, "pi05", release=release)
    processor = load(tmp_path).processor
    spy = Spy()
    observation = tiny_observation()
    observation["observation/state"] = np.array(statistics()["state"]["q01"])
    replace(processor, tokenizer=spy).prepare(observation)
    assert spy.texts == [f"Task: pick up the bowl, State: {' '.join(['0'] * 8 + ['128'] * filling)};\nAction: "]


def edit_modes(mode: str) -> Callable[[dict[str, Any]], None]:
    def change(files: dict[str, Any]) -> None:
        for name in ("normalizer_processor", "unnormalizer_processor"):
            step(files, name)["config"]["norm_map"] = {"STATE": mode, "ACTION": mode, "VISUAL": "IDENTITY"}

    return change


@pytest.mark.parametrize("mode", ["QUANTILES", "MEAN_STD", "IDENTITY"])
def test_lerobots_scaling_by_hand(tmp_path: Path, mode: str) -> None:
    write_lerobot(tmp_path, "pi0", edit_modes(mode))
    processor = load(tmp_path).processor
    table = {k: {n: np.array(v, np.float32).astype(np.float64) for n, v in d.items()} for k, d in statistics().items()}
    raw = np.float32(tiny_observation()["observation/state"]).astype(np.float64)
    s, a = table["state"], table["actions"]
    actions = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    x = actions[:, :7].astype(np.float64)
    expected = {
        "QUANTILES": (2 * (raw - s["q01"]) / (s["q99"] - s["q01"]) - 1, (x + 1) * (a["q99"] - a["q01"]) / 2 + a["q01"]),
        "MEAN_STD": ((raw - s["mean"]) / (s["std"] + 1e-8), x * a["std"] + a["mean"]),
        "IDENTITY": (raw, x),
    }[mode]
    inputs = processor.prepare(tiny_observation())
    np.testing.assert_allclose(inputs.state[:8], expected[0], atol=1e-6)
    np.testing.assert_allclose(processor.unnormalize_actions(actions, inputs), expected[1], atol=1e-12)


def test_other_robots_keep_lerobots_keys(tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        camera = {"type": "VISUAL", "shape": [3, 480, 640]}
        features = files["config"]["input_features"]
        del features["observation.images.image2"]
        features["observation.images.wrist"] = camera
        rename = {"observation.images.hand": "observation.images.wrist"}
        step(files, "rename_observations_processor")["config"]["rename_map"] = rename

    write_lerobot(tmp_path, "pi05", change)
    processor = load(tmp_path).processor
    assert processor.preset.images == ("observation.images.image", "observation.images.hand")
    picture = np.zeros((28, 28, 3), np.uint8)
    observation = {"observation.images.hand": picture, "observation.state": np.zeros(8), "task": "pick up the bowl"}
    assert processor.prepare(observation).images[0].shape == (28, 28, 3)
    chosen = load(tmp_path, PolicyConfig(preset="libero")).processor
    assert (chosen.preset.images, chosen.preset.resize) == (PRESETS["libero"].images, "bilinear")
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: libero\nstate_dim: 6\ndelta_actions: []\n")
    with pytest.raises(ConfigError, match=r"preset: expected 8 numbers of state, got .*mine.yaml's 6"):
        load(tmp_path, PolicyConfig(preset=str(mine)))


IMAGE, IMAGE2 = "observation.images.image", "observation.images.image2"
HAND, STATE = "observation.images.hand", "observation.state"


def rename(names: dict[str, str]) -> Callable[[dict[str, Any]], None]:
    """A change of saved files: the robot's names become the policy's."""
    return lambda files: step(files, "rename_observations_processor")["config"].update(rename_map=names)


@pytest.mark.parametrize(
    ("names", "images"),
    [
        ({HAND: IMAGE2}, (IMAGE, HAND)),
        ({IMAGE: IMAGE2, IMAGE2: IMAGE}, (IMAGE2, IMAGE)),
        # No image reaches a camera whose name becomes another.
        ({IMAGE: IMAGE2}, (IMAGE,)),
        ({IMAGE: "observation.images.other"}, (IMAGE2,)),
        # These rename nothing that the policy reads.
        ({IMAGE: IMAGE}, PRESETS["libero"].images),
        ({HAND: "observation.images.other"}, PRESETS["libero"].images),
    ],
)
def test_a_rename_map_counts_for_cameras_with_liberos_names(
    tmp_path: Path, names: dict[str, str], images: tuple[str, ...]
) -> None:
    write_lerobot(tmp_path, "pi05", rename(names))
    assert load(tmp_path).processor.preset.images == images


def test_a_state_with_another_name_counts_with_liberos_cameras(tmp_path: Path) -> None:
    write_lerobot(tmp_path, "pi05", rename({"joints": STATE}))
    assert load(tmp_path).processor.preset.state == ("joints",)


@pytest.mark.parametrize(("kind", "names"), [("pi05", "q01 <= q99"), ("pi0", "std >= 0")])
def test_statistics_that_no_data_can_have_are_refused(tmp_path: Path, kind: Any, names: str) -> None:
    write_lerobot(tmp_path, kind)
    edit_statistics(
        tmp_path, {"observation.state.q99" if kind == "pi05" else "observation.state.std": -9 * torch.ones(8)}
    )
    with pytest.raises(CheckpointError, match=rf"observation\.state: expected {names}, got a span of -"):
        load(tmp_path)


def test_missing_files_of_lerobot_are_named(tmp_path: Path) -> None:
    write_lerobot(tmp_path, "pi05")
    name = state_files(saved_files(tmp_path))[0]
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"expected {name} with the statistics of normalizer_processor"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected config\.json, found model\.safetensors, policy_postprocessor"):
        load(tmp_path)


def test_damaged_statistics_of_lerobot_are_named(tmp_path: Path) -> None:
    write_lerobot(tmp_path, "pi05")
    name = state_files(saved_files(tmp_path))[1]
    (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=rf"{name}: damaged safetensors file"):
        load(tmp_path)


def test_statistics_that_may_not_be_read_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lerobot(tmp_path, "pi05")
    opened, name = Path.open, state_files(saved_files(tmp_path))[0]

    def refused(self: Path, *words: Any, **options: Any) -> Any:
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *words, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: Permission denied"):
        load(tmp_path)


def test_statistics_in_bf16_are_read(tmp_path: Path) -> None:
    written = {"a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "b": torch.tensor([0.1], dtype=torch.float64)}
    save_file(written, tmp_path / "x.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy 2 has a warning for a tensor that it is given itself
        read = read_arrays(tmp_path / "x.safetensors")
    assert [(name, a.dtype, a.tolist()) for name, a in read.items()] == [
        ("a", np.float32, [1.5, -2.0]), ("b", np.float64, [0.1]),
    ]  # fmt: skip
