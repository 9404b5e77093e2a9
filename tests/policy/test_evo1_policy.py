"""Evo-1 through the whole policy, against actions that lerobot 0.6.1's own code left
(tests/references/make_evo1_reference.py), and the folders that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.references.evo1_weights import previous
from tests.support.evo1_folders import HORIZON, answers, given, noise, tensors, write
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import RtcConfig
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.evo1.network import evo1
from vla_accel.families.evo1.transforms import arrangement_of
from vla_accel.families.family import family_named
from vla_accel.measure.parity import compare
from vla_accel.measure.random_policy import random_policy
from vla_accel.nn import plan

PARTS = ("vision", "kv_cache", "denoise")
RESIZED = 1e-3
"""Largest difference, of 14: a pixel next to a half may be rounded to another level than lerobot's."""


def policy_of(folder: Path, engine: str = "eager", **settings: Any) -> OptimizedPolicy:
    config = PolicyConfig(device="cpu", **{"precision": "fp32", **settings})
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(dict.fromkeys(PARTS, EngineSpec(engine))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("evo1"))


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "bare"])
def test_actions_are_lerobots(tmp_path: Path, variant: str, engine: str) -> None:
    """One observation, three at once with prompts of three lengths, and one without its first camera."""
    # One camera may be missing besides the one that lerobot adds.
    folder = write(tmp_path, variant, config(empty_cameras=2))
    policy, expected, three = policy_of(folder, engine), answers(variant), given(variant)
    assert {e["used"] for e in policy.ledger.as_list()} == {engine}
    seen = {k: v for k, v in three[0].items() if k != "observation.images.front"}
    found = {
        "alone": policy.infer(three[0], noise=noise()[0])["actions"],
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three, noise=noise())]),
        "missing": policy.infer(seen, noise=noise()[0])["actions"],
    }
    bound = RESIZED if variant == "resized" else 5e-5
    for case, actions in found.items():
        np.testing.assert_allclose(actions, expected[case], rtol=0, atol=bound, err_msg=case)
    assert np.abs(expected["missing"] - expected["alone"]).max() > 1e-2, "the first camera is seen"
    swapped = {**three[0], **{f"observation.images.{a}": three[0][f"observation.images.{b}"]
                              for a, b in (("front", "wrist"), ("wrist", "front"))}}  # fmt: skip
    if variant == "plain":
        assert np.abs(policy.infer(swapped, noise=noise()[0])["actions"] - expected["alone"]).max() > 1e-2


def three_cameras(files: dict[str, Any]) -> None:
    """The camera that lerobot added becomes one of the robot; one of the three may be missing."""
    inputs = files["config.json"]["input_features"]
    (added,) = (name for name in inputs if "empty_camera" in name)
    inputs["observation.images.side"] = inputs.pop(added)
    files["config.json"]["empty_cameras"] = 1


def test_as_many_cameras_may_be_missing_as_in_lerobot(tmp_path: Path) -> None:
    policy, two = policy_of(write(tmp_path, change=three_cameras)), given()[0]
    assert policy.infer(two)["actions"].shape == (HORIZON, 7)
    one = {name: value for name, value in two.items() if "wrist" not in name}
    with pytest.raises(ObservationError, match=r"expected at most 1 missing cameras .* got 2: .*wrist, .*side"):
        policy.infer(one)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_a_previous_chunk_guides_as_in_lerobot(folder: Path, engine: str) -> None:
    policy = policy_of(folder, engine, rtc=RtcConfig(execution_horizon=6, max_guidance_weight=5.0))
    earlier = policy.processor.unnormalize_actions(previous(HORIZON), None)
    found = policy.infer(given()[0], noise=noise()[0], prev_chunk=earlier, inference_delay=2)["actions"]
    np.testing.assert_allclose(found, answers("plain")["rtc"], rtol=0, atol=5e-5)
    assert np.abs(found - answers("plain")["alone"]).max() > 0.1
    with pytest.raises(ConfigError, match=r"rtc\.trained: expected none for evo1"):
        policy_of(folder, rtc=RtcConfig(trained=True))


@pytest.mark.parametrize(("denoise", "least"), [("auto", 0.999), ("fp8", 0.95), ("int8", 0.99)])
def test_lower_precision_is_near(folder: Path, denoise: str, least: float) -> None:
    exact, low = policy_of(folder), PolicyConfig(device="cpu", precision="bf16")
    specs = {part: EngineSpec("native", precision=denoise if part == "denoise" else "auto") for part in PARTS}  # type: ignore[arg-type]
    policy = OptimizedPolicy.from_pretrained(folder, low.with_specs(specs))
    report = compare(policy, exact, given()[:2], name="evo1")
    assert report.num_steps == 6 and least < report.actions.cosine < 1
    assert list(report.components) == ["image_tokens", "keys", "values"]


