"""Checkpoint folders of GR00T N1.7: Isaac-GR00T's (config.json, shards, processor_config.json, statistics.json,
embodiment_id.json) and lerobot's (one file, and the saved pipelines)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.lerobot import is_lerobot, read_settings
from vla_accel.checkpoints.lerobot_settings import AFTER, BATCH, BEFORE, DEVICE, RENAME
from vla_accel.checkpoints.lerobot_statistics import STATE, statistics_file
from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_arrays, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError
from vla_accel.families.groot.checkpoint import OTHERS, infer_config, load_groot, other_generation
from vla_accel.families.groot.network import Groot
from vla_accel.families.groot.robot import LIBERO_TAG, Robot, isaac_cropping, lerobot_cropping, mapping, read_robot
from vla_accel.families.groot.settings import DECODE, ENCODE, PACK, UNPACK, check_processor, check_step
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.families.overrides import adapter_of, check_vocabulary, robot_of, warn_of_contradictions
from vla_accel.families.qwen import TOKENIZER
from vla_accel.transforms.robots import LIBERO, Preset
from vla_accel.transforms.tokenizer import load_line_tokenizer

PUBLISHED_IDS = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    LIBERO_TAG: 2,
    "new_embodiment": 10,
    "robocasa_panda_omron": 10,
    "robocasa_gr1_tabletop": 10,
    "unitree_g1_sonic": 11,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26,
    "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26,
    "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
}
"""Isaac-GR00T's own embodiments, for folders without embodiment_id.json and for tags that it lacks."""
_log = logging.getLogger("vla_accel.checkpoints")


def load_folder(folder: Path, settings: PolicyConfig) -> tuple[Groot, GrootProcessor]:
    """Return one embodiment's network and its transforms (`Family.load`)."""
    overrides, weights = settings.checkpoint, SafetensorsWeights(folder)
    lora, described = adapter_of(folder, settings)
    content = read_json(described / "config.json")
    if (other := other_generation(content, weights.shapes)) is not None:
        raise CheckpointError(f"checkpoint {folder}: expected GR00T N1.7, got {other}: {OTHERS}")
    if is_lerobot(described):
        robot, preset, stated = _lerobot(described, content, overrides.embodiment)
    else:
        robot, stated = _isaac(folder, overrides.embodiment), content
        preset = _preset(robot, (), {})
    if overrides.action_horizon is not None:
        warn_of_contradictions({"action_horizon": overrides.action_horizon}, stated)
        stated = {**stated, "action_horizon": overrides.action_horizon}
    config = infer_config(weights.shapes, stated, str(folder))
    if overrides.max_token_len is not None:
        config = dataclasses.replace(config, max_token_len=overrides.max_token_len)
    tokenizer = load_line_tokenizer(described, overrides.tokenizer, TOKENIZER)
    check_vocabulary(tokenizer, config.language.vocab_size, settings)
    cropping = dataclasses.replace(robot.transforms["cropping"], unit=config.vision.unit)
    processor = GrootProcessor(
        **{**robot.transforms, "cropping": cropping},
        tokenizer=tokenizer,
        preset=robot_of(preset, settings),
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        rows=min(robot.rows, config.action_horizon),
        default_prompt=settings.default_prompt,
    )
    return load_groot(weights, config, robot.embodiment, str(folder), lora), processor


def _preset(robot: Robot, features: Collection[str], renamed: Mapping[str, str]) -> Preset:
    """Return the robot's keys: openpi's for LIBERO, so that LIBERO's clients work, else lerobot's.

    Args:
        robot: The robot.
        features: lerobot's names of the cameras, empty if the folder has none.
        renamed: The robot's names of lerobot's features, if they differ.
    """
    sizes = robot.transforms["state"].size, robot.transforms["actions"].size
    if robot.tag == LIBERO_TAG and len(robot.cameras) == 2 and sizes == (LIBERO.state_dim, LIBERO.action_dim):
        return LIBERO
    names = [f"observation.images.{camera}" for camera in robot.cameras]
    wrist, second = "observation.images.wrist_image", "observation.images.image2"
    if wrist not in features and second in features:
        names = [second if name == wrist else name for name in names]
    images = tuple(renamed.get(name, name) for name in names)
    return Preset(images, (renamed.get(STATE, STATE),), *sizes, "task", images)


