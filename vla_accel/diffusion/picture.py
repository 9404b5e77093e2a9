"""Pictures in and out: tensors in -1..1 to PNG with metadata, and files to tensors. Needs pillow."""

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
"""The PNG text field that image tools read."""


def to_uint8(image: Tensor) -> np.ndarray:
    """(3, H, W) or (3, 1, H, W) in -1..1 to uint8 (H, W, 3), rounded as diffusers does."""
    flat = image.detach().float().reshape(3, *image.shape[-2:])
    unit = (flat / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).cpu().numpy()
    return (unit * 255).round().astype(np.uint8)


def save_png(path: Path, pixels: np.ndarray, parameters: Mapping[str, Any]) -> None:
    """Write uint8 (H, W, 3) with the parameters in its metadata. Raises ConfigError for another suffix."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"image file: expected a .png, which can carry its parameters, got {path.name}")
    _pillow()
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text(PARAMETERS, json.dumps(dict(parameters)))
    with replacing(path) as temporary:
        Image.fromarray(pixels).save(temporary, pnginfo=info)


def read_parameters(path: Path) -> dict[str, Any]:
    """What `save_png` put into a file's metadata."""
    _pillow()
    from PIL import Image

    with Image.open(path) as image:
        return json.loads(image.info[PARAMETERS])


def load_image(path: Path, size: tuple[int, int] | None = None) -> Tensor:
    """A picture file as float32 (1, 3, H, W) in -1..1; `size` (height, width) resizes it. Raises ConfigError."""
    _pillow()
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(f"image file {path}: expected a readable picture, got: {error}") from error
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Image.Resampling.LANCZOS)
    unit = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)
    return (unit * 2 - 1).permute(2, 0, 1)[None]


def side_by_side(path: Path, images: Sequence[Tensor]) -> None:
    """Several pictures of the same size in a row."""
    save_png(path, np.concatenate([to_uint8(i[0]) for i in images], axis=1), {"pictures": len(images)})


def _pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DependencyError("pictures need pillow: pip install 'vla_accel[diffusion]'") from error
