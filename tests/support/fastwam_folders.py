"""Small FastWAM folders with the files and tensor names of lerobot's own code, which it left in
tests/nn/fastwam_reference.json (tests/references/make_fastwam_reference.py)."""

from __future__ import annotations

import functools
import json
import re
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
from fastwam_weights import weight  # noqa: E402
from groot_weights import draw  # noqa: E402

from tests.support.lerobot_saved import write_reference  # noqa: E402

REFERENCE = json.loads((Path(__file__).parents[1] / "nn" / "fastwam_reference.json").read_text())
GREYS = {"three": {"front": 90, "left": 30, "wrist": 150}}
TASKS = ("pick up the black bowl", "open it", "put the wine bottle on the rack")


@functools.cache
def tensors(part: str = "checkpoint") -> dict[str, Tensor]:
    """lerobot's, diffusers' or transformers' tensors of the small model: "checkpoint", "vae" or "text_encoder"."""
    found = {}
    for name, shape in REFERENCE["shapes"][part].items():
        # One table under two names.
        drawn = "shared.weight" if name == "encoder.embed_tokens.weight" else name
        found[name] = torch.from_numpy(np.ascontiguousarray(weight(drawn, tuple(shape))))
    return found


def old_keys(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that lerobot's FastWAM had before both blocks of a layer moved into one module."""
    pattern = re.compile(r"model\.mot\.layers\.(\d+)\.blocks\.(\w+)\.(.+)")
    return {pattern.sub(r"model.mot.mixtures.\2.blocks.\1.\3", name): value for name, value in stored.items()}


def write(
    folder: Path, variant: str = "plain", change: Callable[[dict[str, Any]], object] = lambda files: None,
    stored: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint with Wan's folders inside. `change` may edit its JSON files, by name, before; `stored`:
    instead of `tensors()`."""
    write_reference(folder, REFERENCE, variant, change, tensors() if stored is None else stored)
    for part, name in {"vae": "diffusion_pytorch_model", "text_encoder": "model"}.items():
        (folder / part).mkdir(exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(REFERENCE["wan"][part]))
        save_file(tensors(part), str(folder / part / f"{name}.safetensors"))
    return folder


def given(variant: str = "plain") -> list[dict[str, Any]]:
    """The three observations that the script gave lerobot."""
    size = {"resized": (96, 80), "three": (72, 56)}.get(variant, (64, 64))
    greys = GREYS.get(variant, {"front": 128, "wrist": 128})
    images = {c: (g + 60 * draw(f"wam.{c}", 3, *size, 3)).clip(0, 255).astype(np.uint8) for c, g in greys.items()}
    state = draw("wam.state", 3, 8)
    return [
        {**{f"observation.images.{c}": images[c][i] for c in images}, "observation.state": state[i], "task": task}
        for i, task in enumerate(TASKS)
    ]


def answers(variant: str) -> dict[str, np.ndarray]:
    """lerobot's actions, by case, and its latent."""
    return {name: np.asarray(value) for name, value in REFERENCE["variants"][variant]["answers"].items()}
