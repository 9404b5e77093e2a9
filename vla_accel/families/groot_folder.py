"""GR00T N1.7's checkpoint folders: Isaac-GR00T's (config.json, shards, processor_config.json, statistics.json,
embodiment_id.json) and lerobot's (one file, and the saved processors). Each to the same thing: sizes, weights, and the
transforms of one embodiment. Knows nothing of engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel.checkpoints.groot import infer_config, load_groot
from vla_accel.checkpoints.lerobot import is_lerobot, read_settings
from vla_accel.checkpoints.lerobot_statistics import statistics_file
from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_arrays, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError
from vla_accel.families.overrides import check_vocabulary, robot_of
from vla_accel.models.groot import Groot
from vla_accel.models.groot_language import LEAD
from vla_accel.transforms.groot import GrootProcessor
from vla_accel.transforms.groot_images import Cropping
from vla_accel.transforms.modalities import Group, Groups, Scaling, check_references
from vla_accel.transforms.robots import LIBERO, Preset
from vla_accel.transforms.tokenizer import load_line_tokenizer

TOKENIZER = "Qwen/Qwen3-VL-2B-Instruct"
"""On the hub. NVIDIA's own, of the same words, must be asked for."""
LIBERO_TAG = "libero_sim"
PUBLISHED_IDS = {
    "simpler_env_google": 0, "simpler_env_widowx": 1, LIBERO_TAG: 2, "new_embodiment": 10,
    "oxe_droid_relative_eef_relative_joint": 24, "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25, "real_r1_pro_sharpa_relative_eef": 26,
    "xdof_relative_eef_relative_joint": 27,
}  # fmt: skip
"""Embodiments of the published checkpoints, for folders without embodiment_id.json (Isaac-GR00T, lerobot 0.6.1)."""


@dataclass(frozen=True)
class Robot:
    """What a folder says of one embodiment. `cameras` in the model's order; `features`: lerobot's own names of the
    robot's cameras, empty where the folder has none."""

    tag: str
    embodiment: int
    cameras: tuple[str, ...]
    frames: int
    rows: int
    state: Groups
    actions: Groups
    cropping: Cropping
    formal: bool
    gripper: bool
    features: tuple[str, ...] = ()


def load_folder(
    folder: Path, settings: PolicyConfig, *, device: str | torch.device, dtype: torch.dtype | None
) -> tuple[Groot, GrootProcessor]:
    """The model of one embodiment and its transforms; see `vla_accel.checkpoints.loading.load`."""
    given, weights = settings.checkpoint, SafetensorsWeights(folder)
    content = read_json(folder / "config.json")
    if is_lerobot(folder):
        robot, stated = _lerobot(folder, content, given.embodiment)
    else:
        robot, stated = _isaac(folder, given.embodiment), content
    if given.action_horizon is not None:
        stated = {**stated, "action_horizon": given.action_horizon}
    config = infer_config(weights.shapes, stated, str(folder))
    if given.max_token_len is not None:
        config = dataclasses.replace(config, max_token_len=given.max_token_len)
    tokenizer = load_line_tokenizer(folder, given.tokenizer, TOKENIZER)
    check_vocabulary(tokenizer, config.language.vocab_size, settings)
    processor = GrootProcessor(
        tokenizer=tokenizer,
        state=robot.state,
        actions=robot.actions,
        preset=robot_of(_preset(robot), settings),
        cropping=dataclasses.replace(robot.cropping, unit=config.vision.unit),
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        rows=min(robot.rows, config.action_horizon),
        lead=LEAD,
        frames=robot.frames,
        formal=robot.formal,
        gripper=robot.gripper,
        default_prompt=settings.default_prompt,
    )
    return load_groot(weights, config, robot.embodiment, str(folder), device=device, dtype=dtype), processor


def _preset(robot: Robot) -> Preset:
    """The robot's keys: openpi's for LIBERO, so that everything that speaks to LIBERO fits, else lerobot's."""
    sizes = robot.state.size, robot.actions.size
    if robot.tag == LIBERO_TAG and len(robot.cameras) == 2 and sizes == (LIBERO.state_dim, LIBERO.action_dim):
        return LIBERO
    images = []
    for camera in robot.cameras:
        name = f"observation.images.{camera}"
        if name not in robot.features and camera == "wrist_image" and "observation.images.image2" in robot.features:
            name = "observation.images.image2"
        images.append(name)
    keys = tuple(images)
    return Preset(
        images=keys, state=("observation.state",), state_dim=sizes[0], action_dim=sizes[1], prompt="task",
        optional_images=keys,
    )  # fmt: skip


