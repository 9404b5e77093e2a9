"""Multi-task DiT as a policy: both engines and objectives, prompts, steps, and what is refused of lerobot's folders."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.lerobot_saved import configure, edit
from tests.support.tiny_multi_task_dit import CAMERAS, TASKS, observation, tiny_model, tokenizer_content, write_lerobot
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.component import Component
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ObservationError
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler, Step
from vla_accel.families.loading import load
from vla_accel.families.multi_task_dit.family import MULTI_TASK_DIT
from vla_accel.measure.flow import exact_policy
from vla_accel.nn.clip import ClipVisionConfig

EAGER: dict[str, Any] = {"precision": "fp32", "strict": True, "vision": "eager", "kv_cache": "eager",
                         "denoise": "eager"}  # fmt: skip
NATIVE = {**EAGER, "vision": "native", "kv_cache": "native", "denoise": "native"}
BF16 = {**NATIVE, "precision": "bf16"}
FLOW = {"objective": "flow_matching"}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddpm": ({}, {}),
    "flow": (FLOW, {"scheduler": None}),
    "ddim": (
        {"noise_scheduler_type": "DDIM", "use_rope": False, "use_positional_encoding": True, "n_obs_steps": 3,
         "use_separate_rgb_encoder_per_camera": True, "image_resize_shape": [17, 23], "prediction_type": "sample"},
        {"scheduler": NoiseScheduler("DDIM", prediction="sample"), "rope_base": None, "positions": True, "history": 3,
         "shared_encoder": False, "resize": (17, 23)},
    ),
    "base": ({"rope_base": 50.0, **FLOW}, {"rope_base": 50.0, "scheduler": None}),
}  # fmt: skip
"""By name, fields of config.json and of the network's sizes."""


def policy_of(folder: Path, settings: dict[str, Any] = EAGER, variant: str = "ddpm", **changes: Any) -> OptimizedPolicy:
    fields, sizes = VARIANTS[variant]
    write_lerobot(folder, configure(**fields), **sizes)
    return OptimizedPolicy.from_pretrained(folder, {**settings, **changes}, device="cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OptimizedPolicy:
    return policy_of(tmp_path_factory.mktemp("flow"), variant="flow")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_native_engine_agrees_with_eager(variant: str, tmp_path: Path) -> None:
    eager = policy_of(tmp_path, variant=variant)
    native = OptimizedPolicy.from_pretrained(tmp_path, NATIVE, device="cpu")
    drawn = np.random.default_rng(1).standard_normal((3, *eager.noise_shape))
    given = [observation(seed, eager.metadata["history"]) for seed in range(3)]
    want, got = (
        np.stack([r["actions"] for r in one.infer_batch(given, noise=drawn)]) for one in (eager, native)
    )  # fmt: skip
    assert want.shape == (3, 9 - eager.metadata["history"], 5)
    np.testing.assert_allclose(got, want, atol=5e-5)
    np.testing.assert_allclose(native.infer(given[2], noise=drawn[2])["actions"], want[2], atol=5e-5)
    assert {e["used"] for e in native.metadata["engines"]} == {"native"}


@pytest.mark.parametrize("settings", [EAGER, NATIVE], ids=["eager", "native"])
def test_an_instruction_is_encoded_when_it_changes(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, fresh = policy_of(tmp_path, settings), OptimizedPolicy.from_pretrained(tmp_path, settings, device="cpu")
    runs, engine = [], policy.pipelines.newest.engine("kv_cache")
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda: (runs.append(1), run()))
    noise = np.random.default_rng(1).standard_normal(policy.noise_shape)
    counts = []
    for seed, task in enumerate(TASKS[index] for index in (1, 1, 2, 1, 1)):
        given = {**observation(seed, 2), "task": task}
        fresh.pipelines.newest._known = None
        want = fresh.infer(given, noise=noise)["actions"]
        np.testing.assert_array_equal(policy.infer(given, noise=noise)["actions"], want)
        counts.append(len(runs))
    assert counts == [1, 1, 2, 3, 3]
    # What a call left that failed half-way is not used.
    last = policy.pipelines.newest.engines[-1][1]
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="lost"):
        broken.setattr(last, "run", lambda: (_ for _ in ()).throw(RuntimeError("lost")))
        policy.infer(given, noise=noise)
    np.testing.assert_array_equal(policy.infer(given, noise=noise)["actions"], want)
    assert len(runs) == 4


