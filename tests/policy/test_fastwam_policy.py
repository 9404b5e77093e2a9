"""FastWAM through the whole policy, against actions that lerobot 0.6.1's own code left
(tests/references/make_fastwam_reference.py), its prompts, and the folders that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fastwam_folders import REFERENCE, TASKS, answers, given, old_keys, tensors, write
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.cli import main
from vla_accel.config import CheckpointSpec
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.fastwam.components import FastWamShape
from vla_accel.families.fastwam.family import text_bias
from vla_accel.families.fastwam.network import fastwam
from vla_accel.measure.parity import compare
from vla_accel.measure.random_policy import random_policy
from vla_accel.nn.flow import Schedule

PARTS = ("vision", "kv_cache", "denoise")
ENCODER = CheckpointSpec(text_encoder=True)


def policy_of(folder: Path, engine: str = "eager", **settings: Any) -> OptimizedPolicy:
    config = PolicyConfig(device="cpu", **{"precision": "fp32", "checkpoint": ENCODER, **settings})
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(dict.fromkeys(PARTS, EngineSpec(engine))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fastwam"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> OptimizedPolicy:
    return policy_of(folder)


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "bare", "three"])
def test_actions_are_lerobots(tmp_path: Path, variant: str, engine: str) -> None:
    policy, expected, three = policy_of(write(tmp_path, variant), engine), answers(variant), given(variant)
    assert {e["used"] for e in policy.ledger.as_list()} == {engine}
    found = {
        "alone": policy.infer(three[0])["actions"],
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three)]),
    }
    span = float(np.ptp(expected["batch"]))
    for case, actions in found.items():
        assert np.abs(actions - expected[case]).max() <= 1e-5 * span, case
    # The toggled gripper is one of two commands, and both views matter.
    assert (set(np.unique(found["batch"][..., -1])) <= {-1.0, 1.0}) == (variant in ("plain", "resized"))
    names = [f"observation.images.{camera}" for camera in ("front", "wrist")]
    swapped = {**three[0], names[0]: three[0][names[1]], names[1]: three[0][names[0]]}
    assert np.abs(policy.infer(swapped)["actions"] - found["alone"]).max() > 1e-3 * span


def test_older_names_are_the_same_weights(tmp_path: Path, plain: OptimizedPolicy) -> None:
    old = policy_of(write(tmp_path, stored=old_keys(tensors())))
    want, found = (p.infer(given()[0])["actions"] for p in (plain, old))
    np.testing.assert_array_equal(want, found)


def test_every_call_starts_from_the_checkpoints_noise(tmp_path: Path, plain: OptimizedPolicy) -> None:
    first, again = (plain.infer(given()[0])["actions"] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    drawn = policy_of(write(tmp_path, change=config(inference_seed=None)))
    first, again = (drawn.infer(given()[0])["actions"] for _ in range(2))
    assert np.abs(first - again).max() > 1e-3


def test_lower_precision_is_near(folder: Path, plain: OptimizedPolicy) -> None:
    report = compare(policy_of(folder, "native", precision="bf16"), plain, given()[:2], name="fastwam")
    assert report.num_steps == 4 and 0.99 < report.actions.cosine < 1
    assert list(report.components) == ["image_tokens", "keys", "values", "text_keys", "text_values"]


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_weights_of_one_byte_are_near(folder: Path, plain: OptimizedPolicy, form: Any) -> None:
    native = EngineSpec("native")
    specs = {"vision": native, **dict.fromkeys(("kv_cache", "denoise"), EngineSpec("native", precision=form))}
    low = PolicyConfig(device="cpu", precision="bf16", checkpoint=ENCODER).with_specs(specs)
    report = compare(OptimizedPolicy.from_pretrained(folder, low), plain, given()[:2], name="fastwam")
    assert 0.95 < report.actions.cosine < 1


def test_placed_steps_are_another_flow(folder: Path, plain: OptimizedPolicy) -> None:
    placed = policy_of(folder, "native", schedule=(1.0, 0.6, 0.0))
    first, other = (p.infer(given()[0])["actions"] for p in (plain, placed))
    assert placed.metadata["num_steps"] == 2 and np.abs(first - other).max() > 1e-3
    # Without a schedule the checkpoint's shift counts: 5 u / (1 + 4 u).
    np.testing.assert_allclose(plain.schedule.times, [1.0, 15 / 16, 5 / 6, 5 / 8, 0.0])


# -- prompts --------------------------------------------------------------------------------------------------------


def test_encoded_prompts_replace_the_text_encoder(tmp_path: Path, plain: OptimizedPolicy) -> None:
    folder = write(tmp_path / "checkpoint")
    assert main(["prompts", str(folder), TASKS[0]]) == 0
    assert main(["prompts", str(folder), TASKS[1]]) == 0
    shutil.rmtree(folder / "text_encoder")
    policy = policy_of(folder, checkpoint=CheckpointSpec())
    for one in given()[:2]:
        np.testing.assert_array_equal(policy.infer(one)["actions"], plain.infer(one)["actions"])
    loaded, cached = (p.latency_report()["memory"]["weights"] for p in (plain, policy))
    assert loaded.pop("text_encoder") == sum(
        t.nbytes for n, t in tensors("text_encoder").items() if n != "shared.weight"
    ) and [*loaded] == [*cached] == [*PARTS]
    with pytest.raises(ObservationError) as caught:
        policy.infer(given()[2])
    for words in (TASKS[1], "vla-accel prompts", "text_encoder: true", TASKS[2]):
        assert words in str(caught.value)
    other = config(prompt_template="Do this : {task}")
    shutil.copy(folder / "prompts.safetensors", tmp_path / "prompts.safetensors")
    with pytest.raises(CheckpointError, match="expected prompts of the template"):
        policy_of(write(tmp_path, change=other))


def test_padding_is_one_key_that_counts_for_all_its_rows() -> None:
    bias = text_bias([1, 3], most=3, rows=6)
    np.testing.assert_allclose(np.exp(bias), [[1, 2, 1, 0, 0, 0], [1, 0, 1, 1, 1, 0]], rtol=1e-6)
    assert [fastwam().context_rows(tokens) for tokens in (1, 30, 31, 126, 127, 128)] == [32, 32, 64, 128, 130, 130]


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_a_prompt_may_fill_all_rows(folder: Path, engine: str) -> None:
    policy = policy_of(folder, engine)
    rows = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
    policy.processor.prompts.rows.update({"all": rows, "less": rows[:23]})
    batch = policy.infer_batch([{**given()[0], "task": task} for task in ("all", "less")])
    for task, found in zip(("all", "less"), batch, strict=True):
        alone = policy.infer({**given()[0], "task": task})["actions"]
        np.testing.assert_allclose(found["actions"], alone, atol=1e-4)
    assert np.abs(batch[0]["actions"] - batch[1]["actions"]).max() > 1e-3


def test_shapes_of_all_known_prompts_are_built_early() -> None:
    transforms = bench_card(family_named("fastwam")).dummy(fastwam(), 2)
    shape = FastWamShape(1, Schedule.uniform(1), 2, (64, 64), 32)
    transforms.prompts.rows.update({str(count): np.zeros((count, 4096), np.float32) for count in (1, 40, 60, 128)})
    assert [one.rows for one in shape.reachable(transforms, {})] == [32, 64, 130]


def test_a_policy_needs_prompts_or_the_encoder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy_of(write(tmp_path), checkpoint=CheckpointSpec())
    assert "expected prompts.safetensors" in str(caught.value) and "vla-accel prompts" in str(caught.value)


# -- folders and input that are refused -----------------------------------------------------------------------------


def config(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["config.json"].update(changes)


def inside(part: str, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["config.json"][part].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(action_horizon=0), "action_horizon: expected a whole number"),
        (config(image_size=[64]), "image_size: expected a height and a width"),
        (config(image_size=[64, 120]), "expected multiples of 32"),
        (config(proprio_dim=9), "config says 9, weights say 8"),
        (config(prompt_template="Do it"), "prompt_template: expected one {task}"),
        (config(rand_device="cuda"), 'rand_device: expected "cpu"'),
        (config(sigma_shift=0.0), "expected above 0"),
        (config(new_setting=1), "expected settings of lerobot"),
        (config(proprio_dim=None), "proprio_dim: expected a whole number, got null"),
        (inside("video_dit_config", video_attention_mask_mode="causal"), "expected first_frame_causal, got 'causal'"),
        (inside("video_dit_config", seperated_timestep=False), "seperated_timestep: expected True, got False"),
        (inside("video_dit_config", patch_size=[1, 1, 1]), "patch_size: expected [1, 2, 2], got [1, 1, 1]"),
        (inside("action_scheduler", num_train_timesteps=100), "num_train_timesteps: expected 1000, got 100"),
        (
            lambda files: files["policy_postprocessor.json"]["steps"][1]["config"].update(toggle_dimensions=[7]),
            "expected dimensions of 7 actions",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_folders_of_other_networks_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy_of(write(tmp_path, change=change))
    assert message in str(caught.value)


def test_untrained_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    base = {n: t for n, t in tensors().items() if not n.startswith(("model.mot.mixtures.action.action", "model.prop"))}
    with pytest.raises(CheckpointError, match="fastwam_base is only where training starts"):
        policy_of(write(tmp_path / "base", stored=base))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "libero_uncond_2cam224.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a pickle of FastWAM's own project"):
        policy_of(pickled)
    bare, empty = write(tmp_path / "bare"), tmp_path / "empty"
    shutil.rmtree(bare / "vae")
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"expected vae/config\.json in .*checkpoint\.wan"):
        policy_of(bare, checkpoint=CheckpointSpec(text_encoder=True, wan=str(empty)))


def test_bad_input_is_one_error(plain: OptimizedPolicy, folder: Path) -> None:
    good = given()[0]
    wide = {**good, "observation.images.wrist": np.zeros((64, 80, 3), np.uint8)}
    less = {k: v for k, v in good.items() if k != "observation.images.wrist"}
    for changed, message in (
        ({**good, "task": " "}, "task: expected an instruction"),
        ({**good, "task": "open " * 40}, "task: expected at most 24 tokens"),
        (wide, "expected images of one shape"),
        (less, "missing observation.images.wrist"),
    ):
        with pytest.raises(ObservationError) as caught:
            plain.infer(changed)
        assert message in str(caught.value)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"rtc": {"execution_horizon": 3}}, "rtc"),
        ({"checkpoint": CheckpointSpec(text_encoder=True, max_token_len=20)}, "max_token_len: expected none"),
        ({"schedule": "cubic", "num_steps": 2, "checkpoint": CheckpointSpec(embodiment="x")}, "embodiment"),
    ]
    for settings, message in refused:
        with pytest.raises(ConfigError, match=message):
            policy_of(folder, **settings)


# -- measurements ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """As counted apart from this code, for a tenth of the 30 blocks (counting all takes long): 1.64 GB and 0.052 TFLOP
    a step, 0.163 TFLOP of an image; 6.02 B parameters, and 0.05 B of an encoder of one frame."""
    card, sizes = bench_card(family_named("fastwam")), fastwam()
    few = card.shallow(sizes, 3)
    transforms = card.dummy(few, 2)
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    work = card.work(few, inputs, 10, PolicyConfig().specs(PARTS))
    assert work["denoise"].bytes / 1e9 == pytest.approx(1.64, rel=0.08)
    assert work["denoise"].flop / 1e12 == pytest.approx(0.052, rel=0.08)
    assert work["vision"].flop / 1e12 == pytest.approx(0.163, rel=0.01)
    parameters = sum(p.numel() for p in card.family.network_class.empty(sizes).parameters())
    assert parameters / 1e9 == pytest.approx(6.07, abs=0.02)
    assert fastwam(image_size=(384, 320)).grid == (12, 10)  # RoboTwin's 120 rows


def test_a_random_policy_of_any_size(plain: OptimizedPolicy) -> None:
    policy, _ = random_policy("fastwam", PolicyConfig(device="cpu", num_steps=1), model=plain.model)
    card = bench_card(policy.family)
    result = policy.infer(card.random_observation(policy.processor, np.random.default_rng(0)))
    assert result["actions"].shape == (16, 7) and np.isfinite(result["actions"]).all()


def test_the_kept_folders_have_lerobots_steps() -> None:
    names = [s["registry_name"] for s in REFERENCE["variants"]["plain"]["files"]["policy_postprocessor.json"]["steps"]]
    assert names[:2] == ["unnormalizer_processor", "fastwam_action_toggle_processor"]
    assert torch.equal(tensors("text_encoder")["shared.weight"], tensors("text_encoder")["encoder.embed_tokens.weight"])
