"""Settings of GR00T's folders that are unknown, unsupported or contradictory raise an error that names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support import groot_folders as written
from tests.support.groot_folders import TAG, put, tensors, write_isaac, write_lerobot
from tests.support.lerobot_saved import Change
from vla_accel.config import CheckpointSpec, PolicyConfig
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import load

W3 = "action_head.action_encoder.W3.W"
CONFIG, PROCESSOR, STATISTICS, IDS = "config.json", "processor_config.json", "statistics.json", "embodiment_id.json"
BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"
NO_SIZE = "expected a whole number from 1 to 4096, got"
STATE = written.statistics(written.STATE)
SWAPPED = {
    name: {**entry, "q01": entry["q99"], "q99": entry["q01"], "min": entry["max"], "max": entry["min"]}
    for name, entry in STATE.items()
}


def config(*path: Any) -> Change:
    return put(CONFIG, *path)


def setting(name: str, value: Any) -> Change:
    return put(PROCESSOR, "processor_kwargs", name, value)


def images(**values: Any) -> Change:
    """Settings of a processor with OpenCV's filter."""
    settings = {"use_albumentations": True, "image_target_size": [256, 256], "image_crop_size": [230, 230], **values}
    return lambda files: files[PROCESSOR]["processor_kwargs"].update(settings)


def modality(*path: Any) -> Change:
    return put(PROCESSOR, "processor_kwargs", "modality_configs", TAG, *path)


def step(file: str, index: int, name: str, value: Any) -> Change:
    return put(file, "steps", index, "config", name, value)


def relation(**form: Any) -> Change:
    """The first action is relative to the state."""
    form = {"rep": "RELATIVE", "state_key": "x", **form}

    def change(files: dict[str, Any]) -> None:
        settings = files[PROCESSOR]["processor_kwargs"]
        settings["use_relative_action"] = True
        settings["modality_configs"][TAG]["action"]["action_configs"] = [form, *[{"rep": "ABSOLUTE"}] * 6]
        files[STATISTICS][TAG]["relative_action"] = written.statistics({"x": 1}, rows=6)

    return change


