"""`lerobot_policy_vla_accel` with lerobot's factories: its name, the engines' own actions, clear errors.

Runs where lerobot and the package are installed (see CONTRIBUTING), on the CPU, with tiny checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "lerobot_policy_vla_accel", reason="NOT RUN: needs the environment of the plugins (see CONTRIBUTING)"
)

from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies import get_policy_class, make_pre_post_processors
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.utils.import_utils import register_third_party_plugins
from lerobot_policy_vla_accel import VlaAccelConfig
from lerobot_policy_vla_accel.__main__ import main
from lerobot_policy_vla_accel.modeling_vla_accel import VlaAccelPolicy
from lerobot_policy_vla_accel.observations import camera_name, observations
from safetensors.torch import save_file

from tests.plugins.folders import write_arm, write_pusht
from tests.support import tiny_act
from tests.support.lerobot_saved import configure
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from tests.support.tiny_smolvla import observation
from vla_accel import OptimizedPolicy
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.transforms.robots import PRESETS

pytestmark = pytest.mark.filterwarnings("default")
ARM = ("observation.images.front", "observation.images.wrist", "observation.state")


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arm(tmp_path_factory.mktemp("arm") / "checkpoint")


@pytest.fixture(scope="module")
def policy(arm: Path) -> VlaAccelPolicy:
    return VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), num_steps=2, device="cpu"))


@pytest.fixture(scope="module")
def engine(arm: Path) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(arm, num_steps=2, device="cpu")


def as_batch(rows: list[dict[str, Any]], names: dict[str, str], task: str) -> dict[str, Any]:
    """Observations as lerobot's environments and datasets give them: images divided by 255, channels first."""
    batch: dict[str, Any] = {"task": [row[task] for row in rows]}
    for key, name in names.items():
        values = torch.from_numpy(np.stack([row[key] for row in rows]))
        images = values.ndim == 4
        batch[name] = values.permute(0, 3, 1, 2).type(torch.float32) / 255 if images else values.type(torch.float32)
    return batch


def arm_batch(*seeds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [observation(seed) for seed in seeds]
    for row in rows:
        row["observation.state"] = row["observation.state"].astype(np.float32)
    return rows, as_batch(rows, dict(zip(ARM, ARM, strict=True)), "task")


def test_lerobot_finds_the_policy() -> None:
    register_third_party_plugins()
    assert PreTrainedConfig.get_choice_class("vla_accel") is VlaAccelConfig
    assert get_policy_class("vla_accel") is VlaAccelPolicy


def test_a_batch_gets_the_engines_own_actions(policy: VlaAccelPolicy, engine: OptimizedPolicy) -> None:
    rows, batch = arm_batch(0, 1)
    noise = np.random.default_rng(0).normal(size=(2, *engine.action_shape))
    ours = engine.infer_batch(rows, noise=noise)
    before, after = make_pre_post_processors(policy.config)
    theirs = after(policy.predict_action_chunk(before(batch), noise=torch.from_numpy(noise)))
    assert theirs.shape == (2, engine.metadata["action_horizon"], 6) and theirs.dtype == torch.float32
    np.testing.assert_array_equal(theirs.numpy(), np.stack([r["actions"] for r in ours]).astype(np.float32))
    assert not np.array_equal(theirs[0], theirs[1])


def test_every_presets_cameras_have_names_and_its_state_comes_apart() -> None:
    assert camera_name("images/cam_high") == "observation.images.cam_high"
    names = [camera_name(key) for key in PRESETS["libero"].images]
    assert names == ["observation.images.image", "observation.images.image2"]
    for preset in PRESETS.values():
        batch: dict[str, Any] = {camera_name(key): torch.zeros(1, 3, 8, 8) for key in preset.images}
        batch["observation.state"] = torch.arange(preset.state_dim, dtype=torch.float32)[None]
        (row,) = observations({**batch, "task": ["x"]}, preset)
        assert set(row) == {*preset.images, *preset.state, preset.prompt}
        np.testing.assert_array_equal(np.concatenate([row[k] for k in preset.state]), np.arange(preset.state_dim))
        assert [len(row[k]) for k in preset.state[1:]] == [1] * (len(preset.state) - 1)


def test_an_image_between_whole_numbers_is_rounded() -> None:
    preset = PRESETS["libero"]
    image = torch.full((1, 3, 8, 8), 100.6 / 255)
    batch = {camera_name(key): image for key in preset.images} | {"observation.state": torch.zeros(1, 8), "task": "x"}
    (row,) = observations(batch, preset)
    for key in preset.images:
        assert row[key].shape == (8, 8, 3) and row[key].dtype == np.uint8 and (row[key] == 101).all()


def test_actions_are_taken_one_by_one_and_forgotten_at_a_reset(policy: VlaAccelPolicy, arm: Path) -> None:
    few = VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), num_steps=2, n_action_steps=2, device="cpu"))
    (_, first), (_, second) = arm_batch(0), arm_batch(1)
    few.reset()
    taken = [few.select_action(b) for b in (first, second, second)]
    few.reset()
    chunk = few.predict_action_chunk(first)
    assert torch.equal(torch.stack(taken[:2]), chunk[0, :2, None])
    assert not torch.equal(taken[2], chunk[:, 2])
    few.reset()
    again = few.select_action(first)
    few.reset()
    assert torch.equal(few.select_action(second), few.select_action(second)) is False
    assert torch.equal(again, taken[0])


