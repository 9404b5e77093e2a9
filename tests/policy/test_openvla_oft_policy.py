"""OpenVLA-OFT through the whole policy, against actions that openvla-oft's own code left
(tests/references/make_openvla_oft_reference.py), its conversion, and the folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.openvla_oft_folders import (
    ODD,
    REFERENCE,
    VARIANTS,
    Change,
    answers,
    given,
    image,
    preset,
    tensors,
    write,
    write_run,
)
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.cli import main
from vla_accel.config import load_config
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.openvla_oft.transforms import CROP, centre_crop
from vla_accel.measure.random_policy import random_policy
from vla_accel.pictures import CentreCrop

PARTS = ("vision", "decode")


def policy_of(folder: Path, engine: str = "eager", **settings: Any) -> OptimizedPolicy:
    settings = {"precision": "fp32", "preset": preset(folder, folder.name), **settings}
    config = PolicyConfig(device="cpu", **settings)
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(dict.fromkeys(PARTS, EngineSpec(engine))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {variant: write(tmp_path_factory.mktemp(variant) / variant, variant) for variant in VARIANTS}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_actions_are_openvla_ofts(folders: dict[str, Path], variant: str, engine: str) -> None:
    """In the robot's units: two or three images, also of one, with prompts of different lengths."""
    policy, want = policy_of(folders[variant], engine), answers(variant)["whole"]
    assert {e["used"] for e in policy.ledger.as_list()} == {engine}
    three = [given(variant, index) for index in range(3)]
    batch = np.stack([one["actions"] for one in policy.infer_batch(three)])
    np.testing.assert_allclose(policy.infer(three[0])["actions"], want[0], atol=3e-5)
    np.testing.assert_allclose(batch, want, atol=3e-5)


def test_images_and_state_count_and_cameras_have_an_order(folders: dict[str, Path]) -> None:
    policy, one = policy_of(folders["libero"], "native"), given("libero", 0)
    first, wrist = "observation/image", "observation/wrist_image"
    usual = policy.infer(one)["actions"]
    for change in (
        {first: one[wrist], wrist: one[first]}, {"observation/state": one["observation/state"] + 0.5},
        {"prompt": given("libero", 1)["prompt"]},
    ):  # fmt: skip
        assert np.abs(policy.infer({**one, **change})["actions"] - usual).max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_actions_of_cameras_of_other_sizes_are_openvla_ofts(folders: dict[str, Path], variant: str) -> None:
    """JPEG, filter and crop of images that are square or not; a few pixels round to the next level."""
    found = policy_of(folders[variant]).infer(given(variant, 0, ODD))["actions"]
    np.testing.assert_allclose(found, answers(variant)["resized"], atol=2e-3)


