"""Autoencoder components for one size, or for all sizes of an engine file; a size is (height, width) in pixels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from vla_accel.component import Component, Program, TensorSpec
from vla_accel.errors import ConfigError, unknown
from vla_accel.images.autoencoder import SCALE, Half
from vla_accel.images.native_autoencoder import NativeHalf
from vla_accel.numeric import round_up

SMALLEST, LARGEST = 64, 1920
"""Height and width of an engine file, in pixels. The eager and the native engine take every size."""
Size = tuple[int, int]
Side = Literal["encoder", "decoder"]

PROFILES: tuple[Size, ...] = (
    *((512, 512), (1024, 1024), (480, 848), (720, 1280), (1088, 1920)),
    *((1280, 720), (1920, 1088), (768, 1024), (1088, 1632)),
)
"""The sizes that a multi-profile engine is tuned for, each over the whole range; 1080 and 1620 padded to 16."""

RATIOS: dict[str, Size] = {
    "16_9": (928, 1664),
    "9_16": (1664, 928),
    "1_1": (1328, 1328),
    "4_3": (1136, 1472),
    "3_4": (1024, 768),
}
"""The static text-to-image sizes. The guide's 4:3 is 1472x1140, which no latent fits; diffusers reduces it to 1136."""


def check_size(size: Size) -> Size:
    """Return `size` if an engine file may have it. Raises ConfigError, which names the next larger size."""
    height, width = (min(max(SMALLEST, round_up(n, SCALE)), LARGEST) for n in size)
    if (height, width) != size:
        fits = "" if max(size) > LARGEST else f"; the smallest that holds it is {size_text((height, width))}"
        expected = f"expected multiples of {SCALE} from {SMALLEST} to {LARGEST} pixels a side"
        raise ConfigError(f"image size: {expected}, got {size_text(size)}{fits}")
    return size


def size_key(size: Size) -> str:
    """Return the name of a size, also of its folder: one of the five ratios, else WIDTHxHEIGHT."""
    return {v: k for k, v in RATIOS.items()}.get(size) or size_text(size)


def parse_size(text: str) -> Size:
    """Parse WIDTHxHEIGHT or a ratio's name to (height, width). Raises ConfigError."""
    if text in RATIOS:
        return RATIOS[text]
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdigit() and height.isdigit()):
        raise ConfigError(unknown("size", text, RATIOS, "WIDTHxHEIGHT or "))
    return check_size((int(height), int(width)))


def static_sizes(extra: Iterable[str] = ()) -> dict[str, Size]:
    """Return key to size of the five ratios and of `extra`."""
    return {size_key(s): s for s in (*RATIOS.values(), *(parse_size(t) for t in extra))}


def vae_component(
    half: Half, side: Side, size: Size, *, dynamic: bool = False, batch: int = 1, program: Program | None = None
) -> Component:
    """Return `vae_encoder` (image to moments) or `vae_decoder` (latents to image) for one size.

    As in diffusers, an encoder takes any size of at least one latent and returns the latents that fit.

    Args:
        dynamic: height and width range over every size of an engine file; `size` is then the example.
        program: the native program of another size, whose weights all sizes share.
    """
    scale = half.scale
    if min(size) < scale:
        raise ConfigError(f"image size: expected at least {scale} pixels a side, got {size_text(size)}")
    if half.patch > 1 and any(side % scale for side in size):
        raise ConfigError(f"image size: expected multiples of {scale} pixels a side, got {size_text(size)}")
    inside, outside = half.channels
    frames = (1,) if half.frames else ()
    first = 2 + len(frames)

    def spec(name: str, channels: int, unit: int) -> TensorSpec:
        ranges = {first + i: (SMALLEST // unit, LARGEST // unit) for i in range(2)} if dynamic else {}
        shape = (batch, channels, *frames, size[0] // unit, size[1] // unit)
        return TensorSpec(name, shape, half.dtype, ranges)

    if side == "encoder":
        source, target = spec("image", inside, 1), spec("moments", outside, scale)
    else:
        source, target = spec("latents", inside, scale), spec("image", outside, 1)
    return Component(f"vae_{side}", half, (source,), (target,), lambda _: program or NativeHalf(half))


def profile_texts(component: Component) -> tuple[str, ...]:
    """Return `PROFILES` over the component's whole range, as `TensorrtOptions.profiles`."""
    (source,), half = component.inputs, component.module
    assert isinstance(half, Half)
    unit = 1 if source.name == "image" else half.scale
    ranges = sorted(source.ranges.items())
    return tuple(
        ", ".join(f"{source.name}.{d}={a}:{n // unit}:{b}" for (d, (a, b)), n in zip(ranges, size, strict=True))
        for size in PROFILES
    )


def size_text(size: Size) -> str:
    """WIDTHxHEIGHT."""
    return f"{size[1]}x{size[0]}"
