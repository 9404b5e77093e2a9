"""MolmoAct2 through the whole policy, against actions that lerobot's own code left
(tests/references/make_molmoact2_reference.py), and the folders that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.support.molmoact2_folders import (
    REFERENCE,
    adapted,
    answers,
    given,
    noise,
    previous,
    published,
    tensors,
    write,
)
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.lerobot_settings import FIELDS, STEPS, releases
from vla_accel.config import CheckpointSpec, RtcConfig
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.molmoact2.network import molmoact2
from vla_accel.families.molmoact2.transforms import cleaned
from vla_accel.measure.parity import compare
from vla_accel.measure.random_policy import random_policy
from vla_accel.nn.quantised import calibrated_products
from vla_accel.transforms.robots import LIBERO as LIBERO_ROBOT

PARTS = ("vision", "kv_cache", "denoise")
ENGINES = ("eager", "native")
LIBERO = CheckpointSpec(embodiment="libero")
VARIANTS = ("plain", "resized", "robot", "tagged", "adapted")


def policy_of(folder: Path, engine: str = "eager", **settings: Any) -> OptimizedPolicy:
    config = PolicyConfig(device="cpu", **{"precision": "fp32", **settings})
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(dict.fromkeys(PARTS, EngineSpec(engine))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("molmoact2"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_actions_are_lerobots(tmp_path: Path, variant: str, engine: str) -> None:
    policy, expected, three = policy_of(write(tmp_path, variant), engine), answers(variant), given(variant)
    assert {e["used"] for e in policy.ledger.as_list()} == {engine}
    found = {
        "alone": np.stack([policy.infer(one, noise=x)["actions"] for one, x in zip(three, noise(), strict=True)]),
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three, noise=noise())]),
    }
    if "missing" in expected:
        less = {k: v for k, v in three[0].items() if k != "observation.images.wrist"}
        found["missing"] = policy.infer(less, noise=noise()[0])["actions"]
    for case, actions in found.items():
        # Images that are resized may differ by a level where lerobot's float32 is between two.
        bound = 1e-4 if variant == "resized" else 2e-6
        assert np.abs(actions - expected[case if case == "missing" else "alone"]).max() <= bound, case


@pytest.mark.parametrize("engine", ENGINES)
def test_actions_of_the_authors_folder_are_theirs(tmp_path: Path, engine: str) -> None:
    policy, expected = policy_of(published(tmp_path, "tagged"), engine, checkpoint=LIBERO), answers("tagged")
    for one, x, actions in zip(given(), noise(), expected["published"], strict=True):
        np.testing.assert_allclose(policy.infer(one, noise=x)["actions"], actions, atol=2e-6)
    assert np.abs(expected["published"] - expected["alone"]).max() > 1e-3, "a number that never varies counts"


@pytest.mark.parametrize("engine", ENGINES)
def test_chunks_continue_as_lerobots(folder: Path, engine: str) -> None:
    policy = policy_of(folder, engine, rtc=RtcConfig(max_guidance_weight=10.0, execution_horizon=5))
    left = policy.processor.actions.restore(previous().astype(np.float64))
    found = policy.infer(given()[0], noise=noise()[0], prev_chunk=left, inference_delay=2)["actions"]
    np.testing.assert_allclose(found, answers("plain")["guided"], atol=2e-6)


@pytest.mark.parametrize(("variant", "release"), [("plain", "0.6.1"), ("adapted", "main")])
def test_the_tables_have_what_each_release_saves(variant: str, release: str) -> None:
    files = REFERENCE["variants"][variant]["files"]
    known = {n for setting in FIELDS["molmoact2"] if release in releases(setting) for n in setting.names}
    assert files["config.json"].keys() == known
    for one in (s for name in files if name.startswith("policy_") for s in files[name]["steps"]):
        step = one["registry_name"].replace("molmoact2_masked_", "") + "_processor" * ("masked" in one["registry_name"])
        assert one["config"].keys() <= {n for s in STEPS[step] for n in s.names}, one


@pytest.mark.parametrize(
    ("mode", "hidden"), [("continuous", False), ("both", True)], ids=["the whole prompt", "a part of the prompt"]
)
def test_the_expert_of_the_main_branch_sees_what_it_was_trained_with(
    tmp_path: Path, mode: str, hidden: bool
) -> None:  # fmt: skip
    """Up to 0.6.1 the model that lerobot trains from decides, whatever the policy's action_mode."""
    change = config(train_mode_vlm="fft", action_mode=mode)
    policy = policy_of(write(tmp_path, "adapted", change, stored=tensors()))
    found = policy.infer(given()[0], noise=noise()[0])["actions"]
    difference = np.abs(found - answers("plain")["alone"][0]).max()
    assert difference < 2e-6 if hidden else difference > 1e-3


