"""X-VLA through the whole policy, against actions that lerobot's own code left (releases 0.5.1 and 0.6.1;
tests/references/make_xvla_reference.py), and the folders that are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.xvla_folders import (
    VARIANTS,
    answers,
    domain_tables,
    given,
    noise,
    reference,
    tensors,
    write,
    write_original,
)
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.loading import load
from vla_accel.families.xvla.network import xvla
from vla_accel.families.xvla.transforms import axis_angles
from vla_accel.kernels.attention import choice
from vla_accel.kernels.autotune import Fastest
from vla_accel.measure.parity import compare
from vla_accel.measure.random_policy import random_policy
from vla_accel.nn import native_davit
from vla_accel.transforms.robots import XVLA_LIBERO

PARTS = ("vision", "kv_cache", "denoise")
ENGINES = ("eager", "native")
CAMERAS = ("observation.images.front", "observation.images.wrist")


def policy_of(folder: Path, engine: str = "eager", **settings: Any) -> OptimizedPolicy:
    config = PolicyConfig(device="cpu", **{"precision": "fp32", **settings})
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(dict.fromkeys(PARTS, EngineSpec(engine))))  # type: ignore[arg-type]


def actions_of(policy: OptimizedPolicy, observation: dict[str, Any], row: int = 0) -> np.ndarray:
    return policy.infer(observation, noise=noise(policy.action_shape[1])[row])["actions"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("xvla"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("release", "variant"), VARIANTS)
def test_actions_are_lerobots(tmp_path: Path, release: str, variant: str, engine: str) -> None:
    policy = policy_of(write(tmp_path, variant, release=release), engine)
    expected, three = answers(variant, release), given(variant, release)
    assert {e["used"] for e in policy.ledger.as_list()} == {engine}
    rest = {k: v for k, v in three[0].items() if k != next(iter(three[0]))}
    batch = policy.infer_batch(three, noise=noise(policy.action_shape[1]))
    found = {
        "alone": actions_of(policy, three[0]), "missing": actions_of(policy, rest),
        "batch": np.stack([one["actions"] for one in batch]),
    }  # fmt: skip
    for case, actions in found.items():
        np.testing.assert_allclose(actions, expected[case], atol=2e-5, err_msg=case)
    assert np.abs(expected["missing"] - expected["alone"]).max() > 0.1, "the first camera is seen"


def test_the_projects_own_folder_is_read(tmp_path: Path) -> None:
    """The same weights under lerobot's names, with images that need no resizing."""
    robot = tmp_path / "robot.yaml"
    robot.write_text(
        f"images: [{', '.join(CAMERAS)}]\nstate: [observation.state]\nstate_dim: 20\naction_dim: 20\nprompt: task\n"
        f"optional_images: [{', '.join(CAMERAS)}]\n"
    )
    original = write_original(tmp_path / "original")
    with pytest.raises(ConfigError, match=r"checkpoint\.domain"):
        policy_of(original, preset=str(robot))
    theirs = policy_of(write(tmp_path / "lerobot", release="0.5.1"))
    ours = policy_of(original, preset=str(robot), num_steps=4, checkpoint={"domain": 2, "max_token_len": 12})
    square = {**given()[0], **{key: np.resize(image, (64, 64, 3)) for key, image in images().items()}}
    np.testing.assert_array_equal(actions_of(ours, square), actions_of(theirs, square))
    with pytest.raises(ObservationError, match="another filter"):
        ours.infer(given()[0])


def images() -> dict[str, np.ndarray]:
    return {key: given()[0][key] for key in CAMERAS}


