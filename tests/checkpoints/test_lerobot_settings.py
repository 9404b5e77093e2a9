"""Every setting of lerobot's folders is honoured, known to change nothing, or refused by name: config.json's fields and
those of the saved steps, as releases from 0.4.4 to the main branch save them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.lerobot_folders import KINDS, OBSERVATIONS, edit_statistics, made, state_of, write
from tests.support.lerobot_saved import (
    Change,
    configure,
    edit,
    relative,
    releases,
    saved_files,
    state_files,
    step,
    together,
)
from tests.support.tiny import tiny_observation
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.lerobot import relative_dims
from vla_accel.checkpoints.lerobot_settings import FIELDS, STEPS
from vla_accel.checkpoints.lerobot_settings import releases as releases_of
from vla_accel.config import RtcConfig, load_config
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import FAMILIES, family_named
from vla_accel.families.loading import load
from vla_accel.measure.systems import CheckpointFactory
from vla_accel.transforms.tokenizer import SmallTokenizer

FP32 = load_config("eager_fp32")


# -- the tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*FIELDS])
def test_a_field_is_in_the_table_once(kind: str) -> None:
    names = [name for setting in FIELDS[kind] for name in setting.names]
    assert len(names) == len(set(names))
    assert all(releases_of(setting) for setting in FIELDS[kind])
    assert {s.use for s in FIELDS[kind] if s.values} <= {"fixed"}


@pytest.mark.parametrize(("kind", "release"), [(k, r) for k in FIELDS if k != "groot" for r in releases(k)])
def test_the_table_has_the_fields_that_each_release_saves(kind: str, release: str) -> None:
    """Of the classes of `tests.references.make_lerobot_folders`, whose files lerobot's own code wrote."""
    known = {name for setting in FIELDS[kind] if release in releases_of(setting) for name in setting.names}
    saved = json.loads((Path(__file__).parents[1] / "support" / "lerobot_saved.json").read_text())[release][kind]
    assert saved["config"].keys() == known
    for pipeline in ("policy_preprocessor", "policy_postprocessor"):
        for one in saved[pipeline]["steps"]:
            name = one["registry_name"].replace("delta_actions", "relative_actions")
            assert one["config"].keys() <= {n for setting in STEPS[name] for n in setting.names}, name


@pytest.mark.skipif(importlib.util.find_spec("lerobot") is None, reason="NOT RUN: needs lerobot")
@pytest.mark.parametrize("kind", [*FIELDS])
def test_the_table_has_the_fields_of_the_lerobot_that_is_installed(kind: str) -> None:
    import importlib.metadata

    release = importlib.metadata.version("lerobot")
    module = importlib.import_module(f"lerobot.policies.{kind}.configuration_{kind}")
    (config,) = (c for n, c in vars(module).items() if n.lower() == f"{kind.replace('_', '')}config")
    known = {name for setting in FIELDS[kind] if release in releases_of(setting) for name in setting.names}
    assert {f.name for f in dataclasses.fields(config)} | {"type"} == known


@pytest.mark.parametrize("release", releases())
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_every_release_loads(kind: str, release: str, tmp_path: Path) -> None:
    checkpoint = made(tmp_path, kind, release=release)
    observation = OBSERVATIONS[kind]()
    inputs = checkpoint.processor.prepare(observation)
    assert len(inputs.images) == 2 and np.isfinite(inputs.state).all()
    assert checkpoint.processor.preset.delta_actions == ()


