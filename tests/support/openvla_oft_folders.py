"""Small folders of openvla-oft with the settings and tensor names of its own code, which it left in
tests/nn/openvla_oft_reference.json (tests/references/make_openvla_oft_reference.py)."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.references.groot_weights import draw, weight
from vla_accel.families.openvla_oft.convert import convert

REFERENCE = json.loads((Path(__file__).parents[1] / "nn" / "openvla_oft_reference.json").read_text())
VARIANTS = ("libero", "bare", "aloha")
TASKS = ("Put the bowl on the plate", "open the drawer", "pick up the bowl on the stove and put it on the plate")
ODD = ((256, 256), (120, 200), (200, 333))
"""Sizes of cameras that are resized."""
SIDES = ("action_head", "proprio_projector")
_IMAGES = {
    "libero": {"observation/image": "full_image", "observation/wrist_image": "wrist_image"},
    "aloha": {
        "images/cam_high": "full_image", "images/cam_left_wrist": "left_wrist_image",
        "images/cam_right_wrist": "right_wrist_image",
    },
}  # fmt: skip
Change = Callable[[dict[str, Any]], object]


@functools.lru_cache(maxsize=2)
def tensors(variant: str) -> dict[str, Tensor]:
    """All tensors of a variant, those of the files next to the model's with the name of the file in front."""
    return {n: torch.from_numpy(weight(n, tuple(s))) for n, s in REFERENCE[variant]["shapes"].items()}


def write_run(folder: Path, variant: str = "libero", change: Change = lambda files: None, stored: Any = None) -> Path:
    """Write the folder of a run, with pickles. `change` edits its JSON files, by name; `stored`: other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    files, kept = copy.deepcopy(REFERENCE[variant]["files"]), dict(tensors(variant) if stored is None else stored)
    change(files)
    sides: dict[str, dict[str, Tensor]] = {}
    for name in [n for n in kept if n.startswith(SIDES)]:
        side, _, rest = name.partition(".")
        sides.setdefault(side, {})[f"module.{rest}"] = kept.pop(name)
    for name, content in sides.items():
        torch.save(content, folder / f"{name}--7_checkpoint.pt")
    shards = {f"model-0000{i + 1}-of-00002.safetensors": sorted(kept)[i::2] for i in range(2)}
    for name, names in shards.items():
        save_file({n: kept[n].contiguous() for n in names}, str(folder / name))
    table = {n: name for name, names in shards.items() for n in names}
    files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": table}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def write(folder: Path, variant: str = "libero", change: Change = lambda files: None, stored: Any = None) -> Path:
    """Write the folder of a run, converted."""
    convert(write_run(folder, variant, change, stored), folder)
    return folder


def preset(folder: Path, variant: str) -> str | None:
    """The preset that a variant needs: the one for one image is a file, which this writes."""
    if variant != "bare":
        return None
    path = folder / "one_image.yaml"
    path.write_text("base: libero\nimages: [observation/image]\n")
    return str(path)


def image(name: str, height: int, width: int) -> np.ndarray:
    """The script's image of a name: cells of 8 x 8 pixels with some noise, uint8."""
    cells = draw(f"{name}.cells", -(-height // 8), -(-width // 8), 3).repeat(8, 0).repeat(8, 1)[:height, :width]
    return (128 + 50 * cells + 4 * draw(f"{name}.noise", height, width, 3)).clip(0, 255).astype(np.uint8)


def given(variant: str, index: int, sizes: tuple[tuple[int, int], ...] = ((224, 224),)) -> dict[str, Any]:
    """One of the observations that the script gave openvla-oft."""
    robot = "aloha" if variant == "aloha" else "libero"
    keys = list(_IMAGES[robot].items())[: 1 if variant == "bare" else None]
    images = {k: image(f"oft.{n}.{index}", *sizes[i % len(sizes)]) for i, (k, n) in enumerate(keys)}
    name, count = ("state", 14) if robot == "aloha" else ("observation/state", 8)
    state = draw(f"oft.state.{index}", count).astype(np.float64) * 1.5
    return {**images, name: state, "prompt": TASKS[index]}


def observation(seed: int = 0) -> dict[str, Any]:
    """One of LIBERO's."""
    return given("libero", seed % 3)


def answers(variant: str) -> dict[str, np.ndarray]:
    """openvla-oft's actions for the robot, by case."""
    return {name: np.asarray(value) for name, value in REFERENCE[variant]["answers"].items()}
