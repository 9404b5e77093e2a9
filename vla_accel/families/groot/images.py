"""Camera images to what GR00T takes: cropped and resized in one of two ways, then to whole tokens.

"area" (checkpoints that say `use_albumentations`) resizes by OpenCV's area filter and keeps the aspect ratio. "bicubic"
(lerobot) and "bilinear" (Isaac-GR00T) make every image square with torch's antialiased filter. Source: Isaac-GR00T's
image transforms, lerobot's processors and transformers' Qwen2-VL image processor (all Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from vla_accel.errors import DependencyError

LEAST_PIXELS, MOST_PIXELS = 65_536, 16_777_216
"""Of an image, in Qwen3-VL's preprocessor_config.json."""


@dataclass(frozen=True)
class Cropping:
    """How an image becomes the model's.

    Attributes:
        filter: "area", "bicubic" or "bilinear".
        edge: Pixels of the shortest edge (area) or of each (bicubic). None for an area filter that resizes to `target`.
        crop: The share of each edge that is kept, around the middle; or, for bilinear, (height, width) in pixels after
            an image was resized to `target`.
        target: (height, width) of bicubic, bilinear, and of area without an edge.
        letterbox: Whether black bars make an image square first.
        unit: Pixels a side of a token.
        pixels: Least and most pixels of the result; None for Qwen3-VL's.
    """

    filter: Literal["area", "bicubic", "bilinear"] = "bicubic"
    edge: int | None = 256
    crop: float | tuple[int, int] = 230 / 256
    target: tuple[int, int] = (256, 256)
    letterbox: bool = False
    unit: int = 32
    pixels: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        # Fail while the checkpoint is read: one extra brings cv2 and what its tokenizer needs.
        if self.filter == "area":
            try:
                import cv2  # noqa: F401
            except ImportError as error:
                raise DependencyError(
                    "images of a checkpoint with use_albumentations need OpenCV: pip install 'vla_accel[groot]'"
                ) from error

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """uint8 (H, W, 3) to uint8, sides multiples of `unit`."""
        image = _letterboxed(image) if self.letterbox else image
        image = {"area": self._area, "bicubic": self._bicubic, "bilinear": self._bilinear}[self.filter](image)
        return _resized(image, whole_tokens(image.shape[0], image.shape[1], self.unit, self.pixels))

    def _area(self, image: np.ndarray) -> np.ndarray:
        assert isinstance(self.crop, float)
        image = self._by_area(image)
        height, width = (max(1, int(n * self.crop)) for n in image.shape[:2])
        return self._by_area(_middle(image, height, width))

    def _by_area(self, image: np.ndarray) -> np.ndarray:
        return _area(image, self.target) if self.edge is None else _shortest_edge(image, self.edge)

    def _bicubic(self, image: np.ndarray) -> np.ndarray:
        assert isinstance(self.crop, float) and self.edge is not None
        image = _resized(image, (self.edge, self.edge))
        height, width = (max(1, round(n * self.crop)) for n in image.shape[:2])
        return _resized(_middle(image, height, width), self.target)

    def _bilinear(self, image: np.ndarray) -> np.ndarray:
        crop = self.crop
        if not isinstance(crop, tuple):  # a share of the camera's own pixels
            height, width = (int(n * crop) for n in image.shape[:2])
        else:
            image, (height, width) = _resized(image, self.target, "bilinear"), crop
        # torchvision rounds half a pixel to even, lerobot rounds it down.
        top, left = round((image.shape[0] - height) / 2), round((image.shape[1] - width) / 2)
        middle = image[top : top + height, left : left + width]
        return _resized(middle, self.target, "bilinear", fractions=not isinstance(crop, tuple))


def whole_tokens(height: int, width: int, unit: int, pixels: tuple[int, int] | None = None) -> tuple[int, int]:
    """The size nearest to this one that is whole tokens and not too few or too many pixels."""
    least, most = pixels or (LEAST_PIXELS, MOST_PIXELS)
    rows, columns = (round(n / unit) * unit for n in (height, width))
    if rows * columns > most:
        shrink = (height * width / most) ** 0.5
        return tuple(max(unit, int(n / shrink / unit) * unit) for n in (height, width))  # type: ignore[return-value]
    if rows * columns < least:
        grow = (least / (height * width)) ** 0.5
        return tuple(-int(-n * grow // unit) * unit for n in (height, width))  # type: ignore[return-value]
    return rows, columns


def _middle(image: np.ndarray, height: int, width: int) -> np.ndarray:
    top, left = max(0, (image.shape[0] - height) // 2), max(0, (image.shape[1] - width) // 2)
    return image[top : top + height, left : left + width]


def _letterboxed(image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    side = max(height, width)
    out = np.zeros((side, side, 3), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    out[top : top + height, left : left + width] = image
    return out


def _shortest_edge(image: np.ndarray, edge: int) -> np.ndarray:
    shortest = min(image.shape[:2])
    if shortest == edge:
        return image
    height, width = (max(1, round(n * edge / shortest)) for n in image.shape[:2])
    return _area(image, (height, width))


def _area(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if image.shape[:2] == size:
        return image
    import cv2

    return cv2.resize(np.ascontiguousarray(image), size[::-1], interpolation=cv2.INTER_AREA)


def _resized(
    image: np.ndarray, size: tuple[int, int], mode: str = "bicubic", *, fractions: bool = False
) -> np.ndarray:  # fmt: skip
    """Resized with an antialiased filter, as torchvision resizes uint8 images or, with `fractions`, floats, which are
    then cut to whole levels."""
    if image.shape[:2] == size:
        return image
    # What came over the wire is read-only, of which torch would warn.
    channels = torch.from_numpy(np.require(image, requirements=["C", "W"])).permute(2, 0, 1)[None]
    channels = channels.float() / 255.0 if fractions else channels
    made = F.interpolate(channels, size=size, mode=mode, antialias=True, align_corners=False)
    made = (made * 255.0).to(torch.uint8) if fractions else made
    return made[0].permute(1, 2, 0).contiguous().numpy()
