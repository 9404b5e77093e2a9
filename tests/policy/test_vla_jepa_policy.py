"""VLA-JEPA through the whole policy, against actions that lerobot's own code left
(tests/references/make_vla_jepa_reference.py), and the folders that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.vla_jepa_folders import REFERENCE, answers, given, noise, tensors, write
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.lerobot_settings import FIELDS, STEPS, releases
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.loading import load
from vla_accel.families.vla_jepa.network import vla_jepa
from vla_accel.families.vla_jepa.transforms import Gripper
from vla_accel.measure.parity import compare
from vla_accel.measure.random_policy import random_policy

PARTS = ("vision", "kv_cache", "denoise")
RESIZED = 1e-3
"""Largest difference, as a fraction of the range: lerobot resizes images to fractions of a level."""


def policy_of(folder: Path, engine: str = "eager", **settings: Any) -> OptimizedPolicy:
    config = PolicyConfig(device="cpu", **{"precision": "fp32", **settings})
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(dict.fromkeys(PARTS, EngineSpec(engine))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("vla_jepa"))


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "bare", "relative"])
def test_actions_are_lerobots(tmp_path: Path, variant: str, engine: str) -> None:
    policy, expected, three = policy_of(write(tmp_path, variant), engine), answers(variant), given(variant)
    assert {e["used"] for e in policy.ledger.as_list()} == {engine}
    seen = {k: v for k, v in three[0].items() if k != "observation.images.wrist"}
    found = {
        "alone": policy.infer(three[0], noise=noise()[0])["actions"],
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three, noise=noise())]),
        "missing": policy.infer(seen, noise=noise()[0])["actions"],
    }
    span = float(np.ptp(expected["batch"]))
    for case, actions in found.items():
        difference = np.abs(actions - expected[case]).max()
        assert difference <= (RESIZED * span if variant == "resized" else 1e-5), case
    assert np.abs(expected["missing"] - expected["alone"]).max() > 1e-2, "the second camera is seen"


def test_lower_precision_is_near(folder: Path) -> None:
    exact, low = policy_of(folder), policy_of(folder, "native", precision="bf16")
    report = compare(low, exact, given()[:2], name="vla_jepa")
    assert report.num_steps == 4 and 0.99 < report.actions.cosine < 1
    assert list(report.components) == ["image_tokens", "deepstack", "all_keys", "all_values"]


def test_placed_steps_are_another_flow(folder: Path) -> None:
    plain, placed = policy_of(folder), policy_of(folder, "native", schedule=(1.0, 0.6, 0.0))
    first, other = (p.infer(given()[0], noise=noise()[0])["actions"] for p in (plain, placed))
    assert placed.metadata["num_steps"] == 2 and np.abs(first - other).max() > 1e-3


def test_the_world_model_is_not_read(tmp_path: Path, folder: Path) -> None:
    stored = {**tensors(), "model.video_encoder.x": torch.ones(2), "model.video_predictor.y.weight": torch.ones(2)}
    policy = policy_of(write(tmp_path, stored=stored))
    want, found = (p.infer(given()[0], noise=noise()[0])["actions"] for p in (policy_of(folder), policy))
    np.testing.assert_array_equal(want, found)


def test_a_base_may_have_been_another_robots(tmp_path: Path, folder: Path) -> None:
    """A policy that was trained from a base keeps the base's features in config.json."""

    def features(files: dict[str, Any]) -> None:
        files["config.json"]["output_features"]["action"]["shape"] = [14]

    want, found = (
        p.infer(given()[0], noise=noise()[0])["actions"]
        for p in (policy_of(folder), policy_of(write(tmp_path, change=features)))
    )
    np.testing.assert_array_equal(want, found)


@pytest.mark.parametrize(("variant", "release"), [("plain", "0.6.1"), ("bare", "0.6.1"), ("relative", "main")])
def test_the_tables_have_what_each_release_saves(variant: str, release: str) -> None:
    files = REFERENCE["variants"][variant]["files"]
    known = {n for setting in FIELDS["vla_jepa"] if release in releases(setting) for n in setting.names}
    assert files["config.json"].keys() == known
    for one in (s for name in files if name.startswith("policy_") for s in files[name]["steps"]):
        assert one["config"].keys() <= {n for s in STEPS[one["registry_name"]] for n in s.names}, one