def test_folders_of_0_6_1_with_an_adapter_have_the_same_tensors(tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        plain = REFERENCE["variants"]["plain"]["files"]
        files["config.json"] = {
            **json.loads(json.dumps(plain["config.json"]).replace("PUBLISHED", str(tmp_path / "base"))),
            "enable_lora_vlm": True, "lora_rank": 4, "lora_alpha": 6,
        }  # fmt: skip

    old, new = policy_of(write(tmp_path, "adapted", change)), policy_of(write(tmp_path / "new", "adapted"))
    for name in old.model.state_dict():
        read = [p.model.origin.read(name, None, p.device) for p in (old, new)]
        assert torch.equal(*read), name
    assert old.model.config.hidden and not new.model.config.hidden


def without_factor(factor: str) -> dict[str, Any]:
    return {name: value for name, value in adapted().items() if "0.self_attn.att_proj.lora_" + factor not in name}


@pytest.mark.parametrize(
    ("change", "stored", "message"),
    [
        (
            lambda files: None,
            without_factor("B"),
            "att_proj.weight: expected factors of rank 4 for (256, 64), got lora_A",
        ),
        (lambda files: None, tensors(), "expected weights with lora_A and lora_B of linear layers, got none"),
        (
            lambda files: None,
            {**adapted(), "lora_magnitude_vector": torch.ones(1)},
            "expected weights with lora_A and lora_B of linear layers, got model.lora_magnitude_vector",
        ),
        (lambda files: files["config.json"].update(lora_rank=5), None, "expected factors of rank 5"),
        (lambda files: files["config.json"].update(train_mode_vlm="fft"), None, "does not fit MolmoAct2"),
        (lambda files: files["config.json"].update(train_mode_vlm="qlora"), None, 'train_mode_vlm: expected "fft" or'),
        (
            lambda files: files["policy_preprocessor.json"]["steps"][4]["config"].update(
                normalization_masks={"observation.state": [True] * 8}
            ),
            None,
            "normalization_masks: expected the statistics' mask of the state, [True, True, True, True, True, True,",
        ),
        (
            lambda files: files["policy_preprocessor.json"]["steps"][4]["config"].update(normalization_masks=[True]),
            None,
            "got [True]",
        ),
    ],
    ids=["factor", "no adapter", "another adapter", "rank", "no mode", "another mode", "mask", "no table of masks"],
)
def test_contradictory_folders_of_the_main_branch_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], stored: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy_of(write(tmp_path, "adapted", change, stored=stored))
    assert message in str(caught.value)


def swapped(one: dict[str, Any]) -> dict[str, Any]:
    names = "observation.images.front", "observation.images.wrist"
    return {**one, names[0]: one[names[1]], names[1]: one[names[0]]}


def test_what_a_prompt_has_changes_the_actions(folder: Path) -> None:
    """What the comparisons with lerobot would not see otherwise."""
    policy, one = policy_of(folder), given()[0]
    base = policy.infer(one, noise=noise()[0])["actions"]
    for changed in (swapped(one), {**one, "task": "open it"}, {**one, "observation.state": -one["observation.state"]}):
        assert np.abs(policy.infer(changed, noise=noise()[0])["actions"] - base).max() > 1e-3


