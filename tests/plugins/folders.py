"""Tiny checkpoints for the tests of the plugins: SmolVLA of one layer or two, whatever the robot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.tiny_smolvla import statistics, write_lerobot


def write_arm(folder: Path) -> Path:
    """lerobot's folder for `ToyArm`: six joints, cameras front and wrist."""
    write_lerobot(folder)
    return folder


def write_pusht(folder: Path) -> Path:
    """lerobot's folder for gym-pusht: one camera, two numbers of state, two of action; two actions of a chunk are
    executed."""

    def change(files: dict[str, Any]) -> None:
        config = files["config"]
        image = config["input_features"]["observation.images.front"]
        state = {"type": "STATE", "shape": [2]}
        config["input_features"] = {"observation.image": image, "observation.state": state}
        config["output_features"] = {"action": {"type": "ACTION", "shape": [2]}}
        config["n_action_steps"] = 2

    write_lerobot(folder, change=change)
    table = {f"{key}.{name}": torch.from_numpy(value) for key in ("observation.state", "action")
             for name, value in statistics(2).items()}  # fmt: skip
    for path in folder.glob("policy_*.safetensors"):
        save_file(table, path)
    return folder