def test_a_checkpoint_of_lerobot_says_how_many_actions_are_executed(tmp_path: Path) -> None:
    folder = write_pusht(tmp_path / "pusht")
    policy = VlaAccelPolicy(VlaAccelConfig(checkpoint=str(folder), num_steps=2, device="cpu"))
    batch = {"observation.image": torch.zeros(1, 3, 96, 96), "observation.state": torch.ones(1, 2), "task": ["go"]}
    for left in (1, 0, 1):
        assert policy.select_action(batch).shape == (1, 2)
        assert len(policy._queue) == left


def test_a_checkpoints_temporal_ensembling_is_lerobots(tmp_path: Path) -> None:
    """Equal observations have equal chunks: at coefficient 0, the action of step t is the mean of their rows 0 to t."""
    saved = configure(temporal_ensemble_coeff=0.0, n_action_steps=1)
    folder = str(tiny_act.write_lerobot(tmp_path / "act", saved))
    policy = VlaAccelPolicy(VlaAccelConfig(checkpoint=folder, config="eager_fp32", device="cpu"))
    rng = np.random.default_rng(0)
    batch = {key: torch.from_numpy(rng.random((2, 3, *size), np.float32)) for key, size in tiny_act.CAMERAS.items()}
    batch["observation.state"] = torch.from_numpy(rng.normal(size=(2, tiny_act.STATE)).astype(np.float32))
    chunk = policy.predict_action_chunk(batch)
    for _ in range(2):
        policy.reset()
        for step in range(3):
            torch.testing.assert_close(policy.select_action(batch), chunk[:, : step + 1].mean(1))
    with pytest.raises(ConfigError, match=r"n_action_steps: expected 1 with .*temporal_ensemble_coeff, got 2"):
        VlaAccelPolicy(VlaAccelConfig(checkpoint=folder, n_action_steps=2, device="cpu"))


def test_a_warm_start_is_refused_for_actions_one_by_one(arm: Path, tmp_path: Path) -> None:
    (config := tmp_path / "warm.yaml").write_text("warm_start: 0.5\n")
    policy = VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), config=str(config), num_steps=1, device="cpu"))
    _, batch = arm_batch(0)
    rest = policy.predict_action_chunk(batch)[0, 2:]
    policy.predict_action_chunk(batch, inference_delay=1, prev_chunk_left_over=rest)
    with pytest.raises(ConfigError, match=r"policy\.config: expected no warm_start .*, got 0\.5"):
        policy.select_action(batch)
    policy.config.rtc_config = RTCConfig(enabled=False)
    with pytest.raises(ConfigError, match=r"rtc_config: expected enabled: true .* warm_start 0\.5, got false"):
        policy.init_rtc_processor()


def test_a_family_without_real_time_chunking_says_so(tmp_path: Path) -> None:
    from tests.support.tiny_pi0_fast import write_lerobot

    write_lerobot(tmp_path)
    policy = VlaAccelPolicy(VlaAccelConfig(checkpoint=str(tmp_path), device="cpu"))
    assert not policy.supports_rtc()
    policy.config.rtc_config = RTCConfig(enabled=False)
    policy.init_rtc_processor()
    policy.config.rtc_config = RTCConfig(enabled=True)
    with pytest.raises(ConfigError, match="rtc_config: expected none for pi0_fast"):
        policy.init_rtc_processor()