def test_a_previous_chunk_becomes_relative_to_the_new_state(tmp_path: Path) -> None:
    processor = load(write(tmp_path, "relative"), PolicyConfig()).processor
    first, second = map(processor.prepare, given("relative")[:2])
    actions = np.linspace(-1, 1, 49, dtype=np.float32).reshape(7, 7)
    actions[:, 5] = [0, 1] * 3 + [0]
    robot = processor.unnormalize_actions(actions, first)
    expected = processor.actions.restore(actions.astype(np.float64)) + first.raw_state[:7]
    assert processor.preset.delta_actions == (0, 1, 2, 3, 4, 6)
    np.testing.assert_allclose(np.delete(robot, 5, 1), np.delete(expected, 5, 1))
    np.testing.assert_array_equal(robot[:, 5], [1, -1] * 3 + [1])
    again = processor.unnormalize_actions(processor.normalize_actions(robot, second), second)
    np.testing.assert_allclose(np.delete(again, 5, 1), np.delete(robot, 5, 1), atol=1e-5)


def test_the_gripper_becomes_binary_after_the_state_is_added(tmp_path: Path) -> None:
    """lerobot's order of the steps, where the gripper is relative as well."""
    processor = load(write(tmp_path, "relative"), PolicyConfig()).processor
    assert processor.binarize is not None
    at = processor.binarize.dim
    whole = replace(processor, preset=replace(processor.preset, delta_actions=(*processor.preset.delta_actions, at)))
    inputs = whole.prepare(given("relative")[0])
    for moved, command in ((50.0, -1.0), (-50.0, 1.0)):
        state = inputs.raw_state.copy()
        state[at] = moved
        robot = whole.unnormalize_actions(np.zeros((2, whole.action_dim), np.float32), replace(inputs, raw_state=state))
        assert (robot[:, at] == command).all()


def test_a_preset_has_the_relative_actions_of_the_training(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    for variant, dims in (("plain", ()), ("relative", (0, 1, 2, 3, 4, 6))):
        folder = write(tmp_path / variant, variant)
        mine.write_text("base: libero\ndelta_actions: [2]\n")
        with pytest.raises(ConfigError, match=re.escape(f"preset.delta_actions: expected {[*dims]}")):
            load(folder, PolicyConfig(preset=str(mine)))
        mine.write_text("base: libero\n")
        assert load(folder, PolicyConfig(preset=str(mine))).processor.preset.delta_actions == dims


@pytest.mark.parametrize(
    ("enabled", "patches", "tokens"), [(True, (4, 3, 2, 2, 2), 1), (False, (4, 3, 2, 2, 2), 3), (True, None, 3)]
)
def test_the_video_encoder_sets_the_tokens_of_the_prompt(
    tmp_path: Path, enabled: bool, patches: tuple[int, ...] | None, tokens: int
) -> None:
    """lerobot reads the frames of a token from an encoder that it loads, else from config.json."""
    name = "model.video_encoder.encoder.embeddings.patch_embeddings.proj.weight"
    stored = tensors() if patches is None else {**tensors(), name: torch.ones(patches)}
    change = config(enable_world_model=enabled, jepa_tubelet_size=1, num_video_frames=4)
    processor = load(write(tmp_path, change=change, stored=stored), PolicyConfig()).processor
    assert processor.template.count("<|action_") == tokens * 2


def test_the_size_of_the_step_that_prepares_images_is_the_models(tmp_path: Path) -> None:
    def sizes(step: Any, model: Any) -> Callable[[dict[str, Any]], object]:
        def change(files: dict[str, Any]) -> None:
            files["config.json"]["resize_images_to"] = model
            files["policy_preprocessor.json"]["steps"][3]["config"]["resize_to"] = step

        return change

    for step in (None, [224, 224]):
        folder = write(tmp_path / str(step), "relative", sizes(step, [224, 224]))
        assert load(folder, PolicyConfig()).model.config.resize == (224, 224)
    for step, model in (([96, 96], [224, 224]), ([96, 96], None)):
        with pytest.raises(
            CheckpointError, match=r"image_prep: resize_to: expected config.json's resize_images_to .*got \[96, 96"
        ):
            load(write(tmp_path / "other", "relative", sizes(step, model)), PolicyConfig())


def test_the_saved_steps_gripper_is_used(tmp_path: Path) -> None:
    """lerobot 0.6.1 saves none: config.json must then have the one that lerobot loads."""
    processor = load(write(tmp_path / "main", "relative"), PolicyConfig()).processor
    assert processor.snap == processor.binarize == Gripper(5, 0.125) and not processor.clipped
    processor = load(write(tmp_path / "0.6.1"), PolicyConfig()).processor
    assert processor.snap == processor.binarize == Gripper(6, 0.5) and processor.clipped
    bare = load(write(tmp_path / "bare", "bare", config(gripper_dim=13, gripper_threshold=0.1)), PolicyConfig())
    assert bare.processor.snap is bare.processor.binarize is None


def config(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["config.json"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(chunk_size=0), "chunk_size: expected a whole number"),
        (config(resize_images_to=[224]), "resize_images_to: expected a height and a width"),
        (config(action_model_type="DiT-XL"), "action_model_type: expected DiT-B or DiT-L"),
        (config(num_embodied_action_tokens_per_instruction=7), "config says 7, weights say 6"),
        (config(prompt_template="Do {instruction}"), "expected {instruction} and {e_actions}"),
        (config(prompt_template="Do {what} {e_actions}"), "prompt_template: expected a template of lerobot's"),
        (config(new_setting=1), "expected settings of lerobot"),
        (config(gripper_dim=13), "gripper_dim: expected 6, which lerobot loads"),
        (config(gripper_threshold=0.1), "gripper_threshold: expected 0.5, which lerobot loads"),
        (config(use_relative_actions=True), "relative actions: expected one value in all files"),
        (
            lambda files: files["policy_preprocessor.json"]["steps"][3]["config"]["norm_map"].update(VISUAL="MEAN_STD"),
            "expected observation.images.front.mean",
        ),
    ],
    ids=[
        "chunk", "size", "kind", "condition", "no condition", "template", "setting", "gripper", "threshold", "relative",
        "visual",
    ],
)  # fmt: skip
def test_folders_of_other_networks_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy_of(write(tmp_path, change=change))
    assert message in str(caught.value)


