"""Small VLA-JEPA folders with the files and tensor names of lerobot's own code, which it left in
tests/nn/vla_jepa_reference.json (tests/references/make_vla_jepa_reference.py)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.references.groot_weights import draw, weight
from tests.support.lerobot_saved import write_reference

REFERENCE = json.loads((Path(__file__).parents[1] / "nn" / "vla_jepa_reference.json").read_text())
CAMERAS = ("front", "wrist")
TASKS = ("pick up the black bowl", "open it", "put the wine_bottle on the rack")


@functools.cache
def tensors() -> dict[str, Tensor]:
    """lerobot's tensors of the small model."""
    return {n: torch.from_numpy(weight(n, tuple(s))) for n, s in REFERENCE["shapes"].items()}


def write(
    folder: Path, variant: str = "plain", change: Callable[[dict[str, Any]], object] = lambda files: None,
    stored: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write a folder. `change` may edit its JSON files, by name, before; `stored`: instead of `tensors()`."""
    write_reference(folder, REFERENCE, variant, change, tensors() if stored is None else stored)
    return folder


def given(variant: str = "plain") -> list[dict[str, Any]]:
    """The three observations that the script gave lerobot."""
    features = REFERENCE["variants"][variant]["files"]["config.json"]["input_features"]
    images = {}
    for camera in CAMERAS:
        size = features[f"observation.images.{camera}"]["shape"][1:]
        images[camera] = np.uint8((128 + 60 * draw(f"jepa.{camera}", 3, *size, 3)).clip(0, 255))
    state = draw("jepa.state", 3, 8)
    return [
        {**{f"observation.images.{c}": images[c][i] for c in CAMERAS}, "observation.state": state[i], "task": task}
        for i, task in enumerate(TASKS)
    ]


def observation(seed: int = 0) -> dict[str, Any]:
    """One of them."""
    return given()[seed % 3]


def noise() -> np.ndarray:
    """The noise (3, 7, 7) of the three."""
    return draw("jepa.noise", 3, 7, 7)


def answers(variant: str) -> dict[str, np.ndarray]:
    """lerobot's actions, by case."""
    return {name: np.asarray(value) for name, value in REFERENCE["variants"][variant]["answers"].items()}