# -- Isaac-GR00T --------------------------------------------------------------------------------------------------


def _isaac(folder: Path, wanted: str | None) -> Robot:
    for name in ("processor_config.json", "statistics.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {folder}: expected {name}, found {listing(folder)}")
    path = folder / "processor_config.json"
    settings = _mapping(read_json(path), "processor_kwargs", path)
    modalities, statistics = _mapping(settings, "modality_configs", path), read_json(folder / "statistics.json")
    ids_path = folder / "embodiment_id.json"
    ids = read_json(ids_path) if ids_path.is_file() else PUBLISHED_IDS
    there = sorted(tag for tag in modalities if tag in statistics and tag in ids)
    if not there:
        parts = (path.name, modalities), ("statistics.json", statistics), (ids_path.name, ids)
        found = "; ".join(f"{', '.join(sorted(tags)) or 'none'} in {name}" for name, tags in parts)
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment that all its files have, found {found}")
    tag = wanted or (LIBERO_TAG if LIBERO_TAG in there else there[0] if len(there) == 1 else None)
    if tag is None or tag not in there:
        asked = "choose one as checkpoint.embodiment" if tag is None else f"got {tag!r}"
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment of {', '.join(there)}; {asked}")
    return _robot(tag, ids[tag], modalities[tag], statistics[tag], settings, settings, path)


def _robot(
    tag: str, embodiment: Any, modality: Any, statistics: Any, settings: Mapping[str, Any],
    images: Mapping[str, Any], path: Path,
) -> Robot:  # fmt: skip
    """One embodiment's groups, cameras and images, from Isaac-GR00T's settings."""
    video, action = _mapping(modality, "video", path), _mapping(modality, "action", path)
    if not isinstance(embodiment, int) or isinstance(embodiment, bool) or embodiment < 0:
        raise CheckpointError(f"{path}: expected a number for embodiment {tag}, got {embodiment!r}")
    rows = len(action.get("delta_indices") or ())
    cameras = tuple(map(str, video.get("modality_keys") or ()))
    if not rows or not cameras:
        raise CheckpointError(f"{path}: {tag}: expected video.modality_keys and action.delta_indices, got none")
    state = _groups("state", modality, statistics, settings, f"{path}: {tag}")
    actions = _groups("action", modality, statistics, settings, f"{path}: {tag}")
    check_references(actions, state.groups, f"{path}: {tag}")
    return Robot(
        tag=tag, embodiment=embodiment, cameras=cameras, frames=max(1, len(video.get("delta_indices") or ())),
        rows=rows, state=state, actions=actions, cropping=_cropping(images, path),
        formal=settings.get("formalize_language", True) is not False, gripper=tag == LIBERO_TAG,
    )  # fmt: skip


def _groups(kind: str, modality: Any, statistics: Any, settings: Mapping[str, Any], where: str) -> Groups:
    config = _mapping(modality, kind, where)
    table = _mapping(statistics, kind, where)
    names = [str(n) for n in config.get("modality_keys") or ()]
    forms = config.get("action_configs") or []
    found = []
    for index, name in enumerate(names):
        entry = _mapping(table, name, f"{where}: statistics of {kind}")
        size = _size(entry, f"{where}: statistics of {kind} {name}")
        form = forms[index] if index < len(forms) and isinstance(forms[index], Mapping) else {}
        relative = bool(settings.get("use_relative_action")) and _word(form.get("rep")) == "relative"
        group = Group(name, size, "sin_cos")
        if relative:
            entry = _mapping(_mapping(statistics, "relative_action", where), name, f"{where}: relative_action")
            group = dataclasses.replace(
                group, relative=_relation(form, f"{where}: action {name}"), reference=form.get("state_key") or name
            )
        as_angles = settings.get("apply_sincos_state_encoding") and name in (config.get("sin_cos_embedding_keys") or ())
        if not as_angles:
            scaling = "mean_std" if name in (config.get("mean_std_embedding_keys") or ()) else "range"
            group = _scaled(group, entry, scaling, settings, relative, f"{where}: {kind} {name}")
        found.append(group)
    if not found:
        raise CheckpointError(f"{where}: expected {kind}.modality_keys, got none")
    return Groups(tuple(found))


