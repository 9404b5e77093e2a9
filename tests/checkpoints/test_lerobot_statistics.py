"""The statistics of lerobot's folders: a robot other than the base's, those of lerobot 0.3 among the weights, and base
checkpoints without any that could be used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import tiny_smolvla
from tests.support.lerobot_folders import KINDS, edit_statistics, edit_tensors, made, write
from tests.support.lerobot_saved import Change, edit, saved_files, state_files, step, together
from tests.support.tiny import tiny_observation
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import load

FP32 = load_config("eager_fp32")
JSON = ("policy_preprocessor.json", "policy_postprocessor.json")


# -- another robot than the base's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [6, 32])
def test_the_state_is_as_long_as_its_statistics(said: int, tmp_path: Path) -> None:
    """What is trained from a base keeps the base's features in config.json."""

    def change(files: dict[str, Any]) -> None:
        files["config"]["input_features"]["observation.state"]["shape"] = [said]

    processor = made(tmp_path, "pi05", change).processor
    assert processor.preset.state_dim == 8 and len(processor.state.low) == 8
    # The cameras and sizes are LIBERO's, so that the keys are.
    assert processor.example()["observation/state"].shape == (8,)
    assert np.isfinite(processor.prepare(tiny_observation()).state).all()


def test_a_policy_of_another_robot_than_its_base_acts(tmp_path: Path) -> None:
    tiny_smolvla.write_lerobot(tmp_path)
    mean, std = torch.arange(9.0) * 0.1, torch.arange(9.0) + 0.5
    edit_statistics(tmp_path, {"observation.state.mean": mean, "observation.state.std": std})
    policy = OptimizedPolicy.from_pretrained(tmp_path, FP32, num_steps=1)
    state = np.random.default_rng(0).normal(size=9)
    observation = {**tiny_smolvla.observation(), "observation.state": state}
    found = policy.processor.prepare(observation).state[:9]
    np.testing.assert_allclose(found, (state - mean.numpy()) / std.numpy(), rtol=1e-5, atol=1e-6)
    assert policy.infer(observation)["actions"].shape == (5, 6)


def test_actions_are_as_long_as_config_says(tmp_path: Path) -> None:
    """lerobot takes them from the dataset, as it does their statistics."""
    write(tmp_path, "pi0")
    edit_statistics(tmp_path, {"action.mean": torch.zeros(6), "action.std": torch.ones(6)})
    with pytest.raises(CheckpointError, match="expected statistics of action's 7 values, got 6"):
        load(tmp_path)


# -- lerobot 0.3: statistics among the weights ---------------------------------------------------------------------


def buffers(dataset: str = "") -> dict[str, Tensor]:
    table = {"observation_state": tiny_smolvla.statistics(6), "action": tiny_smolvla.statistics(6)}
    start = f"{dataset}_buffer" if dataset else "buffer"
    return {
        f"{layer}.{start}_{key}.{name}": torch.from_numpy(value.copy())
        for layer, key in (("normalize_inputs", "observation_state"), ("normalize_targets", "action"),
                           ("unnormalize_outputs", "action"))
        for name, value in table[key].items()
    }  # fmt: skip


def write_old(folder: Path, stored: Mapping[str, Tensor], change: Change = lambda files: None) -> None:
    """A SmolVLA as lerobot 0.3 saves it."""
    later = ("use_peft", "pretrained_path", "pretrained_revision", "rtc_config", "compile_model", "compile_mode")

    def old(files: dict[str, Any]) -> None:
        files["config"] = {k: v for k, v in files["config"].items() if k not in later}
        change(files)

    tiny_smolvla.write_lerobot(folder, change=old)
    for name in (*state_files(saved_files(folder)), *JSON):
        (folder / name).unlink()
    edit_tensors(folder / "model.safetensors", stored)


def test_statistics_among_the_weights_are_the_same_numbers(tmp_path: Path) -> None:
    tiny_smolvla.write_lerobot(tmp_path / "new")
    write_old(tmp_path / "old", buffers())
    new, old = (OptimizedPolicy.from_pretrained(tmp_path / name, FP32, num_steps=2) for name in ("new", "old"))
    noise = np.random.default_rng(0).normal(size=(5, 9))
    answers = [p.infer(tiny_smolvla.observation(), noise=noise)["actions"] for p in (new, old)]
    np.testing.assert_allclose(*answers, atol=1e-6)
    assert old.processor.max_token_len == 48


def test_ranges_among_the_weights(tmp_path: Path) -> None:
    """lerobot 0.3 adds its epsilon to every range that it divides by."""
    low, high = torch.zeros(6), torch.tensor([0.0, 1e-8, 1, 2, 3, 4])
    stored = {
        f"{layer}.buffer_{key}.{name}": value.clone()
        for layer, key in (("normalize_inputs", "observation_state"), ("unnormalize_outputs", "action"))
        for name, value in (("min", low), ("max", high))
    }
    modes = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
    write_old(tmp_path, stored, lambda files: files["config"].update(normalization_mapping=modes))
    processor = load(tmp_path).processor
    inputs = processor.prepare({**tiny_smolvla.observation(), "observation.state": high.numpy()})
    np.testing.assert_allclose(inputs.state[:6], [-1, 0, 1, 1, 1, 1], atol=1e-5)
    middle = processor.unnormalize_actions(np.zeros((1, 9), np.float32), inputs)[0]
    np.testing.assert_allclose(middle, ((low + high) / 2).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            {**buffers("so100"), **buffers("so100-blue")},
            "one dataset, found those of so100, so100-blue: a base ",
        ),
        (
            {k: torch.full_like(v, torch.inf) for k, v in buffers().items()},
            r"observation\.state\.mean: expected a list of finite numbers",
        ),
    ],
)
def test_unusable_statistics_among_the_weights_are_refused(
    stored: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    write_old(tmp_path, stored)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_among_the_weights_are_ignored_next_to_processors(kind: Any, tmp_path: Path) -> None:
    """Half of a migration: new processors, old weights. lerobot reads the processors."""
    before = made(tmp_path, kind).processor
    edit_tensors(tmp_path / "model.safetensors", {k: v + 3 for k, v in buffers().items()})
    after = load(tmp_path).processor
    assert np.array_equal(before.state.low, after.state.low) and np.array_equal(before.actions.span, after.actions.span)


# -- bases ---------------------------------------------------------------------------------------------------------


def test_a_base_without_statistics_says_what_it_is(tmp_path: Path) -> None:
    """As lerobot/pi05_base and pi0_base: no features, no files."""

    def bare(files: dict[str, Any]) -> None:
        for name in ("normalizer_processor", "unnormalizer_processor"):
            del step(files, name)["state_file"]

    for change in (bare, together(bare, *(edit(f"{n}normalizer_processor", features={}) for n in ("", "un")))):
        with pytest.raises(CheckpointError) as raised:
            made(tmp_path, "pi05", change)
        assert "found no statistics: a base checkpoint to fine-tune" in str(raised.value)


def test_statistics_of_several_datasets_without_a_state_say_what_they_are(tmp_path: Path) -> None:
    """As lerobot/smolvla_base."""
    tiny_smolvla.write_lerobot(tmp_path)
    others = {
        f"{dataset}.buffer.action.{name}": torch.ones(6)
        for dataset in ("so100", "so100-blue", "so100-red")
        for name in ("mean", "std")
    }
    own = {f"{key}.{name}": None for key in ("observation.state", "action") for name in ("mean", "std")}
    edit_statistics(tmp_path, {**others, **own})
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    said = str(raised.value)
    assert "found action of several datasets (so100, so100-blue, so100-red): a base checkpoint to fine-tune" in said