def test_bad_input_is_one_error(folder: Path, tmp_path: Path) -> None:
    policy, good = policy_of(folder), given()[0]
    wide = {**good, "observation.images.wrist": np.zeros((256, 320, 3), np.uint8)}
    for changed, message in (
        ({**good, "task": " "}, "task: expected an instruction"),
        ({**good, "task": "open <|embodied_action|>"}, "task: expected no special tokens"),
        (wide, "expected images of one shape"),
    ):
        with pytest.raises(ObservationError) as caught:
            policy.infer(changed)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="rtc"):
        policy_of(folder, rtc={"execution_horizon": 3})
    names = [n for n in tensors() if "state_encoder" not in n]
    with pytest.raises(CheckpointError, match="state_encoder"):
        policy_of(write(tmp_path, stored={n: tensors()[n] for n in names}))


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """As counted apart from this code: 2.3 B parameters; 1.0 TFLOP and 0.21 GB a step at two views of 64 tokens."""
    card, sizes = bench_card(family_named("vla_jepa")), vla_jepa()
    transforms = card.dummy(sizes, 2)
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    work = card.work(sizes, inputs, 4, PolicyConfig().specs(PARTS))
    assert sum(w.flop for w in work.values()) / 1e12 == pytest.approx(1.02, abs=0.05)
    assert work["denoise"].bytes / 4 / 1e9 == pytest.approx(0.21, abs=0.02)
    parameters = sum(p.numel() for p in card.family.network_class.empty(sizes).parameters())
    assert parameters / 1e9 == pytest.approx(2.25, abs=0.1)


def test_a_random_policy_of_any_size(folder: Path) -> None:
    model = policy_of(folder).model
    policy, _ = random_policy("vla_jepa", PolicyConfig(device="cpu", num_steps=1), model=model)
    card = bench_card(policy.family)
    result = policy.infer(card.random_observation(policy.processor, np.random.default_rng(0)))
    assert result["actions"].shape == (7, 7) and np.isfinite(result["actions"]).all()


def test_the_kept_folders_have_lerobots_steps() -> None:
    names = [s["registry_name"] for s in REFERENCE["variants"]["plain"]["files"]["policy_postprocessor.json"]["steps"]]
    assert names[:2] == ["vla_jepa_clip_actions", "vla_jepa_pre_snap_gripper"]
