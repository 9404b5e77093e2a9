"""The pixels and prompts that a lerobot folder was trained with, as they follow from the release that saved it and from
the statistics of its cameras."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.weights import read_json, size_of
from vla_accel.errors import CheckpointError
from vla_accel.pictures import ChannelScale, PixelValues
from vla_accel.transforms.normalisation import Normaliser

_BLACK, _WHITE = 0.0, 255.0


def is_of_04(config: Mapping[str, Any], path: Path) -> bool:
    """Whether the folder of a π0, π0.5 or π0-FAST was saved by lerobot 0.4.

    Releases since 0.5.1 write `use_relative_actions` into config.json. The config.json of 0.5.0 is that of 0.4, but the
    train_config.json that its training saves next to it has `cudnn_deterministic`, which 0.4 does not know.
    """
    if "use_relative_actions" in config:
        return False
    training = path.with_name("train_config.json")
    return not training.is_file() or "cudnn_deterministic" not in read_json(training)


def prompt_state_dim(config: Mapping[str, Any], path: Path) -> int | None:
    """The numbers that π0.5's and π0-FAST's prompts fill the state up to, as lerobot did before 0.5; None where they do
    not."""
    return size_of(config, "max_state_dim", path) if is_of_04(config, path) else None


def pixel_values(
    config: Mapping[str, Any], cameras: Mapping[str, Normaliser | None], path: Path
) -> PixelValues | None:  # fmt: skip
    """Return the pixels that a policy was trained with, None for the usual ones: byte / 127.5 - 1 and black bars.

    lerobot scales images x in [0, 1] by the statistics of their camera, fits them into a square, and computes 2 x - 1.
    SmolVLA's bars around an image are x = 0. Since lerobot 0.5 π0, π0.5 and π0-FAST clip resized images to [0, 1] and
    have the same bars; lerobot 0.4 clips to [-1, 1] and has bars of x = -1, which become -3.

    Args:
        config: A policy's config.json.
        cameras: How the images of each camera are scaled, by its key; None where they are not.
        path: Of config.json.

    Raises:
        CheckpointError: For statistics that are not those of three channels.
    """
    scaled = any(camera is not None for camera in cameras.values())
    scales = tuple(_channels(camera, f"{path}: {key}") for key, camera in cameras.items()) if scaled else ()
    if config["type"] == "smolvla":
        return PixelValues(cameras=scales) if scaled else None
    if is_of_04(config, path):
        return PixelValues(outside=-_WHITE, clipped=(-_WHITE, _WHITE), cameras=scales)
    return PixelValues(clipped=(_BLACK, _WHITE), cameras=scales) if scaled else None


def _channels(camera: Normaliser | None, where: str) -> ChannelScale:
    if camera is None:
        return ChannelScale()
    if len(camera.low) != 3:
        raise CheckpointError(f"{where}: expected statistics of 3 channels, got {len(camera.low)}")
    # Of (x - low) / span * factor + offset for x in [0, 1], in levels.
    factor, offset = (2.0, -_WHITE) if camera.kind == "quantile" else (1.0, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        shift, scale = (_WHITE * camera.low).tolist(), (factor / camera.span).tolist()
    return ChannelScale((shift[0], shift[1], shift[2]), (scale[0], scale[1], scale[2]), offset)
