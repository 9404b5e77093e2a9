"""Checkpoint folders of GR00T: Isaac-GR00T's (config.json, shards, processor_config.json, statistics.json,
embodiment_id.json; of N1.5 experiment_cfg/metadata.json) and lerobot's (one file, and the saved pipelines)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.lerobot import is_lerobot, read_settings
from vla_accel.checkpoints.lerobot_settings import AFTER, BATCH, BEFORE, DEVICE, RENAME
from vla_accel.checkpoints.lerobot_statistics import ACTION, STATE, statistics_file
from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_arrays, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError
from vla_accel.families.groot.checkpoint import infer_config, load_groot
from vla_accel.families.groot.images import Cropping
from vla_accel.families.groot.network import Groot
from vla_accel.families.groot.releases import LIBERO_TAGS, N15, N17, Release, release_of
from vla_accel.families.groot.robot import (
    Robot,
    chosen_embodiment,
    isaac_cropping,
    lerobot_cropping,
    mapping,
    read_robot,
)
from vla_accel.families.groot.settings import (
    DECODE,
    ENCODE,
    N15_COLLATE,
    N15_ENCODE,
    N15_PACK,
    N15_UNPACK,
    PACK,
    UNPACK,
    check_processor,
    check_step,
    flat_config,
)
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.families.overrides import adapter_of, check_vocabulary, robot_of, warn_of_contradictions
from vla_accel.transforms.robots import LIBERO, Preset
from vla_accel.transforms.tokenizer import load_line_tokenizer

_log = logging.getLogger("vla_accel.checkpoints")


def load_folder(release: Release, folder: Path, settings: PolicyConfig) -> tuple[Groot, GrootProcessor]:
    """Return one embodiment's network and its transforms (`Family.load`)."""
    overrides, weights = settings.checkpoint, SafetensorsWeights(folder)
    lora, described = adapter_of(folder, settings)
    content, wanted = read_json(described / "config.json"), overrides.embodiment
    if (other := release_of(weights.shapes)) not in (None, release):
        raise CheckpointError(
            f"checkpoint {folder}: expected the weights of {release.title}, got those of {other.title}"
        )
    hub, renamed, features = release.tokenizer, {}, ()
    if is_lerobot(described):
        read_settings(described / "config.json", ("groot",))
        read = {N17: _lerobot, N15: _lerobot_n15}.get(release)
        if read is None:
            raise CheckpointError(
                f"checkpoint {folder}: expected Isaac-GR00T's layout of {release.title}, got lerobot's"
            )
        found = read(described, content, wanted)
        robot, stated, hub = found.robot, found.stated, found.tokenizer or hub
        renamed, features = found.renamed, content.get("input_features") or ()
    else:
        robot = (_isaac_n15 if release is N15 else _isaac)(release, folder, wanted)
        stated = flat_config(content, f"checkpoint {folder}", release)
    if overrides.action_horizon is not None:
        warn_of_contradictions({"action_horizon": overrides.action_horizon}, stated)
        stated = {**stated, "action_horizon": overrides.action_horizon}
    tokenizer = load_line_tokenizer(described, overrides.tokenizer, hub, apart=release is not N17)
    config = infer_config(weights.shapes, stated, str(folder), release.prompt.arrangement(tokenizer))
    if overrides.max_token_len is not None:
        config = dataclasses.replace(config, max_token_len=overrides.max_token_len)
    check_vocabulary(tokenizer, config.language.vocab_size, settings)
    cropping = dataclasses.replace(robot.transforms["cropping"], unit=config.vision.unit, pixels=release.pixels)
    processor = GrootProcessor(
        **{**robot.transforms, "cropping": cropping},
        tokenizer=tokenizer,
        form=release.prompt,
        arrangement=config.arrangement,
        preset=robot_of(_preset(robot, features, renamed), settings),
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
    if robot.tag in LIBERO_TAGS and len(robot.cameras) == 2 and sizes == (LIBERO.state_dim, LIBERO.action_dim):
        return LIBERO
    names = [camera if camera == _ONE_IMAGE else _IMAGES + camera for camera in robot.cameras]
    wrist, second = "observation.images.wrist_image", "observation.images.image2"
    if wrist not in features and second in features:
        names = [second if name == wrist else name for name in names]
    images = tuple(renamed.get(name, name) for name in names)
    return Preset(images, (renamed.get(STATE, STATE),), *sizes, "task", images)


# -- Isaac-GR00T --------------------------------------------------------------------------------------------------


def _isaac(release: Release, folder: Path, wanted: str | None) -> Robot:
    path = _processor_folder(folder) / "processor_config.json"
    settings = mapping(read_json(path), "processor_kwargs", path)
    check_processor(settings, path, release)
    modalities, statistics = mapping(settings, "modality_configs", path), read_json(path.parent / "statistics.json")
    ids_path = path.parent / "embodiment_id.json"
    own = read_json(ids_path) if ids_path.is_file() else {}
    ids = {**release.embodiments, **own}
    tables = {path.name: modalities, "statistics.json": statistics, ids_path.name: ids}
    tag = chosen_embodiment(tables, wanted, folder)
    if own and tag not in own:
        _log.warning("%s: found no number for %s: using Isaac-GR00T's, %d", ids_path, tag, ids[tag])
    modality = modalities[tag]
    robot = read_robot(release, tag, ids[tag], modality, statistics[tag], settings, path)
    exclude = bool(settings.get("exclude_state") or mapping(modality, "state", path).get("exclude_state"))
    robot.transforms.update(cropping=isaac_cropping(settings, path), exclude_state=exclude)
    return robot


_N15_SETTINGS = {"use_percentiles": False, "clip_outliers": False, "formalize_language": False}
"""N1.5 scales by minimum and maximum."""


def _isaac_n15(release: Release, folder: Path, wanted: str | None) -> Robot:
    """N1.5's folder has statistics alone: cameras, groups and cropping are in the code that trained it, unless a
    processor_config.json in N1.6's form says them."""
    places = (folder / "experiment_cfg", folder.parent / "experiment_cfg")
    path = next((place / "metadata.json" for place in places if (place / "metadata.json").is_file()), None)
    if path is None:
        raise CheckpointError(
            f"checkpoint {folder}: expected experiment_cfg/metadata.json, found {listing(folder)}; training leaves it "
            "in its output folder: copy it from there"
        )
    metadata, own = read_json(path), folder / "processor_config.json"
    settings = mapping(read_json(own), "processor_kwargs", own) if own.is_file() else {}
    check_processor(settings, own, release)
    written = settings.get("modality_configs") or {}
    tag = chosen_embodiment({path.name: metadata, "Isaac-GR00T": release.embodiments}, wanted, folder)
    where = f"{path}: {tag}"
    statistics, parts = (mapping(metadata[tag], name, where) for name in ("statistics", "modalities"))
    rows = {"delta_indices": list(range(16))}
    modality = written.get(tag) or {
        part: {"modality_keys": list(mapping(parts, part, where)), **(rows if part == "action" else {})}
        for part in ("video", "state", "action")
    }
    if tag not in written:
        _log.warning(
            "%s: the folder does not contain the cameras, groups and scaling of this N1.5 training; assuming cameras "
            "%s, groups in this file's order, scaling by minimum and maximum, and the middle 95 %% of each image; set "
            "others in %s",
            where, ", ".join(mapping(parts, "video", where)), own.name,
        )  # fmt: skip
    robot = read_robot(
        release, tag, release.embodiments[tag], modality, statistics, {**_N15_SETTINGS, **settings}, path
    )
    crop = settings.get("crop_fraction", 0.95)
    if isinstance(crop, bool) or not isinstance(crop, (int, float)) or not 0 < crop <= 1:
        raise CheckpointError(f"{own}: crop_fraction: expected more than 0 and at most 1, got {crop!r:.60}")
    robot.transforms.update(cropping=Cropping("bilinear", None, float(crop), (224, 224)))
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

_IMAGES, _ONE_IMAGE = "observation.images.", "observation.image"
"""lerobot's names of cameras, and of one that is alone."""
_SHARED = {RENAME, BATCH, DEVICE}
_KNOWN = {N17: {PACK, ENCODE, DECODE, UNPACK}, N15: {N15_PACK, N15_ENCODE, N15_COLLATE, N15_UNPACK}}


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What lerobot's pipelines say: the robot, settings of the model under Isaac-GR00T's names, the robot's names of
    renamed features, and the tokenizer on the hub, None for the usual one."""

    robot: Robot
    stated: Mapping[str, Any]
    renamed: Mapping[str, str]
    tokenizer: str | None = None


def _lerobot(folder: Path, content: Mapping[str, Any], wanted: str | None) -> _Saved:
    path = folder / BEFORE
    before, after = _steps(path, N17), _steps(folder / AFTER, N17)
    pack, encode = before.get(PACK), before.get(ENCODE)
    decode = after.get(DECODE) or after.get(UNPACK)
    if pack is None or encode is None or decode is None:
        raise CheckpointError(f"{path}: expected the steps {PACK}, {ENCODE} and one that decodes, found {[*before]}")
    tag, number = _embodiment(folder, pack, N17, wanted)
    images = {**encode, "use_albumentations": encode.get("use_albumentations", False)}
    modality, statistics = pack.get("modality_config"), pack.get("raw_stats")
    merged = {**pack, "use_relative_action": bool(decode.get("use_relative_action"))}
    horizon = size_of(pack, "action_horizon", path, 40)
    if not modality or not statistics:
        # Trained without groups of the checkpoint: one group, scaled by the range of the data.
        rows = size_of(content, "chunk_size", folder / "config.json", 40)
        rows = size_of(pack, "valid_action_horizon", path, rows)
        modality, statistics = _one_group(rows), _flat_statistics(folder, pack, PACK)
        merged, horizon = {**merged, "use_percentiles": False}, 40
    modality = {**modality, "video": _video(modality, pack, content, path)}
    robot = read_robot(N17, tag, number, modality, statistics, merged, path)
    _check_actions(robot, decode, folder)
    gripper = decode.get("action_decode_transform") == "libero" or bool(decode.get("libero_gripper_action"))
    robot.transforms.update(cropping=lerobot_cropping(images, path), gripper=gripper)
    stated = {name: content.get(name) for name in ("num_inference_timesteps", "rtc_ramp_rate")}
    stated = {"action_horizon": horizon, **{k: v for k, v in stated.items() if v is not None}}
    return _Saved(robot, stated, _renamed(before))


def _lerobot_n15(folder: Path, content: Mapping[str, Any], wanted: str | None) -> _Saved:
    """lerobot 0.4 and 0.5 scale one group of state and one of actions by minimum and maximum."""
    path = folder / BEFORE
    before, after = _steps(path, N15), _steps(folder / AFTER, N15)
    pack, encode, decode = before.get(N15_PACK), before.get(N15_ENCODE), after.get(N15_UNPACK)
    if pack is None or encode is None or decode is None:
        raise CheckpointError(f"{path}: expected {N15_PACK}, {N15_ENCODE} and {N15_UNPACK}, found {[*before, *after]}")
    tag, number = _embodiment(folder, pack, N15, wanted)
    statistics = {
        "state": _flat_statistics(folder, pack, N15_PACK)["state"],
        "action": _flat_statistics(folder, decode, N15_UNPACK)["action"],
    }
    modality = _one_group(size_of(pack, "action_horizon", path, 16))
    modality = {**modality, "video": _video(modality, pack, content, path)}
    robot = read_robot(N15, tag, number, modality, statistics, _N15_SETTINGS, path)
    _check_actions(robot, decode, folder)
    robot.transforms.update(cropping=Cropping("bicubic", 224, 1.0, (224, 224)))
    named = encode.get("tokenizer_assets_repo") or content.get("tokenizer_assets_repo")
    return _Saved(robot, {}, _renamed(before), named)


def _embodiment(folder: Path, pack: Mapping[str, Any], release: Release, wanted: str | None) -> tuple[str, Any]:
    """Return the tag and the number that a policy was trained with. lerobot takes 0 for an unknown tag."""
    tag, ids = str(pack.get("embodiment_tag")), pack.get("embodiment_mapping") or release.embodiments
    if tag not in ids or wanted not in (None, tag):
        there = tag if tag in ids else ", ".join(sorted(ids))
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment of {there}, got {wanted or tag!r}")
    return tag, ids[tag]


def _check_actions(robot: Robot, decode: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError if lerobot drops numbers of an action. 0 means that it drops none."""
    size, post = robot.transforms["actions"].size, folder / AFTER
    count = size_of({"env_action_dim": decode.get("env_action_dim") or size}, "env_action_dim", post)
    if count < size:
        raise CheckpointError(f"{post}: env_action_dim: expected {size}, got {count}")


def _renamed(steps: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the robot's names of the model's features, if they differ."""
    return {model: own for own, model in (steps.get(RENAME, {}).get("rename_map") or {}).items()}


def _video(
    modality: Mapping[str, Any], pack: Mapping[str, Any], content: Mapping[str, Any], path: Path
) -> Mapping[str, Any]:
    """Return the cameras: in the checkpoint's own order, else the features sorted by name, as lerobot does. It repeats
    the present image where the checkpoint reads several."""
    video = modality.get("video")
    repeated = {"delta_indices": [0] * size_of(pack, "video_horizon", path, 1)}
    if isinstance(video, Mapping) and video.get("modality_keys"):
        return {**video, **repeated}
    features = content.get("input_features") or ()
    names = pack.get("video_modality_keys") or sorted(
        key.removeprefix(_IMAGES) for key in features if key.startswith(_IMAGES)
    )
    if not names and _ONE_IMAGE in features:
        names = [_ONE_IMAGE]
    return {"modality_keys": names, **repeated}


def _one_group(rows: int) -> Mapping[str, Any]:
    """Return the modalities of one group of state and one of actions."""
    action = {"modality_keys": ["action"], "delta_indices": list(range(rows))}
    return {"state": {"modality_keys": ["state"]}, "action": action}


def _flat_statistics(folder: Path, step: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the statistics of a saved step as those of one group of state and one of actions."""
    path = statistics_file(folder, step.get("state_file"), name)
    statistics: dict[str, Any] = {"state": {"state": {}}, "action": {"action": {}}}
    found = read_arrays(path)
    for key, value in found.items():
        feature, _, statistic = key.rpartition(".")
        kind = {STATE: "state", ACTION: "action"}.get(feature)
        if kind is not None:
            statistics[kind][kind][statistic] = value.tolist()
    for feature, kind in ((STATE, "state"), (ACTION, "action")):
        if not statistics[kind][kind]:
            there = sorted({key.rpartition(".")[0] for key in found})
            raise CheckpointError(f"{path}: expected statistics of {feature}, found those of {', '.join(there)}")
    return statistics


def _steps(path: Path, release: Release) -> dict[str, dict[str, Any]]:
    """Return the settings of each step of a saved pipeline, with its `state_file`. An unknown step is an error."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: expected {path.name} with the statistics, found no such file")
    steps = read_json(path).get("steps")
    if not isinstance(steps, Sequence) or not all(isinstance(s, Mapping) for s in steps):
        raise CheckpointError(f"{path}: expected a list of steps, got {steps!r:.60}")
    known = _SHARED | _KNOWN[release]
    unknown = [str(s.get("registry_name", s.get("class"))) for s in steps if s.get("registry_name") not in known]
    for other, names in _KNOWN.items():
        if others := [name for name in unknown if name in names]:
            raise CheckpointError(
                f"{path}: expected the steps of {release.title}, as the weights are, got those of {other.title}: "
                f"{', '.join(others)}"
            )
    if unknown:
        raise CheckpointError(f"{path}: expected steps among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    for step in steps:
        check_step(step["registry_name"], step.get("config") or {}, str(path))
    return {s["registry_name"]: {**(s.get("config") or {}), "state_file": s.get("state_file")} for s in steps}
