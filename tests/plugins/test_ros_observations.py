"""ROS messages as observations: pictures of every encoding, joints by name, ages and stamps. Needs no ROS."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vla_accel_ros.images import compressed, raw
from vla_accel_ros.observations import Observations, StaleError
from vla_accel_ros.operators import Resize

from tests.plugins.test_ros_contract import PRESENT, read
from vla_accel.errors import ObservationError

RGB = np.random.default_rng(0).integers(0, 256, (3, 5, 3), np.uint8)


def image(encoding: str, pixels: np.ndarray, *, padding: int = 0, big: bool = False, **fields: Any) -> Any:
    """A `sensor_msgs/Image` of an array whose rows get some bytes more."""
    rows = pixels.reshape(len(pixels), -1)
    rows = rows.view(np.uint8) if rows.dtype == np.uint8 else rows.astype(">u2" if big else "<u2").view(np.uint8)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=77)
    known = {"height": len(pixels), "width": pixels.shape[1], "step": rows.shape[1], "data": rows.tobytes()}
    return SimpleNamespace(encoding=encoding, is_bigendian=int(big), **{**known, **fields})


def file(pixels: Image.Image, form: str, kind: str = "PNG") -> Any:
    data = io.BytesIO()
    pixels.save(data, kind, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {}))
    return SimpleNamespace(format=form, data=data.getvalue())


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("encoding", "store"),
    [
        ("rgb8", lambda p: p),
        ("BGR8", lambda p: p[..., ::-1]),
        ("rgba8", lambda p: np.dstack([p, p[..., 0]])),
        ("bgra8", lambda p: np.dstack([p[..., ::-1], p[..., 0]])),
        ("rgb16", lambda p: p.astype(np.uint16) * 256 + 255 - p),
        ("bgr16", lambda p: p[..., ::-1].astype(np.uint16) * 256 + 7),
    ],
)
def test_every_encoding_becomes_the_same_picture(
    encoding: str, store: Callable[[np.ndarray], np.ndarray], padding: int
) -> None:
    for big in (False, True):
        np.testing.assert_array_equal(raw(image(encoding, store(RGB), padding=padding, big=big), "/cam"), RGB)


def test_grey_becomes_three_equal_channels_and_rows_may_be_packed() -> None:
    for encoding in ("mono8", "8UC1"):
        found = raw(image(encoding, RGB[..., 1], step=0), "/cam")
        assert found.shape == (3, 5, 3) and all(np.array_equal(found[..., i], RGB[..., 1]) for i in range(3))


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (image("16UC1", RGB[..., 0]), ("rgb8", "'16UC1'")),
        (image("8UC3", RGB), ("rgb8", "'8UC3'")),
        (image("rgb8", RGB, step=14), ("15", "45 bytes")),
        (image("rgb8", RGB, height=4), ("4 rows of 15 bytes", "45 bytes")),
        (image("rgb16", RGB), ("30", "rgb16", "45 bytes")),
        (image("rgb8", RGB, width=0), ("0 pixels",)),
    ],
)
def test_an_image_that_is_no_picture_is_refused(message: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ObservationError) as raised:
        raw(message, "/cam")
    assert all(part in str(raised.value) for part in ("/cam", "expected", "got", *parts)), raised.value


def test_compressed_pictures_have_the_colours_of_the_camera() -> None:
    picture = Image.fromarray(RGB)
    np.testing.assert_array_equal(compressed(file(picture, "png"), "/cam"), RGB)
    np.testing.assert_array_equal(compressed(file(picture, "rgb8; png compressed bgr8"), "/cam"), RGB)
    swapped = file(Image.fromarray(np.ascontiguousarray(RGB[..., ::-1])), "rgb8; png compressed rgb8")
    np.testing.assert_array_equal(compressed(swapped, "/cam"), RGB)
    grey = compressed(file(picture.convert("L"), "mono8; png compressed "), "/cam")
    assert grey.shape == (3, 5, 3) and np.array_equal(grey[..., 0], grey[..., 2])
    np.testing.assert_array_equal(compressed(file(picture.convert("RGBA"), "png"), "/cam"), RGB)
    plain = np.full((16, 16, 3), (200, 100, 50), np.uint8)
    found = compressed(file(Image.fromarray(plain), "jpeg", "JPEG"), "/cam")
    assert np.abs(found.astype(int) - plain).max() <= 2


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (file(Image.fromarray(RGB), "; compressedDepth png"), "depth"),
        (file(Image.fromarray(RGB), "16UC1; png compressed "), "depth"),
        (file(Image.fromarray(RGB[..., 0].astype(np.uint16)), "png"), "I;16"),
        (SimpleNamespace(format="jpeg", data=file(Image.fromarray(RGB), "", "JPEG").data[:200]), "200 bytes"),
        (SimpleNamespace(format="webp", data=b"RIFFxxxxWEBP"), "12 bytes of format 'webp'"),
        (SimpleNamespace(format="png", data=b""), "0 bytes"),
    ],
)
def test_a_compressed_image_that_is_no_picture_is_refused(message: Any, part: str) -> None:
    with pytest.raises(ObservationError, match="/cam: expected a picture") as raised:
        compressed(message, "/cam")
    assert part in str(raised.value)


def test_resizing_picks_the_pixels_that_rosetta_picks() -> None:
    ramp = np.dstack([np.arange(12).reshape(3, 4)] * 3)
    assert Resize(2, 2).forward(ramp)[..., 0].tolist() == [[0, 3], [8, 11]]
    assert Resize(4, 4).forward(ramp[:2, :2])[..., 0].tolist() == [[0, 0, 1, 1]] * 2 + [[4, 4, 5, 5]] * 2


def stamped(seconds: float, **fields: Any) -> Any:
    stamp = SimpleNamespace(sec=int(seconds), nanosec=round(seconds % 1 * 1e9))
    return SimpleNamespace(header=SimpleNamespace(stamp=stamp), **fields)


def joints(**fields: Any) -> Any:
    known = {"name": ["b", "other", "a"], "position": [0.5, 9.0, -1.0], "velocity": [], "effort": []}
    return SimpleNamespace(**{**known, **fields})


@pytest.fixture
def observations(tmp_path: Path) -> Observations:
    """A camera whose images may be 50 ms old, and joints that may be 0.5 s old, as they arrive."""
    return Observations(read(tmp_path, PRESENT), max_age_s=0.5, max_skew_s=0.2)


def front(seconds: float, pixels: np.ndarray = RGB) -> Any:
    return stamped(seconds, **vars(file(Image.fromarray(pixels), "png")))


def test_an_observation_has_the_joints_by_name_and_the_age_of_the_oldest_message(observations: Observations) -> None:
    top, state = observations.streams
    top.receive(front(99.97), 100.0)
    state.receive(joints(), 99.9)
    found = observations.read(100.0)
    np.testing.assert_allclose(found.values["observation.state"], np.rad2deg([-1.0, 0.5]))
    assert found.values["observation.images.top"].shape == (2, 3, 3)
    assert found.age_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("camera", "state_at", "parts"),
    [
        (None, 100.0, ("/top/compressed", "expected a message, got none")),
        (front(99.9), 100.0, ("/top/compressed", "last 0.05 s", "0.10 s")),
        (front(103.0), 100.0, ("/top/compressed", "in the future", "3.00 s", "timeline: receive")),
        (front(0.0), 100.0, ("/top/compressed", "expected a stamp, got 0")),
        (front(99.98), 99.0, ("/joints", "last 0.5 s", "1.00 s")),
        (front(99.98), 99.7, ("/joints and /top/compressed", "within 0.2 s", "0.28 s")),
    ],
)
def test_a_message_that_is_missing_or_too_old_is_named(
    observations: Observations, camera: Any, state_at: float, parts: tuple[str, ...]
) -> None:
    top, state = observations.streams
    if camera is not None:
        top.receive(camera, 100.0)
    state.receive(joints(), state_at)
    with pytest.raises(StaleError) as raised:
        observations.read(100.0)
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (joints(name=["b", "c", "d"]), ("joint a", "b, c, d")),
        (joints(position=[0.5]), ("3 numbers in position", "1")),
        (joints(position=[0.5, 9.0, np.nan]), ("finite", "nan")),
    ],
)
def test_refused_joints_are_reported_once_the_last_good_ones_are_too_old(
    observations: Observations, message: Any, parts: tuple[str, ...]
) -> None:
    top, state = observations.streams
    state.receive(joints(), 99.9)
    state.receive(message, 100.0)
    top.receive(front(100.0), 100.0)
    assert observations.read(100.0).age_s == pytest.approx(0.1)
    top.receive(front(101.0), 101.0)
    with pytest.raises(StaleError) as raised:
        observations.read(101.0)
    assert all(part in str(raised.value) for part in ("/joints", *parts)), raised.value


def test_an_array_of_another_size_names_both_sizes_until_a_restart(tmp_path: Path) -> None:
    text = PRESENT.replace("/joints, type: sensor_msgs/msg/JointState", "/joints, type: std_msgs/msg/Float64MultiArray")
    free = text.replace("    select: [position.a, position.b]\n    apply: [rad2deg]\nactions", "actions")
    for content, expected in ((text, "2 numbers, as in select, got 3"), (free, "that of the first message, got (3,)")):
        observations = Observations(read(tmp_path, content), max_age_s=0.5, max_skew_s=0.2)
        _, state = observations.streams
        state.receive(SimpleNamespace(data=[1.0, 2.0]), 100.0)
        state.receive(SimpleNamespace(data=[1.0, 2.0, 3.0]), 100.0)
        assert expected in state.refused and state.count == 1
    observations.restart()
    state.receive(SimpleNamespace(data=[1.0, 2.0, 3.0]), 100.0)
    assert not state.refused and state.count == 2
