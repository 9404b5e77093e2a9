"""The published sizes by name and shape, and where checkpoints are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.openpi_dialect import EMBED_TOKENS, LM_HEAD, to_openpi
from tests.support.published_folders import KINDS, real_config, shapes_of, write_openpi
from tests.support.tiny import random_state, statistics, write_tiny_checkpoint
from vla_accel import PolicyConfig
from vla_accel.checkpoints.bundled import NAMED, bundled
from vla_accel.checkpoints.paligemma import DEAD
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.config import CheckpointSpec
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.loading import find, load
from vla_accel.families.pi0.checkpoint import Stated, infer_config, load_weights
from vla_accel.families.pi0.network import SIZES, Kind
from vla_accel.transforms.robots import PRESETS

# -- the published sizes, by name and shape -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_published_size(kind: Kind, prefix: str) -> None:
    config = SIZES[kind](action_horizon=10)
    weights = shapes_of(config, prefix)
    stated = Stated(kind=kind, action_dim=32, action_horizon=10, image_size=224, variants=("gemma_2b", "gemma_300m"))
    assert infer_config(weights.shapes, prefix, stated, "x") == config
    origin: Any = load_weights(weights, config, "x").origin
    used = [p.name for parts in origin.recipe.values() for p in parts]
    assert len(used) == len(set(used)) == len(weights.shapes) - 2
    assert sum(int(np.prod(weights.shapes[n])) for n in used) == {"pi0": 3_238_046_480, "pi05": 3_353_431_824}[kind]
    other: Kind = "pi0" if kind == "pi05" else "pi05"
    with pytest.raises(CheckpointError, match=rf"does not fit {other}: \d+ missing: .*left over: "):
        load_weights(weights, SIZES[other](action_horizon=10), "x")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("kind", KINDS)
def test_every_single_key_is_needed_and_no_other_is_accepted(kind: Kind, prefix: str) -> None:
    made = real_config(kind)
    names = {prefix + name for name in to_openpi(random_state(made), made)}
    for name in names - {prefix + dead for dead in DEAD}:
        named = prefix + EMBED_TOKENS if name == prefix + LM_HEAD else name
        with pytest.raises(CheckpointError, match=rf"does not fit {kind}: 1 missing: {named}$"):
            load_weights(shapes_of(made, prefix, without=name), made, "x")
    with pytest.raises(CheckpointError, match=r"1 left over: model\.stray$"):
        load_weights(shapes_of(made, prefix, extra="model.stray"), made, "x")


def test_weights_of_both_kinds_are_neither() -> None:
    shapes = {**shapes_of(real_config("pi0"), "").shapes, **shapes_of(real_config("pi05"), "").shapes}
    with pytest.raises(
        CheckpointError, match=r"expected weights of π0 \(state_proj.* or of π0\.5 .*, found state_proj"
    ):
        infer_config(shapes, "", Stated(action_horizon=5), "x")


# -- where checkpoints are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dmeo", "/no/such/folder", "./folder", "a/b/../c", "a/b/c@main", ""])
def test_names_that_are_neither(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(
        CheckpointError,
        match=rf"expected a folder or one of demo.*, got '{name}'.*{'owner/name' * ('/' in name)}",
    ):
        find(name)


def test_a_path_below_a_folder_that_is_here_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs" / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"got 'outputs/run/last'; outputs/run contains checkpoints/"):
        find("outputs/run/last")


@pytest.mark.parametrize("inside", ["pretrained_model", "checkpoints/000100/pretrained_model", "libero_10"])
@pytest.mark.parametrize("sign", ["config.json", "adapter_config.json"])
def test_a_runs_folder_says_which_folder_in_it_is_the_checkpoint(inside: str, sign: str, tmp_path: Path) -> None:
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / inside / sign).write_text("{}")
    (tmp_path / "training_state").mkdir()
    with pytest.raises(CheckpointError, match=rf"expected config\.json, found .*; did you mean {tmp_path / inside}\?"):
        load(tmp_path)


def test_the_last_checkpoint_of_a_run_is_named_first(tmp_path: Path) -> None:
    for step in ("000100", "000200"):
        (tmp_path / "checkpoints" / step / "pretrained_model").mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "pretrained_model" / "config.json").write_text("{}")
    (tmp_path / "checkpoints" / "last").symlink_to("000200")
    with pytest.raises(CheckpointError, match=r"did you mean \S*/checkpoints/last/pretrained_model or "):
        load(tmp_path)


def test_bundled_checkpoints_are_found_by_their_folders(tmp_path: Path) -> None:
    (tmp_path / "pi05_demo").mkdir()
    assert bundled(tmp_path) == {"demo": tmp_path / "pi05_demo"}
    for name in ("pi05_demo", "other_demo"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "no_checkpoint").mkdir()
    assert bundled(tmp_path) == {"demo": tmp_path / "pi05_demo", "other_demo": tmp_path / "other_demo"}
    assert all((folder / "config.json").is_file() for folder in NAMED.values()), "a name without a checkpoint"


def test_our_own_folder(tmp_path: Path) -> None:
    config = write_tiny_checkpoint(tmp_path, "pi0")
    checkpoint = load(tmp_path)
    model, processor = checkpoint.model, checkpoint.processor
    assert model.config == config and processor.preset == PRESETS["libero"]
    with pytest.raises(ConfigError, match="preset: expected at most 8 state and action dimensions, got 14"):
        table = {n: {k: [1.0] * 14 for k in d} for n, d in statistics().items()}
        (tmp_path / "norm_stats.json").write_text(json.dumps(table))
        load(tmp_path, PolicyConfig(preset="aloha"))


def test_no_pickle_is_ever_opened(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi05")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        load(tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged safetensors file"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("pi0", "embodiment", "libero_sim"), ("pi0", "discrete_state_input", False), ("pi05", "relaxed_actions", True)],
)
def test_settings_that_a_family_lacks_are_refused(tmp_path: Path, kind: Kind, name: str, value: Any) -> None:
    write_tiny_checkpoint(tmp_path, kind)
    with pytest.raises(ConfigError, match=rf"^checkpoint\.{name}: {kind} has no such setting, expected tokenizer, "):
        load(tmp_path, PolicyConfig(checkpoint=CheckpointSpec(**{name: value})))