# -- denoising steps, trained chunking ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"), [("pi0", "num_inference_steps"), ("pi05", "num_inference_steps"), ("smolvla", "num_steps")]
)
def test_the_checkpoints_denoising_steps_are_the_default(kind: str, name: str, tmp_path: Path) -> None:
    actions = {}
    for steps in (10, 4):
        write(tmp_path / str(steps), kind, configure(**{name: steps}))
        policy = OptimizedPolicy.from_pretrained(tmp_path / str(steps), FP32)
        assert policy.num_steps == policy.metadata["num_steps"] == policy.latency_report()["steps"] == steps
        factory = CheckpointFactory(str(tmp_path / str(steps)), ["eager_fp32"], device="cpu", ceilings=None)
        assert factory.sweep == ((10, 3, 1) if steps == 10 else (4, 10, 3, 1)), "what bench times"
        noise = np.random.default_rng(0).normal(size=policy.action_shape)
        actions[steps] = policy.infer(OBSERVATIONS[kind](), noise=noise)["actions"]
        forced = OptimizedPolicy.from_pretrained(tmp_path / str(steps), FP32, num_steps=4)
        actions[f"forced {steps}"] = forced.infer(OBSERVATIONS[kind](), noise=noise)["actions"]
    assert np.abs(actions[10] - actions[4]).max() > 1e-4
    assert np.array_equal(actions[4], actions["forced 10"])
    assert np.array_equal(actions[4], actions["forced 4"])


def test_chunking_is_trained_where_the_checkpoint_is(tmp_path: Path) -> None:
    write(tmp_path, "pi05", configure(rtc_training_max_delay=2), release="main")
    policy = OptimizedPolicy.from_pretrained(tmp_path, FP32, num_steps=2)
    assert policy.config.rtc == RtcConfig(trained=True, max_delay=2)
    observation = OBSERVATIONS["pi05"]()
    chunk = policy.infer(observation)["actions"]
    pinned = policy.infer(observation, prev_chunk=chunk, inference_delay=2)["actions"]
    np.testing.assert_allclose(pinned[:2], chunk[:2], atol=1e-5)
    with pytest.raises(ObservationError, match=r"inference_delay: expected at most 2 actions"):
        policy.infer(observation, prev_chunk=chunk, inference_delay=3)


@pytest.mark.parametrize(
    ("trained", "configured", "expected"),
    [
        (3, RtcConfig(), RtcConfig(trained=True, max_delay=3)),
        (3, RtcConfig(trained=True), RtcConfig(trained=True, max_delay=3)),
        (3, RtcConfig(trained=True, max_delay=2), RtcConfig(trained=True, max_delay=2)),
        (3, RtcConfig(schedule="exp"), RtcConfig(schedule="exp")),
        (3, RtcConfig(trained=True, max_delay=4), "expected a max_delay of at most 3"),
        (0, RtcConfig(), RtcConfig()),
        (0, RtcConfig(trained=True), "expected guided chunking"),
        (None, RtcConfig(trained=True), RtcConfig(trained=True)),
    ],
)
def test_chunking_of_the_configuration_wins_or_contradicts(
    trained: int | None, configured: RtcConfig, expected: RtcConfig | str, tmp_path: Path
) -> None:
    family = family_named("pi05")
    sizes = dataclasses.replace(bench_card(family).published(), trained_delay=trained)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"rtc: {expected}"):
            family.chunking.resolve(sizes, configured)
    else:
        assert family.chunking.resolve(sizes, configured) == expected


@pytest.mark.parametrize("name", ["pi05", "smolvla"])
@pytest.mark.parametrize("settings", [{"execution_horizon": 11}, {"trained": True, "max_delay": 10}])
def test_chunking_beyond_the_chunk_is_refused(name: str, settings: dict[str, Any]) -> None:
    family = family_named(name)
    sizes = dataclasses.replace(bench_card(family).published(), action_horizon=10)
    name, value = [*settings.items()][-1]
    with pytest.raises(ConfigError, match=rf"rtc\.{name}: expected at most (10|9), .*got {value}"):
        family.chunking.resolve(sizes, RtcConfig(**settings))


@pytest.mark.parametrize("name", [*FAMILIES])
def test_every_family_keeps_what_the_configuration_says_of_chunking(name: str) -> None:
    family, said = family_named(name), RtcConfig(schedule="exp")
    assert family.chunking.resolve(bench_card(family).published(), said) == said