def test_other_domains_are_other_policies(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = actions_of(policy_of(folder), given()[0])
    with caplog.at_level(logging.WARNING):
        other = policy_of(folder, checkpoint={"domain": 3})
    assert "checkpoint.domain: 3 instead of the checkpoint's own 2" in caplog.text
    assert np.abs(actions_of(other, given()[0]) - own).max() > 0.1
    # Only its rows of the tables matter.
    stored = tensors()
    for name in domain_tables(stored):
        stored[name][[0, 1, 3]] = torch.nan
    np.testing.assert_array_equal(actions_of(policy_of(write(tmp_path, stored=stored)), given()[0]), own)
    with pytest.raises(CheckpointError, match="domain: expected 0 to 3, got 4"):
        policy_of(folder, checkpoint={"domain": 4})


def test_poses_become_axis_angles_for_a_robot_that_takes_them(folder: Path) -> None:
    robot = policy_of(folder, preset="xvla_libero")
    observation = {
        "observation/image": images()[CAMERAS[0]], "observation/wrist_image": images()[CAMERAS[1]],
        "observation/state": given()[0]["observation.state"], "prompt": given()[0]["task"],
    }  # fmt: skip
    raw, found = actions_of(policy_of(folder), given()[0]), actions_of(robot, observation)
    assert found.shape == (8, 7) and robot.processor.preset.motion_dims == ()
    np.testing.assert_allclose(found[:, :3], raw[:, :3], atol=1e-6)
    np.testing.assert_allclose(found[:, 3:6], axis_angles(raw[:, 3:9]), atol=1e-5)
    np.testing.assert_array_equal(found[:, 6], np.where(raw[:, 9] > 0.5, 1, -1))
    other = bench_card(family_named("pi05"))
    with pytest.raises(ConfigError, match="pose"):
        replace(other.dummy(other.published(), 2), preset=XVLA_LIBERO)


def test_a_robot_with_other_actions_than_the_mode_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"preset libero: expected 20 numbers of an action of ee6d, got 7; .*xvla_libe"
    ):
        policy_of(folder, preset="libero")
    short = tmp_path / "short.yaml"
    short.write_text("base: xvla_libero\nstate_dim: 8\n")
    with pytest.raises(ConfigError, match=r"a state of at least 10 numbers .*, got ee6d and 8"):
        policy_of(folder, preset=str(short))
    with pytest.raises(ConfigError, match=r"expected actions of ee6d .* got joint and 20"):
        policy_of(write(tmp_path / "joint", "joint"), preset="xvla_libero", checkpoint={"domain": 0})


def test_only_liberos_preset_implies_its_domain(tmp_path: Path) -> None:
    original = write_original(tmp_path / "original")
    assert policy_of(original, preset="xvla_libero", checkpoint={"max_token_len": 12}).processor.preset == XVLA_LIBERO
    other = tmp_path / "other.yaml"
    other.write_text("base: xvla_libero\nprompt: task\n")
    with pytest.raises(ConfigError, match=r"checkpoint\.domain: expected the number"):
        policy_of(original, preset=str(other))


def test_a_libero_folder_with_poses_reads_liberos_state(tmp_path: Path) -> None:
    """lerobot's environment makes 20 numbers of it, whatever the features in config.json say."""

    def features(files: dict[str, Any]) -> None:
        config = files["config.json"]
        config["input_features"]["observation.state"]["shape"] = [8]
        config["output_features"]["action"]["shape"] = [7]

    folder = write(tmp_path, "libero", features)
    for file in folder.glob("*normalizer*"):
        save_file({name: value[: 8 if "state" in name else 7] for name, value in load_file(file).items()}, file)
    assert policy_of(folder).processor.preset == XVLA_LIBERO


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"new_setting": 1}, "new_setting 1"),
        ("config.json", {"action_mode": "auto"}, "expected 10 numbers of an action of auto, got 20"),
        ("config.json", {"action_mode": "auto", "max_action_dim": 14}, "action_mode: config says 14, weights say 20"),
        ("config.json", {"use_proprio": False}, "use_proprio"),
        ("preprocessor_config.json", {"image_mean": [0.5, 0.5, 0.5]}, "image_mean"),
    ],
)  # fmt: skip
def test_unknown_settings_of_the_projects_own_folder_are_refused(
    tmp_path: Path, file: str, fields: dict[str, Any], message: str
) -> None:
    path = write_original(tmp_path / "original") / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    robot = tmp_path / "robot.yaml"
    robot.write_text("base: xvla_libero\naction_dim: 20\npose: model\n")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        policy_of(path.parent, preset=str(robot), checkpoint={"max_token_len": 12, "domain": 0})


