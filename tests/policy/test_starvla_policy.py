"""starVLA's checkpoints, converted, through the whole policy, against actions that starVLA's own code left
(tests/references/make_starvla_reference.py), and the files that are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from tests.support.starvla_folders import REFERENCE, Change, answers, given, noise, tensors, write, write_run
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.cli import main
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.measure.random_policy import random_policy

VARIANTS = ("groot", "state", "pi", "oft")


def data(name: str, value: Any) -> Change:
    return lambda config: config["datasets"]["vla_data"].update({name: value})


def action(name: str, value: Any) -> Change:
    return lambda config: config["framework"]["action_model"].update({name: value})


def policy_of(folder: Path, engine: str = "eager", **settings: Any) -> OptimizedPolicy:
    config = PolicyConfig(device="cpu", **{"precision": "fp32", **settings})
    parts = ("vision", "decode") if "oft" in str(folder) else ("vision", "kv_cache", "denoise")
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(dict.fromkeys(parts, EngineSpec(engine))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {variant: write(tmp_path_factory.mktemp(variant) / variant, variant) for variant in VARIANTS}


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_actions_are_starvlas(folders: dict[str, Path], variant: str, engine: str) -> None:
    policy, expected, three, drawn = (
        policy_of(folders[variant], engine),
        answers(variant),
        given(variant),
        noise(variant),
    )
    assert {e["used"] for e in policy.ledger.as_list()} == {engine}
    first = {} if drawn is None else {"noise": drawn[0]}
    found = {
        "alone": policy.infer(three[0], **first)["actions"],
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three, noise=drawn)]),
    }
    for case, actions in found.items():
        # The gripper's number becomes -1 or 1 after its scaling, which is none.
        scaled = policy.processor.actions.invert(actions)[..., :6]
        np.testing.assert_allclose(scaled, expected[case][..., :6].clip(-1, 1), atol=1e-5)
        np.testing.assert_array_equal(actions[..., 6], 1.0 - 2.0 * (expected[case][..., 6] > 0.5))


def test_the_state_counts_where_it_was_trained(folders: dict[str, Path]) -> None:
    for variant, counts in (("groot", False), ("state", True)):
        policy, one, drawn = policy_of(folders[variant], "native"), given(variant)[0], noise(variant)
        assert drawn is not None
        other = {**one, "observation/state": one["observation/state"] + 1.0}
        first, second = (policy.infer(o, noise=drawn[0])["actions"] for o in (one, other))
        assert (np.abs(first - second).max() > 1e-4) == counts


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_conversion_keeps_every_tensor_once(tmp_path: Path, suffix: str) -> None:
    checkpoint, output, kept = write_run(tmp_path / "run", "groot"), tmp_path / "out", tensors("groot")
    if suffix != checkpoint.suffix:
        checkpoint.unlink()
        checkpoint = checkpoint.with_suffix(suffix)
        save_file({name: kept[name] for name in kept if "lm_head" not in name}, str(checkpoint))
    with pytest.raises(CheckpointError, match=f"type vla-accel convert {checkpoint}"):
        policy_of(tmp_path / "run")
    assert main(["convert", str(checkpoint), str(output)]) == 0
    stored = SafetensorsWeights(output).shapes
    assert len(stored) == len(kept) - 1, "the head of the language model is its table"
    assert sorted(path.name for path in output.iterdir()) == [
        "config.json", "dataset_statistics.json", "model.safetensors",
    ]  # fmt: skip


def test_actions_keep_to_the_range_of_the_data(folders: dict[str, Path]) -> None:
    """In the robot's units, as starVLA's un-normalization."""
    policy = policy_of(folders["oft"])
    table = REFERENCE["oft"]["statistics"]["franka"]["action"]
    one = policy.processor.prepare(given("oft")[0])
    for sign, bound in ((-1.7, "min"), (1.7, "max")):
        found = policy.processor.unnormalize_actions(np.full((1, 7), sign), one)[0]
        np.testing.assert_allclose(found[:6], table[bound][:6], atol=1e-12)
        assert found[6] == -np.sign(sign)


def bridge(config: dict[str, Any]) -> None:
    config["datasets"]["vla_data"].update(data_mix="bridge", include_state="True")
    ends = {"q01": [-1.0] * 6 + [0.3, 0.0], "q99": [3.0] * 6 + [0.3, 1.0]}
    actions = {name: values[:6] + values[7:] for name, values in ends.items()}
    config["statistics"] = {"oxe_bridge": {"state": ends, "action": actions}}


def test_a_state_is_scaled_as_in_training(tmp_path: Path) -> None:
    """Quantiles, clipped; a number that never changes stays; the gripper is 0 or 1."""
    policy = policy_of(write(tmp_path / "state", "state", bridge))
    one = given("state")[0]
    images = {"observation/image_0": one["observation/image"], "prompt": one["prompt"]}
    state = np.array([1.0, 2.0, 3.0, 9.0, -9.0, -1.0, 0.3, 0.6])
    found = policy.processor.prepare({**images, "observation/state": state}).state
    np.testing.assert_allclose(found, [0.0, 0.5, 1.0, 1.0, -1.0, -1.0, 0.3, 1.0], atol=1e-6)
    np.testing.assert_array_less(0, np.isfinite(policy.infer({**images, "observation/state": state})["actions"]))


@pytest.mark.parametrize(("value", "counts"), [("False", False), ("True", True), (None, False)])
def test_a_text_says_whether_the_state_counts(tmp_path: Path, value: str | None, counts: bool) -> None:
    policy = policy_of(write(tmp_path / "state", "state", data("include_state", value)))
    assert policy.model.config.head.state == counts  # type: ignore[union-attr]


def test_a_longer_state_than_the_models_is_refused(tmp_path: Path) -> None:
    stored, name = tensors("state"), "action_model.state_encoder.layer1.weight"
    stored[name] = stored[name][:, :7].contiguous()
    folder = write(tmp_path / "state", "state", action("state_dim", 7), stored)
    with pytest.raises(ConfigError, match="state: expected at most the model's 7 numbers, got 8"):
        policy_of(folder)


class Other:
    """An object that a pickle of tensors must not make."""


@pytest.mark.parametrize("content", [{"a": Other()}, b"nothing"], ids=["object", "no pickle"])
def test_a_pickle_of_other_objects_is_refused(tmp_path: Path, content: Any, capsys: Any) -> None:
    checkpoint = write_run(tmp_path / "run", "oft", stored=content)
    if isinstance(content, bytes):
        checkpoint.write_bytes(content)
    assert main(["convert", str(checkpoint), str(tmp_path / "out")]) == 1
    assert "expected a pickle of tensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def mask(gripper: bool) -> Change:
    statistics = copy.deepcopy(REFERENCE["groot"]["statistics"])
    statistics["franka"]["action"]["mask"] = [True] * 6 + [gripper]
    return lambda config: config.update(statistics=statistics)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("groot", data("data_mix", "my_robot"), "data_mix: expected one of libero_all"),
        ("groot", data("CoT_prompt", "do it"), "expected a text with one {instruction}"),
        ("groot", action("num_target_vision_tokens", 7), "config says 7, weights say 5"),
        ("groot", action("add_pos_embed", False), "add_pos_embed: expected True, got False"),
        ("oft", data("include_state", True), "include_state: expected false"),
        ("groot", data("include_state", "yes"), "include_state: expected true or false, got 'yes'"),
        ("groot", mask(True), "action: mask: expected"),
        (
            "groot",
            lambda c: c["framework"].update(obs_image_size=[224, 224]),
            "obs_image_size: expected [256",
        ),
        (
            "oft",
            lambda c: c.update(statistics={"franka": {"delta": {}}}),
            "statistics of abs actions, got delta",
        ),
        (
            "oft",
            lambda c: c["framework"].update(name="QwenFAST"),
            "QwenOFT or QwenPI, got QwenFAST",
        ),
    ],
)
def test_folders_that_are_not_understood_are_refused(
    tmp_path: Path, variant: str, change: Change, message: str
) -> None:
    folder = write(tmp_path / variant, variant, change)
    with pytest.raises(CheckpointError) as caught:
        policy_of(folder)
    assert message in str(caught.value)


def test_statistics_of_several_kinds_of_actions(tmp_path: Path, folders: dict[str, Path]) -> None:
    (robot,) = REFERENCE["oft"]["statistics"].values()
    nested = {"franka": {"abs": robot, "delta": {"action": {}}}}
    plain, found = (
        policy_of(folder).infer(given("oft")[0])["actions"]
        for folder in (folders["oft"], write(tmp_path / "oft", "oft", lambda c: c.update(statistics=nested)))
    )
    np.testing.assert_array_equal(plain, found)


def test_bad_input_is_one_error(folders: dict[str, Path]) -> None:
    policy, good = policy_of(folders["oft"]), given("oft")[0]
    with pytest.raises(ObservationError, match="missing observation/wrist_image"):
        policy.infer({k: v for k, v in good.items() if "wrist" not in k})
    with pytest.raises(ConfigError, match="schedule: expected none for starvla_oft"):
        policy_of(folders["oft"], schedule="cubic")


@pytest.mark.parametrize(
    ("name", "variant"), [("starvla_groot", "groot"), ("starvla_pi", "pi"), ("starvla_oft", "oft")]
)
def test_random_weights_of_any_size(folders: dict[str, Path], name: str, variant: str) -> None:
    card, model = bench_card(family_named(name)), policy_of(folders[variant]).model
    policy, _ = random_policy(name, PolicyConfig(device="cpu"), model=model)
    result = policy.infer(card.random_observation(policy.processor, np.random.default_rng(0)))
    assert result["actions"].shape[1] == 7 and np.isfinite(result["actions"]).all()


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """QwenOFT's TFLOP at two views of 64 tokens, as counted apart from this code."""
    card = bench_card(family_named("starvla_oft"))
    transforms = card.dummy(card.published(), 2)
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    work = card.work(card.published(), inputs, 1, PolicyConfig().specs(card.family.parts))
    assert sum(w.flop for w in work.values()) / 1e12 == pytest.approx(1.6, abs=0.25)
