"""One embodiment of a GR00T checkpoint, from Isaac-GR00T's settings, and the cropping of its images."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vla_accel.checkpoints.weights import size_of
from vla_accel.errors import CheckpointError
from vla_accel.families.groot.images import Cropping
from vla_accel.families.groot.modalities import Group, Groups, Relative, Scaling, check_references
from vla_accel.families.groot.releases import LIBERO_TAGS, Release
from vla_accel.families.groot.settings import check_modality

D = TypeVar("D")
_LONGEST = 255
"""Control steps that images may lie back: a policy keeps them all."""


@dataclass(frozen=True)
class Robot:
    """One embodiment of a folder.

    Attributes:
        tag: Its tag.
        embodiment: Its number.
        cameras: In the model's order.
        rows: Actions of a chunk.
        transforms: Fields of `GrootProcessor`.
    """

    tag: str
    embodiment: int
    cameras: tuple[str, ...]
    rows: int
    transforms: dict[str, Any]


def chosen_embodiment(tables: Mapping[str, Collection[str]], wanted: str | None, folder: Path) -> str:
    """Return the tag of an embodiment that all tables have: the wanted one, LIBERO's, or the only one.

    Raises CheckpointError that lists what there is.
    """
    there = sorted(set.intersection(*map(set, tables.values())))
    if not there:
        found = "; ".join(f"{', '.join(sorted(tags)) or 'none'} in {name}" for name, tags in tables.items())
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment that all its files have, found {found}")
    usual = [tag for tag in there if tag in LIBERO_TAGS] or there
    tag = wanted or (usual[0] if len(usual) == 1 else None)
    if tag is None or tag not in there:
        got = "choose one as checkpoint.embodiment" if tag is None else f"got {tag!r}"
        raise CheckpointError(f"checkpoint {folder}: expected an embodiment of {', '.join(there)}; {got}")
    return tag


def read_robot(
    release: Release, tag: str, embodiment: Any, modality: Any, statistics: Any, settings: Mapping[str, Any], path: Path
) -> Robot:
    """Return one embodiment. Raises CheckpointError for settings that are missing or refused."""
    where = f"{path}: {tag}"
    check_modality(modality, where)
    video, action = mapping(modality, "video", path), mapping(modality, "action", path)
    if not isinstance(embodiment, int) or isinstance(embodiment, bool) or embodiment < 0:
        raise CheckpointError(f"{path}: expected a number for embodiment {tag}, got {embodiment!r}")
    rows = len(action.get("delta_indices") or ())
    cameras = tuple(map(str, video.get("modality_keys") or ()))
    if not rows or not cameras:
        raise CheckpointError(f"{where}: expected video.modality_keys and action.delta_indices, got none")
    state, actions = (
        _groups(kind, modality, statistics, settings, where, release.bounded) for kind in ("state", "action")
    )
    check_references(actions, state.groups, where)
    transforms = {
        "state": state,
        "actions": actions,
        "moments": _moments(video.get("delta_indices") or [0], where),
        "formal": settings.get("formalize_language", True) is not False,
        "gripper": tag in LIBERO_TAGS,
    }
    return Robot(tag, embodiment, cameras, rows, transforms)


def _moments(indices: Any, where: str) -> tuple[int, ...]:
    whole = isinstance(indices, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in indices)
    if not whole or sorted(indices) != indices or indices[-1] != 0 or indices[0] < -_LONGEST:
        expected = f"ascending control steps from {-_LONGEST} or later to 0"
        raise CheckpointError(f"{where}: video.delta_indices: expected {expected}, got {indices!r:.60}")
    return tuple(indices)


def _groups(
    kind: str, modality: Any, statistics: Any, settings: Mapping[str, Any], where: str, bounded: bool
) -> Groups:
    config = mapping(modality, kind, where)
    table = mapping(statistics, kind, where)
    names = [str(n) for n in config.get("modality_keys") or ()]
    forms = config.get("action_configs") or []
    found = []
    for index, name in enumerate(names):
        entry = mapping(table, name, f"{where}: statistics of {kind}")
        size = _size(entry, f"{where}: statistics of {kind} {name}")
        form = forms[index] if index < len(forms) and isinstance(forms[index], Mapping) else {}
        relative = bool(settings.get("use_relative_action")) and str(form.get("rep")).lower() == "relative"
        if relative:
            entry = mapping(mapping(statistics, "relative_action", where), name, f"{where}: relative_action")
        angles = config.get("sin_cos_embedding_keys") if settings.get("apply_sincos_state_encoding") else None
        scaling: Scaling = "mean_std" if name in (config.get("mean_std_embedding_keys") or ()) else "range"
        if kind == "state" and name in (angles or ()):
            scaling, low, high = "sin_cos", None, None
        else:
            percentiles = bool(settings.get("use_percentiles")) and not relative
            low, high = _limits(entry, scaling, percentiles, f"{where}: {kind} {name}")
        group = Group(
            name,
            size,
            scaling,
            low,
            high,
            clipped=settings.get("clip_outliers", True) is not False,
            bounded=bounded,
            relative=_relation(form, f"{where}: action {name}") if relative else "no",
            reference=form.get("state_key"),
        )
        found.append(group)
    if not found:
        raise CheckpointError(f"{where}: expected {kind}.modality_keys, got none")
    return Groups(tuple(found))


def _limits(entry: Mapping[str, Any], scaling: Scaling, percentiles: bool, where: str) -> tuple[np.ndarray, np.ndarray]:
    names = ("mean", "std") if scaling == "mean_std" else ("q01", "q99") if percentiles else ("min", "max")
    low, high = (_numbers(entry.get(n), f"{where}: {n}") for n in names)
    if (high < (0.0 if scaling == "mean_std" else low)).any():
        raise CheckpointError(f"{where}: expected {'std >= 0' if scaling == 'mean_std' else ' <= '.join(names)}")
    return low, high


def _relation(form: Mapping[str, Any], where: str) -> Relative:
    kind, layout = (str(form.get(name)).lower().replace("_", "+") for name in ("type", "format"))
    if kind == "non+eef":
        return "difference"
    if kind == "eef" and layout == "xyz+rot6d":
        return "pose"
    raise CheckpointError(f"{where}: expected NON_EEF, or EEF as XYZ_ROT6D, got {dict(form)}")


# -- images -------------------------------------------------------------------------------------------------------


def lerobot_cropping(settings: Mapping[str, Any], path: Path) -> Cropping:
    """Return lerobot's cropping: 230 of 256 pixels if no target size is stored."""
    target, crop = _sides(settings, "image_target_size", path, (256, 256)), settings.get("crop_fraction")
    if settings.get("image_target_size") is None:
        crop = 230 / 256
    elif crop is None:
        crop = _sides(settings, "image_crop_size", path, target)[0] / target[0]
    crop = _fraction(crop, path)
    return Cropping(
        filter="area" if settings.get("use_albumentations") else "bicubic",
        edge=size_of(settings, "shortest_image_edge", path, target[0]),
        crop=crop if 0.0 < crop < 1.0 else 1.0,
        target=target,
        letterbox=bool(settings.get("letter_box_transform")),
    )