def test_an_execution_horizon_beyond_the_chunk_is_the_whole_chunk(arm: Path) -> None:
    policy = VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), num_steps=1, device="cpu"))
    horizon = policy.engine.action_shape[0]
    policy.config.rtc_config = RTCConfig(execution_horizon=horizon + 1)
    policy.init_rtc_processor()
    assert policy.engine.config.rtc.execution_horizon == horizon


def test_real_time_chunking_as_lerobot_asks_for_it(policy: VlaAccelPolicy, arm: Path) -> None:
    policy = VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), num_steps=4, device="cpu"))
    assert policy.supports_rtc()
    policy.config.rtc_config = RTCConfig(execution_horizon=4, max_guidance_weight=5.0)
    store = policy.engine.store
    policy.init_rtc_processor()
    rtc = policy.engine.config.rtc
    assert (rtc.schedule, rtc.execution_horizon, rtc.max_guidance_weight) == ("linear", 4, 5.0)
    assert policy.engine.store is store
    rows, batch = arm_batch(0)
    noise = np.random.default_rng(2).normal(size=policy.engine.action_shape)
    given = torch.from_numpy(noise)[None]
    plain = policy.predict_action_chunk(batch, noise=given)
    left = plain[0, 2:4] + 0.5
    padded = torch.cat((left, torch.zeros(3, 6)))
    guided = policy.predict_action_chunk(batch, noise=given, inference_delay=1, prev_chunk_left_over=padded)
    ours = policy.engine.infer(rows[0], noise=noise, prev_chunk=left.numpy(), inference_delay=1)["actions"]
    np.testing.assert_array_equal(guided[0].numpy(), ours.astype(np.float32))
    assert not torch.equal(guided, plain)
    nothing = policy.predict_action_chunk(batch, noise=given, inference_delay=0, prev_chunk_left_over=padded * 0)
    assert torch.equal(nothing, plain)


def test_a_folder_is_loaded_as_lerobots_tools_load_it(
    arm: Path, tmp_path: Path, policy: VlaAccelPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(arm.parent)
    folder = tmp_path / "made"
    words = [arm.name, str(folder), "--num-steps", "2"]
    assert main(words) == 0
    monkeypatch.chdir(tmp_path)
    assert json.loads((folder / "config.json").read_text())["type"] == "vla_accel"
    loaded = VlaAccelPolicy.from_pretrained(folder)
    assert set(loaded.config.image_features) == set(ARM[:2])
    overrides = {
        "device_processor": {"device": "cpu"},
        "rename_observations_processor": {"rename_map": {"observation.images.top": ARM[0]}},
    }
    before, _ = make_pre_post_processors(loaded.config, str(folder), preprocessor_overrides=overrides)
    _, batch = arm_batch(5)
    renamed = {"observation.images.top" if k == ARM[0] else k: v for k, v in batch.items()}
    policy.reset()
    expected = policy.predict_action_chunk(batch)
    loaded.reset()
    assert torch.equal(loaded.predict_action_chunk(before(renamed)), expected)
    assert main(words) == 1
    loaded.save_pretrained(tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["config.json"]
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_settings_that_cannot_be_are_refused_and_no_folder_is_made(
    arm: Path, tmp_path: Path, engine: OptimizedPolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    most = engine.metadata["action_horizon"]
    every = VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), num_steps=2, n_action_steps=most, device="cpu"))
    every.select_action(arm_batch(0)[1])
    assert len(every._queue) == most - 1
    with pytest.raises(ConfigError, match=rf"n_action_steps: expected at most {most}, .*, got {most + 1}"):
        VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), n_action_steps=most + 1, device="cpu"))
    (listed := tmp_path / "listed.yaml").write_text("schedule: [1.0, 0.3, 0.0]\n")
    for words in (
        [str(arm), "--n-action-steps", str(most + 1)],
        [str(arm), "--num-steps", "3", "--config", str(listed)],
        ["demo", "--num-steps", "0"],
    ):
        assert main([words[0], str(tmp_path / "made"), *words[1:]]) == 1 and not (tmp_path / "made").exists()
    assert "num-steps: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_obs_steps": 2}, r"n_obs_steps: expected 1.*, got 2"),
        ({"use_amp": True}, r"use_amp: expected false.*policy\.config"),
        ({"use_peft": True}, r"use_peft: expected false.*policy\.lora"),
        ({"rtc_config": RTCConfig(debug=True)}, r"rtc_config\.debug: expected false"),
    ],
)
def test_settings_of_lerobot_that_would_do_nothing_are_refused(
    arm: Path, setting: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lerobot itself ignores use_amp where the device has none.
    monkeypatch.setattr("lerobot.configs.policies.is_amp_available", lambda device: True)
    with pytest.raises(ConfigError, match=message):
        VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), device="cpu", **setting))