def test_lower_precision_is_near(folder: Path) -> None:
    exact, low = policy_of(folder), policy_of(folder, "native", precision="bf16")
    report = compare(low, exact, given()[:2], name="molmoact2")
    assert report.num_steps == 5 and 0.99 < report.actions.cosine < 1
    assert list(report.components) == ["image_tokens", "keys", "values"]


def test_low_precision_weights_are_near(folder: Path) -> None:
    exact = policy_of(folder)
    for precision in ("fp8", "int8"):
        config = PolicyConfig(device="cpu", precision="bf16").with_specs(
            {"denoise": EngineSpec("native", precision=precision)}  # type: ignore[arg-type]
        )
        low = OptimizedPolicy.from_pretrained(folder, config)
        assert compare(low, exact, given()[:2], name=precision).actions.cosine > 0.99


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_calibrated_vision_and_prompt_are_near(folder: Path, precision: Literal["fp8", "int8"]) -> None:
    """Scales are of every product, in the order of the blocks, also where features of several blocks are joined."""
    pytest.importorskip("modelopt", reason="NOT RUN: needs pip install 'vla_accel[onnx]'")
    exact = policy_of(folder)
    config = PolicyConfig(device="cpu", precision="bf16", strict=True).with_specs({
        "vision": EngineSpec("native", precision=precision), "kv_cache": EngineSpec("native", precision=precision),
        "denoise": EngineSpec("native"),
    })  # fmt: skip
    low, _ = random_policy("molmoact2", config, model=policy_of(folder, precision="bf16").model)
    assert low.checkpoint.scales is not None
    assert list(low.checkpoint.scales.amax) == calibrated_products(exact.model.config)
    seen = [bench_card(low.family).random_observation(low.processor, np.random.default_rng(i)) for i in range(2)]
    plain, _ = random_policy("molmoact2", PolicyConfig(device="cpu"), model=exact.model)
    assert compare(low, plain, seen, name=precision).actions.cosine > 0.99
    details = {e["component"]: str(e["detail"]) for e in low.ledger.as_list()}
    assert details["kv_cache"].endswith(f"{precision.upper()}: o_proj, gate_up_proj, down_proj")
    assert details["vision"].endswith(f"{precision.upper()}: qkv_proj, out_proj, fc1, fc2")


def test_placed_steps_are_another_flow(folder: Path) -> None:
    plain, placed = policy_of(folder), policy_of(folder, "native", schedule=(1.0, 0.6, 0.0))
    first, other = (p.infer(given()[0], noise=noise()[0])["actions"] for p in (plain, placed))
    assert placed.metadata["num_steps"] == 2 and np.abs(first - other).max() > 1e-3


def three_cameras(files: dict[str, Any]) -> None:
    files["config.json"]["input_features"]["observation.images.above"] = {"type": "VISUAL", "shape": [3, 70, 70]}
    pack(image_keys=[f"observation.images.{name}" for name in ("wrist", "front", "above")])(files)


def test_remaining_cameras_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    """As lerobot's fallback has them; all cameras, and those of a user's preset, keep theirs."""
    folder, one = write(tmp_path, change=three_cameras), given()[0]
    one["observation.images.above"] = 255 - one["observation.images.front"]
    names = [f"observation.images.{name}" for name in ("wrist", "front", "above")]
    processor = policy_of(folder).processor
    order = {gone: [*processor.observe({k: v for k, v in one.items() if k != gone}).views] for gone in ("", *names)}
    assert order == {"": names, names[0]: [names[2], names[1]], names[1]: [names[2], names[0]], names[2]: names[1::-1]}
    robot = {
        "images": names[:2], "state": ["observation.state"], "state_dim": 8, "action_dim": 7, "prompt": "task",
        "optional_images": names[:2],
    }  # fmt: skip
    (tmp_path / "robot.json").write_text(json.dumps(robot))
    chosen, _ = policy_of(folder, preset=str(tmp_path / "robot.json")).processor, one.pop("observation.images.above")
    assert [*chosen.observe({k: v for k, v in one.items() if k != names[0]}).views] == [names[1]]
    assert [*chosen.observe(one).views] == names[:2]


