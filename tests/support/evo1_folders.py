"""Small Evo-1 folders with the files and tensor names of lerobot's own code, which it left in
tests/nn/evo1_reference.json (tests/references/make_evo1_reference.py)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.references import evo1_weights
from tests.references.evo1_weights import TASKS, evo1_weight
from tests.support.lerobot_saved import write_reference

REFERENCE = json.loads((Path(__file__).parents[1] / "nn" / "evo1_reference.json").read_text())
CAMERAS = ("front", "wrist")
HORIZON = 8


@functools.cache
def tensors(variant: str = "plain") -> dict[str, Tensor]:
    """lerobot's tensors of a small model."""
    shapes = REFERENCE["variants"][variant]["shapes"]
    return {n: torch.from_numpy(evo1_weight(n, tuple(s))) for n, s in shapes.items()}


def write(
    folder: Path, variant: str = "plain", change: Callable[[dict[str, Any]], object] = lambda files: None,
    stored: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write a folder. `change` may edit its JSON files, by name, before; `stored`: instead of `tensors(variant)`."""
    write_reference(folder, REFERENCE, variant, change, tensors(variant) if stored is None else stored)
    return folder


def drawn(variant: str = "plain") -> dict[str, np.ndarray]:
    """What the script drew: images, states and noise of three observations."""
    features = REFERENCE["variants"][variant]["files"]["config.json"]["input_features"]
    sizes = {c: tuple(features[f"observation.images.{c}"]["shape"][1:]) for c in CAMERAS}
    return evo1_weights.given(sizes, HORIZON)  # type: ignore[arg-type]


def given(variant: str = "plain") -> list[dict[str, Any]]:
    """The three observations that the script gave lerobot."""
    found = drawn(variant)
    return [
        {
            **{f"observation.images.{c}": found[c][i] for c in CAMERAS},
            "observation.state": found["state"][i], "task": task,
        }
        for i, task in enumerate(TASKS)
    ]  # fmt: skip


def observation(seed: int = 0) -> dict[str, Any]:
    """One of them."""
    return given()[seed % 3]


def noise() -> np.ndarray:
    """The noise (3, H, 24) of the three."""
    return drawn()["noise"]


def answers(variant: str) -> dict[str, np.ndarray]:
    """lerobot's actions, by case."""
    return {name: np.asarray(value) for name, value in REFERENCE["variants"][variant]["answers"].items()}
