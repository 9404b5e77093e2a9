"""Tiny image models with random weights, and the pictures that diffusers' own pipelines make with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.images import AcceleratedVae  # noqa: E402
from vla_accel.images.models import random_model, random_stable_diffusion  # noqa: E402
from vla_accel.images.parts import diffusers_call  # noqa: E402
from vla_accel.images.picture import PARAMETERS  # noqa: E402
from vla_accel.images.stable import Engines, Request, StableDiffusion  # noqa: E402

CPU = torch.device("cpu")
VAES = ("tiny-sd-vae", "tiny-qwen-vae", "tiny-wan22-vae")
"""One of each network: Wan 2.1's is Qwen-Image's."""
ENGINES = ("eager", "native")
ONE_EACH = tuple(zip(VAES, ("eager", "native", "native"), strict=True))
"""Each network and each engine once, for what the plug-in does and neither of them."""


def make_vae(name: str = "tiny-qwen-vae", dtype: torch.dtype = torch.float32) -> Any:
    return random_model(name, dtype=dtype, device=CPU)


def vae_inputs(
    name: str, height: int = 64, width: int = 64, batch: int = 1, channels: int = 4
) -> tuple[Tensor, Tensor]:
    """An image and latents of `channels`. Wan 2.2, which takes multiples of 16, has an image of twice as many pixels a
    side for the same latents."""
    frames = () if "sd" in name else (1,)
    latents = height // 8, width // 8
    if "wan22" in name:
        height, width = (16 * side for side in latents)
    generator = torch.Generator().manual_seed(height)
    image = torch.rand(batch, 3, *frames, height, width, generator=generator) * 2 - 1
    return image, 2 * torch.randn(batch, channels, *frames, *latents, generator=generator)


@torch.no_grad()  # as diffusers' pipelines call: tiles are blended in place
def both_sides(vae: Any, image: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of the image, and the picture of the latents."""
    return vae.encode(image).latent_dist.parameters, vae.decode(latents).sample


def assert_near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def engine_sizes(accelerated: AcceleratedVae) -> list[str]:
    """The engines in memory, least recently used first."""
    return [f"{side} {key}" for side, _, key in accelerated.cache.made]


def make_parts() -> Any:
    """A diffusers `StableDiffusionPipeline`."""
    made = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    made.set_progress_bar_config(disable=True)
    return made


def accelerated(parts: Any, engine: Any = "native", **options: Any) -> StableDiffusion:
    return StableDiffusion(parts, Engines.all(EngineSpec(engine)), **options)


def picture(height: int = 64, width: int = 64) -> Tensor:
    """A picture to start from, (1, 3, H, W) in -1..1."""
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(4)) * 2 - 1


def diffusers_picture(parts: Any, request: Request, image: Tensor | None = None) -> np.ndarray:
    """The picture of diffusers' own pipeline for a request."""
    return diffusers_call(parts, request, image)()


def assert_same_picture(pixels: np.ndarray, want: np.ndarray, noise: float = 2e-4) -> None:
    """Equal but for half a step of uint8, which our picture is rounded to, and float32 noise over some steps."""
    assert pixels.shape == want.shape and want.std() > 0.05
    assert np.abs(pixels / 255 - want).max() < 0.5 / 255 + noise


def read_parameters(path: Path) -> dict[str, Any]:
    """The metadata that `save_png` wrote."""
    from PIL import Image

    with Image.open(path) as image:
        return json.loads(image.info[PARAMETERS])


def last_json(text: str) -> dict[str, Any]:
    """The JSON line that ends a command."""
    return json.loads(text.strip().splitlines()[-1])


def wrong_answers(
    call: Callable[[int], Tensor], expected: Sequence[Tensor], calls: int, within: Callable[[], Any] = nullcontext,
    *, tolerance: float | None = None,
) -> int:  # fmt: skip
    """How often one of several threads, each calling with its own index inside `within`, gets another's answer."""
    wrong: list[int] = []
    errors: list[BaseException] = []
    start = threading.Barrier(len(expected))
    atol = tolerance or (1e-2 if expected[0].dtype == torch.bfloat16 else 1e-4)
    rtol = max(atol, 1e-3)

    def repeat(index: int) -> None:
        try:
            start.wait()
            with within():
                for _ in range(calls):
                    got, want = call(index).float(), expected[index].float()
                    if not torch.allclose(got, want, rtol=rtol, atol=atol):
                        wrong.append(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(expected))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return len(wrong)