@pytest.mark.parametrize("size", [*ODD, (224, 224)])
def test_images_are_resized_and_cropped_as_tensorflow_does(size: tuple[int, int]) -> None:
    """After JPEG; at most one level apart, at a few pixels that round otherwise; exactly if they are only cropped."""
    found = centre_crop(image("oft.sampled", *size), CentreCrop(224, CROP))
    want = np.asarray(REFERENCE["images"][f"{size[0]}x{size[1]}"])
    step = -(-224 // len(want))
    apart = np.abs(found[::step, ::step].astype(int) - want)
    assert apart.max() <= (size != (224, 224)) and (apart > 0).mean() < 0.01


def test_a_run_is_converted_and_keeps_every_tensor(tmp_path: Path, capsys: Any) -> None:
    run, output = write_run(tmp_path / "run"), tmp_path / "out"
    with pytest.raises(CheckpointError, match=f"type vla-accel convert {run} {run}"):
        policy_of(run)
    assert main(["convert", str(run), str(output)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kind"] == "openvla_oft"
    for side in ("action_head", "proprio_projector"):
        stored = SafetensorsWeights(output / f"{side}--7_checkpoint.safetensors")
        kept = {n.partition(".")[2]: t for n, t in tensors("libero").items() if n.startswith(side)}
        assert stored.shapes.keys() == kept.keys()
        assert all(torch.equal(stored.read(name), kept[name]) for name in kept)
    assert not [*output.glob("*.pt")]
    policy_of(output)


class Other:
    """An object that a pickle of tensors must not make."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("action_head--7_checkpoint.pt", {"a": Other()}, "expected a pickle of tensors"),
        (
            "action_head--7_checkpoint.pt",
            {"module.noise_predictor.x": torch.ones(1)},
            "diffusion head is not supported",
        ),
        ("noisy_action_projector--7_checkpoint.pt", {}, "diffusion head is not supported"),
        ("vision_backbone--7_checkpoint.pt", {}, "FiLM is not supported"),
    ],
)
def test_runs_that_cannot_be_converted_are_refused(
    tmp_path: Path, name: str, content: Any, message: str, capsys: Any
) -> None:
    run = write_run(tmp_path / "run")
    torch.save(content, run / name)
    assert main(["convert", str(run), str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_folded_in(tmp_path: Path) -> None:
    """Of a run that is not merged, on the model that it was trained from: of a language layer and of a tower."""
    changed = {
        "language_model.model.layers.1.self_attn.k_proj": (64, 64),
        "vision_backbone.featurizer.blocks.0.mlp.fc1": (256, 64),
        "vision_backbone.featurizer.blocks.2.mlp.fc1": (256, 64),  # of the last block, which nothing reads
    }
    base, run, adapter = write(tmp_path / "base"), tmp_path / "run", tmp_path / "run" / "lora_adapter"
    merged, factors, generator = dict(tensors("libero")), {}, torch.Generator().manual_seed(0)
    for name, (rows, columns) in changed.items():
        a, b = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + 2.0 * (b @ a) / 16
        factors |= {f"base_model.model.{name}.lora_{k}.weight": x.contiguous() / 4 for k, x in (("A", a), ("B", b))}
    adapter.mkdir(parents=True)
    save_file(factors, str(adapter / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    for file in [*base.glob("*.safetensors"), base / "dataset_statistics.json"]:
        if not file.name.startswith("model"):
            file.rename(run / file.name)
    with pytest.raises(CheckpointError, match=f"checkpoint.lora: {adapter}"):
        policy_of(run)
    found = policy_of(base, checkpoint={"lora": str(adapter)}).infer(given("libero", 0))["actions"]
    want = policy_of(write(tmp_path / "merged", stored=merged)).infer(given("libero", 0))["actions"]
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert np.abs(want - answers("libero")["whole"][0]).max() > 1e-3


def test_numbers_are_scaled_as_in_training(tmp_path: Path) -> None:
    """Quantiles, also of a number that never changes, clipped; actions outside of the mask as they are; the gripper."""

    def change(files: dict[str, Any]) -> None:
        (table,) = files["dataset_statistics.json"].values()
        table["proprio"].update(q01=[-1.0] * 7 + [0.3], q99=[3.0] * 7 + [0.3])
        table["action"].update(q01=[-1.0] * 7, q99=[3.0] * 7)

    processor = policy_of(write(tmp_path / "run", change=change)).processor
    state = np.array([1.0, 2.0, 3.0, 9.0, -9.0, -1.0, 0.0, 0.3])
    inputs = processor.prepare({**given("libero", 0), "observation/state": state})
    np.testing.assert_allclose(inputs.state, [0.0, 0.5, 1.0, 1.0, -1.0, -1.0, -0.5, -1.0], atol=1e-6)
    model = np.array([[0.0, 0.5, 1.0, 2.0, -1.0, -3.0, 0.9], [0.0] * 6 + [0.2], [0.0] * 6 + [0.5]])
    robot = processor.unnormalize_actions(model, inputs)
    np.testing.assert_allclose(robot[0], [1.0, 2.0, 3.0, 5.0, -1.0, -5.0, -1.0], atol=1e-6)
    assert robot[1, 6] == 1.0 and robot[2, 6] == 0.0


def test_the_data_are_chosen_by_name(tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        table = files["dataset_statistics.json"]
        table["libero_other_no_noops"] = json.loads(json.dumps(table["libero_task_no_noops"]))
        table["libero_other_no_noops"]["action"]["q99"] = [9.0] * 7

    folder = write(tmp_path / "run", change=change)
    with pytest.raises(CheckpointError, match=r"statistics of libero_other_no_noops, libero_task_no_noops; choose one"):
        policy_of(folder)
    with pytest.raises(CheckpointError, match="got 'third'"):
        policy_of(folder, checkpoint={"embodiment": "third"})
    first, second = (
        policy_of(folder, checkpoint={"embodiment": name}).infer(given("libero", 0))["actions"]
        for name in ("libero_task", "libero_other_no_noops")
    )
    np.testing.assert_allclose(first, answers("libero")["whole"][0], atol=3e-5)
    assert np.abs(first - second).max() > 1


def test_data_of_other_robots_need_a_preset_and_a_horizon(tmp_path: Path) -> None:
    """Nothing of LIBERO's applies to them: neither the chunk nor the gripper."""

    def change(files: dict[str, Any]) -> None:
        table = files["dataset_statistics.json"]
        table["bridge_orig"] = table.pop("libero_task_no_noops")

    folder = write(tmp_path / "run", change=change)
    some: tuple[dict[str, Any], ...] = ({}, {"preset": "libero"}, {"checkpoint": {"action_horizon": 5}})
    for settings in some:
        with pytest.raises(CheckpointError, match=r"got bridge_orig, .* checkpoint.action_horizon and preset"):
            policy_of(folder, **settings)
    policy = policy_of(folder, preset="libero", checkpoint={"action_horizon": 5})
    actions = policy.infer(given("libero", 0))["actions"]
    assert len(actions) == 5 and not np.isin(actions[:, 6], (-1.0, 0.0, 1.0)).any()


def test_the_gripper_is_that_of_liberos_robot(folders: dict[str, Path]) -> None:
    """Another robot's preset, with the same numbers, gets the model's own."""
    own = folders["libero"] / "own.yaml"
    own.write_text("base: libero\nstate: [arm]\n")
    policy, one = policy_of(folders["libero"], preset=str(own)), given("libero", 0)
    actions = policy.infer({**one, "arm": one.pop("observation/state")})["actions"]
    want = answers("libero")["whole"][0]
    np.testing.assert_allclose(actions[:, :6], want[:, :6], atol=3e-5)
    np.testing.assert_array_equal(-np.sign(2 * actions[:, 6] - 1), want[:, 6])
    assert not np.isin(actions[:, 6], (-1.0, 0.0, 1.0)).any()
    assert not np.isfinite(policy.processor.ranges["actions"].span[6]), "nothing is known of a number outside the mask"


def config(**fields: Any) -> Change:
    return lambda files: files["config.json"].update(fields)


def text(**fields: Any) -> Change:
    return lambda files: files["config.json"]["text_config"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(vision_backbone_id="siglip-vit-so400m"), "vision_backbone_id: expected"),
        (config(llm_backbone_id="phi-2-3b"), "llm_backbone_id: expected"),
        (config(use_fused_vision_backbone="False"), "use_fused_vision_backbone: expected true"),
        (config(quantization_config={"bits": 4}), "quantization_config"),
        (text(rope_theta=5e5), "text_config.rope_theta: expected 10000.0"),
        (text(rope_scaling={"factor": 2}), "text_config.rope_scaling"),
        (text(num_hidden_layers=4), "num_hidden_layers: config says 4, weights say 3"),
        (text(num_attention_heads=8), "num_key_value_heads: config says 4, weights say 8"),
        (text(rms_norm_eps="1e-6"), "rms_norm_eps: expected a number"),
        (lambda files: files["preprocessor_config.json"].update(stds=[[0.0] * 3] * 2), "stds: expected three numbers"),
        (lambda files: files["dataset_statistics.json"]["libero_task_no_noops"].pop("proprio"), "proprio: expected"),
        (lambda files: files["dataset_statistics.json"].update(libero_task_no_noops=7), "statistics of actions, got 7"),
        (
            lambda files: files["dataset_statistics.json"]["libero_task_no_noops"]["action"].update(mask=["False"] * 7),
            "mask: expected 7 times true or false",
        ),
        (
            lambda files: files["tokenizer.json"].update(post_processor=None),
            "tokenizer: expected Llama's, which begins with token 1",
        ),
    ],
)  # fmt: skip
def test_folders_that_are_not_understood_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy_of(write(tmp_path / "run", change=change))
    assert message in str(caught.value)


def test_models_without_their_head_or_of_other_robots_are_refused(tmp_path: Path) -> None:
    for name, change, message in (
        ("discrete", "action_head", "whose actions are tokens, is not supported"),
        ("bridge", "proprio_projector", "expected actions of 7 numbers and states of 8"),
    ):
        folder = write(tmp_path / name)
        (side,) = folder.glob(f"{change}--*.safetensors")
        stored = SafetensorsWeights(side)
        other = {n: stored.read(n).clone() for n in stored.shapes}
        side.unlink()
        (folder / f"{change}--7_checkpoint.pt").unlink()
        if name == "bridge":
            other["fc1.weight"] = other["fc1.weight"][:, :7].contiguous()
            save_file(other, str(side))
        with pytest.raises(CheckpointError) as caught:
            policy_of(folder)
        assert message in str(caught.value)


def test_bad_input_is_one_error(folders: dict[str, Path]) -> None:
    policy, good = policy_of(folders["libero"]), given("libero", 0)
    for change, message in (
        ({"observation/state": np.zeros(7)}, r"expected shape \(8,\)"), ({"prompt": "  "}, "expected an instruction"),
        ({"prompt": "a" * 200}, "at most 128 tokens"), ({"observation/image": np.zeros((9, 9), np.uint8)}, "shape"),
    ):  # fmt: skip
        with pytest.raises(ObservationError, match=message):
            policy.infer({**good, **change})
    with pytest.raises(ObservationError, match="missing observation/wrist_image"):
        policy.infer({k: v for k, v in good.items() if "wrist" not in k})
    with pytest.raises(ConfigError, match="schedule: expected none for openvla_oft"):
        policy_of(folders["libero"], schedule="cubic")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "fp8", "int8"])
