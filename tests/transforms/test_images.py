"""Camera images of every size and kind, against Pillow and torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vla_accel.errors import DependencyError, ObservationError
from vla_accel.pictures import Resize, fitted
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


def test_the_right_size_is_not_even_copied() -> None:
    image = picture(56, 56)
    for given in (image, image[::-1], np.asfortranarray(image)):
        assert resized(given, "antialias") is given


def test_a_flipped_view_can_be_resized() -> None:
    image = picture(100, 120)
    np.testing.assert_array_equal(
        resized(image[::-1, ::-1], "antialias"), resized(np.ascontiguousarray(image[::-1, ::-1]), "antialias")
    )


def test_a_sliver_is_refused() -> None:
    with pytest.raises(ObservationError, match="expected a shape that can be resized to 56"):
        resized(picture(1, 300), "antialias")


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DependencyError, match=r"pip install 'vla_accel\[checkpoints\]', or send images of the size"):
        resized(picture(60, 60), "antialias")
    resized(picture(60, 60), "bilinear")
    resized(picture(56, 56), "antialias")


def test_kinds_of_pixels() -> None:
    image = picture(8, 9)
    assert to_uint8(image, "k") is image
    np.testing.assert_array_equal(to_uint8(np.moveaxis(image, -1, 0), "k"), image)
    np.testing.assert_array_equal(to_uint8(image / 255, "k"), (255 * (image / 255)).astype(np.uint8))
    assert (to_uint8(np.full((2, 2, 3), 0.999, np.float16), "k") == 254).all()


@pytest.mark.parametrize("shape", [(8, 9), (8, 9, 4), (1, 8, 9, 3), (0, 9, 3), (3, 0, 9)])
def test_other_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(ObservationError, match=r"cam: expected shape \(height, width, 3\), got"):
        to_uint8(np.zeros(shape, np.uint8), "cam")


@pytest.mark.parametrize(("shape", "colours"), [((8, 9, 4), "[..., :3]"), ((4, 8, 9), "[:3]"), ((8, 9, 2), "")])
def test_an_alpha_channel_is_named_with_what_to_pass_instead(shape: Any, colours: str) -> None:
    with pytest.raises(ObservationError) as caught:
        to_uint8(np.zeros(shape, np.uint8), "cam")
    assert str(caught.value).endswith(f"image{colours}" if colours else f"got {shape}")


@pytest.mark.parametrize(
    ("image", "got"),
    [
        (None, "None"),
        ("cam.png", "'cam.png'"),
        (np.full((2, 2, 3), 1.5), "1.5 to 1.5"),
        (np.nan * np.ones((2, 2, 3)), "nan to nan"),
    ],
)
def test_what_is_no_image_is_told_as_what_it_is(image: Any, got: str) -> None:
    with pytest.raises(ObservationError, match=f"cam: expected .*, got {got}$"):
        to_uint8(image, "cam")


@pytest.mark.parametrize("mode", ["HSV", "YCbCr", "L", "P", "RGBA"])
def test_an_image_of_pillow_in_other_colours_is_refused(mode: str) -> None:
    """HSV and YCbCr have three channels of bytes, too."""
    image = Image.fromarray(picture(20, 30))
    np.testing.assert_array_equal(to_uint8(image, "camera"), picture(20, 30))
    with pytest.raises(ObservationError, match=rf"^camera: expected .*RGB, got {mode};.*convert") as refused:
        to_uint8(image.convert(mode), "camera")
    assert "\n" not in str(refused.value)


def test_a_masked_image_is_refused() -> None:
    """NumPy drops the mask, so that the model would see the pixels below it."""
    image = picture(20, 30)
    np.testing.assert_array_equal(to_uint8(np.ma.array(image), "camera"), image)
    with pytest.raises(ObservationError, match=r"^camera: expected an image without a mask, got"):
        to_uint8(np.ma.array(image, mask=image > 200), "camera")