def test_real_time_chunking_can_be_set_as_a_policys_setting(arm: Path) -> None:
    _, batch = arm_batch(0)

    def made(**setting: Any) -> VlaAccelPolicy:
        rtc = RTCConfig(execution_horizon=4, max_guidance_weight=5.0, **setting)
        return VlaAccelPolicy(VlaAccelConfig(checkpoint=str(arm), num_steps=4, device="cpu", rtc_config=rtc))

    on, off = made(), made(enabled=False)
    assert on.engine.config.rtc.execution_horizon == 4
    engine = on.engine
    on.init_rtc_processor()
    assert on.engine is engine
    noise = torch.randn(1, *engine.action_shape, generator=torch.Generator().manual_seed(0))
    plain = on.predict_action_chunk(batch, noise=noise)
    before = {"inference_delay": 1, "prev_chunk_left_over": plain[0, 2:4] + 0.5}
    assert not torch.equal(on.predict_action_chunk(batch, noise=noise, **before), plain)
    assert torch.equal(off.predict_action_chunk(batch, noise=noise, **before), plain)
    with pytest.raises(ConfigError, match="rtc_config: expected none"):
        on.select_action(batch)
    assert off.select_action(batch).shape == (1, 6)


@pytest.mark.parametrize("key", ["images.front", "front", "observation.image.front"])
def test_an_image_under_any_unknown_key_is_refused_while_a_camera_is_missing(policy: VlaAccelPolicy, key: str) -> None:
    _, batch = arm_batch(0)
    with pytest.raises(ObservationError) as refused:
        policy.predict_action_chunk({key if k == ARM[0] else k: v for k, v in batch.items()})
    expected, _, got = str(refused.value).partition(", got ")
    assert ARM[0] in expected and key in got.partition(";")[0].split(", ")
    policy.predict_action_chunk({**batch, key: batch[ARM[0]]})


def test_a_folder_names_an_adapter(tmp_path: Path) -> None:
    config = write_tiny_checkpoint(tmp_path / "base")
    rank, width = 3, config.expert.width
    generator = torch.Generator().manual_seed(0)
    name = "base_model.model.action_in_proj.lora"
    tensors = {
        f"{name}_A.weight": torch.randn(rank, config.action_dim, generator=generator),
        f"{name}_B.weight": torch.randn(width, rank, generator=generator),
    }
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": 6.0, "base_model_name_or_path": None}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(content))
    base, adapter, folder = (str(tmp_path / n) for n in ("base", "adapter", "made"))
    assert main([base, folder, "--lora", adapter, "--num-steps", "2"]) == 0
    noise = np.random.default_rng(0).normal(size=(config.action_horizon, config.action_dim))
    ours, plain, theirs = (
        policy.infer(tiny_observation(), noise=noise)["actions"]
        for policy in (
            OptimizedPolicy.from_pretrained(base, num_steps=2, device="cpu", lora=adapter),
            OptimizedPolicy.from_pretrained(base, num_steps=2, device="cpu"),
            VlaAccelPolicy.from_pretrained(folder).engine,
        )
    )
    np.testing.assert_array_equal(theirs, ours)
    assert not np.allclose(ours, plain)


