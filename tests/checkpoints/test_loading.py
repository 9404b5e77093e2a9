"""Whole folders of every kind to model and transforms: what they say, what they leave open, and every contradiction."""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from tests.support.openpi_dialect import EMBED_TOKENS, LM_HEAD, ROOT, openpi_names, to_openpi
from tests.support.tiny import TOKENIZER, random_state, statistics, tiny_config, tiny_observation, write_tiny_checkpoint
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.dialects import DEAD, Stated, infer_config
from vla_accel.checkpoints.loading import find, load
from vla_accel.checkpoints.pi0 import check_weights
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.config import CheckpointSpec, load_config
from vla_accel.errors import CheckpointError, ConfigError, DependencyError
from vla_accel.models.gemma import GemmaConfig
from vla_accel.models.network import Network
from vla_accel.models.pi0 import SIZES, Kind, Pi0, Pi0Config
from vla_accel.models.siglip import SiglipConfig
from vla_accel.transforms.robots import PRESETS

KINDS: tuple[Kind, ...] = ("pi0", "pi05")
LIBERO_ASSET = "physical-intelligence/libero"


def real_config(kind: Kind, **changes: Any) -> Pi0Config:
    """Tiny, but with what every real checkpoint shares: one key/value head, heads of 72 in the tower."""
    config = tiny_config(
        kind,
        vision=SiglipConfig(width=72, depth=2, mlp_dim=20, heads=1, image_size=28, patch_size=14),
        prefix=GemmaConfig(width=18, depth=3, mlp_dim=22, heads=4, head_dim=6),
        expert=GemmaConfig(width=14, depth=3, mlp_dim=26, heads=4, head_dim=6),
        vocab_size=TOKENIZER.vocab_size,
        action_dim=16,
        max_token_len=200 if kind == "pi05" else 48,
    )
    return replace(config, **changes)