@pytest.mark.parametrize(
    ("order", "name", "message"),
    [
        (("vision", "kv_cache", "denoise"), "vision", ".* the second of at least three, got component 1 of 3"),
        (("vision", "kv_cache", "denoise"), "denoise", ".* the second of at least three, got component 3 of 3"),
        (("vision", "denoise", "kv_cache"), "denoise", "expected inputs from the host, .* got noise, features"),
    ],
)
def test_a_component_that_no_call_can_leave_out_is_refused(
    order: tuple[str, ...], name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, components = type(MULTI_TASK_DIT), type(MULTI_TASK_DIT).components

    def changed(*arguments: Any, **more: Any) -> list[Component]:
        parts = {part.name: replace(part, seldom=part.name == name) for part in components(*arguments, **more)}
        return [parts[part] for part in order]

    monkeypatch.setattr(family, "parts", order)
    monkeypatch.setattr(family, "components", changed)
    with pytest.raises(EngineError, match=f"^{name}: {message}"):
        policy_of(tmp_path).infer(observation(0, 2))


def test_what_a_setting_says_changes_the_actions(tmp_path: Path) -> None:
    """Variants that give the same actions would agree without their settings."""
    found = []
    for variant in ("flow", "base"):
        one = policy_of(tmp_path / variant, variant=variant)
        noise = np.random.default_rng(0).standard_normal(one.noise_shape)
        found.append(one.infer(observation(0, 2), noise=noise)["actions"])
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("high", "low", "limit"),
    [
        (EAGER, {**EAGER, "precision": "bf16"}, 0.03), (NATIVE, BF16, 0.03),
        (BF16, {**BF16, "denoise": {"engine": "native", "precision": "fp8"}}, 0.15),
        (BF16, {**BF16, "denoise": {"engine": "native", "precision": "int8"}}, 0.04),
    ],
    ids=["eager bf16", "native bf16", "fp8", "int8"],
)  # fmt: skip
def test_a_lower_precision_changes_actions_by_a_part_of_what_an_observation_changes(
    high: dict[str, Any], low: dict[str, Any], limit: float, tmp_path: Path
) -> None:
    exact = policy_of(tmp_path, high, "flow")
    rough = OptimizedPolicy.from_pretrained(tmp_path, low, device="cpu")
    noise = 0.3 * np.random.default_rng(0).standard_normal(exact.noise_shape)  # more would hide the observation
    want, other = (exact.infer(observation(seed, 2), noise=noise)["actions"] for seed in (0, 1))
    got = rough.infer(observation(0, 2), noise=noise)["actions"]
    assert 0 < np.square(got - want).mean() < limit**2 * np.square(other - want).mean()


# -- observations -------------------------------------------------------------------------------------------------


def test_prompt_state_and_each_camera_of_each_moment_matter(policy: OptimizedPolicy) -> None:
    given, other = observation(0, 2), observation(3, 2)
    noise = np.zeros(policy.noise_shape)
    first = policy.infer(given, noise=noise)["actions"]
    changes: list[dict[str, Any]] = [{"task": TASKS[1]}, {CAMERAS[0]: given[CAMERAS[1]], CAMERAS[1]: given[CAMERAS[0]]}]
    for key in (*CAMERAS, "observation.state"):
        for moment in (0, 1):
            changed = given[key].copy()
            changed[moment] = other[key][moment]
            changes.append({key: changed})
    for change in changes:
        assert np.abs(policy.infer({**given, **change}, noise=noise)["actions"] - first).max() > 1e-3, list(change)


