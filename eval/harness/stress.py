"""Stress: disturbances of the observations, or delays of the actions.

Two policies that nearly always succeed cannot be distinguished; a disturbance that lowers success to 40 to 80 % shows
their difference. Each disturbance is drawn from the seed of the episode, so it is equal for all policies and numbers of
workers. None changes the simulation, its check of the goal, or a video. Disturbances that only a simulator can make
(the position of a camera) are in `Benchmark.stresses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError

GREY = 127


@dataclass(frozen=True)
class Kind:
    """A disturbance: the lowest and highest value, the one that changes nothing, and what the value means; `whole`: it
    takes integers only."""

    low: float
    high: float
    neutral: float
    meaning: str
    whole: bool = False


IMAGES = {
    "contrast": Kind(0, 4, 1, "factor of a pixel's distance from its image's mean"),
    "brightness": Kind(0, 4, 1, "factor of every pixel"),
    "occlusion": Kind(0, 0.9, 0, "share of each image behind a grey rectangle, at one place in an episode"),
    "noise": Kind(0, 1, 0, "deviation of what is added to every pixel, as a share of white"),
}
"""Disturbances of every camera's image, in the order in which they are applied."""
LATENCY = {"latency": Kind(0, 64, 0, "control ticks from an observation to the actions it leads to", whole=True)}


def parse_stress(text: str, kinds: Mapping[str, Kind]) -> dict[str, float]:
    """`"noise=0.1,latency=2"` to values by name, in the order of `kinds`, without those that change nothing.

    Raises ConfigError for an unknown name, a repeated name, and a value out of its range; it lists all names.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        kind = kinds.get(name)
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if kind is None or name in found or not kind.low <= number <= kind.high or (kind.whole and number % 1):
            listed = ", ".join(
                f"{n} ({k.low:g} to {k.high:g}{', whole' * k.whole}: {k.meaning})" for n, k in kinds.items()
            )
            raise ConfigError(f"stress: expected NAME=VALUE, a name once, of {listed}; got {part.strip()!r}")
        found[name] = int(number) if kind.whole else number
    return {name: found[name] for name, kind in kinds.items() if name in found and found[name] != kind.neutral}


def disturb(
    observation: Mapping[str, Any],
    cameras: Sequence[str],
    stress: Mapping[str, float],
    *,
    episode: Sequence[int],
    call: int,
) -> dict[str, Any]:
    """An observation as a policy under stress sees it; the one that came in stays as it is.

    Args:
        cameras: keys of the images, uint8 (H, W, 3).
        stress: values by name; names that are not in `IMAGES` are ignored.
        episode: numbers that identify the episode; they seed what is drawn once in an episode.
        call: index of the call in this episode; every call has its own noise.
    """
    seen = dict(observation)
    if not stress.keys() & IMAGES.keys():
        return seen
    for index, camera in enumerate(cameras):
        pixels = np.asarray(observation[camera]).astype(np.float32)
        if "contrast" in stress:
            mean = pixels.mean()
            pixels = mean + stress["contrast"] * (pixels - mean)
        if "brightness" in stress:
            pixels *= stress["brightness"]
        if "occlusion" in stress:
            _cover(pixels, stress["occlusion"], np.random.default_rng([*episode, index, 1]))
        if "noise" in stress:
            rng = np.random.default_rng([*episode, index, call, 2])
            pixels += 255 * stress["noise"] * rng.standard_normal(pixels.shape, dtype=np.float32)
        seen[camera] = pixels.round().clip(0, 255).astype(np.uint8)
    return seen


def _cover(pixels: np.ndarray, share: float, rng: np.random.Generator) -> None:
    """Paint a rectangle of the image's own proportions grey, somewhere inside."""
    height, width = (round(size * share**0.5) for size in pixels.shape[:2])
    top, left = (
        int(rng.integers(whole - part + 1)) for whole, part in zip(pixels.shape, (height, width), strict=False)
    )
    pixels[top : top + height, left : left + width] = GREY