def test_norms_inside_the_products_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does where all products are own kernels: LayerScale and biases are in them as well."""
    monkeypatch.setattr(plan, "is_inside", lambda *_: True)
    found = [policy_of(folder, e).infer(given()[0], noise=noise()[0])["actions"] for e in ("eager", "native")]
    np.testing.assert_allclose(*found, rtol=0, atol=2e-4)


def test_noise_is_uniform(folder: Path) -> None:
    policy = policy_of(folder, seed=3)
    policy.infer(given()[0])
    drawn = policy.pipelines.newest.engine("denoise").inputs["noise"]
    assert -1 <= drawn.min() < -0.8 and 0.8 < drawn.max() < 1 and len(drawn.unique()) == drawn.numel()


def test_numbers_that_the_robot_lacks_change_nothing(folder: Path) -> None:
    policy, other = policy_of(folder), noise()[0].copy()
    other[:, 7:] = 5.0
    want, found = (policy.infer(given()[0], noise=start)["actions"] for start in (noise()[0], other))
    np.testing.assert_array_equal(want, found)


def config(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["config.json"].update(changes)


def feature(name: str, count: int) -> Callable[[dict[str, Any]], object]:
    table = "output_features" if name == "action" else "input_features"
    return lambda files: files["config.json"][table][name].update(shape=[count])


def test_a_state_is_as_long_as_its_statistics(tmp_path: Path, folder: Path) -> None:
    """A policy that was trained from a base keeps the base's features; statistics are filled up to the model's size."""
    want, found = (
        p.infer(given()[0], noise=noise()[0])["actions"]
        for p in (policy_of(folder), policy_of(write(tmp_path, change=feature("observation.state", 6))))
    )
    np.testing.assert_array_equal(want, found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(chunk_size=0), "chunk_size: expected a whole number"),
        (config(chunk_size=6, n_action_steps=6), "max_action_dim: config says 24, weights say 32"),
        (config(image_resolution=[448, 448]), "image_resolution: config says [448, 448], weights say [56, 56]"),
        (config(vlm_num_layers=2), "vlm_num_layers: config says 2, weights say 3"),
        (config(num_heads=3), "head.heads: expected heads of equal, even width"),
        (config(max_text_length=12), "max_text_length: expected at least 13"),
        (config(return_cls_only=True), "return_cls_only: expected false"),
        (config(action_head="mlp"), "action_head: expected \"flowmatching\""),
        (config(embodiment_id_field="robot"), "embodiment_id_field: expected null"),
        (config(default_embodiment_id=1), "default_embodiment_id: expected 0 to 0, got 1"),
        (config(default_embodiment_id=False), "default_embodiment_id: expected 0 to 0, got False"),
        (config(vlm_model_name=5), "expected vlm_model_name of type str, got 5"),
        (config(binarize_gripper="False"), "expected binarize_gripper of type bool, got 'False'"),
        (config(binarize_gripper=True, gripper_index=7), "gripper_index: expected 0 to 6, got 7"),
        (config(new_setting=1), "expected settings of lerobot"),
        (feature("action", 25), "expected statistics of action's 25 values, got 24"),
        (
            lambda files: files["policy_preprocessor.json"]["steps"][4]["config"]["norm_map"].update(VISUAL="MEAN_STD"),
            "expected observation.images.front.mean",
        ),
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
    for changed, message in (
        ({**good, "task": " "}, "task: expected an instruction"),
        ({**good, "task": "open <IMG_CONTEXT>"}, "task: expected no special tokens"),
        ({**good, "task": "open it " * 60}, "task: expected at most 52 tokens"),
        ({**good, "observation.state": np.zeros(9)}, "observation.state: expected shape (8,), got (9,)"),
        ({k: v for k, v in good.items() if "wrist" not in k}, "missing observation.images.wrist"),
    ):
        with pytest.raises(ObservationError) as caught:
            policy.infer(changed)
        assert message in str(caught.value)
    names = [n for n in tensors() if "seq_pool" not in n]
    with pytest.raises(CheckpointError, match=r"1 missing: model\.action_head\.seq_pool_proj\.weight"):
        policy_of(write(tmp_path, stored={n: tensors()[n] for n in (*names, "model.action_head.seq_pool_proj.bias")}))


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """As counted apart from this code: 0.72 TFLOP a view and 216 MB a step besides keys and values."""
    card, sizes = bench_card(family_named("evo1")), evo1()
    transforms = card.dummy(sizes, 2)
    assert arrangement_of(transforms.tokenizer, 3) == sizes.arrangement
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    work = card.work(sizes, inputs, 32, PolicyConfig().specs(PARTS))
    assert work["vision"].flop / 2e12 == pytest.approx(0.72, abs=0.02)
    cache = 2 * 8 * (1 + 512 + len(inputs.tokens)) * 896 * 2
    assert (work["denoise"].bytes / 32 - cache) / 1e6 == pytest.approx(216, abs=3)
    parameters = sum(p.numel() for p in card.family.network_class.empty(sizes).parameters())
    assert (parameters - sizes.language.vocab_size * 896) / 1e9 == pytest.approx(0.64, abs=0.01)


def test_a_random_policy_of_any_size(folder: Path) -> None:
    model = policy_of(folder).model
    policy, _ = random_policy("evo1", PolicyConfig(device="cpu", num_steps=1), model=model)
    card = bench_card(policy.family)
    result = policy.infer(card.random_observation(policy.processor, np.random.default_rng(0)))
    assert result["actions"].shape == (HORIZON, 7) and np.isfinite(result["actions"]).all()


def test_placed_steps_are_another_flow(folder: Path) -> None:
    plain, placed = policy_of(folder), policy_of(folder, "native", schedule=(1.0, 0.6, 0.0))
    first, other = (p.infer(given()[0], noise=noise()[0])["actions"] for p in (plain, placed))
    assert placed.metadata["num_steps"] == 2 and np.abs(first - other).max() > 1e-3
    assert placed.model.moments(placed.schedule) == [0, 399]
    assert torch.isfinite(torch.from_numpy(other)).all()