def test_a_prompt_of_a_batch_changes_no_other_row(policy: OptimizedPolicy) -> None:
    given = [observation(seed, 2) for seed in range(3)]
    noise = np.random.default_rng(0).standard_normal((3, *policy.noise_shape))
    rows = policy.infer_batch(given, noise=noise)
    for row, one, drawn in zip(rows, given, noise, strict=True):
        np.testing.assert_allclose(row["actions"], policy.infer(one, noise=drawn)["actions"], atol=2e-5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("pick " * 11, r"task: expected at most 12 tokens \(max_token_len\), got 13"),
        ("pick <end> up", "task: expected no special tokens, got 'pick <end> up'"),
        (3, "task: expected a str, got int"), ("  ", "task: expected an instruction, got '  '"),
    ],
)  # fmt: skip
def test_a_prompt_is_refused(prompt: object, message: str, policy: OptimizedPolicy) -> None:
    with pytest.raises(ObservationError, match=message):
        policy.infer({**observation(0, 2), "task": prompt})


def test_a_default_prompt_is_used(tmp_path: Path) -> None:
    default = policy_of(tmp_path, variant="flow", default_prompt=TASKS[1])
    given, noise = observation(1, 2), np.zeros(default.noise_shape)
    without = {key: value for key, value in given.items() if key != "task"}
    expected = default.infer(given, noise=noise)["actions"]
    np.testing.assert_array_equal(default.infer(without, noise=noise)["actions"], expected)


