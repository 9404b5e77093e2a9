"""openpi's folders and their shards to model and transforms: what they say and leave open, and every contradiction."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.published_folders import KINDS, same_weights, write_openpi
from tests.support.tiny import random_state, statistics, tiny_observation
from vla_accel import PolicyConfig
from vla_accel.config import CheckpointSpec, load_config
from vla_accel.errors import CheckpointError, ConfigError, DependencyError
from vla_accel.families.loading import load
from vla_accel.families.pi0.network import Kind, Pi0
from vla_accel.transforms.robots import PRESETS


@pytest.mark.parametrize("kind", KINDS)
def test_an_openpi_folder(tmp_path: Path, kind: Kind) -> None:
    made = write_openpi(tmp_path, kind)
    checkpoint = load(tmp_path)
    model, processor = checkpoint.model, checkpoint.processor
    same_weights(model, made)
    # pi05_libero was trained without the state in its prompt, pi0_libero with one more delta.
    assert not processor.discrete_state
    assert processor.preset == PRESETS["pi0_libero" if kind == "pi0" else "libero"]
    q = {k: np.array(v) for k, v in statistics()["state"].items()}
    raw = tiny_observation()["observation/state"]
    inputs = processor.prepare(tiny_observation())
    low, span = (q["q01"], (q["q99"] - q["q01"]) / 2) if kind == "pi05" else (q["mean"], q["std"])
    np.testing.assert_allclose(inputs.state[:8], (raw - low) / span - (kind == "pi05"), atol=1e-4)
    assert inputs.state.shape == (16,)


def test_dtypes_are_those_of_the_policy(tmp_path: Path) -> None:
    made = write_openpi(tmp_path, "pi05")
    model = load(tmp_path, dtype=torch.bfloat16).model
    expected = Pi0(made)
    expected.load_state_dict(random_state(made))
    expected = expected.to_compute_dtype(torch.bfloat16).state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
    assert {v.dtype for v in expected.values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    ("asset", "kind", "preset", "discrete"),
    [
        ("droid", "pi05", "droid", True),
        ("trossen", "pi0", "aloha", False),
        ("trossen", "pi05", "aloha", True),
        ("lerobot/aloha_sim_transfer_cube_human", "pi0", "aloha_sim", False),
    ],
)
def test_the_asset_decides_the_preset(tmp_path: Path, asset: str, kind: Kind, preset: str, discrete: bool) -> None:
    write_openpi(tmp_path, kind, asset)
    processor = load(tmp_path).processor
    assert (processor.preset, processor.discrete_state) == (PRESETS[preset], discrete)


def test_an_asset_of_no_known_robot_needs_a_preset(tmp_path: Path) -> None:
    """LIBERO's conventions on another robot's statistics would act, and act wrongly."""
    write_openpi(tmp_path, "pi05", "someone/robot")
    with pytest.raises(
        CheckpointError,
        match=r"statistics of physical-int.*, got assets/someone/robot: set preset",
    ):
        load(tmp_path)
    assert load(tmp_path, PolicyConfig(preset="droid")).processor.preset == PRESETS["droid"]
    write_openpi(tmp_path, "pi05", "someone/robot", preset="aloha")
    assert load(tmp_path).processor.preset == PRESETS["aloha"], "a converted folder says it itself"
    (tmp_path / "assets" / "someone" / "robot" / "norm_stats.json").rename(tmp_path / "norm_stats.json")
    write_openpi(tmp_path / "other", "pi05")
    (tmp_path / "other" / "config.json").rename(tmp_path / "config.json")
    assert load(tmp_path).processor.preset == PRESETS["libero"], "statistics next to the weights are LIBERO's"


def test_settings_go_before_the_checkpoint(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi05", "droid", max_token_len=90, preset="droid")
    processor = load(tmp_path).processor
    assert (processor.preset, processor.max_token_len, processor.discrete_state) == (PRESETS["droid"], 90, True)
    spec = CheckpointSpec(action_horizon=7, max_token_len=60, discrete_state_input=False)
    checkpoint = load(tmp_path, PolicyConfig(preset="droid_joint_position", checkpoint=spec, default_prompt="pick"))
    model, processor = checkpoint.model, checkpoint.processor
    assert (model.config.action_horizon, processor.max_token_len, processor.discrete_state) == (7, 60, False)
    assert (processor.preset, processor.default_prompt) == (PRESETS["droid_joint_position"], "pick")
    path = tmp_path / "mine.yaml"
    path.write_text("base: libero\ndelta_actions: [2]\n")
    assert load(tmp_path, PolicyConfig(preset=str(path))).processor.preset.delta_actions == (2,)
    assert load_config({"checkpoint": {"asset_id": "droid"}}).checkpoint.asset_id == "droid"
    with pytest.raises(ConfigError, match=r"checkpoint\.action_horizon: expected 1 to 4096, got 0"):
        CheckpointSpec(action_horizon=0)
    with pytest.raises(ConfigError, match=r"checkpoint\.max_token_len: expected 1 to 4096, got 1000000000"):
        CheckpointSpec(max_token_len=10**9)


@pytest.mark.parametrize("written", [True, False])
def test_a_shipped_preset_of_another_robot_than_the_statistics_is_an_error(tmp_path: Path, written: bool) -> None:
    """Its numbers may fit, and would be another robot's."""
    write_openpi(tmp_path, "pi05", "droid", **({"preset": "libero"} if written else {}))
    with pytest.raises(
        ConfigError, match=r"preset: expected droid, which assets/droid names, or a YAML file, got libero"
    ):
        load(tmp_path, PolicyConfig(preset=None if written else "libero"))