def _scaled(
    group: Group, entry: Mapping[str, Any], scaling: Scaling, settings: Mapping[str, Any], relative: bool, where: str
) -> Group:
    names = ("mean", "std") if scaling == "mean_std" else ("min", "max")
    if scaling == "range" and settings.get("use_percentiles") and not relative:
        names = ("q01", "q99")
    low, high = (_numbers(entry.get(n), f"{where}: {n}") for n in names)
    if (high < (0.0 if scaling == "mean_std" else low)).any():
        raise CheckpointError(f"{where}: expected {'std >= 0' if scaling == 'mean_std' else ' <= '.join(names)}")
    clipped = settings.get("clip_outliers", True) is not False
    return dataclasses.replace(group, scaling=scaling, low=low, high=high, clipped=clipped)


def _relation(form: Mapping[str, Any], where: str) -> Any:
    kind, layout = _word(form.get("type")), _word(form.get("format")).replace("_", "+")
    if kind == "non+eef" or kind == "non_eef":
        return "difference"
    if kind == "eef" and layout == "xyz+rot6d":
        return "pose"
    raise CheckpointError(f"{where}: expected NON_EEF, or EEF as XYZ_ROT6D, got {dict(form)}")


def _word(value: Any) -> str:
    return str(value).lower()


def _cropping(settings: Mapping[str, Any], path: Path) -> Cropping:
    def sides(key: str, default: tuple[int, int]) -> tuple[int, int]:
        value = default if settings.get(key) is None else settings[key]
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise CheckpointError(f"{path}: {key}: expected a height and a width, got {value!r:.60}")
        height, width = (size_of({key: side}, key, path) for side in value)
        return height, width

    target, crop = sides("image_target_size", (256, 256)), settings.get("crop_fraction")
    if settings.get("image_target_size") is None:
        crop = 230 / 256
    elif crop is None:
        crop = sides("image_crop_size", target)[0] / target[0]
    if not isinstance(crop, (int, float)):
        raise CheckpointError(f"{path}: crop_fraction: expected a number, got {crop!r:.60}")
    return Cropping(
        filter="area" if settings.get("use_albumentations") else "bicubic",
        edge=size_of(settings, "shortest_image_edge", path, target[0]),
        crop=crop if 0.0 < crop < 1.0 else 1.0,
        target=target,
        letterbox=bool(settings.get("letter_box_transform")),
    )


# -- lerobot ------------------------------------------------------------------------------------------------------

_PACK, _ENCODE, _DECODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1", "groot_n1_7_action_decode_v1"
_UNPACK = "groot_action_unpack_unnormalize_v2"
_KNOWN = {"rename_observations_processor", "to_batch_processor", "device_processor", _PACK, _ENCODE, _DECODE, _UNPACK}


def _lerobot(folder: Path, content: Mapping[str, Any], wanted: str | None) -> tuple[Robot, Mapping[str, Any]]:
    """The robot, and what lerobot's folder states of the model in Isaac-GR00T's words."""
    read_settings(folder / "config.json", ("groot",))
    path = folder / "policy_preprocessor.json"
    before, after = _steps(path), _steps(folder / "policy_postprocessor.json")
    pack, encode = before.get(_PACK), before.get(_ENCODE)
    decode = after.get(_DECODE) or after.get(_UNPACK)
    if pack is None or encode is None or decode is None:
        raise CheckpointError(f"{path}: expected the steps {_PACK}, {_ENCODE} and one that decodes, found {[*before]}")
    tag, ids = str(pack.get("embodiment_tag")), pack.get("embodiment_mapping") or PUBLISHED_IDS
    if tag not in ids or wanted not in (None, tag):
        there = tag if tag in ids else ", ".join(sorted(ids))
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment of {there}, got {wanted or tag!r}")
    images = {**encode, "use_albumentations": encode.get("use_albumentations", False)}
    modality, statistics = pack.get("modality_config"), pack.get("raw_stats")
    merged = {**pack, "use_relative_action": bool(decode.get("use_relative_action"))}
    horizon = size_of(pack, "action_horizon", path, 40)
    if not modality or not statistics:
        # Trained without a checkpoint's own groups: one group, scaled by the data's own range.
        modality, statistics = _whole(folder, pack, content)
        merged, horizon = {**merged, "use_percentiles": False}, 40
    modality = {**modality, "video": _video(modality, pack, content, path)}
    robot = _robot(tag, ids[tag], modality, statistics, merged, images, path)
    transform = decode.get("action_decode_transform")
    features = content.get("input_features")
    robot = dataclasses.replace(
        robot,
        gripper=transform == "libero" or bool(decode.get("libero_gripper_action")),
        features=tuple(features) if isinstance(features, Mapping) else (),
    )
    stated = {
        "action_horizon": horizon,
        "num_inference_timesteps": content.get("num_inference_timesteps"),
        "rtc_ramp_rate": content.get("rtc_ramp_rate"),
    }
    return robot, {k: v for k, v in stated.items() if v is not None}