def test_a_server_answers_as_the_policy(policy: OptimizedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_accel.client import PolicyClient
    from vla_accel.server import ServerConfig, background

    monkeypatch.setattr(type(policy.family), "draw", lambda self, noise, generator: noise.fill_(1.0))
    given = [observation(seed) for seed in (0, 3)]
    policy.reset()
    expected = [policy.infer(one)["actions"] for one in given]
    policy.reset()
    with background(policy, ServerConfig(port=0)) as server, PolicyClient(server.address) as client:
        got = [client.infer(one)["actions"] for one in given]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3


# -- steps --------------------------------------------------------------------------------------------------------


def test_the_noise_is_that_of_the_objective(policy: OptimizedPolicy, tmp_path: Path) -> None:
    assert policy.noise_shape == (8, 5)
    ddpm = policy_of(tmp_path)
    assert ddpm.noise_shape == (4, 8, 5) and ddpm.with_steps(1).noise_shape == (8, 5)


def test_a_flow_has_the_times_that_a_user_sets(policy: OptimizedPolicy, tmp_path: Path) -> None:
    given, noise = observation(0, 2), np.ones(policy.noise_shape)
    want = policy.infer(given, noise=noise)["actions"]
    equal, placed = (
        policy.with_steps(4, times).infer(given, noise=noise)["actions"]
        for times in ((1.0, 0.75, 0.5, 0.25, 0.0), (1.0, 0.9, 0.8, 0.1, 0.0))
    )
    np.testing.assert_allclose(equal, want, atol=1e-5)
    assert np.abs(placed - want).max() > 1e-3
    native = policy_of(tmp_path, {**NATIVE, "schedule": (1.0, 0.9, 0.8, 0.1, 0.0)}, "flow")
    np.testing.assert_allclose(native.infer(given, noise=noise)["actions"], placed, atol=5e-5)


@torch.inference_mode()
def test_a_step_of_a_flow_is_eulers_at_its_time(policy: OptimizedPolicy) -> None:
    times = (1.0, 0.9, 0.8, 0.1, 0.0)
    placed = policy.with_steps(4, times)
    placed.infer(observation(0, 2), noise=np.random.default_rng(0).standard_normal(policy.noise_shape))
    engine, model = placed.pipelines.newest.engine("denoise"), placed.model
    x, *given = (engine.inputs[name] for name in ("noise", "features", "text", "state"))
    own = model.own_modulations(model.config.condition(*given))
    for before, after in itertools.pairwise(times):
        (table,) = model.times([Step(1.0 - before, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)])
        modulations = [row + part for row, part in zip(table, own, strict=True)]
        x = x + (before - after) * model.head(x, modulations)
    torch.testing.assert_close(engine.outputs["actions"], x, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cubic"}, "schedule: expected none for multi_task_dit, which has no flow, got cubic"),
        ({"warm_start": 0.5}, "warm_start: expected none for multi_task_dit, which has no flow"),
        ({"num_steps": 101}, "num_steps: expected 1 to 100, the steps of the training, got 101"),
    ],
)
def test_a_noise_scheduler_has_no_times(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_of(tmp_path, **settings)


def test_a_flow_starts_from_noise_alone(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="warm_start: expected none for multi_task_dit, whose chunks begin in the past"
    ):
        policy_of(tmp_path, variant="flow", warm_start=0.5)


def test_a_flow_is_measured_where_there_is_one(tmp_path: Path) -> None:
    for name, fields in (("flow", FLOW), ("noise", {})):
        write_lerobot(tmp_path / name, configure(**fields))
    assert exact_policy(str(tmp_path / "flow"), PolicyConfig()).num_steps == 4
    with pytest.raises(ConfigError, match="expected a model whose steps integrate a flow, got multi_task_dit"):
        exact_policy(str(tmp_path / "noise"), PolicyConfig())


# -- folders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{"release": "0.5.1"}, {"prefixed": False}])
def test_every_layout_is_the_same_policy(layout: dict[str, Any], tmp_path: Path) -> None:
    found = load(write_lerobot(tmp_path, **layout))
    theirs = tiny_model().state_dict()
    for name, value in found.model.whole().state_dict().items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert found.processor.preset.images == CAMERAS and (found.processor.history, found.processor.first) == (2, 1)


def test_a_crop_that_is_larger_than_the_images_is_dropped(tmp_path: Path) -> None:
    """As lerobot does."""
    fields = {"image_resize_shape": [16, 16], "image_crop_shape": [24, 16]}
    found = load(write_lerobot(tmp_path, configure(**fields)))
    assert found.model.config.crop is None and found.model.config.seen == (16, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (configure(objective="consistency"), "objective: expected diffusion or flow_matching, got 'consistency'"),
        (configure(integration_method="rk4", **FLOW), "integration_method: expected euler, got 'rk4': not supported"),
        (configure(vision_encoder_name="laion/CLIP-ViT-H-14"), r"vision_encoder_name: expected OpenAI's CLIP \(clip-"),
        (configure(text_encoder_name="my/clip"), "text_encoder_name: expected OpenAI's CLIP"),
        (configure(image_crop_shape=[16, 12]), r"expected images of 16 x 16 for CLIP, got \(16, 12\)"),
        (configure(image_crop_shape=None), r"expected images of 16 x 16 for CLIP, got \(20, 28\)"),
        (configure(hidden_dim=56), "hidden_dim: config says 56, weights say 48"),
        (configure(num_heads=5), "num_heads: expected heads of an even part of 48, got 5 heads"),
        (configure(use_rope=False), "use_rope: config says False, weights say True"),
        (configure(use_positional_encoding=True), "1 missing: noise_predictor.pos_embedding"),
        (configure(use_separate_rgb_encoder_per_camera=True), "use_separate_rgb_encoder_per_camera: config says True"),
        (configure(n_obs_steps=3), "1 misshaped|2 misshaped"),
        (configure(timestep_embed_dim=24), "timestep_embed_dim: config says 24, weights say 16"),
        (configure(noise_scheduler_type="PNDM"), "scheduler.kind"),
        (edit("tokenizer_processor", padding_side="left"), "padding on the left is not supported"),
        (edit("tokenizer_processor", max_length=13), "tokenizer_max_length: expected at most 12, got 13"),
    ],
)  # fmt: skip
def test_a_folder_is_refused(change: Callable[..., object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write_lerobot(tmp_path, change))


def test_a_tokenizer_is_required_and_must_be_clips(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)
    (folder / "tokenizer.json").unlink()
    gone = {"tokenizer": str(tmp_path / "nowhere.json")}
    with pytest.raises(CheckpointError, match=r"tokenizer: expected a file at .*nowhere\.json, found none"):
        OptimizedPolicy.from_pretrained(folder, {**EAGER, "checkpoint": gone}, device="cpu")
    content = tokenizer_content()
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer: expected CLIP's, which ends prompts in"):
        load(folder)


def test_a_tower_of_images_needs_whole_heads() -> None:
    with pytest.raises(ConfigError):
        ClipVisionConfig(width=65, heads=2)
