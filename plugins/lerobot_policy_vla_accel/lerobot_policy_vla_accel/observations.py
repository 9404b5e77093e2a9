"""lerobot's batches to this package's observations: names of cameras and state, floats back to uint8, rows.

Needs neither a model nor lerobot's policies; a preset describes the checkpoint's robot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs.types import FeatureType, PolicyFeature
from torch import Tensor, bfloat16

from vla_accel.checkpoints.lerobot import is_lerobot
from vla_accel.checkpoints.weights import read_json
from vla_accel.errors import ObservationError
from vla_accel.transforms.robots import LIBERO, Preset
from vla_accel.transforms.unknown_keys import looks_like_image

_IMAGES, _STATE = "observation.images.", "observation.state"
_LIBERO_CAMERAS = dict(zip(LIBERO.images, (f"{_IMAGES}image", f"{_IMAGES}image2"), strict=True))


def camera_name(key: str) -> str:
    """What lerobot calls a preset's camera: the same where it is one of lerobot's names, LIBERO's as lerobot's
    environment has them, else `observation.images.` and the key's last part."""
    if key.startswith("observation."):
        return key
    return _LIBERO_CAMERAS.get(key) or _IMAGES + key.rpartition("/")[2]


def stated(folder: Path | None) -> Mapping[str, Any]:
    """config.json of a checkpoint that lerobot wrote; empty for others."""
    return read_json(folder / "config.json") if folder is not None and is_lerobot(folder) else {}


def input_features(preset: Preset, shapes: Sequence[tuple[int, ...]]) -> dict[str, PolicyFeature]:
    """Return lerobot's description of what the policy reads.

    Args:
        preset: The robot.
        shapes: (3, height, width) of the model's own images, one for each of the preset's cameras. Frames of any other
            size are resized by the policy.
    """
    named = {camera_name(k): PolicyFeature(FeatureType.VISUAL, s) for k, s in zip(preset.images, shapes, strict=True)}
    return {**named, _state_name(preset): PolicyFeature(FeatureType.STATE, (preset.state_dim,))}


def observations(batch: Mapping[str, Any], preset: Preset) -> list[dict[str, Any]]:
    """A batch, images float in [0, 1] or uint8 (B, 3, H, W), state (B, n), `task` B texts, as B observations. An empty
    text, which environments without a task give, is none: the configuration's `default_prompt` takes its place.

    Raises ObservationError for images under unknown keys while a camera of the checkpoint is missing, for images,
    states and tasks of different numbers of rows, and for batches that lerobot has normalised or tokenised already.
    """
    if done := [k for k in batch if k.startswith("observation.language.")]:
        raise ObservationError(
            f"{', '.join(done)}: expected raw observations, got some that another policy's processors have already "
            "changed; create a folder for lerobot: python -m lerobot_policy_vla_accel CHECKPOINT FOLDER"
        )
    names = {camera_name(key): key for key in preset.images}
    missing = [k for k in names if k not in batch]
    unknown = missing and any(looks_like_image(value) for key, value in batch.items() if key not in names)
    state = _state_name(preset)
    if state not in batch or (missing and (unknown or len(missing) == len(names))):
        given = ", ".join(k for k, v in batch.items() if k.startswith("observation") or looks_like_image(v))
        raise ObservationError(
            f"observation: expected {', '.join((*names, state))}, got {given}; pass --rename_map to rename keys"
        )
    images = {key: _pixels(batch[name], name) for name, key in names.items() if name in batch}
    states = _array(batch[state], state)
    if states.ndim != 2:
        raise ObservationError(f"{state}: expected shape (batch, {preset.state_dim}), got {states.shape}")
    tasks = batch.get("task")
    tasks = [tasks] * len(states) if tasks is None or isinstance(tasks, str) else list(tasks)
    rows = {state: len(states), "task": len(tasks)}
    rows |= {name: len(images[key]) for name, key in names.items() if key in images}
    if len(set(rows.values())) > 1:
        got = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ObservationError(f"batch: expected the same number of rows for each, got {got}")
    return [
        {**{k: v[row] for k, v in images.items()}, **preset.split(states[row])}
        | ({preset.prompt: tasks[row]} if tasks[row] else {})
        for row in range(len(states))
    ]


def _state_name(preset: Preset) -> str:
    return preset.state[0] if preset.state[0].startswith("observation.") else _STATE


def _array(value: Any, name: str) -> np.ndarray:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    if value.dtype == bfloat16:  # NumPy has none, and it has already lost bits of pixels and joints
        raise ObservationError(f"{name}: expected dtype float32 or uint8, got bfloat16")
    return value.detach().cpu().numpy()


def _pixels(value: Any, name: str) -> np.ndarray:
    """uint8 (B, H, W, 3). lerobot has divided by 255; rounding undoes that exactly."""
    images = _array(value, name)
    if images.ndim != 4 or images.shape[1] != 3:
        raise ObservationError(f"{name}: expected shape (batch, 3, height, width), got {images.shape}")
    if images.dtype != np.uint8:
        if not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1):
            raise ObservationError(f"{name}: expected uint8, or floats in [0, 1], got values outside this range")
        images = np.rint(images * 255).astype(np.uint8)
    return images.transpose(0, 2, 3, 1)