# -- Isaac-GR00T --------------------------------------------------------------------------------------------------


def _isaac(folder: Path, wanted: str | None) -> Robot:
    path = _processor_folder(folder) / "processor_config.json"
    settings = mapping(read_json(path), "processor_kwargs", path)
    check_processor(settings, path)
    modalities, statistics = mapping(settings, "modality_configs", path), read_json(path.parent / "statistics.json")
    ids_path = path.parent / "embodiment_id.json"
    own = read_json(ids_path) if ids_path.is_file() else {}
    ids = {**PUBLISHED_IDS, **own}
    there = sorted(tag for tag in modalities if tag in statistics and tag in ids)
    if not there:
        parts = (path.name, modalities), ("statistics.json", statistics), (ids_path.name, ids)
        found = "; ".join(f"{', '.join(sorted(tags)) or 'none'} in {name}" for name, tags in parts)
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment that all its files have, found {found}")
    tag = wanted or (LIBERO_TAG if LIBERO_TAG in there else there[0] if len(there) == 1 else None)
    if tag is None or tag not in there:
        got = "choose one as checkpoint.embodiment" if tag is None else f"got {tag!r}"
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment of {', '.join(there)}; {got}")
    if own and tag not in own:
        _log.warning("%s: lacks %s: using Isaac-GR00T's own number, %d", ids_path, tag, ids[tag])
    modality = modalities[tag]
    robot = read_robot(tag, ids[tag], modality, statistics[tag], settings, path)
    exclude = bool(settings.get("exclude_state") or mapping(modality, "state", path).get("exclude_state"))
    robot.transforms.update(cropping=isaac_cropping(settings, path), exclude_state=exclude)
    return robot


def _processor_folder(folder: Path) -> Path:
    """Return the folder of the processor's files: the checkpoint itself, or `processor/` of the training run's output
    folder, which is the checkpoint or its parent."""
    names = ("processor_config.json", "statistics.json")
    for candidate in (folder, folder / "processor", folder.parent / "processor"):
        if all((candidate / name).is_file() for name in names):
            return candidate
    lacking = next(name for name in names if not (folder / name).is_file())
    raise CheckpointError(
        f"checkpoint {folder}: expected {lacking}, found {listing(folder)}; training keeps it in processor/ of its "
        "output folder: copy the files from there"
    )


# -- lerobot ------------------------------------------------------------------------------------------------------

_N1_5 = {"groot_pack_inputs_v3", "groot_eagle_encode_v3", "groot_eagle_collate_v3"}
_KNOWN = {RENAME, BATCH, DEVICE, PACK, ENCODE, DECODE, UNPACK}


