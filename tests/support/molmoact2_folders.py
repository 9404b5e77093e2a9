"""Small MolmoAct2 folders with the files and tensor names of lerobot's and the authors' own code, which it left in
tests/nn/molmoact2_reference.json (tests/references/make_molmoact2_reference.py)."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

REFERENCES = Path(__file__).parents[1] / "references"
# The module imports its neighbour as the other project's interpreter does.
sys.path.insert(0, str(REFERENCES))
import molmoact2_weights  # noqa: E402
from molmoact2_weights import CAMERAS, TASKS, images_of, state, weight  # noqa: E402

noise, previous = molmoact2_weights.noise, molmoact2_weights.previous

REFERENCE = json.loads((Path(__file__).parents[1] / "nn" / "molmoact2_reference.json").read_text())
Change = Callable[[dict[str, Any]], object]


@functools.cache
def tensors() -> dict[str, Tensor]:
    """The authors' tensors of the small model."""
    return {name.removeprefix("model."): drawn(name, shape) for name, shape in REFERENCE["shapes"].items()}


@functools.cache
def adapted() -> dict[str, Tensor]:
    """Those of the variant `adapted`, whose layers have a LoRA adapter, as lerobot names them behind "model."."""
    shapes = REFERENCE["variants"]["adapted"]["shapes"]
    return {name.removeprefix("model."): drawn(name, shape) for name, shape in shapes.items()}


def drawn(name: str, shape: list[int]) -> Tensor:
    """A tensor of lerobot's policy, by its name without an adapter's words."""
    if "lora_" not in name:
        name = name.replace("base_model.model.", "").replace(".base_layer", "").removeprefix("model.")
    return torch.from_numpy(np.ascontiguousarray(weight(name, tuple(shape))))


def published(
    folder: Path, variant: str = "plain", change: Change = lambda files: None, stored: dict[str, Tensor] | None = None
) -> Path:
    """Write the model in its authors' layout. `change` may edit its JSON files, by name, before; `stored`: instead of
    `tensors()`, None of them: no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    files = copy.deepcopy({**REFERENCE["variants"][variant]["published"], **REFERENCE["shared"]})
    files["norm_stats.json"] = copy.deepcopy(REFERENCE["norm_stats"])
    change(files)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_file(tensors() if stored is None else stored, str(folder / "model.safetensors"))
    return folder


def write(
    folder: Path, variant: str = "plain", change: Change = lambda files: None, model: Change = lambda files: None,
    stored: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write lerobot's folder, and in it the authors' that it names. `change` may edit its JSON files, by name, before,
    and `model` those of the authors; `stored`: tensors instead of `tensors()`."""
    base = published(folder / "base", variant, model)
    kept = REFERENCE["variants"][variant]
    files = json.loads(json.dumps(kept["files"]).replace("PUBLISHED", str(base)))
    change(files)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    weights = (adapted() if variant == "adapted" else tensors()) if stored is None else stored
    save_file({f"model.{name}": value for name, value in weights.items()}, str(folder / "model.safetensors"))
    for name, table in kept["statistics"].items():
        save_file({key: torch.tensor(value) for key, value in table.items()}, str(folder / name))
    return folder


def given(variant: str = "plain") -> list[dict[str, Any]]:
    """The three observations that the script gave lerobot."""
    images, states = images_of(variant), state()
    return [
        {**{f"observation.images.{c}": images[c][i] for c in CAMERAS}, "observation.state": states[i], "task": task}
        for i, task in enumerate(TASKS)
    ]


def answers(variant: str) -> dict[str, np.ndarray]:
    """lerobot's actions, by case."""
    return {name: np.asarray(value) for name, value in REFERENCE["variants"][variant]["answers"].items()}