# -- relative actions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["0.5.1", "0.6.1", "main"])
@pytest.mark.parametrize("kind", ["pi0", "pi05", "pi0_fast"])
def test_relative_actions_are_added_to_the_raw_state(kind: str, release: str, tmp_path: Path) -> None:
    """0.5.1 calls the step delta_actions_processor."""
    plain = made(tmp_path / "plain", kind, release=release).processor
    count = plain.preset.action_dim
    names = [f"joint_{i}.pos" for i in range(count - 1)] + ["Gripper.pos"]
    change = relative(exclude_joints=["gripper"], action_names=names)
    processor = made(tmp_path / "relative", kind, change, release=release).processor
    observation = OBSERVATIONS[kind]()
    state = state_of(observation)
    actions = np.random.default_rng(0).normal(size=(5, processor.action_dim)).astype(np.float32)
    inputs = processor.prepare(observation)
    expected = plain.unnormalize_actions(actions, plain.prepare(observation))
    expected[:, : count - 1] += state[: count - 1]
    found = processor.unnormalize_actions(actions, inputs)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(processor.normalize_actions(found, inputs)[:, :count], actions[:, :count], atol=1e-5)
    assert np.array_equal(inputs.state, plain.prepare(observation).state), "the state itself is no other"


def test_relative_actions_make_targets_of_motion(tmp_path: Path) -> None:
    """Holding still with zeros would move a robot whose actions are targets."""
    assert made(tmp_path / "plain", "pi05").processor.preset.motion_dims == (0, 1, 2, 3, 4, 5)
    assert made(tmp_path / "relative", "pi05", relative()).processor.preset.motion_dims is None
    assert load(tmp_path / "relative", PolicyConfig(preset="libero")).processor.preset.motion_dims is None


def test_a_previous_chunk_is_anchored_at_the_new_state(tmp_path: Path) -> None:
    processor = made(tmp_path, "pi05", relative()).processor
    first, second = tiny_observation(), tiny_observation()
    second["observation/state"] = first["observation/state"] + 0.25
    actions = np.zeros((3, processor.action_dim), np.float32)
    targets = processor.unnormalize_actions(actions, processor.prepare(first))
    again = processor.normalize_actions(targets, processor.prepare(second))
    np.testing.assert_allclose(processor.unnormalize_actions(again, processor.prepare(second)), targets, atol=1e-5)
    assert np.abs(again - actions).max() > 1e-2


