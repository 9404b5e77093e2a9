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


def write_act(folder: Path, cameras: dict[str, tuple[int, int]], count: int) -> None:
    """A small ACT with `count` numbers of state and action, as lerobot saves it."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    inputs = {key: PolicyFeature(FeatureType.VISUAL, (3, *size)) for key, size in cameras.items()}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (count,))
    config = ACTConfig(
        input_features=inputs, output_features={"action": PolicyFeature(FeatureType.ACTION, (count,))}, chunk_size=6,
        n_action_steps=3, dim_model=64, n_heads=4, dim_feedforward=96, n_encoder_layers=1, latent_dim=8,
        pretrained_backbone_weights=None, device="cpu", push_to_hub=False,
    )  # fmt: skip
    torch.manual_seed(0)
    table = {key: {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.3)} for key in cameras}
    for key in ("observation.state", "action"):
        table[key] = {"mean": torch.linspace(200, 300, count), "std": torch.linspace(100, 80, count)}
    for part in (ACTPolicy(config), *make_pre_post_processors(config, dataset_stats=table)):
        part.save_pretrained(folder)