def _lerobot(folder: Path, content: Mapping[str, Any], wanted: str | None) -> tuple[Robot, Preset, Mapping[str, Any]]:
    """Return the robot, its keys, and the settings of the model under Isaac-GR00T's names."""
    read_settings(folder / "config.json", ("groot",))
    path = folder / BEFORE
    before, after = _steps(path), _steps(folder / AFTER)
    pack, encode = before.get(PACK), before.get(ENCODE)
    decode = after.get(DECODE) or after.get(UNPACK)
    if pack is None or encode is None or decode is None:
        raise CheckpointError(f"{path}: expected the steps {PACK}, {ENCODE} and one that decodes, found {[*before]}")
    tag, ids = str(pack.get("embodiment_tag")), pack.get("embodiment_mapping") or PUBLISHED_IDS
    if tag not in ids or wanted not in (None, tag):
        there = tag if tag in ids else ", ".join(sorted(ids))
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment of {there}, got {wanted or tag!r}")
    images = {**encode, "use_albumentations": encode.get("use_albumentations", False)}
    modality, statistics = pack.get("modality_config"), pack.get("raw_stats")
    merged = {**pack, "use_relative_action": bool(decode.get("use_relative_action"))}
    horizon = size_of(pack, "action_horizon", path, 40)
    if not modality or not statistics:
        # Trained without groups of the checkpoint: one group, scaled by the range of the data.
        modality, statistics = _one_group(folder, pack, content)
        merged, horizon = {**merged, "use_percentiles": False}, 40
    modality = {**modality, "video": _video(modality, pack, content, path)}
    robot = read_robot(tag, ids[tag], modality, statistics, merged, path)
    size, post = robot.transforms["actions"].size, folder / AFTER
    # 0 means all of them.
    count = size_of({"env_action_dim": decode.get("env_action_dim") or size}, "env_action_dim", post)
    if count < size:
        raise CheckpointError(f"{post}: env_action_dim: expected {size}, got {count}")
    gripper = decode.get("action_decode_transform") == "libero" or bool(decode.get("libero_gripper_action"))
    robot.transforms.update(cropping=lerobot_cropping(images, path), gripper=gripper)
    features = content.get("input_features")
    renamed = {model: own for own, model in (before.get(RENAME, {}).get("rename_map") or {}).items()}
    preset = _preset(robot, features if isinstance(features, Mapping) else (), renamed)
    stated = {name: content.get(name) for name in ("num_inference_timesteps", "rtc_ramp_rate")}
    return robot, preset, {"action_horizon": horizon, **{k: v for k, v in stated.items() if v is not None}}


def _video(
    modality: Mapping[str, Any], pack: Mapping[str, Any], content: Mapping[str, Any], path: Path
) -> Mapping[str, Any]:
    """Return the cameras: in the checkpoint's own order, else the features sorted by name, as lerobot does."""
    video = modality.get("video")
    if isinstance(video, Mapping) and video.get("modality_keys"):
        return video
    names = pack.get("video_modality_keys") or sorted(
        key.removeprefix("observation.images.")
        for key in content.get("input_features") or ()
        if key.startswith("observation.images.")
    )
    return {"modality_keys": names, "delta_indices": [0] * size_of(pack, "video_horizon", path, 1)}


def _one_group(
    folder: Path, pack: Mapping[str, Any], content: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return one group of state and one of actions, with the statistics of the saved pipeline."""
    flat = read_arrays(statistics_file(folder, pack.get("state_file"), PACK))
    statistics: dict[str, Any] = {"state": {"state": {}}, "action": {"action": {}}}
    for key, value in flat.items():
        feature, _, statistic = key.rpartition(".")
        kind = {"observation.state": "state", "action": "action"}.get(feature)
        if kind is not None:
            statistics[kind][kind][statistic] = value.tolist()
    rows = size_of(content, "chunk_size", folder / "config.json", 40)
    rows = size_of(pack, "valid_action_horizon", folder / BEFORE, rows)
    action = {"modality_keys": ["action"], "delta_indices": list(range(rows))}
    return {"state": {"modality_keys": ["state"]}, "action": action}, statistics


def _steps(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of each step of a saved pipeline, with its `state_file`. An unknown step is an error."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: expected {path.name} with the statistics, found no such file")
    steps = read_json(path).get("steps")
    if not isinstance(steps, Sequence) or not all(isinstance(s, Mapping) for s in steps):
        raise CheckpointError(f"{path}: expected a list of steps, got {steps!r:.60}")
    unknown = [str(s.get("registry_name", s.get("class"))) for s in steps if s.get("registry_name") not in _KNOWN]
    if any(name in _N1_5 for name in unknown):
        raise CheckpointError(
            f"checkpoint {path.parent}: expected GR00T N1.7, got N1.5 ({', '.join(unknown)}): {OTHERS}"
        )
    if unknown:
        raise CheckpointError(f"{path}: expected steps among {', '.join(sorted(_KNOWN))}, got {', '.join(unknown)}")
    for step in steps:
        check_step(step["registry_name"], step.get("config") or {}, str(path))
    return {s["registry_name"]: {**(s.get("config") or {}), "state_file": s.get("state_file")} for s in steps}