def test_another_policys_folder_is_refused_before_its_processors_come_in(arm: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a folder of type vla_accel, got smolvla\. Either --policy"):
        VlaAccelPolicy.from_pretrained(arm)
    with pytest.raises(CheckpointError, match="got smolvla"):
        VlaAccelPolicy.from_pretrained(arm, config=VlaAccelConfig(checkpoint=str(arm), device="cpu"))


def test_an_invalid_setting_or_observation_is_one_error_that_names_it(policy: VlaAccelPolicy, arm: Path) -> None:
    two = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    for settings, message in (
        ({"checkpoint": None}, r"policy\.checkpoint: expected"),
        ({"n_action_steps": 0}, r"n_action_steps: expected at least 1, got 0"),
        ({"output_features": two}, r"action: expected \(2,\) as the environment"),
    ):
        with pytest.raises(ConfigError, match=message):
            VlaAccelPolicy(VlaAccelConfig(**{"checkpoint": str(arm), "device": "cpu", **settings}))
    with pytest.raises(ConfigError, match="expected cpu, where the engines were built, got cuda"):
        policy.to("cuda")
    assert policy.to("cpu").to(torch.float32) is policy
    with pytest.raises(ConfigError, match="train with the policy's own type"):
        policy.forward({})
    _, batch = arm_batch(0)
    top = {"observation.images.top" if k == ARM[0] else k: v for k, v in batch.items()}
    for wrong, message in (
        ({**batch, "observation.language.tokens": torch.zeros(1, 4)}, r"language\.tokens: expected raw observations"),
        (top, r"expected observation\.images\.front.*got.*top.*--rename_map"),
        ({**batch, ARM[0]: batch[ARM[0]] * 2 - 1}, r"images\.front: expected uint8, or floats in \[0, 1\]"),
        ({**batch, "task": [""]}, "missing task"),
        *(({**batch, k: batch[k].bfloat16()}, f"{k}: expected dtype float32 or uint8, got bfloat16") for k in ARM),
    ):
        with pytest.raises(ObservationError, match=message):
            policy.predict_action_chunk(wrong)


@pytest.mark.parametrize("key", [*ARM, "task"])
@pytest.mark.parametrize("rows", [1, 3])
def test_images_state_and_tasks_have_as_many_rows(policy: VlaAccelPolicy, key: str, rows: int) -> None:
    """Otherwise a robot would get no action, or an action for another robot's images."""
    _, batch = arm_batch(0, 1)
    other = arm_batch(*range(rows))[1]
    with pytest.raises(ObservationError, match=rf"batch: expected the same number of rows .*{key} {rows}"):
        policy.predict_action_chunk({**batch, key: other[key]})


@pytest.mark.parametrize(
    ("device", "config"),
    [pytest.param("cpu", "eager", marks=pytest.mark.slow), pytest.param("cuda", "native", marks=pytest.mark.gpu)],
)
def test_the_demo_in_lerobots_hands(device: str, config: str) -> None:
    """Through the factories' processors, on the device and back; guided by real-time chunking on the same weights."""
    policy = VlaAccelPolicy(VlaAccelConfig(checkpoint="demo", config=config, num_steps=3, device=device))
    assert {entry["used"] for entry in policy.engine.metadata["engines"]} == {config}
    names = {
        "observation/image": "observation.images.image",
        "observation/wrist_image": "observation.images.image2",
        "observation/state": "observation.state",
    }
    row = policy.engine.processor.example()
    rng = np.random.default_rng(0)
    row |= {key: rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for key in list(names)[:2]}
    row["observation/state"] = row["observation/state"].astype(np.float32)
    noise = rng.normal(size=policy.engine.action_shape).astype(np.float32)
    before, after = make_pre_post_processors(policy.config)
    batch, given = before(as_batch([row], names, "prompt")), torch.from_numpy(noise)[None]
    assert batch["observation.images.image"].device.type == device
    chunk = policy.predict_action_chunk(batch, noise=given)
    assert chunk.device.type == device and after(chunk).device.type == "cpu"
    expected = policy.engine.infer(row, noise=noise)["actions"]
    np.testing.assert_allclose(after(chunk)[0].numpy(), expected, rtol=0, atol=1e-3)
    assert policy.select_action(batch, noise=given).shape == (1, 7)
    policy.config.rtc_config = RTCConfig(execution_horizon=8)
    policy.init_rtc_processor()
    left = chunk[0, 4:] + 0.1
    guided = policy.predict_action_chunk(batch, noise=given, inference_delay=2, prev_chunk_left_over=left)
    nearer = (guided[0, :2] - left[:2]).abs().mean() < (chunk[0, :2] - left[:2]).abs().mean()
    assert nearer and torch.isfinite(guided).all()