def test_relative_actions_of_smolvla(tmp_path: Path) -> None:
    """lerobot's class has no field for them, but its pipelines run the steps."""

    def insert(files: dict[str, Any]) -> None:
        steps = files["policy_preprocessor"]["steps"]
        at = next(i for i, s in enumerate(steps) if s["registry_name"] == "normalizer_processor")
        steps.insert(at, {"registry_name": "relative_actions_processor", "config": {"enabled": True}})
        absolute = {"registry_name": "absolute_actions_processor", "config": {"enabled": True}}
        files["policy_postprocessor"]["steps"].insert(1, absolute)

    assert made(tmp_path, "smolvla", insert).processor.preset.delta_actions == tuple(range(6))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0, 1, 2, 3)),
        ({"exclude_joints": ["gripper"], "action_names": None}, (0, 1, 2, 3)),
        ({"exclude_joints": [], "action_names": ["a", "b", "c", "gripper"]}, (0, 1, 2, 3)),
        ({"exclude_joints": ["GRIP", "pan"], "action_names": ["pan.pos", "b", "left_Gripper"]}, (1, 3)),
        ({"exclude_joints": ["", None, "b"], "action_names": ["a", "b", "c", "d", "b"]}, (0, 2, 3)),
    ],
)
def test_names_exclude_actions_as_lerobot_does(settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert relative_dims(settings, (6, 4), Path("x")) == expected
    with pytest.raises(CheckpointError, match="expected a state of at least the actions' 4 numbers, got 3"):
        relative_dims(settings, (3, 4), Path("x"))


def test_a_preset_keeps_the_relative_actions_of_the_training(tmp_path: Path) -> None:
    write(tmp_path / "c", "pi05", relative(exclude_joints=["grip"], action_names=[*"abcdef", "grip"]))
    assert load(tmp_path / "c", PolicyConfig(preset="libero")).processor.preset.delta_actions == (0, 1, 2, 3, 4, 5)
    assert load(tmp_path / "c", PolicyConfig(preset="pi0_libero")).processor.preset.delta_actions == (0, 1, 2, 3, 4, 5)
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: libero\ndelta_actions: [0, 1]\n")
    with pytest.raises(ConfigError, match=r"preset\.delta_actions: expected \[0, 1, 2, 3, 4, 5\], .* got \[0, 1\]"):
        load(tmp_path / "c", PolicyConfig(preset=str(mine)))


# -- the steps' settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda files: step(files, "normalizer_processor")["config"]["features"].pop("observation.state"),
        lambda files: step(files, "normalizer_processor")["config"]["features"]["observation.state"].update(type="ENV"),
        edit("normalizer_processor", features={}),
        edit("normalizer_processor", normalize_observation_keys=["observation.images.front"]),
        edit("normalizer_processor", norm_map={"ACTION": "MEAN_STD"}),
        edit("normalizer_processor", norm_map={}),
    ],
    ids=["not a feature", "another kind", "no features", "not among the keys", "no mode", "no modes"],
)
def test_a_state_that_lerobot_leaves_raw_stays_raw(kind: str, change: Change, tmp_path: Path) -> None:
    plain, processor = made(tmp_path / "plain", kind).processor, made(tmp_path / "raw", kind, change).processor
    observation = OBSERVATIONS[kind]()
    state = state_of(observation)
    found = processor.prepare(observation).state[: len(state)]
    size = min(len(found), len(state))
    np.testing.assert_allclose(found[:size], np.asarray(state, np.float32)[:size], atol=0)
    assert np.abs(plain.prepare(observation).state[:size] - found[:size]).max() > 1e-2
    actions = np.ones((2, processor.action_dim), np.float32)
    inputs = processor.prepare(observation)
    assert np.array_equal(processor.unnormalize_actions(actions, inputs), plain.unnormalize_actions(actions, inputs)), (
        "the actions are scaled"
    )


def test_quantiles_of_ten_percent(tmp_path: Path) -> None:
    modes = {"VISUAL": "IDENTITY", "STATE": "QUANTILE10", "ACTION": "QUANTILE10"}
    steps = "normalizer_processor", "unnormalizer_processor"
    write(tmp_path, "pi0", together(*(edit(name, norm_map=modes) for name in steps)))
    table = load_file(tmp_path / state_files(saved_files(tmp_path))[0])
    for key in ("observation.state", "action"):
        table |= {f"{key}.q10": 0.5 * table[f"{key}.q01"], f"{key}.q90": 0.5 * table[f"{key}.q99"]}
    edit_statistics(tmp_path, table)
    processor = load(tmp_path).processor
    inputs = processor.prepare(tiny_observation())
    low, high = table["observation.state.q10"].double().numpy(), table["observation.state.q90"].double().numpy()
    state = np.float32(state_of(tiny_observation()))
    np.testing.assert_allclose(inputs.state[:8], 2 * (state - low) / (high - low) - 1, atol=1e-5)
    low, high = table["action.q10"].double().numpy(), table["action.q90"].double().numpy()
    actions = np.full((2, processor.action_dim), 0.5, np.float32)
    np.testing.assert_allclose(
        processor.unnormalize_actions(actions, inputs)[0], 1.5 / 2 * (high - low) + low, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["pi05", "pi0_fast", "smolvla"])