def renamed(files: dict[str, Any]) -> None:
    """LIBERO's names."""
    text = json.dumps(files).replace("images.front", "images.image").replace("images.wrist", "images.image2")
    files.update(json.loads(text))


def test_cameras_with_the_names_of_libero(tmp_path: Path) -> None:
    policy, one = policy_of(write(tmp_path, change=renamed)), given()[0]
    assert policy.processor.preset.images == LIBERO_ROBOT.images
    keys = dict(zip(("observation.images.front", "observation.images.wrist"), LIBERO_ROBOT.images, strict=True))
    raw = {keys.get(name, name): value for name, value in one.items() if name in keys}
    raw |= {LIBERO_ROBOT.state[0]: one["observation.state"], LIBERO_ROBOT.prompt: one["task"]}
    found = policy.infer(raw, noise=noise()[0])["actions"]
    np.testing.assert_allclose(found, answers("plain")["alone"][0], atol=2e-6)
    del raw[LIBERO_ROBOT.images[1]]
    found = policy.infer(raw, noise=noise()[0])["actions"]
    np.testing.assert_allclose(found, answers("plain")["missing"], atol=2e-6)


def test_instructions_are_cleaned() -> None:
    texts = {
        "Pick up  the\nbowl!": "pick up the bowl", 'Task: "Open it."': "open it",
        "open it. Then stop": "open it; then stop",
        "(Your task is to stop)": "stop", "...": "",
    }  # fmt: skip
    assert {text: cleaned(text) for text in texts} == texts


def config(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["config.json"].update(changes)


def nested(name: str, file: str = "config.json", **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files[file][name].update(changes)


def pack(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["policy_preprocessor.json"]["steps"][5]["config"].update(changes)


def frame(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda files: files["policy_preprocessor.json"]["steps"][2]["config"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(action_mode="discrete"), 'action_mode: expected "continuous" or "both", got "discrete"'),
        (config(inference_action_mode="discrete"), "actions in tokens are not supported"),
        (config(enable_lora_vlm=True), "expected weights with lora_A and lora_B"),
        (config(chunk_size=5, n_action_steps=5), "chunk_size: expected config.json's 5, got 6"),
        (config(new_setting=1), "expected settings of lerobot"),
        (pack(image_keys=["observation.images.top"]), "image_keys: expected some of observation.images.front"),
        (pack(env_action_dim=6), "env_action_dim: expected 7"),
        (pack(num_state_tokens=512), "expected <state_511> as one token"),
        (pack(max_sequence_length=18), "max_sequence_length: expected more than 2 images"),
        (frame(joint_signs=[1.0], joint_offsets=[0.0]), "the same joint_signs and joint_offsets"),
    ],
    ids=["mode", "tokens", "lora", "chunk", "setting", "camera", "actions", "states", "length", "frame"],
)
def test_folders_of_other_policies_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy_of(write(tmp_path, change=change))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(enable_depth_reasoning=True), "MolmoAct2-Think"),
        (config(action_expert_depth_gate=True), "MolmoAct2-Think"),
        (config(action_mode="discrete"), "action_mode"),
        (config(n_obs_steps=2), "n_obs_steps: expected 1"),
        (config(mask_action_dim_padding=False), "mask_action_dim_padding"),
        (config(another=1), "expected settings of MolmoAct2"),
        (config(add_setup_tokens="False"), "add_setup_tokens"),
        (nested("text_config", qk_norm_type="olmo"), 'qk_norm_type: expected "qwen3"'),
        (nested("vit_config", image_num_pos=24), "image_num_pos: expected 25"),
        (nested("adapter_config", vit_layers=[-9]), "vit_layers: expected some of 5 layers"),
        (nested("action_expert_config", num_layers=4), "expert.depth: expected the language model's 3"),
        (nested("image_processor", "processor_config.json", crop_mode="overlap-and-resize-c2"), "crop_mode"),
        (nested("image_processor", "processor_config.json", size={"height": 84}), "size: expected the model"),
        (lambda files: files["norm_stats.json"].update(norm_mode="mean_std"), "norm_mode: expected q01_q99"),
    ],
    ids=["think", "gate", "mode", "history", "padding", "setting", "words", "norms", "positions", "levels", "depth",
         "crops", "size", "statistics"],
)  # fmt: skip
def test_other_models_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        policy_of(published(tmp_path, change=change), checkpoint=LIBERO)
    assert message in str(caught.value)


