"""The settings of Isaac-GR00T's files: each is honoured, changes nothing, or is refused by name; and where training
leaves the processor's files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.support import groot_folders as written
from tests.support.groot_folders import TAG, write_isaac, write_lerobot
from vla_accel import PolicyConfig
from vla_accel.config import CheckpointSpec
from vla_accel.errors import CheckpointError
from vla_accel.families.groot.images import Cropping
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.families.loading import load

Change = Callable[[Any], None]
# processor_kwargs as NVIDIA's checkpoints have them.
PUBLISHED: dict[str, Any] = {
    **written.SETTINGS, "use_albumentations": True, "image_target_size": [256, 256], "image_crop_size": [230, 230],
    "shortest_image_edge": 256, "crop_fraction": 0.95, "state_dropout_prob": 0.2, "max_state_dim": 132,
    "max_action_dim": 132, "model_name": "nvidia/Cosmos-Reason2-2B", "model_type": "qwen", "exclude_state": False,
    "use_mean_std": False, "apply_sincos_state_encoding": False, "random_rotation_angle": None,
    "color_jitter_params": {"brightness": 0.3, "contrast": 0.4, "saturation": 0.5, "hue": 0.08},
}  # fmt: skip
# config.json likewise, but for the sizes.
PUBLISHED_CONFIG: dict[str, Any] = {
    **written.CONFIG, "dtype": "bfloat16", "model_dtype": "bfloat16", "transformers_version": "4.57.1",
    "backbone_model_type": "qwen", "reproject_vision": False, "use_flash_attention": True, "load_bf16": True,
    "tune_llm": True, "tune_top_llm_layers": 0, "backbone_trainable_params_fp32": False, "use_vl_self_attention": True,
    "noise_beta_alpha": 1.5, "noise_beta_beta": 1.0, "noise_s": 0.999, "attn_dropout": 0.2, "state_dropout_prob": 0.2,
    "state_gaussian_noise_std": 0.0, "tune_linear": True, "image_target_size": [256, 256], "crop_fraction": 0.95,
    "color_jitter_params": {"brightness": 0.3}, "use_albumentations": True, "random_history_crop": True,
    "random_rotation_angle": 0, "use_future_tokens": False, "use_percentiles": True, "exclude_state": False,
    "strict_action_padding_mask": False, "use_soft_prompts": False, "soft_prompt_num_tokens": 32,
}  # fmt: skip
PUBLISHED_CONFIG["diffusion_model_cfg"] = {
    **written.CONFIG["diffusion_model_cfg"], "dropout": 0.2, "final_dropout": True, "attention_bias": True,
}  # fmt: skip


def processor(folder: Path, **given: Any) -> GrootProcessor:
    found = load(folder, PolicyConfig(checkpoint=CheckpointSpec(**given)), whole=False).processor
    assert isinstance(found, GrootProcessor)
    return found


def modality(change: Change) -> dict[str, Any]:
    made = copy.deepcopy(written.LIBERO)
    change(made)
    return {TAG: made}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GrootProcessor:
    return processor(write_isaac(tmp_path_factory.mktemp("groot") / "isaac"))


def test_published_settings_load(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    found = processor(write_isaac(tmp_path, settings=PUBLISHED, config=PUBLISHED_CONFIG))
    assert found.cropping == Cropping("area", 256, 0.95, (256, 256)) and not found.exclude_state


# -- images ---------------------------------------------------------------------------------------------------------

PICTURE = np.random.default_rng(0).integers(0, 256, (180, 240, 3), np.uint8)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"image_target_size": None, "image_crop_size": None}, 243),
        ({"crop_fraction": None}, 230),
        ({"crop_fraction": 1.0}, 256),
    ],
)
def test_an_area_filter_keeps_what_isaac_groot_keeps(changes: dict[str, Any], kept: int, tmp_path: Path) -> None:
    """Of a shortest edge of 256 pixels."""
    cv2 = pytest.importorskip("cv2")
    found = processor(write_isaac(tmp_path, settings={**PUBLISHED, **changes}))
    width = round(240 * 256 / 180)
    columns = int(width * kept / 256) if "crop_fraction" in changes else int(width * 0.95)
    first = cv2.resize(PICTURE, (width, 256), interpolation=cv2.INTER_AREA)
    top, left = (256 - kept) // 2, (width - columns) // 2
    middle = first[top : top + kept, left : left + columns]
    back = cv2.resize(np.ascontiguousarray(middle), (round(columns * 256 / kept), 256), interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(found.cropping._area(PICTURE), back)


def test_without_a_shortest_edge_the_target_is_the_size(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    found = processor(write_isaac(tmp_path, settings={**PUBLISHED, "shortest_image_edge": None}))
    assert found.cropping._area(PICTURE).shape == (256, 256, 3)


def test_images_without_albumentations_are_cropped_in_pixels(tmp_path: Path) -> None:
    """The fraction and the shortest edge do not count. Half a pixel is rounded to even, as torchvision rounds it."""
    settings = {**PUBLISHED, "use_albumentations": False, "image_crop_size": [225, 229], "shortest_image_edge": 200}
    found = processor(write_isaac(tmp_path, settings=settings))

    def resized(image: torch.Tensor) -> torch.Tensor:
        made = F.interpolate(image[None], size=(256, 256), mode="bilinear", antialias=True, align_corners=False)
        return made[0].round()

    first = resized(torch.from_numpy(PICTURE).permute(2, 0, 1).double())
    expected = resized(first[:, 16:241, 14:243]).permute(1, 2, 0).numpy()  # 15.5 and 13.5 pixels are left over
    assert np.abs(found.cropping(PICTURE).astype(int) - expected).max() <= 2, "a level for each resize"


def test_lerobots_form_keeps_lerobots_crop(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)
    path = folder / "policy_preprocessor.json"
    content = json.loads(path.read_text())
    content["steps"][3]["config"].update(image_target_size=None, image_crop_size=None, shortest_image_edge=256)
    path.write_text(json.dumps(content))
    assert processor(folder).cropping == Cropping("bicubic", 256, 230 / 256, (256, 256))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"use_albumentations": False, "image_target_size": None}, "image_target_size"),
        ({"use_albumentations": False, "image_crop_size": None}, "image_crop_size"),
        ({"use_albumentations": False, "image_crop_size": [300, 230]}, "image_crop_size"),
        ({"crop_fraction": None, "image_crop_size": None}, "image_crop_size"),
        ({"shortest_image_edge": None, "image_target_size": None}, "image_target_size"),
        ({"crop_fraction": 1.5}, "crop_fraction"),
    ],
)
def test_sizes_that_isaac_groot_needs_are_named(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"processor_config\.json: {key}: expected .*, got "):
        processor(write_isaac(tmp_path, settings={**PUBLISHED, **changes}))


# -- the state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["processor", "modality"])
def test_an_excluded_state_is_zeros_to_the_model(place: str, plain: GrootProcessor, tmp_path: Path) -> None:
    change: Change = lambda made: made["state"].update(exclude_state=place == "modality")  # noqa: E731
    settings = {**written.SETTINGS, "exclude_state": place == "processor"}
    found = processor(write_isaac(tmp_path, settings=settings, modalities=modality(change)))
    given = written.observation()
    assert np.abs(plain.prepare(given).state).max() > 0
    inputs = found.prepare(given)
    assert not inputs.state.any() and np.array_equal(inputs.raw_state, given["observation/state"])
    rows = np.random.default_rng(0).uniform(-1, 1, (8, 132))
    np.testing.assert_array_equal(
        found.unnormalize_actions(rows, inputs), plain.unnormalize_actions(rows, plain.prepare(given))
    )


def test_angles_of_actions_are_not_encoded(plain: GrootProcessor, tmp_path: Path) -> None:
    """Isaac-GR00T makes sines and cosines of states alone."""
    change: Change = lambda made: [made[kind].update(sin_cos_embedding_keys=["x"]) for kind in ("state", "action")]  # type: ignore[func-returns-value]  # noqa: E731
    settings = {**written.SETTINGS, "apply_sincos_state_encoding": True}
    found = processor(write_isaac(tmp_path, settings=settings, modalities=modality(change)))
    assert (found.state.width, found.actions.width) == (plain.state.width + 1, plain.actions.width)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_tactile", True), ("model_type", "eagle"), ("a_later_setting", 3), ("statistics_override", {"a": 1}),
    ],
)  # fmt: skip
def test_a_processor_setting_that_is_not_honoured_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    settings = {**written.SETTINGS, name: value, "tactile_state_keys": ["gripper"]}
    with pytest.raises(CheckpointError, match=rf"processor_config\.json: ({name}: )?expected .*got ({name}|true|\")"):
        processor(write_isaac(tmp_path, settings=settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict_action_padding_mask", True), ("use_future_tokens", True), ("use_soft_prompts", True),
        ("use_tactile", True), ("backbone_model_type", "eagle"), ("use_motion", True), ("state_history_length", 3),
        ("loss_mechanism", "dual_branch"), ("diffusion_model_cfg.norm_type", "layer_norm"),
        ("diffusion_model_cfg.a_later_setting", 3), ("vl_self_attention_cfg.positional_embeddings", "sinusoidal"),
    ],
)  # fmt: skip
def test_a_network_that_is_not_built_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(written.CONFIG)
    *parts, leaf = name.split(".")
    (config[parts[0]] if parts else config)[leaf] = value
    with pytest.raises(CheckpointError, match=rf"{name}\b.*got|got {name} "):
        load(write_isaac(tmp_path, config=config), whole=False)


def test_a_stated_attention_that_the_weights_lack_is_a_contradiction(tmp_path: Path) -> None:
    config = {**written.CONFIG, "use_vl_self_attention": False}
    with pytest.raises(CheckpointError, match="use_vl_self_attention: config says False, weights say True"):
        load(write_isaac(tmp_path, config=config), whole=False)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("state", "delta_indices", [-2, -1, 0]), ("state", "delta_indices", [-1]), ("video", "a_later_setting", 1),
        ("action", "a_later_setting", "x"), ("state", "noise", 0.1),
    ],
)  # fmt: skip
def test_a_modality_that_is_not_honoured_is_refused(kind: str, name: str, value: Any, tmp_path: Path) -> None:
    change: Change = lambda made: made[kind].update({name: value})  # noqa: E731
    with pytest.raises(CheckpointError, match=rf"{TAG}: .*{kind}\.{name}\b"):
        processor(write_isaac(tmp_path, modalities=modality(change)))


def test_a_kind_of_modality_that_is_not_known_is_refused(tmp_path: Path) -> None:
    change: Change = lambda made: made.update(force={"modality_keys": ["wrist"]})  # noqa: E731
    with pytest.raises(CheckpointError, match=rf"{TAG}: .*got force "):
        processor(write_isaac(tmp_path, modalities=modality(change)))


# -- where training leaves its files --------------------------------------------------------------------------------

SIDE = ("processor_config.json", "statistics.json", "embodiment_id.json")


@pytest.mark.parametrize("inside", [True, False])
def test_the_processor_of_an_output_folder_is_found(inside: bool, plain: GrootProcessor, tmp_path: Path) -> None:
    """In `processor/` of the output folder, which is the checkpoint itself, or holds it."""
    output = tmp_path / "output"
    folder = write_isaac(output if inside else output / "best_checkpoint")
    (output / "processor").mkdir()
    for name in SIDE:
        (folder / name).rename(output / "processor" / name)
    assert processor(folder).actions.size == plain.actions.size


def test_a_checkpoint_without_the_processors_files_says_where_they_are(tmp_path: Path) -> None:
    folder = write_isaac(tmp_path / "isaac")
    for name in SIDE:
        (folder / name).unlink()
    with pytest.raises(
        CheckpointError, match=r"expected processor_config\.json, found .*; .* processor/ of its output"
    ):
        processor(folder)


@pytest.mark.parametrize(("tag", "number"), [("robocasa_panda_omron", 10), ("unitree_g1_sonic", 11), (TAG, 2),
                                             ("xdof_relative_eef_relative_joint_subtask", 27)])  # fmt: skip
def test_a_tag_that_the_folder_does_not_number_has_isaac_groots_number(
    tag: str, number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats = {tag: {"state": written.statistics(written.STATE), "action": written.statistics(written.ACTION)}}
    folder = write_isaac(tmp_path, modalities={tag: written.LIBERO}, stats=stats, ids={"mine": 1})
    if number < written.CONFIG["max_num_embodiments"]:
        assert processor(folder).state.size == 8
    else:
        with pytest.raises(CheckpointError, match=rf"misshaped: .*expected \({number + 1}, "):
            processor(folder)
    assert f"lacks {tag}" in caplog.text and str(number) in caplog.text


def test_the_folders_own_number_counts_before_isaac_groots(tmp_path: Path) -> None:
    stats = {TAG: {"state": written.statistics(written.STATE), "action": written.statistics(written.ACTION)}}
    one, other = (
        load(write_isaac(tmp_path / str(ids[TAG]), stats=stats, ids=ids)).model.state_dict()["head.state_in.weight"]
        for ids in ({TAG: 2}, {TAG: 3})
    )
    assert not torch.equal(one, other)


# -- other generations ----------------------------------------------------------------------------------------------


def _old(folder: Path, weights: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"type": "groot", "input_features": {}, **config}))
    return folder


EAGLE = {"_groot_model.backbone.eagle_model.language_model.lm_head.weight": torch.zeros(4, 4)}
OLD = {"_groot_model.action_head.model.proj_out_1.weight": torch.zeros(4, 4)}
STEPS = ("groot_pack_inputs_v3", "groot_eagle_encode_v3", "groot_eagle_collate_v3")


@pytest.mark.parametrize(
    ("weights", "config", "generation"),
    [
        (EAGLE, {}, r"N1\.5"),
        (OLD, {"base_model_path": "nvidia/GR00T-N1.5-3B"}, r"N1\.5"),
        (OLD, {"base_model_path": "nvidia/GR00T-N1.6-3B"}, r"N1\.6"),
        ({"_groot_model.backbone.model.vision_model.x": torch.zeros(1)}, {}, r"N1\.6"),
    ],
)
def test_an_older_generation_is_named(
    weights: dict[str, torch.Tensor], config: dict[str, Any], generation: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"expected GR00T N1\.7, got {generation}: another network, .*supported"):
        load(_old(tmp_path, weights, **config))


def test_the_steps_of_an_older_generation_are_named(tmp_path: Path) -> None:
    folder = _old(tmp_path, OLD)
    steps = [{"registry_name": name, "config": {}} for name in STEPS]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    with pytest.raises(CheckpointError, match=r"expected GR00T N1\.7, got N1\.5 \(groot_pack_inputs_v3, "):
        load(folder)


def test_a_base_of_this_generation_is_not_taken_for_another(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "base_model_path": "nvidia/GR00T-N1.7-3B"}))
    assert processor(folder).state.size == 8


# -- lerobot's form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "step", "name", "value"),
    [
        ("pre", 2, "state_horizon", 2), ("pre", 2, "normalize_min_max", False), ("pre", 2, "language_key", "text"),
        ("pre", 2, "a_later_setting", 1), ("pre", 3, "a_later_setting", 1), ("post", 0, "a_later_setting", "x"),
        ("post", 0, "action_decode_transform", "another"),
    ],
)  # fmt: skip
def test_a_setting_of_lerobots_steps_that_is_not_honoured_is_refused(
    file: str, step: int, name: str, value: Any, tmp_path: Path
) -> None:
    folder = write_lerobot(tmp_path)
    path = folder / f"policy_{file}processor.json"
    content = json.loads(path.read_text())
    content["steps"][step]["config"][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{path.name}: groot_\w+: .*\b{name}\b"):
        processor(folder)


def test_actions_that_lerobot_would_cut_are_refused(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)
    path = folder / "policy_postprocessor.json"
    content = json.loads(path.read_text())
    content["steps"][0]["config"]["env_action_dim"] = 5
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="env_action_dim: expected 7, got 5"):
        processor(folder)