def test_axis_angles_of_columns_of_any_length() -> None:
    rng = np.random.default_rng(0)
    turns = rng.standard_normal((50, 3))
    turns *= (np.r_[0.0, 1e-5, np.pi - 1e-3, rng.uniform(0, np.pi, 47)] / np.linalg.norm(turns, axis=1))[:, None]
    cross = np.cross(np.eye(3), turns[:, None])
    matrices = torch.linalg.matrix_exp(torch.from_numpy(cross)).numpy()
    columns = np.concatenate((3.0 * matrices[:, :, 0], 0.5 * matrices[:, :, 1] + matrices[:, :, 0]), 1)
    np.testing.assert_allclose(axis_angles(columns), turns, atol=1e-5)


def test_placed_steps_are_other_times(folder: Path) -> None:
    plain, placed = policy_of(folder), policy_of(folder, schedule=(1.0, 0.6, 0.0))
    same = policy_of(folder, schedule=(1.0, 0.75, 0.5, 0.25, 0.0))
    first, other, again = (actions_of(policy, given()[0]) for policy in (plain, placed, same))
    assert placed.metadata["num_steps"] == 2 and np.abs(first - other).max() > 1e-3
    np.testing.assert_allclose(again, first, atol=1e-5)
    with pytest.raises(ConfigError, match="warm_start: expected none"):
        policy_of(folder, warm_start=0.5)


def config(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["config.json"].update(changes)


def step(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["policy_preprocessor.json"]["steps"][index]["config"].update(changes)


def florence(part: str, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["config.json"]["florence_config"][part].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(action_mode="joint_velocity"), "action_mode: expected ee6d"),
        (config(action_mode="joint"), "action_mode: config says 14, weights say 20"),
        (config(max_state_dim=32), "max_state_dim: config says 32, weights say 20"),
        (config(use_proprio=False), "use_proprio: expected true"),
        (config(domain_feature_key="robot"), "domain_feature_key: expected null"),
        (config(pad_language_to="longest"), "pad_language_to"),
        (config(num_heads=5), "heads"),
        (config(num_denoising_steps="10"), "num_denoising_steps"),
        (config(resize_imgs_with_padding=64), "resize_imgs_with_padding: expected a height and a width"),
        (config(empty_cameras="1"), "empty_cameras: expected a whole number"),
        (config(dim_time=200), "dim_time: expected at most 27"),
        (config(resize_imgs_with_padding=[64]), "resize_imgs_with_padding: expected a height and a width"),
        (config(num_image_views=9), "rows"),
        (config(use_hetero_proj=True), "vlm_proj.fc.weight"),
        (config(use_hetero_proj="False"), "use_hetero_proj"),
        (config(new_setting=1), "expected settings of lerobot"),
        (florence("vision_config", patch_stride=[4, 2]), "patch_stride: expected one for each of 3 stages"),
        (florence("vision_config", num_heads=[3, 2, 3]), "davit: expected heads"),
        (florence("vision_config", image_feature_source=["last_frame"]), "image_feature_source"),
        (florence("text_config", scale_embedding=True), "scale_embedding"),
        (florence("text_config", activation_function="relu"), "activation_function"),
        (lambda files: files["config.json"]["output_features"]["action"].update(shape=[7]), "preset: xvla_libero"),
        (lambda files: files["policy_preprocessor.json"]["steps"].insert(4, files["policy_preprocessor.json"]["steps"][4]), "expected one xvla_imagenet_normalize step"),  # noqa: E501
        (step(2, padding="longest"), "padding: expected max_length"),
        (step(3, image_keys=["observation.images.front"]), "image_keys: expected null"),
        (step(5, domain_id=-1), "domain_id of 0 or more"),
    ],
)  # fmt: skip
def test_folders_of_other_networks_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        policy_of(write(tmp_path, change=change))
    assert message in str(caught.value)