def test_random_weights_of_any_size_in_each_precision(folders: dict[str, Path], precision: str) -> None:
    """FP8 and INT8 of the language model stay near the same weights in float32."""
    card, model = bench_card(family_named("openvla_oft")), policy_of(folders["libero"]).model
    specs = {"vision": EngineSpec("native"), "decode": EngineSpec("native", precision=precision)}  # type: ignore[arg-type]
    config = PolicyConfig(device="cpu", precision="bf16")
    policy, _ = random_policy("openvla_oft", config.with_specs(specs), model=model)
    one = card.random_observation(policy.processor, np.random.default_rng(0))
    exact, _ = random_policy("openvla_oft", PolicyConfig(device="cpu", precision="fp32"), model=model)
    found, want = policy.infer(one)["actions"], exact.infer(one)["actions"]
    assert {e["used"] for e in policy.ledger.as_list()} == {"native"}
    assert np.abs(found - want).max() < (0.05 if precision == "auto" else 0.3) * want.std()


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """TFLOP at two views and a prompt of 35 tokens, as counted apart from this code: language 8.0, vision 0.8."""
    card = bench_card(family_named("openvla_oft"))
    transforms = card.dummy(card.published(), 2)
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    for config, precision in (("native", "bf16"), ("native_fp8_denoise", "fp8")):
        work = card.work(card.published(), inputs, 1, load_config(config).specs(card.family.parts))
        assert work["vision"].flop / 1e12 == pytest.approx(0.8, abs=0.1)
        assert work["decode"].flop / 1e12 == pytest.approx(8.0, abs=0.2)
        assert work["decode"].precision == precision