@pytest.mark.parametrize(("kind", "name"), [("pi05", "q99"), ("pi0", "std")])
def test_statistics_that_no_data_can_have_are_refused(tmp_path: Path, kind: Any, name: str) -> None:
    write_openpi(tmp_path, kind)
    path = tmp_path / "assets" / "physical-intelligence" / "libero" / "norm_stats.json"
    content = json.loads(path.read_text())
    content["norm_stats"]["actions"][name][1] = -9.0
    path.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"norm_stats\.actions: expected q01 <= q99 and std >= 0, got a span of -"
    ):
        load(tmp_path)


def test_statistics_of_several_robots(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi0")
    write_openpi(tmp_path, "pi0", "trossen")
    with pytest.raises(
        CheckpointError, match=r"found physical-intelligence/libero, trossen: choose one as checkpoint\.asset_id"
    ):
        load(tmp_path)
    processor = load(tmp_path, PolicyConfig(checkpoint=CheckpointSpec(asset_id="trossen"))).processor
    assert processor.preset == PRESETS["aloha"]
    with pytest.raises(
        CheckpointError, match=r"expected assets/droid/norm_stats\.json, found physical-intelligence/libero, tro"
    ):
        load(tmp_path, PolicyConfig(checkpoint=CheckpointSpec(asset_id="droid")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asset", ["physical-intelligence/libero", "droid"])
def test_statistics_by_robot_without_an_assets_folder(tmp_path: Path, asset: str, kind: Kind) -> None:
    """As RLinf leaves them; another checkpoint inside the folder keeps its own."""
    for folder, name in ((tmp_path, asset), (tmp_path / "expected", asset), (tmp_path / "step_100", "trossen")):
        write_openpi(folder, kind, name)
    for folder in (tmp_path, tmp_path / "step_100"):
        for entry in (folder / "assets").iterdir():
            entry.rename(folder / entry.name)
        (folder / "assets").rmdir()
    found, expected = (load(folder).processor for folder in (tmp_path, tmp_path / "expected"))
    assert found.preset == expected.preset and found.discrete_state == expected.discrete_state
    example = expected.example()
    np.testing.assert_array_equal(found.prepare(example).state, expected.prepare(example).state)


def test_statistics_in_assets_count_before_those_outside(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi05")
    (tmp_path / "droid").mkdir()
    outside = tmp_path / "droid" / "norm_stats.json"
    outside.write_text((tmp_path / "assets/physical-intelligence/libero/norm_stats.json").read_text())
    assert load(tmp_path).processor.preset == PRESETS["libero"]
    with pytest.raises(ConfigError, match="preset: expected droid"):
        load(tmp_path, PolicyConfig(preset="libero", checkpoint=CheckpointSpec(asset_id="droid")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"action_horizon": None}, r"expected config\.json with action_horizon, .* set checkpoint\.action_horizon"),
        ({"action_horizon": "5"}, r"action_horizon: expected a whole number from 1 to 4096, got '5'"),
        ({"action_dim": 32}, "contradict each other: action_dim: config says 32, weights say 16"),
        ({"pi05": False}, "contradict each other: kind: config says pi0, weights say pi05"),
        (
            {"paligemma_variant": "gemma_2b"},
            r"contradict each other: prefix gemma_2b: config says GemmaConfig\(width=2048",
        ),
        ({"action_expert_variant": "gemma_9b"}, "expected expert one of gemma_2b, .*, got 'gemma_9b'"),
    ],
)
def test_what_config_and_weights_say_must_agree(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_openpi(tmp_path, "pi05", **config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_folder_without_config_needs_only_the_horizon(tmp_path: Path) -> None:
    """As openpi's PyTorch training leaves it."""
    made = write_openpi(tmp_path, "pi05")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="action_horizon"):
        load(tmp_path)
    model = load(tmp_path, PolicyConfig(checkpoint=CheckpointSpec(action_horizon=5))).model
    same_weights(model, made)


@pytest.mark.parametrize("name", ["assets", "tokenizer.json", "model.safetensors"])
def test_every_part_of_an_openpi_folder_is_needed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_openpi(tmp_path, "pi05")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("vla_accel.transforms.tokenizer._OPENPI_CACHE", tmp_path / "none")
    (tmp_path / name).rename(tmp_path / "away")
    with pytest.raises((CheckpointError, DependencyError), match=name.removesuffix(".json").split(".")[0]):
        load(tmp_path)


def test_jax_parameters_are_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    with pytest.raises(CheckpointError, match=r"found openpi's JAX parameters: convert them with vla-accel convert"):
        load(tmp_path)


# -- shards -------------------------------------------------------------------------------------------------------


def shard(folder: Path, change: Callable[[dict[str, str]], None] = lambda table: None) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    files = {"model-00001-of-00002.safetensors": names[:50], "model-00002-of-00002.safetensors": names[50:]}
    table = {k: file for file, keys in files.items() for k in keys}
    for file, keys in files.items():
        save_file({k: state[k] for k in keys}, folder / file)
    change(table)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def test_an_index_beside_the_whole_weights_says_what_to_remove(tmp_path: Path) -> None:
    made = write_openpi(tmp_path, "pi05")
    whole = (tmp_path / "model.safetensors").read_bytes()
    shard(tmp_path)
    for file in tmp_path.glob("model-*.safetensors"):
        file.unlink()
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(
        CheckpointError, match=r"found .*; if model\.safetensors holds all .* remove model\.safe.*index"
    ):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    same_weights(load(tmp_path).model, made)


def test_shards_with_an_index(tmp_path: Path) -> None:
    made = write_openpi(tmp_path, "pi05")
    shard(tmp_path)
    save_file({"old": torch.zeros(1)}, tmp_path / "model-old.safetensors")  # not in the index
    same_weights(load(tmp_path).model, made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra="model-00001-of-00002.safetensors"), r"1 not in the file named: extra; 0 not in"),
        (lambda t: t.pop(sorted(t)[0]), r"0 not in the file named: ; 1 not in the index: action_in_proj\.bias"),
        (lambda t: t.update({sorted(t)[0]: "model-00002-of-00002.safetensors"}), "1 not in the file named: action_in"),
        (
            lambda t: t.update(x="model-00003-of-00003.safetensors"),
            r"expected model-00003-of-00003\.safetensors, found",
        ),
        (lambda t: t.update(x="../other.safetensors"), "expected weight_map from keys to files of this folder"),
        (lambda t: t.clear(), "expected weight_map from keys to files of this folder"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, change: Callable[[dict[str, str]], None], message: str) -> None:
    write_openpi(tmp_path, "pi05")
    shard(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