def test_a_base_may_have_been_another_robots(tmp_path: Path, folder: Path) -> None:
    """A policy that was trained from a base keeps the base's features in config.json, not in its statistics."""

    def features(files: dict[str, Any]) -> None:
        files["config.json"]["input_features"]["observation.state"]["shape"] = [7]

    want, found = (actions_of(policy_of(f), given()[0]) for f in (folder, write(tmp_path, change=features)))
    np.testing.assert_array_equal(want, found)


def test_images_are_normalised_as_imagenets_alone(tmp_path: Path) -> None:
    mapping = {"VISUAL": "MEAN_STD", "STATE": "IDENTITY", "ACTION": "IDENTITY"}
    folder = write(tmp_path, change=step(7, norm_map=mapping))
    (file,) = folder.glob("*_normalizer_*")
    save_file(
        {**load_file(file), **{f"{CAMERAS[0]}.{n}": np.full((3, 1, 1), 0.5, np.float32) for n in ("mean", "std")}}, file
    )
    with pytest.raises(CheckpointError, match="expected IDENTITY for VISUAL"):
        policy_of(folder)


def test_bad_input_is_one_error(folder: Path, tmp_path: Path) -> None:
    policy, good = policy_of(folder), given()[0]
    for changed, message in (
        ({**good, "task": " "}, "task: expected an instruction"),
        ({**good, "task": "pick " * 12}, "task: expected at most 12 tokens"),
        ({**good, CAMERAS[0]: np.zeros((4, 900, 3), np.uint8)}, f"{CAMERAS[0]}: expected a shape that can be resized"),
        ({**good, "observation.state": np.zeros(21)}, "observation.state: expected shape (20,)"),
    ):
        with pytest.raises(ObservationError) as caught:
            policy.infer(changed)
        assert message in str(caught.value)
    free = policy_of(write(tmp_path, "libero"))
    unlike = {**given("libero")[0], "observation.images.image": np.zeros((64, 80, 3), np.uint8)}
    large = {k: np.zeros((256, 256, 3), np.uint8) if "image" in k else v for k, v in given("libero")[0].items()}
    for changed, message in ((unlike, "expected images of one shape"), (large, "expected maps of up to 8 a side")):
        with pytest.raises(ObservationError) as caught:
            free.infer(changed)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="rtc"):
        policy_of(folder, rtc={"execution_horizon": 3})


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """As counted apart from this code: 0.88 B parameters, of which 30 domains have 35 M; 2.0 TFLOP at two views."""
    card, sizes = bench_card(family_named("xvla")), xvla()
    transforms = card.dummy(sizes, 2)
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    work = card.work(sizes, inputs, 10, PolicyConfig().specs(PARTS))
    assert sum(w.flop for w in work.values()) / 1e12 == pytest.approx(1.95, abs=0.1)
    assert work["denoise"].bytes / 10 / 1e9 == pytest.approx(0.6, abs=0.05)
    parameters = sum(p.numel() for p in card.family.network_class.empty(sizes).parameters())
    assert parameters / 1e9 == pytest.approx(0.87, abs=0.01)