def test_the_tokenizer_saved_with_the_pipeline_is_read(kind: str, tmp_path: Path) -> None:
    """As lerobot's main branch saves it: a folder, by its relative name."""
    write(tmp_path, kind, release="main")
    assert step(saved_files(tmp_path), "tokenizer_processor")["artifacts"] == {"tokenizer_name": "tokenizer"}
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer" / "tokenizer.json")
    assert len(load(tmp_path).processor.prepare(OBSERVATIONS[kind]()).tokens) > 3
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "tokenizer").rmdir()
    with pytest.raises(CheckpointError, match="expected the tokenizer in the folder 'tokenizer' next to it"):
        load(tmp_path)
    (tmp_path / "other").mkdir()

    def outside(files: dict[str, Any]) -> None:
        step(files, "tokenizer_processor")["artifacts"] = {"tokenizer_name": "../other"}

    with pytest.raises(CheckpointError, match=r"artifacts: expected a folder next to it, got '\.\./other'"):
        made(tmp_path / "policy", kind, outside, release="main")


def test_the_action_tokenizer_saved_with_the_pipeline_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lerobot's main branch saves π0-FAST's. The checkpoint's own folder comes first, and what a step names without
    having saved it does not count: lerobot decodes with the tokenizer that config.json names."""
    named: list[str] = []

    def from_hub(name: str, *_: Any) -> Path:
        named.append(name)
        return tmp_path / "elsewhere"

    monkeypatch.setattr("vla_accel.families.pi0_fast.transforms.files_from_hub", from_hub)
    write(tmp_path, "pi0_fast", release="main")
    saved = step(saved_files(tmp_path), "action_tokenizer_processor")
    assert saved["artifacts"] == {"action_tokenizer_name": "action_tokenizer"}
    shutil.copytree(tmp_path / "action_tokenizer", tmp_path / "fast")
    content = json.loads((tmp_path / "fast" / "processor_config.json").read_text())
    (tmp_path / "fast" / "processor_config.json").write_text(json.dumps({**content, "scale": 7}))
    assert load(tmp_path).processor.detokeniser.fast.scale == 7
    (tmp_path / "fast").rename(tmp_path / "elsewhere")
    assert load(tmp_path).processor.detokeniser.fast.scale == content["scale"] != 7
    (tmp_path / "action_tokenizer").rename(tmp_path / "gone")
    assert load(tmp_path).processor.detokeniser.fast.scale == 7
    config = json.loads((tmp_path / "config.json").read_text())["action_tokenizer_name"]

    def other(files: dict[str, Any]) -> None:
        one = step(files, "action_tokenizer_processor")
        one["config"]["action_tokenizer_name"] = "another/fast"
        del one["artifacts"]

    made(tmp_path / "other", "pi0_fast", other, release="main")
    assert named == [config, config]


@pytest.mark.parametrize(
    ("name", "artifacts"),
    [
        ("tokenizer_processor", ["tokenizer"]), ("tokenizer_processor", {"max_length": "tokenizer"}),
        ("normalizer_processor", {"tokenizer_name": "tokenizer"}), ("tokenizer_processor", {"tokenizer_name": 1}),
    ],
)  # fmt: skip
def test_other_artifacts_of_a_pipeline_are_refused(name: str, artifacts: Any, tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        step(files, name)["artifacts"] = artifacts

    with pytest.raises(CheckpointError, match=f"{name}: artifacts: expected "):
        made(tmp_path, "pi0_fast", change, release="main")


def test_the_tokenizer_that_the_pipeline_names_is_read(tmp_path: Path) -> None:
    """π0.5's may be a folder, too."""
    mine = tmp_path / "mine"
    mine.mkdir()
    write(tmp_path / "policy", "pi05", edit("tokenizer_processor", tokenizer_name=str(mine)))
    (tmp_path / "policy" / "tokenizer.json").rename(mine / "tokenizer.json")
    assert isinstance(load(tmp_path / "policy").processor.tokenizer, SmallTokenizer)
