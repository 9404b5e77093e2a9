"""Camera images of every size and kind, against Pillow and torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vla_accel.errors import DependencyError, ObservationError
from vla_accel.pictures import ChannelScale, PixelValues, Resize, fitted
from vla_accel.transforms.images import resize, to_uint8

SIZES = [(480, 640), (640, 480), (256, 256), (100, 30), (28, 300), (56, 56), (20, 20), (29, 28), (112, 112)]


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def resized(image: np.ndarray, method: Resize, size: int = 56) -> np.ndarray:
    out = resize(image, size, method)
    assert out.shape == (size, size, 3) and out.dtype == np.uint8
    return out


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("method", ["antialias", "bilinear"])
def test_aspect_ratio_is_kept_and_the_rest_is_black(height: int, width: int, method: Resize) -> None:
    out = resized(picture(height, width) | 1, method)
    top, left, inner_height, inner_width = fitted(height, width, 56)
    assert max(inner_height, inner_width) in (55, 56), "openpi cuts 55.99 to 55"
    assert inner_height / inner_width == pytest.approx(height / width, rel=0.15)
    inside = np.zeros((56, 56), bool)
    inside[top : top + inner_height, left : left + inner_width] = True
    assert not out[~inside].any() and out[inside].any(-1).all()
    # An odd row or column goes to the bottom or the right.
    assert 0 <= (56 - inner_height - top) - top <= 1 and 0 <= (56 - inner_width - left) - left <= 1


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_antialias_is_pillows(height: int, width: int) -> None:
    image = picture(height, width)
    top, left, h, w = fitted(height, width, 56)
    expected = np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(resized(image, "antialias")[top : top + h, left : left + w], expected)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_bilinear_is_torchs(height: int, width: int) -> None:
    image = picture(height, width)
    top, left, h, w = fitted(height, width, 56)
    floats = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(floats, (h, w), mode="bilinear", align_corners=False)[0]
    ours = resized(image, "bilinear")[top : top + h, left : left + w].astype(np.float32)
    difference = np.abs(ours - expected.permute(1, 2, 0).numpy()).max()
    # Half a grey level, and what torch loses by taking positions in float32.
    assert difference <= 0.51


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_corner_pads_above_and_on_the_left(height: int, width: int) -> None:
    """The picture is that of "bilinear"."""
    image = picture(height, width)
    top, left, h, w = fitted(height, width, 56)
    expected = np.zeros((56, 56, 3), np.uint8)
    expected[56 - h :, 56 - w :] = resized(image, "bilinear")[top : top + h, left : left + w]
    np.testing.assert_array_equal(resized(image, "corner"), expected)


def test_an_image_of_the_right_size_is_not_copied() -> None:
    image = picture(56, 56)
    for given in (image, image[::-1], np.asfortranarray(image)):
        assert resized(given, "antialias") is given
    flipped = picture(100, 120)[::-1, ::-1]
    np.testing.assert_array_equal(resized(flipped, "antialias"), resized(np.ascontiguousarray(flipped), "antialias"))


def test_pixel_maps_are_those_of_their_values_and_sizes() -> None:
    """Also of a second call. Nobody may change them, because calls share them."""
    scales = [(), (ChannelScale((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), 7.0),)]
    values = [PixelValues(outside, clipped, scale) for outside in (0.0, -255.0) for clipped in (None, (0.0, 255.0))
              for scale in scales]  # fmt: skip
    places: list[tuple[list[tuple[int, int, int]], int, Resize]] = [
        ([(0, *size)], side, method) for size in ((36, 60), (60, 36)) for side in (28, 56)
        for method in ("bilinear", "corner")
    ]  # fmt: skip
    cases = [(one, place) for one in values for place in places]
    first = [one.maps(*place).copy() for one, place in cases]
    assert len({made.tobytes() for made in first}) == len(cases)
    for (one, place), want in zip(reversed(cases), reversed(first), strict=True):
        made = replace(one).maps(*place)
        np.testing.assert_array_equal(made, want)
        assert not made.flags.writeable


def test_a_sliver_is_refused() -> None:
    with pytest.raises(ObservationError, match="resized to 56"):
        resized(picture(1, 300), "antialias")


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DependencyError, match=r"pip install 'vla_accel\[checkpoints\]'"):
        resized(picture(60, 60), "antialias")
    resized(picture(60, 60), "bilinear")
    resized(picture(56, 56), "antialias")


def test_kinds_of_pixels() -> None:
    image = picture(8, 9)
    assert to_uint8(image, "k") is image
    for same in (np.moveaxis(image, -1, 0), np.ma.array(image), Image.fromarray(image)):
        np.testing.assert_array_equal(to_uint8(same, "k"), image)
    np.testing.assert_array_equal(to_uint8(image / 255, "k"), (255 * (image / 255)).astype(np.uint8))
    assert (to_uint8(np.full((2, 2, 3), 0.999, np.float16), "k") == 254).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_floats_of_every_layout_are_cut_to_levels(dtype: Any) -> None:
    """To the last bit, from 0, -0 and the numbers next to each level up to 1; the argument is not changed."""
    levels = picture(20, 30)
    image = (levels / 255).astype(dtype)
    image[::3] = np.nextafter(image[::3], np.float32(0).astype(dtype))
    image[0, :3] = 0.0, -0.0, 1.0
    want = (255 * image).astype(np.uint8)
    for one in (image, np.moveaxis(np.moveaxis(image, -1, 0).copy(), 0, -1), image[::-1, ::-1], image[..., ::-1]):
        before = one.copy()
        got = to_uint8(one, "k")
        np.testing.assert_array_equal(got, (255 * before).astype(np.uint8))
        np.testing.assert_array_equal(one, before)
    first = np.ascontiguousarray(np.moveaxis(image, -1, 0))
    for one in (first, torch.from_numpy(first) if first.dtype.isnative else first):
        np.testing.assert_array_equal(to_uint8(one, "k"), want)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("wrong", ["above", "below", np.nan, -np.nan, np.inf, -np.inf])
def test_one_float_out_of_range_is_refused(dtype: Any, wrong: Any) -> None:
    one = np.ones((), dtype)
    values = {"above": np.nextafter(one, one + one), "below": np.nextafter(one - one, -one)}
    for channels_first in (False, True):
        image = np.full((3, 20, 30) if channels_first else (20, 30, 3), 0.5, dtype)
        image[2, 11, 1] = values.get(wrong, wrong)
        with pytest.raises(ObservationError, match=r"^k: expected uint8, or floats in \[0, 1\], got "):
            to_uint8(image, "k")


RGB = Image.fromarray(picture(20, 30))
REFUSED: list[tuple[Any, tuple[str, ...]]] = [
    *((np.zeros(shape, np.uint8), ("(height, width, 3)", str(shape))) for shape in
      [(8, 9), (1, 8, 9, 3), (0, 9, 3), (3, 0, 9), (8, 9, 2)]),
    (np.zeros((8, 9, 4), np.uint8), ("(8, 9, 4)", "image[..., :3]")),
    (np.zeros((4, 8, 9), np.uint8), ("(4, 8, 9)", "image[:3]")),
    (None, ("None",)),
    ("cam.png", ("'cam.png'",)),
    (np.full((2, 2, 3), 1.5), ("[0, 1]", "1.5 to 1.5")),
    (np.nan * np.ones((2, 2, 3)), ("nan to nan",)),
    (np.zeros((8, 9, 3), np.int64), ("uint8", "int64")),
    (np.zeros((8, 9, 3), bool), ("uint8", "bool")),
    # NumPy drops a mask, so that the model would see the pixels below it.
    (np.ma.array(picture(20, 30), mask=picture(20, 30) > 200), ("mask",)),
    # HSV and YCbCr have three channels of bytes, too.
    *((RGB.convert(mode), ("RGB", mode, "convert")) for mode in ("HSV", "YCbCr", "L", "P", "RGBA")),
]  # fmt: skip


@pytest.mark.parametrize(("image", "parts"), REFUSED)
def test_an_image_that_no_model_takes_is_refused(image: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ObservationError, match=r"^camera: expected ") as refused:
        to_uint8(image, "camera")
    assert all(part in str(refused.value) for part in parts) and "\n" not in str(refused.value)
