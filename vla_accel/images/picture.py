"""Reading and writing pictures: tensors in -1..1 and PNG with metadata. Needs pillow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import ConfigError, DependencyError
from vla_accel.files import replacing

PARAMETERS = "parameters"
"""The text field of a PNG file."""


def to_uint8(image: Tensor) -> np.ndarray:
    """Convert (3, H, W) or (3, 1, H, W) in -1..1 to uint8 (H, W, 3), rounded as diffusers does."""
    flat = image.detach().float().reshape(3, *image.shape[-2:])
    unit = (flat / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).cpu().numpy()
    return (unit * 255).round().astype(np.uint8)


def save_png(path: Path, pixels: np.ndarray, parameters: Mapping[str, Any]) -> None:
    """Write uint8 (H, W, 3) with the parameters in its metadata. Raises ConfigError for another suffix."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"image file: expected a .png, which can carry its parameters, got {path.name}")
    pillow = _pillow()
    info = pillow.PngImagePlugin.PngInfo()
    info.add_text(PARAMETERS, json.dumps(dict(parameters)))
    with replacing(path) as temporary:
        pillow.Image.fromarray(pixels).save(temporary, pnginfo=info)


def load_image(path: Path, size: tuple[int, int] | None = None, *, multiple: int = 1) -> Tensor:
    """Read a picture file as float32 (1, 3, H, W) in -1..1. Raises ConfigError.

    Args:
        size: (height, width) to resize it to; None keeps its own.
        multiple: without `size`, height and width are reduced to multiples of this, as diffusers does with 8.
    """
    pillow = _pillow()
    try:
        with pillow.Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise ConfigError(f"image file {path}: expected a readable picture, got: {error}") from error
    if size is None:
        size = (image.size[1] // multiple * multiple, image.size[0] // multiple * multiple)
        if min(size) < 1:
            raise ConfigError(
                f"image file {path}: expected at least {multiple} pixels a side, got {image.size[0]}x{image.size[1]}"
            )
    if image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), pillow.Image.Resampling.LANCZOS)
    unit = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)
    return (unit * 2 - 1).permute(2, 0, 1)[None]


def side_by_side(path: Path, images: Sequence[Tensor]) -> None:
    """Write several pictures of the same size in a row."""
    save_png(path, np.concatenate([to_uint8(i[0]) for i in images], axis=1), {"pictures": len(images)})


AMPLIFIED = 8
"""The factor by which `compared` magnifies a difference."""
_PANEL = 192


def compared(
    path: Path, source: Tensor, pair: Mapping[str, Tensor], parameters: Mapping[str, Any], *, contrast: float = 1.0
) -> None:
    """Write a row of labelled panels: `source` made small, the middle of two pictures, and their difference.

    The pictures are shown with `contrast`, the difference with `AMPLIFIED` times as much.
    """
    pillow = _pillow()
    first, second = (_middle(image[0].float()) * contrast for image in pair.values())
    lanczos = pillow.Image.Resampling.LANCZOS
    small = pillow.Image.fromarray(to_uint8(source[0])).resize((first.shape[-1], first.shape[-2]), lanczos)
    names = ("source", *pair, f"difference x {AMPLIFIED}")
    panels = (np.asarray(small), *(to_uint8(p) for p in (first, second, (second - first) * AMPLIFIED)))
    strips: list[np.ndarray] = []
    for name, pixels in zip(names, panels, strict=True):
        label = pillow.Image.new("RGB", (pixels.shape[1], 14), "white")
        pillow.ImageDraw.Draw(label).text((2, 1), name, fill="black")
        strips.append(np.concatenate([np.asarray(label), pixels]))
    save_png(path, np.concatenate(strips, axis=1), {**parameters, "contrast": contrast, "panels": names})


def _middle(image: Tensor) -> Tensor:
    top, left = (max(0, (n - _PANEL) // 2) for n in image.shape[-2:])
    return image[..., top : top + _PANEL, left : left + _PANEL]


def scene(size: tuple[int, int]) -> Tensor:
    """Draw a test picture, float32 (1, 3, H, W) in -1..1: shaded balls on a chequered table in front of a wall."""
    rows, columns = (np.linspace(-1, 1, n) for n in size)
    y, x = np.meshgrid(rows, columns, indexing="ij")
    unit = np.stack([0.75 - 0.2 * y, 0.8 - 0.1 * x, 0.85 + 0 * x], axis=-1)
    depth = 1 / np.maximum(y, 0.05)
    squares = (np.floor(depth * 2) + np.floor(x * depth * 2)) % 2
    table = np.stack([0.35 + 0.4 * squares, 0.25 + 0.35 * squares, 0.2 + 0.25 * squares], axis=-1)
    unit = np.where((y > 0.1)[..., None], table * (1.1 - 0.3 * np.abs(x))[..., None], unit)
    for centre_y, centre_x, radius, colour in (
        (0.15, -0.4, 0.4, (0.9, 0.2, 0.15)),
        (0.4, 0.35, 0.3, (0.15, 0.5, 0.9)),
        (0.6, -0.1, 0.2, (0.95, 0.8, 0.2)),
    ):
        dy, dx = (y - centre_y) / radius, (x - centre_x) / radius
        inside = np.clip(1 - dy**2 - dx**2, 0, None)
        # Light from the upper left, and its highlight.
        light = np.clip(-0.5 * dx - 0.6 * dy + 0.62 * np.sqrt(inside), 0.08, None)
        ball = np.asarray(colour) * light[..., None] + 0.7 * (light**24)[..., None]
        unit = np.where((inside > 0)[..., None], ball, unit)
    return torch.from_numpy(np.clip(unit, 0, 1).astype(np.float32) * 2 - 1).permute(2, 0, 1)[None]


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.PngImagePlugin
    except ImportError as error:
        raise DependencyError("pictures need pillow: pip install 'vla_accel[diffusion]'") from error
    return PIL