ISAAC: list[tuple[Change, str]] = [
    # config.json against the weights.
    (config("hidden_size", 64), "hidden_size: config says 64, weights say 56"),
    (config("use_vl_self_attention", False), "use_vl_self_attention: config says False, weights say True"),
    (config("select_layer", 6), "missing: backbone.model.model.language_model.layers.4"),
    *((config(name, value), rf"/config\.json: {name}: {NO_SIZE} {value!r}") for name, value in (
        ("select_layer", "last"), ("select_layer", 10**9), ("action_horizon", -1), ("num_inference_timesteps", 0))),
    (config("model_type", "Gr00tN2"), "expected GR00T N1.7 .*N1.6 .*N1.5 .*, found gr00tn2, another network"),
    # Networks that are not built.
    *((config(*path), rf"{'.'.join(path[:-1])}\b.*got|got {'.'.join(path[:-1])} ") for path in (
        ("use_vlln", False), ("strict_action_padding_mask", True), ("use_future_tokens", True),
        ("use_soft_prompts", True), ("use_tactile", True), ("backbone_model_type", "eagle"), ("use_motion", True),
        ("state_history_length", 3), ("loss_mechanism", "dual_branch"),
        ("diffusion_model_cfg", "norm_type", "layer_norm"), ("diffusion_model_cfg", "a_later_setting", 3),
        ("vl_self_attention_cfg", "positional_embeddings", "sinusoidal"))),
    # Embodiments and statistics.
    *((put(IDS, TAG, number), "misshaped: action_head.action_decoder.layer1.W") for number in (7, 10**9)),
    (lambda files: files.update({STATISTICS: {"gr1": {}}, IDS: {"mine": 1}}),
     f"all its files have, found {TAG} in .*; gr1 in statistics.json; .*mine.* in embodiment_id"),
    (put(STATISTICS, TAG, {"state": STATE}), "expected action, found"),
    (put(STATISTICS, TAG, {"state": {}, "action": {}}), "expected x, found"),
    (put(STATISTICS, TAG, {"state": SWAPPED, "action": SWAPPED}), r"expected \w+ <= "),
    # Images.
    *((images(**changes), rf"/processor_config\.json: {message}") for changes, message in (
        ({"shortest_image_edge": -1}, f"shortest_image_edge: {NO_SIZE} -1"),
        ({"shortest_image_edge": "256"}, f"shortest_image_edge: {NO_SIZE} '256'"),
        ({"image_target_size": [256, 0]}, f"image_target_size: {NO_SIZE} 0"),
        ({"image_target_size": 256}, "image_target_size: expected a height and a width, got 256"),
        ({"crop_fraction": None, "image_crop_size": [-1, 2]}, f"image_crop_size: {NO_SIZE} -1"),
        ({"crop_fraction": None, "image_crop_size": [230]}, r"image_crop_size: expected a height and a width, got \["),
        ({"crop_fraction": "0.9"}, "crop_fraction: expected a number, got '0.9'"),
        ({"crop_fraction": 1.5}, "crop_fraction: expected .*, got 1.5"),
        ({"use_albumentations": False, "image_target_size": None}, "image_target_size: expected .*, got "),
        ({"use_albumentations": False, "image_crop_size": None}, "image_crop_size: expected .*, got "),
        ({"use_albumentations": False, "image_crop_size": [300, 230]}, "image_crop_size: expected .*, got "),
        ({"crop_fraction": None, "image_crop_size": None}, "image_crop_size: expected .*, got "),
        ({"shortest_image_edge": None, "image_target_size": None}, "image_target_size: expected .*, got "))),
    # Settings of the processor and of modalities.
    *((setting(name, value), rf"processor_config\.json: ({name}: )?expected .*got ({name}|true|\")")
      for name, value in (
        ("use_tactile", True), ("model_type", "eagle"), ("a_later_setting", 3), ("statistics_override", {"a": 1}))),
    *((modality(kind, name, value), rf"{TAG}: .*{kind}\.{name}\b") for kind, name, value in (
        ("state", "delta_indices", [-2, -1, 0]), ("state", "delta_indices", [-1]), ("video", "a_later_setting", 1),
        *(("video", "delta_indices", indices) for indices in ([0, -1], [-2, -1], [-1000, 0], ["now"])),
        ("action", "a_later_setting", "x"), ("state", "noise", 0.1))),
    (modality("force", {"modality_keys": ["wrist"]}), rf"{TAG}: .*got force "),
    (relation(type="EEF", format="XYZ_ROTVEC"), "expected NON_EEF, or EEF as XYZ_ROT6D"),
    (relation(type="NON_EEF", state_key="gripper"), "action x is relative to state gripper of 1 numbers"),
]  # fmt: skip
LEROBOT: list[tuple[Change, str]] = [
    (put(BEFORE, "steps", 0, "registry_name", "relative_actions_processor"),
     "expected steps among .*, got relative_actions_processor"),
    # lerobot takes embodiment 0 for an unknown tag.
    (step(BEFORE, 2, "embodiment_tag", "typo"), "got 'typo'"),
    (step(BEFORE, 4, "float_dtype", "bfloat16"), "device_processor: float_dtype: expected .*, got .bfloat16"),
    (step(AFTER, 0, "env_action_dim", 5), "env_action_dim: expected 7, got 5"),
    *((step(file, index, name, value), rf"{file}: groot_\w+: .*\b{name}\b") for file, index, name, value in (
        (BEFORE, 2, "state_horizon", 2), (BEFORE, 2, "normalize_min_max", False), (BEFORE, 2, "language_key", "text"),
        (BEFORE, 2, "a_later_setting", 1), (BEFORE, 3, "a_later_setting", 1), (AFTER, 0, "a_later_setting", "x"),
        (AFTER, 0, "action_decode_transform", "another"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lerobot", "change", "message"), [*((False, *case) for case in ISAAC), *((True, *case) for case in LEROBOT)]
)
def test_a_folder_that_is_not_understood_is_refused_by_name(
    lerobot: bool, change: Change, message: str, tmp_path: Path
) -> None:
    if "use_albumentations" in message or "crop" in message or "image_" in message:
        pytest.importorskip("cv2")
    (write_lerobot if lerobot else write_isaac)(tmp_path, change=change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({W3: None}, f"1 missing: {W3}"),
        ({"action_head.more": torch.zeros(2)}, "1 left over: action_head.more"),
        ({W3: torch.zeros(5, 96, 95)}, r"1 misshaped: .*expected \(5, 96, 96\), got"),
        ({W3: torch.zeros(2, 96, 96)}, r"1 misshaped: .*expected \(3, 96, 96\), got"),
    ],
)
def test_every_key_is_accounted_for(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    weights = {name: value for name, value in {**tensors(), **changes}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        load(write_isaac(tmp_path, weights=weights))


@pytest.mark.parametrize("name", ["action_horizon", "video_horizon", "valid_action_horizon", "chunk_size"])
def test_sizes_in_lerobots_form_that_would_take_all_memory_are_refused(name: str, tmp_path: Path) -> None:
    change = config(name, 10**9) if name == "chunk_size" else step(BEFORE, 2, name, 10**9)
    with pytest.raises(CheckpointError, match=rf"/\w+\.json: {name}: expected .* from 1 to 4096, got 1000000000"):
        load(write_lerobot(tmp_path, flat=True, change=change))


@pytest.mark.parametrize("write", [write_isaac, write_lerobot])
def test_an_embodiment_that_the_folder_lacks_is_refused(write: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"expected an embodiment of {TAG}[;,] got 'gr1'"):
        load(write(tmp_path), PolicyConfig(checkpoint=CheckpointSpec(embodiment="gr1")))


# -- N1.6 and N1.5 ------------------------------------------------------------------------------------------------

METADATA = "experiment_cfg/metadata.json"
Write = Callable[..., Path]


def no_statistics(files: dict[str, Any]) -> None:
    files[METADATA][written.N15_TAG]["statistics"].pop("action")


@pytest.mark.parametrize(
    ("write", "change", "message"),
    [
        (written.write_n16, config("backbone_model_type", "qwen"), 'backbone_model_type: expected "eagle"'),
        (written.write_n16, config("select_layer", 9), "missing: backbone.model.language_model.model.layers.3"),
        (written.write_n16, setting("model_type", "qwen"), 'model_type: expected "eagle", got "qwen"'),
        (written.write_n15, config("backbone_cfg", "project_to_dim", 1536), "backbone_cfg.project_to_dim: expected "),
        (written.write_n15, config("action_head_cfg", "hidden_size", 64), "hidden_size: config says 64, "),
        (written.write_n15, config("action_head_cfg", "num_target_vision_tokens", 32), "config says 32, weights say 5"),
        (written.write_n15, config("action_head_cfg", "a_later_setting", 1), "got a_later_setting 1"),
        (written.write_n15, config("action_head_cfg", None), "expected backbone_cfg and action_head_cfg, found"),
        (written.write_n15, no_statistics, "new_embodiment: expected action, found .*state"),
        (written.write_n15, lambda files: files.update({METADATA: {"mine": {}}}),
         "all its files have, found mine in metadata.json; .*gr1.* in Isaac-GR00T"),
        (written.write_n15_lerobot, step(BEFORE, 2, "embodiment_tag", "typo"), "expected an embodiment of ag.*'typo'"),
        (written.write_n15_lerobot, step(BEFORE, 2, "formalize_language", True), "formalize_language: expected false"),
        (written.write_n15_lerobot, step(AFTER, 0, "env_action_dim", 5), "env_action_dim: expected 7, got 5"),
        (written.write_n15_lerobot, put(BEFORE, "steps", 2, "registry_name", "groot_n1_7_pack_inputs_v1"),
         r"expected the steps of GR00T N1\.5, as the weights are, got those of GR00T N1\.7: groot_n1_7_pack"),
        (written.write_lerobot, put(BEFORE, "steps", 2, "registry_name", "groot_pack_inputs_v3"),
         r"expected the steps of GR00T N1\.7, as the weights are, got those of GR00T N1\.5: groot_pack_inputs_v3"),
    ],
)  # fmt: skip
def test_older_releases_are_refused_by_name_as_well(write: Write, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, change=change), dtype=torch.float32)


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = written.write_n15(tmp_path / "n15")
    (folder / METADATA).unlink()
    with pytest.raises(CheckpointError, match=r"expected experiment_cfg/metadata\.json, found config\.json, .*copy it"):
        load(folder)
    saved = written.write_n15_lerobot(tmp_path / "lerobot")
    save_file({"action.min": torch.zeros(7), "action.max": torch.ones(7)}, str(saved / "step.safetensors"))
    with pytest.raises(CheckpointError, match=r"expected statistics of observation\.state, found those of action"):
        load(saved)
    other = written.write_n16(tmp_path / "n16", ids={"new_embodiment": 3})
    with pytest.raises(CheckpointError, match="expected an embodiment of libero_panda; got 'gr1'"):
        load(other, PolicyConfig(checkpoint=CheckpointSpec(embodiment="gr1")))
    (other / "tokenizer.json").write_text((saved / "tokenizer.json").read_text().replace("<IMG_CONTEXT>", "<CONTEXT>"))
    with pytest.raises(CheckpointError, match=r"tokenizer: expected <IMG_CONTEXT> as one token, 2 of them .* got"):
        load(other)


def test_lerobot_has_no_n16(tmp_path: Path) -> None:
    content = {"type": "groot", "input_features": {}}
    save_file(
        {f"_groot_model.{n}": v for n, v in tensors("groot_n16").items()}, str(tmp_path / "model.safetensors")
    )  # fmt: skip
    (tmp_path / CONFIG).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"expected Isaac-GR00T's layout of GR00T N1\.6, got lerobot's"):
        load(tmp_path)


def test_a_base_of_this_generation_is_not_taken_for_another(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, change=config("base_model_path", "nvidia/GR00T-N1.7-3B"))
    assert load(folder, whole=False).processor.state.size == 8