def _video(
    modality: Mapping[str, Any], pack: Mapping[str, Any], content: Mapping[str, Any], path: Path
) -> Mapping[str, Any]:  # fmt: skip
    """Cameras: the checkpoint's own order, else the features' by name, as lerobot has it."""
    video = modality.get("video")
    if isinstance(video, Mapping) and video.get("modality_keys"):
        return video
    names = pack.get("video_modality_keys") or sorted(
        key.removeprefix("observation.images.")
        for key in content.get("input_features") or ()
        if key.startswith("observation.images.")
    )
    return {"modality_keys": names, "delta_indices": [0] * size_of(pack, "video_horizon", path, 1)}


def _whole(
    folder: Path, pack: Mapping[str, Any], content: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """One group of state and one of actions, of the statistics beside the saved processor."""
    flat = read_arrays(folder / statistics_file(folder, pack.get("state_file"), _PACK))
    statistics: dict[str, Any] = {"state": {"state": {}}, "action": {"action": {}}}
    for key, value in flat.items():
        feature, _, statistic = key.rpartition(".")
        kind = {"observation.state": "state", "action": "action"}.get(feature)
        if kind is not None:
            statistics[kind][kind][statistic] = value.tolist()
    rows = size_of(content, "chunk_size", folder / "config.json", 40)
    rows = size_of(pack, "valid_action_horizon", folder / "policy_preprocessor.json", rows)
    action = {"modality_keys": ["action"], "delta_indices": list(range(rows))}
    return {"state": {"modality_keys": ["state"]}, "action": action}, statistics


def _steps(path: Path) -> dict[str, dict[str, Any]]:
    """The settings of each step of a saved pipeline, with its `state_file`; one that is not known is an error, because
    leaving it out would cost success silently."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: expected {path.name} with the statistics, found no such file")
    steps = read_json(path).get("steps")
    if not isinstance(steps, Sequence) or not all(isinstance(s, Mapping) for s in steps):
        raise CheckpointError(f"{path}: expected a list of steps, got {steps!r:.60}")
    unknown = [str(s.get("registry_name", s.get("class"))) for s in steps if s.get("registry_name") not in _KNOWN]
    if unknown:
        raise CheckpointError(f"{path}: expected steps among {', '.join(sorted(_KNOWN))}, got {', '.join(unknown)}")
    return {s["registry_name"]: {**(s.get("config") or {}), "state_file": s.get("state_file")} for s in steps}


# -- values -------------------------------------------------------------------------------------------------------


def _mapping(content: Any, key: str, where: object) -> Mapping[str, Any]:
    value = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(value, Mapping):
        found = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"{where}: expected {key}, found {found}")
    return value


def _size(entry: Mapping[str, Any], where: str) -> int:
    for name in ("mean", "q01", "min", "max", "std"):
        if entry.get(name) is not None:
            return int(_numbers(entry[name], f"{where}: {name}").shape[-1])
    raise CheckpointError(f"{where}: expected mean, q01 or min, found {sorted(entry)}")


def _numbers(value: Any, where: str) -> np.ndarray:
    """Float64 (n,) or (rows, n) of finite numbers."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: expected finite numbers, got {value!r:.60}") from error
    if array.ndim not in (1, 2) or not array.size or not np.isfinite(array).all():
        raise CheckpointError(f"{where}: expected finite numbers, got {value!r:.60}")
    return array