@pytest.mark.parametrize("low", ["bf16", "fp8", "int8"])
def test_lower_precision_is_near(folder: Path, low: str) -> None:
    exact = policy_of(folder)
    spec = EngineSpec("native", precision="auto" if low == "bf16" else low)  # type: ignore[arg-type]
    config = PolicyConfig(device="cpu", precision="bf16").with_specs(
        {**dict.fromkeys(PARTS, EngineSpec("native")), "denoise": spec}
    )
    checkpoint = load(folder, config)
    prepared = [exact.processor.prepare(observation) for observation in given()]
    scales = bench_card(exact.family).calibrate(exact.model, prepared[:1], "a test")
    assert len(scales.amax) == 4 * exact.model.config.depth and scales.why_not(exact.model) is None
    policy = OptimizedPolicy(replace(checkpoint, calibrated=scales), config)
    report = compare(policy, exact, given()[:2], name="xvla")
    assert 0.98 < report.actions.cosine < 1
    assert list(report.components) == ["image_tokens", "context"]


def test_scales_are_of_the_inputs_that_engines_quantise(folder: Path) -> None:
    """The norm before a product is folded into it, so that its input is a normed row."""
    policy = policy_of(folder)
    amax = bench_card(policy.family).calibrate(policy.model, [policy.processor.prepare(given()[0])], "a test").amax
    width = policy.model.config.width
    assert all(1.0 < amax[f"layers.{i}.{part}"] < width**0.5 for i in range(3) for part in ("qkv_proj", "fc1"))


@pytest.mark.parametrize("found", ["own", "sdpa"])
def test_the_measured_attention_is_what_vision_calls(found: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The own way is the kernel for windows; another backend's includes the copies into windows and back."""
    calls: list[str] = []
    stages: list[list[str]] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(native_davit, name)
        return lambda *args: calls.append(name) or real(*args)

    def measured(candidates: Any, runtime: Any, repeats: int) -> Fastest:
        for name, call in candidates.items():
            calls.clear()
            call()
            if calls:
                stages.append([name, *calls])
        return Fastest(found, {name: 1e-3 for name in candidates})

    for name in ("window_attention", "windowed", "unwindowed"):
        monkeypatch.setattr(native_davit, name, counted(name))
    monkeypatch.setattr(choice, "fastest", measured)
    spec = EngineSpec("native", attention="fastest")
    policy = OptimizedPolicy.from_pretrained(
        folder, PolicyConfig(device="cpu", precision="fp32").with_specs({"vision": spec})
    )
    observation = given()[0]
    got, want = actions_of(policy, observation), actions_of(policy_of(folder, "native"), observation)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert stages[:2] == [["own", "window_attention"], ["sdpa", "windowed", "unwindowed"]]
    assert f"attention {found}, the fastest" in policy.ledger.entries["vision"].detail


@pytest.mark.parametrize("attention", ["sdpa", "fastest"])
def test_vision_attends_as_requested(folder: Path, attention: str) -> None:
    """A library's attention reads windows that are gathered for it."""
    spec = EngineSpec("native", attention=attention)  # type: ignore[arg-type]
    config = PolicyConfig(device="cpu", precision="fp32").with_specs(dict.fromkeys(PARTS, spec))
    policy = OptimizedPolicy.from_pretrained(folder, config)
    assert f"attention {attention}" in policy.ledger.entries["vision"].detail or attention == "fastest"
    want = actions_of(policy_of(folder, "native"), given()[0])
    np.testing.assert_allclose(actions_of(policy, given()[0]), want, atol=1e-5)


def test_a_random_policy_of_any_size(folder: Path) -> None:
    policy, _ = random_policy("xvla", PolicyConfig(device="cpu", num_steps=1), model=policy_of(folder).model)
    card = bench_card(policy.family)
    result = policy.infer(card.random_observation(policy.processor, np.random.default_rng(0)))
    assert result["actions"].shape == (8, 7) and np.isfinite(result["actions"]).all()


def test_the_kept_folders_have_lerobots_steps() -> None:
    steps = reference()["variants"]["plain"]["files"]["policy_preprocessor.json"]["steps"]
    assert [s["registry_name"] for s in steps][3:6] == [
        "xvla_image_to_float", "xvla_imagenet_normalize", "xvla_add_domain_id"
    ]  # fmt: skip
