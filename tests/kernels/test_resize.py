"""Images fitted on the device are those that the host fits, to the bit: Pillow's and four neighbours'. Kernels run in
Triton's interpreter here, in a process of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support.runtimes import steered
from vla_accel.errors import ObservationError
from vla_accel.kernels.image.resize import fit, fit_of, fits_on, rehearse
from vla_accel.pictures import Resampling, Resize
from vla_accel.transforms.images import resample, resize

CPU = torch.device("cpu")
SIZES = [(480, 640), (256, 256), (28, 31), (31, 200), (300, 224), (224, 300), (1, 5), (720, 1280), (97, 97)]
METHODS: tuple[Resize, ...] = ("antialias", "bilinear", "corner")


def picture(height: int, width: int) -> np.ndarray:
    """Half of it at the ends of a byte's range, where sums would leave it."""
    rng = np.random.default_rng(height * 1000 + width)
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    return np.where(rng.random((height, width, 1)) < 0.5, image, np.where(image < 128, 0, 255)).astype(np.uint8)


def fitted_here(image: np.ndarray, size: int, method: Resize, device: torch.device = CPU) -> np.ndarray:
    out = torch.full((size, size, 3), 77, dtype=torch.uint8, device=device)
    fit(torch.from_numpy(image).to(device), fit_of(*image.shape[:2], size, method, device), out)
    return out.cpu().numpy()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [224, 100, 16])
def test_the_reference_is_the_host_s(size: int, method: Resize) -> None:
    """A byte that differs by one is seen."""
    for height, width in SIZES:
        if (height, width) == (1, 5) and size == 224:
            continue  # a line, seen below
        image = picture(height, width)
        np.testing.assert_array_equal(fitted_here(image, size, method), resize(image, size, method), f"{height, width}")


@pytest.mark.parametrize("method", METHODS)
def test_very_high_images_differ_by_no_more_than_pillows_versions(method: Resize) -> None:
    image = picture(300, 70)
    difference = fitted_here(image, 64, method).astype(int) - resize(image, 64, method)
    assert abs(difference).max() <= (method == "antialias")


def test_an_image_of_which_nothing_is_left_is_refused() -> None:
    for method in METHODS:
        with pytest.raises(ObservationError, match=r"can be resized to 16, got \(1, 100, 3\)"):
            fit_of(1, 100, 16, method, CPU)


def test_who_fits_images() -> None:
    assert not fits_on(CPU)


def test_kernels_are_compiled_on_the_device_that_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another GPU is the current one, which refuses to launch with the other's memory."""
    current: list[torch.device | None] = [None]
    launched: list[torch.device | None] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr("vla_accel.kernels.image.resize.on", on)
    monkeypatch.setattr("vla_accel.kernels.image.resize.fit", lambda *_: launched.append(current[-1]))
    rehearse(CPU)
    assert launched and {*launched} == {CPU}


INTERPRETED = """
import numpy as np
from tests.kernels.test_resize import METHODS, fitted_here, picture
from tests.support.runtimes import steered
from vla_accel.transforms.images import resample, resize
for method in METHODS:
    for (height, width), size in (((60, 80), 28), ((25, 20), 32), ((20, 31), 31), ((1, 5), 5), ((33, 33), 33)):
        with steered("triton"):
            got = fitted_here(picture(height, width), size, method)
        np.testing.assert_array_equal(got, resize(picture(height, width), size, method), f"{method} {height, width}")
"""


@pytest.mark.parametrize("between", [None, (224, 224)])
@pytest.mark.parametrize("size", [(96, 132), (250, 150), (256, 256)])
def test_resampling_is_torchs(between: tuple[int, int] | None, size: tuple[int, int]) -> None:
    """On the host and through the device's products, from the float pixels of torch's two filters."""
    image, method = torch.randint(0, 256, (*size, 3), dtype=torch.uint8), Resampling(between, (256, 288))
    pixels = image.permute(2, 0, 1)[None].double()
    pixels = pixels if between is None else F.interpolate(pixels, between, mode="area")
    expected = F.interpolate(pixels, method.size, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    expected = expected.round().clamp(0, 255).to(torch.uint8)
    out = torch.empty(*method.size, 3, dtype=torch.uint8)
    fit(image, fit_of(*size, 0, method, CPU), out)
    for found in (torch.from_numpy(resample(image.numpy(), method)), out):
        # Sums in another order round a tie to another level.
        assert (found.int() - expected.int()).abs().max() <= 1 and (found != expected).float().mean() < 1e-3


def test_an_image_of_the_size_stays() -> None:
    image, method = np.zeros((256, 256, 3), np.uint8), Resampling(None, (256, 256))
    assert resample(image, method) is image and fit_of(256, 256, 256, method, CPU) is None


@pytest.mark.slow
def test_the_kernels_are_the_host_s_too() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_s_kernels_are_the_host_s_too(method: Resize) -> None:
    device = torch.device("cuda")
    for height, width in SIZES:
        for size in (224, 512):
            image = picture(height, width)
            np.testing.assert_array_equal(fitted_here(image, size, method, device), resize(image, size, method))
    with steered("reference", device):
        image = picture(60, 80)
        np.testing.assert_array_equal(fitted_here(image, 28, method, device), resize(image, 28, method))