def isaac_cropping(settings: Mapping[str, Any], path: Path) -> Cropping:
    """Return Isaac-GR00T's cropping. Without `use_albumentations`, it ignores the fraction and the shortest edge."""
    letterbox, fraction = bool(settings.get("letter_box_transform")), settings.get("crop_fraction", 0.95)
    target, crop = (_sides(settings, key, path, None) for key in ("image_target_size", "image_crop_size"))
    fraction = None if fraction is None else _fraction(fraction, path)
    if fraction is not None and not 0.0 < fraction <= 1.0:
        raise CheckpointError(f"{path}: crop_fraction: expected more than 0 and at most 1, got {fraction}")
    edge: int | None = size_of(settings, "shortest_image_edge", path, 256)
    if settings.get("shortest_image_edge", edge) is None:
        edge = None
    area = bool(settings.get("use_albumentations"))
    # Without a fraction or an edge, the two sizes decide.
    if target is None and not (area and fraction is not None and edge is not None):
        raise CheckpointError(f"{path}: image_target_size: expected a height and a width, got None")
    if crop is None and not (area and fraction is not None):
        raise CheckpointError(f"{path}: image_crop_size: expected a height and a width, got None")
    if target is not None and crop is not None and (crop[0] > target[0] or crop[1] > target[1]):
        raise CheckpointError(f"{path}: image_crop_size: expected at most {target}, got {crop}")
    if area:
        share = fraction if fraction is not None else crop[0] / target[0]  # type: ignore[index]
        return Cropping("area", edge, share, target or (edge, edge), letterbox)  # type: ignore[arg-type]
    return Cropping("bilinear", None, crop, target, letterbox)  # type: ignore[arg-type]


def _sides(settings: Mapping[str, Any], key: str, path: Path, default: D) -> tuple[int, int] | D:
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise CheckpointError(f"{path}: {key}: expected a height and a width, got {value!r:.60}")
    height, width = (size_of({key: side}, key, path) for side in value)
    return height, width


def _fraction(value: Any, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{path}: crop_fraction: expected a number, got {value!r:.60}")
    return float(value)


# -- values -------------------------------------------------------------------------------------------------------


def mapping(content: Any, key: str, where: object) -> Mapping[str, Any]:
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
    """Return finite numbers as float64 (n,) or (rows, n)."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: expected finite numbers, got {value!r:.60}") from error
    if array.ndim not in (1, 2) or not array.size or not np.isfinite(array).all():
        raise CheckpointError(f"{where}: expected finite numbers, got {value!r:.60}")
    return array
