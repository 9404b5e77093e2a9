"""The settings of Isaac-GR00T's files: each is honoured, changes nothing, or is refused by name; and where training
leaves the processor's files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    def change(files: dict[str, Any]) -> None:
        sizes = {"image_target_size": None, "image_crop_size": None, "shortest_image_edge": 256}
        files["policy_preprocessor.json"]["steps"][3]["config"].update(sizes)

    assert processor(write_lerobot(tmp_path, change=change)).cropping == Cropping("bicubic", 256, 230 / 256, (256, 256))


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
    assert tag in caplog.text and str(number) in caplog.text


def test_the_folders_own_number_counts_before_isaac_groots(tmp_path: Path) -> None:
    stats = {TAG: {"state": written.statistics(written.STATE), "action": written.statistics(written.ACTION)}}
    one, other = (
        load(write_isaac(tmp_path / str(ids[TAG]), stats=stats, ids=ids)).model.state_dict()["head.state_in.weight"]
        for ids in ({TAG: 2}, {TAG: 3})
    )
    assert not torch.equal(one, other)