def write_openpi(folder: Path, kind: Kind, asset: str = LIBERO_ASSET, **config: Any) -> Pi0Config:
    """A folder as openpi's converter leaves it."""
    made = real_config(kind, discrete_state_input=False)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in to_openpi(random_state(made), made).items()}, folder / "model.safetensors")
    content = {"action_dim": 16, "action_horizon": 5, "precision": "float32", **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    place = folder / "assets" / asset
    place.mkdir(parents=True, exist_ok=True)
    table = {name: {k: (v * 4)[:32] for k, v in d.items()} for name, d in statistics().items()}
    (place / "norm_stats.json").write_text(json.dumps({"norm_stats": table}))
    TOKENIZER.save(folder / "tokenizer.json")
    return made


def write_lerobot(folder: Path, kind: Kind, change: Callable[[dict[str, Any]], None] = lambda files: None) -> Pi0Config:
    """A folder as lerobot saves it; `change` may edit the JSON files before they are written."""
    made = real_config(kind)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{k}": v.contiguous() for k, v in to_openpi(random_state(made), made).items()}
    save_file(weights, folder / "model.safetensors")
    camera, mode = {"type": "VISUAL", "shape": [3, 256, 256]}, "QUANTILES" if kind == "pi05" else "MEAN_STD"
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    text = {"max_length": made.max_token_len, "task_key": "task", "tokenizer_name": "google/paligemma-3b-pt-224"}
    files: dict[str, Any] = {
        "config": {
            "type": kind,
            "input_features": {
                "observation.images.image": camera,
                "observation.images.image2": camera,
                "observation.images.empty_camera_0": camera,
                "observation.state": {"type": "STATE", "shape": [8]},
            },
            "output_features": {"action": {"type": "ACTION", "shape": [7]}},
            "chunk_size": 5,
            "max_state_dim": 16,
            "max_action_dim": 16,
            "min_period": 0.004,
            "max_period": 4.0,
            "image_resolution": [28, 28],
            "tokenizer_max_length": made.max_token_len,
            "normalization_mapping": norm_map,
        },
        "policy_preprocessor": {
            "name": "policy_preprocessor",
            "steps": [
                {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
                {"registry_name": "to_batch_processor", "config": {}},
                {
                    "registry_name": "normalizer_processor",
                    "config": {"eps": 1e-8, "norm_map": norm_map},
                    "state_file": "pre.safetensors",
                },
                {"registry_name": "tokenizer_processor", "config": text},
                {"registry_name": "device_processor", "config": {"device": "cuda"}},
            ],
        },
        "policy_postprocessor": {
            "name": "policy_postprocessor",
            "steps": [
                {
                    "registry_name": "unnormalizer_processor",
                    "config": {"eps": 1e-8, "norm_map": norm_map},
                    "state_file": "post.safetensors",
                }
            ],
        },
    }
    change(files)
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    table = statistics()
    arrays = {f"observation.state.{k}": np.array(v, np.float32) for k, v in table["state"].items()}
    arrays |= {f"action.{k}": np.array(v, np.float32) for k, v in table["actions"].items()}
    arrays |= {"action.min": arrays["action.q01"] - 1, "action.max": arrays["action.q99"] + 1}
    for name in ("pre", "post"):
        save_arrays(arrays, folder / f"{name}.safetensors")
    TOKENIZER.save(folder / "tokenizer.json")
    return made


def same_weights(model: Network, config: Pi0Config) -> None:
    state = random_state(config)
    assert model.config == config
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


# -- openpi's folders ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", KINDS)
def test_an_openpi_folder_acts(tmp_path: Path, kind: Kind) -> None:
    write_openpi(tmp_path, kind)
    policy = OptimizedPolicy.from_pretrained(tmp_path, PolicyConfig(num_steps=2, device="cpu", precision="fp32"))
    actions = policy.infer(tiny_observation())["actions"]
    assert actions.shape == (5, 7) and np.isfinite(actions).all()


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
        match=r"statistics of physical-int.*, got assets/someone/robot: .* as preset:",
    ):
        load(tmp_path)
    assert load(tmp_path, PolicyConfig(preset="droid")).processor.preset == PRESETS["droid"]
    write_openpi(tmp_path, "pi05", "someone/robot", preset="aloha")
    assert load(tmp_path).processor.preset == PRESETS["aloha"], "a converted folder says it itself"
    (tmp_path / "assets" / "someone" / "robot" / "norm_stats.json").rename(tmp_path / "norm_stats.json")
    write_openpi(tmp_path / "other", "pi05")
    (tmp_path / "other" / "config.json").rename(tmp_path / "config.json")
    assert load(tmp_path).processor.preset == PRESETS["libero"], "statistics beside the weights are LIBERO's"


def test_settings_go_before_the_checkpoint(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi05", max_token_len=90, preset="droid")
    processor = load(tmp_path).processor
    assert (processor.preset, processor.max_token_len, processor.discrete_state) == (PRESETS["droid"], 90, True)
    spec = CheckpointSpec(action_horizon=7, max_token_len=60, discrete_state_input=False)
    checkpoint = load(tmp_path, PolicyConfig(preset="libero", checkpoint=spec, default_prompt="pick"))
    model, processor = checkpoint.model, checkpoint.processor
    assert (model.config.action_horizon, processor.max_token_len, processor.discrete_state) == (7, 60, False)
    assert (processor.preset, processor.default_prompt) == (PRESETS["libero"], "pick")
    path = tmp_path / "mine.yaml"
    path.write_text("base: libero\ndelta_actions: [2]\n")
    assert load(tmp_path, PolicyConfig(preset=str(path))).processor.preset.delta_actions == (2,)
    assert load_config({"checkpoint": {"asset_id": "droid"}}).checkpoint.asset_id == "droid"
    with pytest.raises(ConfigError, match=r"checkpoint\.action_horizon: expected at least 1, got 0"):
        CheckpointSpec(action_horizon=0)


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
        CheckpointError, match=r"expected droid/norm_stats\.json, found physical-intelligence/libero, tro"
    ):
        load(tmp_path, PolicyConfig(checkpoint=CheckpointSpec(asset_id="droid")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"action_horizon": None}, r"expected config\.json with action_horizon, .* set checkpoint\.action_horizon"),
        ({"action_horizon": "5"}, r"action_horizon: expected a positive whole number, got '5'"),
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
    with pytest.raises(CheckpointError, match=r"found openpi's JAX parameters: vla-accel convert makes"):
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


# -- lerobot's folders --------------------------------------------------------------------------------------------


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


def test_lerobots_state_fills_the_prompt(tmp_path: Path) -> None:
    """The state is padded before it is put into words: zeros are bin 128."""
    write_lerobot(tmp_path, "pi05")
    processor = load(tmp_path).processor
    asked: list[str] = []

    class Spy:
        def encode(self, text: str, *, add_bos: bool) -> list[int]:
            asked.append(text)
            return [1]

        def finish(self, ids: list[int]) -> list[int]:
            return ids

    observation = tiny_observation()
    observation["observation/state"] = np.array(statistics()["state"]["q01"])
    replace(processor, tokenizer=Spy()).prepare(observation)
    assert asked == [f"Task: pick up the bowl, State: {' '.join(['0'] * 8 + ['128'] * 8)};\nAction: "]


def edit_modes(mode: str) -> Callable[[dict[str, Any]], None]:
    def change(files: dict[str, Any]) -> None:
        for name in ("policy_preprocessor", "policy_postprocessor"):
            for step in files[name]["steps"]:
                if "norm_map" in step["config"]:
                    step["config"]["norm_map"] = {"STATE": mode, "ACTION": mode, "VISUAL": "IDENTITY"}

    return change


@pytest.mark.parametrize("mode", ["QUANTILES", "MEAN_STD", "MIN_MAX", "IDENTITY"])
def test_lerobots_scaling_by_hand(tmp_path: Path, mode: str) -> None:
    if mode == "MIN_MAX":
        with pytest.raises(
            CheckpointError, match=r"expected observation\.state\.min and observation\.state\.max for MIN_"
        ):
            write_lerobot(tmp_path, "pi0", edit_modes(mode))
            load(tmp_path)
        return
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
    np.testing.assert_allclose(processor.finish(actions, inputs), expected[1], atol=1e-12)


def test_other_robots_keep_lerobots_keys(tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        camera = {"type": "VISUAL", "shape": [3, 480, 640]}
        features = files["config"]["input_features"]
        del features["observation.images.image2"]
        features["observation.images.wrist"] = camera
        rename = {"observation.images.hand": "observation.images.wrist"}
        files["policy_preprocessor"]["steps"][0]["config"]["rename_map"] = rename

    write_lerobot(tmp_path, "pi05", change)
    processor = load(tmp_path).processor
    assert processor.preset.images == ("observation.images.image", "observation.images.hand")
    picture = np.zeros((28, 28, 3), np.uint8)
    observation = {"observation.images.hand": picture, "observation.state": np.zeros(8), "task": "pick up the bowl"}
    assert processor.prepare(observation).images[0].shape == (28, 28, 3)
    chosen = load(tmp_path, PolicyConfig(preset="libero")).processor
    assert (chosen.preset.images, chosen.preset.resize) == (PRESETS["libero"].images, "bilinear")


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda files: files.__setitem__(name, None)


def put(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda files: files[name].__setitem__(key, value)


def step(name: str, index: int, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda files: files[name]["steps"][index].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("policy_preprocessor"), r"expected policy_preprocessor\.json with the statistics, found no such file"),
        (drop("policy_postprocessor"), r"expected policy_postprocessor\.json"),
        (put("config", "type", "act"), "expected a policy of type pi0 or pi05 or .*, got .act."),
        (put("config", "type", "pi0"), "contradict each other: kind: config says pi0, weights say pi05"),
        (put("config", "use_peft", True), "expected adapter_config.json beside a policy that says use_peft"),
        (put("config", "min_period", 0.001), r"cannot run with min_period 0\.001 instead of 0\.004"),
        (put("config", "chunk_size", None), "expected chunk_size of type int, got None"),
        (put("config", "image_resolution", [28, 56]), "expected a square image_resolution"),
        (put("config", "image_resolution", [56, 56]), "image_size: config says 56, weights say 28"),
        (put("config", "output_features", {}), "expected features observation.state and action"),
        (put("config", "paligemma_variant", "gemma_2b"), "contradict each other: prefix gemma_2b"),
        (
            step("policy_preprocessor", 1, "registry_name", "delta_actions"),
            "expected steps among .*, got delta_actions",
        ),
        (step("policy_preprocessor", 2, "state_file", "../x.safetensors"), "expected the statistics of normalizer_pro"),
        (step("policy_preprocessor", 2, "registry_name", "to_batch_processor"), "expected a normalizer_processor step"),
        (step("policy_preprocessor", 3, "registry_name", "device_processor"), "expected a tokenizer_processor step"),
        (edit_modes("QUANTILE10"), "expected MEAN_STD, QUANTILES or MIN_MAX of observation.state, got 'QUANTILE10'"),
    ],
)
def test_what_is_not_understood_in_a_lerobot_folder_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    write_lerobot(tmp_path, "pi05", change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_damaged_statistics_of_lerobot_are_named(tmp_path: Path) -> None:
    write_lerobot(tmp_path, "pi05")
    (tmp_path / "post.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"post\.safetensors: damaged safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["pi05", pytest.param("pi0", marks=pytest.mark.slow)])
def test_every_single_lerobot_key_is_needed(tmp_path: Path, kind: Kind) -> None:
    made = real_config(kind)
    names = {f"model.{k}" for k in to_openpi(random_state(made), made)}
    for name in names - {f"model.{d}" for d in DEAD}:
        with pytest.raises(CheckpointError, match="1 missing"):
            check_weights(shapes_of(made, "model.", without=name), made, "x")
    with pytest.raises(CheckpointError, match=r"1 left over: model\.stray$"):
        check_weights(shapes_of(made, "model.", extra="model.stray"), made, "x")


# -- the published sizes, by name and shape -----------------------------------------------------------------------


class Shapes:
    """Weights that are names and shapes alone."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.sizes = dict.fromkeys(shapes, 0)
        self.integers: dict[str, str] = {}

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


@functools.cache
def meta_state(config: Pi0Config) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return Pi0(config).state_dict()


def shapes_of(config: Pi0Config, prefix: str, without: str = "", extra: str = "") -> Shapes:
    """What a saver writes for this size, from the names written down in openpi_dialect."""
    state = meta_state(config)
    shapes: dict[str, tuple[int, ...]] = {}
    c = config.prefix
    for name, value in state.items():
        names = openpi_names(name)
        if len(names) == 3 and not name.startswith("vision."):
            rows = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        else:
            rows = [value.shape[0] // len(names)] * len(names)
        shapes |= {prefix + n: (r, *value.shape[1:]) for n, r in zip(names, rows, strict=True)}
    shapes[prefix + ROOT + "gemma_expert.lm_head.weight"] = (config.vocab_size, config.expert.width)
    shapes[prefix + ROOT + "paligemma.model.language_model.norm.weight"] = (config.prefix.width,)
    if extra:
        shapes[extra] = (1,)
    return Shapes({k: v for k, v in shapes.items() if k != without})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_published_size(kind: Kind, prefix: str) -> None:
    config = SIZES[kind](action_horizon=10)
    weights = shapes_of(config, prefix)
    stated = Stated(kind=kind, action_dim=32, action_horizon=10, image_size=224, variants=("gemma_2b", "gemma_300m"))
    assert infer_config(weights.shapes, prefix, stated, "x") == config
    recipe = check_weights(weights, config, "x")
    used = [p.name for parts in recipe.values() for p in parts]
    assert len(used) == len(set(used)) == len(weights.shapes) - 2
    assert sum(int(np.prod(weights.shapes[n])) for n in used) == {"pi0": 3_238_046_480, "pi05": 3_353_431_824}[kind]
    other: Kind = "pi0" if kind == "pi05" else "pi05"
    with pytest.raises(CheckpointError, match=rf"does not fit {other}: \d+ missing: .*left over: "):
        check_weights(weights, SIZES[other](action_horizon=10), "x")


def test_weights_of_both_kinds_are_neither() -> None:
    shapes = {**shapes_of(real_config("pi0"), "").shapes, **shapes_of(real_config("pi05"), "").shapes}
    with pytest.raises(
        CheckpointError, match=r"expected weights of π0 \(state_proj.* or of π0\.5 .*, found state_proj"
    ):
        infer_config(shapes, "", Stated(action_horizon=5), "x")


# -- where checkpoints are ----------------------------------------------------------------------------------------


def hub(fetch: Callable[..., str]) -> types.ModuleType:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = fetch  # type: ignore[attr-defined]
    return module


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(fetch))
    made = write_lerobot(tmp_path, "pi05")
    found = load("lerobot/pi05_libero_finetuned")
    same_weights(found.model, made)
    assert (found.folder, found.family.name) == (tmp_path, "pi05")
    assert asked[0][0] == "lerobot/pi05_libero_finetuned"
    assert not any("bin" in p or "pt" in p.split(".")[-1:] for p in asked[0][1]), "no pickle is fetched"


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(fetch))
    with pytest.raises(CheckpointError, match=r"'lerobot/pi05_base' is no folder here, and could not be .*: no route"):
        find("lerobot/pi05_base")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DependencyError, match=r"'lerobot/pi05_base' is no folder here; .*pip install 'vla_accel\["):
        find("lerobot/pi05_base")


@pytest.mark.parametrize("name", ["dmeo", "a/b/c", "/no/such/folder", ""])
def test_names_that_are_neither(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(CheckpointError, match=rf"expected a folder or one of demo, got '{name}'"):
        find(name)


def test_our_own_folder(tmp_path: Path) -> None:
    config = write_tiny_checkpoint(tmp_path, "pi0")
    checkpoint = load(tmp_path)
    model, processor = checkpoint.model, checkpoint.processor
    assert model.config == config and processor.preset == PRESETS["libero"]
    with pytest.raises(ConfigError, match="preset: 14 state or action dimensions do not fit a model of 8"):
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
