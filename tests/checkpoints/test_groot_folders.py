"""GR00T N1.7's folders, in Isaac-GR00T's layout and lerobot's: what they load to, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import groot_folders as written
from tests.support.groot_folders import TAG, put, tensors, write_isaac, write_lerobot
from vla_accel.config import CheckpointSpec, PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, DependencyError
from vla_accel.families.groot.network import Groot
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.families.loading import Checkpoint, load


@pytest.fixture(scope="module")
def isaac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("groot") / "isaac")


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lerobot(tmp_path_factory.mktemp("groot") / "lerobot")


def loaded(folder: Path, **given: Any) -> tuple[Groot, GrootProcessor, Checkpoint]:
    checkpoint = load(folder, PolicyConfig(checkpoint=CheckpointSpec(**given)), dtype=torch.float32)
    assert isinstance(checkpoint.model, Groot) and isinstance(checkpoint.processor, GrootProcessor)
    return checkpoint.model.whole(), checkpoint.processor, checkpoint


def test_both_forms_are_one_policy(isaac: Path, lerobot: Path) -> None:
    (a, first, found), (b, second, _) = loaded(isaac), loaded(lerobot)
    assert (found.family.name, a.config, found.folder) == ("groot", b.config, isaac)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert (first.preset, first.rows, first.gripper) == (second.preset, second.rows, second.gripper)
    # Each form has its own code's filter where the checkpoint was trained without albumentations.
    assert (first.cropping.filter, second.cropping.filter) == ("bilinear", "bicubic")
    assert (first.rows, first.gripper, first.preset.images[1]) == (6, True, "observation/wrist_image")
    for x, y in zip(first.actions.groups, second.actions.groups, strict=True):
        assert x.name == y.name and np.array_equal(x.low, y.low), "q01, not min"  # type: ignore[arg-type]


def test_weights_are_where_they_belong(isaac: Path) -> None:
    """Some tensors by their stored names: one matrix of three, an embodiment's own transposed, a patch's two frames."""
    model, given = loaded(isaac)[0], {n: v.float() for n, v in tensors().items()}
    dit = "action_head.model.transformer_blocks."
    both = torch.cat([given[f"{dit}2.attn1.to_{x}.weight"] for x in "kv"])
    assert torch.equal(model.head.layers[2].kv_proj.weight, both)  # type: ignore[union-attr]
    layer = "backbone.model.model.language_model.layers.1.mlp."
    assert torch.equal(
        model.language.layers[1].gate_up_proj.weight,  # type: ignore[union-attr]
        torch.cat((given[layer + "gate_proj.weight"], given[layer + "up_proj.weight"])),
    )
    assert torch.equal(model.head.action_mix.weight, given["action_head.action_encoder.W2.W"][2].T)
    assert torch.equal(model.head.decode_out.bias, given["action_head.action_decoder.layer2.b"][2])
    stored = given["backbone.model.model.visual.deepstack_merger_list.1.norm.weight"]
    assert torch.equal(model.vision.deepstack[1].norm.weight, stored)  # type: ignore[union-attr]
    other, _, _ = loaded(write_other(isaac), embodiment="new_embodiment")
    assert torch.equal(other.head.state_in.weight, given["action_head.state_encoder.layer1.W"][4].T)


def write_other(isaac: Path) -> Path:
    """The same weights with a second embodiment whose actions are relative."""
    relative = {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    pose = {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": "hand"}
    plain = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    state, action = {"arm": 3, "hand": 9, "angle": 1}, {"arm": 3, "pose": 9, "gripper": 1}
    arm = written.modality(state, action, ("front", "wrist"), [relative, pose, plain])
    arm["state"] |= {"sin_cos_embedding_keys": ["angle"], "mean_std_embedding_keys": ["arm"]}
    arm["video"]["delta_indices"] = [-15, 0]
    stats = {
        "new_embodiment": {
            "state": written.statistics(state), "action": written.statistics(action),
            "relative_action": written.statistics({"arm": 3, "pose": 9}, rows=written.ROWS),
        },
        TAG: {"state": written.statistics(written.STATE), "action": written.statistics(written.ACTION)},
    }  # fmt: skip
    settings = {**written.SETTINGS, "use_relative_action": True, "apply_sincos_state_encoding": True}
    return write_isaac(
        isaac.parent / "two", modalities={TAG: written.LIBERO, "new_embodiment": arm}, stats=stats, settings=settings
    )


def test_another_embodiment(isaac: Path) -> None:
    _, processor, _ = loaded(write_other(isaac), embodiment="new_embodiment")
    assert processor.preset.images == ("observation.images.front", "observation.images.wrist")
    assert processor.preset.optional_images == processor.preset.images and processor.preset.prompt == "task"
    assert (processor.moments, processor.history, processor.gripper) == ((-15, 0), 16, False)
    assert (processor.state.size, processor.state.width) == (13, 14)
    arm, pose, gripper = processor.actions.groups
    assert (arm.relative, pose.relative, gripper.relative) == ("difference", "pose", "no")
    assert arm.low is not None and arm.low.shape == (6, 3) and gripper.low is not None and gripper.low.ndim == 1
    assert [g.scaling for g in processor.state.groups] == ["mean_std", "range", "sin_cos"]


def test_a_robot_or_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    folder, mine = write_isaac(tmp_path / "isaac"), tmp_path / "mine.yaml"
    for words, message in (
        ("state_dim: 4", r"preset: expected 8 numbers of state, got .*mine\.yaml's 4"),
        ("action_dim: 6", r"preset: expected 7 numbers of action, got .*mine\.yaml's 6"),
        ("flipped: [1]", r"preset\.flipped: expected none in addition to a GR00T checkpoint's own, got \[1\]"),
        ("delta_actions: [0, 2]", r"preset\.delta_actions: expected none .*, got \[0, 2\]"),
        ("gripper: aloha\ngripper_dims: [6]", r"preset\.gripper_dims: expected none .*, got \[6\]"),
    ):
        mine.write_text(f"base: libero\n{words}\n")
        with pytest.raises(ConfigError, match=f"^{message}$"):
            load(folder, PolicyConfig(preset=str(mine)))
    path, size = folder / "tokenizer.json", load(folder).model.config.language.vocab_size
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"word {i}": i for i in range(len(content["model"]["vocab"]), size + 1)}
    path.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=f"^tokenizer: expected at most the model's {size} tokens, got {size + 1}$"
    ):
        load(folder)


def test_layers_that_nothing_reads_are_not_loaded(isaac: Path) -> None:
    more = {
        n.replace("layers.3.", "layers.7."): v.clone() for n, v in tensors().items() if "language_model.layers.3." in n
    }  # fmt: skip
    folder = write_isaac(isaac.parent / "deep", weights={**tensors(), **more})
    model, _, _ = loaded(folder)
    assert len(model.language.layers) == 4
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), loaded(isaac)[0].parameters(), strict=True))


def test_a_folder_trained_without_groups(isaac: Path) -> None:
    folder = write_lerobot(isaac.parent / "flat", flat=True)
    _, flat, _ = loaded(folder, action_horizon=8)
    _, grouped, _ = loaded(isaac)
    assert [g.size for g in flat.actions.groups] == [7] and flat.gripper
    given = written.observation()
    np.testing.assert_allclose(flat.prepare(given).state, grouped.prepare(given).state, atol=1e-6)


def test_lerobots_names_of_the_robot_count(tmp_path: Path) -> None:
    """A renaming step turns the robot's names into the policy's."""
    names = {"observation.images.hand": "observation.images.image", "observation.joints": "observation.state"}
    change = put("policy_preprocessor.json", "steps", 0, "config", "rename_map", names)
    preset = loaded(write_lerobot(tmp_path, embodiment_tag="new_embodiment", change=change))[1].preset
    assert preset.images[0] == preset.optional_images[0] == "observation.images.hand"
    assert preset.images[1] != "observation.images.hand" and preset.state == ("observation.joints",)


def test_lerobot_repeats_the_present_image(tmp_path: Path) -> None:
    change = put(
        "policy_preprocessor.json", "steps", 2, "config", "modality_config", "video", "delta_indices", [-15, 0]
    )  # fmt: skip
    _, processor, _ = loaded(write_lerobot(tmp_path, video_horizon=2, change=change))
    assert processor.moments == (0, 0) and len(processor.prepare(written.observation()).images) == 4


@pytest.mark.parametrize("names", [["observation.image"], ["observation.image", "observation.images.front"]])
def test_one_camera_of_lerobot_without_a_name(tmp_path: Path, names: list[str]) -> None:
    """Named cameras count, where there are some."""
    features = {key: {"type": "VISUAL", "shape": [3, 64, 64]} for key in (*names, "observation.state")}
    change = put("config.json", "input_features", features)
    _, processor, _ = loaded(written.write_n15_lerobot(tmp_path, change=change))
    given = {names[-1]: written.observation()["observation/image"], "observation.state": np.zeros(8), "task": "go"}
    assert processor.preset.images == (names[-1],) and len(processor.prepare(given).images) == 1
    assert not any(group.bounded for group in processor.actions.groups), "N1.5 clips no action"


def test_a_missing_extra_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The extra that has OpenCV brings tokenizers, too.
    write_isaac(tmp_path, settings={**written.SETTINGS, "use_albumentations": True})
    for name in ("cv2", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=r"need OpenCV: pip install 'vla_accel\[groot\]'"):
        loaded(tmp_path)
