"""ROS images as RGB pictures."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np

from vla_accel.errors import DependencyError, ObservationError


class Layout(NamedTuple):
    """Bytes of a sample, samples of a pixel, and which of them are red, green and blue."""

    size: int
    samples: int
    rgb: tuple[int, int, int]


ENCODINGS = {
    "rgb8": Layout(1, 3, (0, 1, 2)),
    "bgr8": Layout(1, 3, (2, 1, 0)),
    "rgba8": Layout(1, 4, (0, 1, 2)),
    "bgra8": Layout(1, 4, (2, 1, 0)),
    "mono8": Layout(1, 1, (0, 0, 0)),
    "8uc1": Layout(1, 1, (0, 0, 0)),
    "rgb16": Layout(2, 3, (0, 1, 2)),
    "bgr16": Layout(2, 3, (2, 1, 0)),
}
"""Encodings in lower case. Depth (16UC1, 32FC1, mono16) is no picture; 8UC3 leaves the order of the colours open."""

MODES = ("RGB", "RGBA", "L", "P")


def raw(message: Any, topic: str) -> np.ndarray:
    """The picture uint8 (height, width, 3) of a `sensor_msgs/Image`.

    Raises:
        ObservationError: another encoding, or data of another size than height and step say.
    """
    layout = ENCODINGS.get(message.encoding.lower())
    if layout is None:
        expected = f"an encoding of {', '.join(ENCODINGS)}"
        raise ObservationError(f"{topic}: expected {expected}, got {message.encoding!r}")
    height, width = message.height, message.width
    packed = width * layout.size * layout.samples
    step = message.step or packed
    if not packed or step < packed or len(message.data) != height * step or not height:
        raise ObservationError(
            f"{topic}: expected {height} rows of {step} bytes, at least {packed} each for {width} pixels of "
            f"{message.encoding}, got {len(message.data)} bytes"
        )
    rows = np.frombuffer(message.data, np.uint8).reshape(height, step)[:, :packed]
    if layout.size == 2:
        high = 0 if message.is_bigendian else 1  # the byte of the upper eight bits
        rows = rows[:, high::2]
    return np.ascontiguousarray(rows.reshape(height, width, layout.samples)[..., layout.rgb])


def compressed(message: Any, topic: str) -> np.ndarray:
    """The picture uint8 (height, width, 3) of a `sensor_msgs/CompressedImage`, JPEG or PNG.

    Raises:
        ObservationError: depth, another format, or a damaged file.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DependencyError("compressed images: expected Pillow: pip install pillow") from error
    form = message.format.lower()
    encoding = form.partition(";")[0].strip()
    if "compresseddepth" in form or encoding in ("16uc1", "32fc1", "mono16"):
        raise ObservationError(f"{topic}: expected a picture in JPEG or PNG, got the depth format {message.format!r}")
    try:
        with Image.open(io.BytesIO(message.data), formats=("JPEG", "PNG")) as image:
            mode, pixels = image.mode, np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        got = f"{len(message.data)} bytes of format {message.format!r} ({error})"
        raise ObservationError(f"{topic}: expected a picture in JPEG or PNG, got {got}") from error
    if mode not in MODES:
        raise ObservationError(f"{topic}: expected a picture of mode {', '.join(MODES)}, got {mode}")
    # image_transport names the colours of the array that the publisher compressed as if it were BGR. If they were RGB,
    # red and blue of the file are exchanged.
    swapped = form.partition("compressed")[2].strip().startswith("rgb")
    return np.ascontiguousarray(pixels[..., ::-1]) if swapped else pixels