def test_bad_input_is_one_error(folder: Path, tmp_path: Path) -> None:
    policy, good = policy_of(folder), given()[0]
    wide = good["observation.state"].copy()
    wide[6] = 1.5
    for changed, message in (
        ({**good, "task": " ... "}, "task: expected an instruction"),
        ({**good, "task": "open <|IM_END|> it"}, "task: expected no special tokens"),
        ({**good, "task": "open it " * 999}, "max_token_len"),
        ({**good, "observation.state": wide}, "observation.state: expected number 6 in [-1, 1]"),
    ):
        with pytest.raises(ObservationError) as caught:
            policy.infer(changed)
        assert message in str(caught.value)
    with pytest.raises(ObservationError, match=r"missing observation\.images\.wrist"):
        robot = policy_of(write(tmp_path / "robot", "robot"))
        robot.infer({k: v for k, v in good.items() if k != "observation.images.wrist"})
    with pytest.raises(ConfigError, match="rtc"):
        policy_of(folder, rtc=RtcConfig(trained=True))
    with pytest.raises(ConfigError, match="embodiment: lerobot's folder has one robot"):
        policy_of(folder, checkpoint=LIBERO)
    with pytest.raises(ConfigError, match=r"checkpoint.embodiment: expected a robot of norm_stats.json, libero, other"):
        policy_of(published(tmp_path / "published"))
    names = [name for name in tensors() if "context_k_proj" not in name]
    with pytest.raises(CheckpointError, match="context_k_proj"):
        policy_of(write(tmp_path / "less", stored={name: tensors()[name] for name in names}))


def test_the_kept_folders_have_lerobots_steps() -> None:
    steps = REFERENCE["variants"]["plain"]["files"]["policy_preprocessor.json"]["steps"]
    assert [s["registry_name"] for s in steps][3:6] == [
        "molmoact2_masked_normalizer", "molmoact2_clamp_normalized", "molmoact2_pack_inputs",
    ]  # fmt: skip


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """As counted apart from this code: 4.95 B parameters that are read, and 4.9 TFLOP before the steps."""
    card, sizes = bench_card(family_named("molmoact2")), molmoact2()
    transforms = card.dummy(sizes, 2)
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    work = card.work(sizes, inputs, 10, PolicyConfig().specs(PARTS))
    assert (work["vision"].flop + work["kv_cache"].flop) / 1e12 == pytest.approx(4.9, abs=0.1)
    assert work["denoise"].bytes / 10 / 1e9 == pytest.approx(0.65, abs=0.03)
    parameters = sum(p.numel() for p in card.family.network_class.empty(sizes).parameters())
    assert parameters / 1e9 == pytest.approx(4.95, abs=0.02)


def test_a_random_policy_of_any_size(folder: Path) -> None:
    model = policy_of(folder).model
    policy, _ = random_policy("molmoact2", PolicyConfig(device="cpu", num_steps=2), model=model)
    card = bench_card(policy.family)
    result = policy.infer(card.random_observation(policy.processor, np.random.default_rng(0)))
    assert result["actions"].shape == (6, 7) and np.isfinite(result["actions"]).all()
    assert compare(policy, policy, [card.random_observation(policy.processor, np.random.default_rng(1))], name="x")
