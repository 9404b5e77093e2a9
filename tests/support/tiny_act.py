"""A small ACT with random weights, and its folders as lerobot saves them."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.lerobot_saved import Change, buffer_tensors, saved, write_saved
from vla_accel.families.act.bench import DrawnAct
from vla_accel.families.act.network import Act, ActConfig
from vla_accel.nn.random_weights import drawn_model
from vla_accel.nn.resnet import Camera

CAMERAS = {"observation.images.front": (40, 70), "observation.images.wrist": (64, 33)}
LIBERO_CAMERAS = {"observation.images.image": (224, 224), "observation.images.image2": (224, 224)}
STATE, ACTIONS, HORIZON = 6, 5, 7
MODES: dict[str, str] = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
SIZES = {"width": 64, "heads": 4, "mlp_dim": 96, "encoder_depth": 2, "latent_dim": 8}
PIXELS = (((0.2, 0.3, 0.4), (0.1, 0.2, 0.3)), ((0.7, 0.6, 0.5), (0.4, 0.3, 0.5)))
"""Mean and deviation of each camera's channels."""


def config_of(**changes: Any) -> ActConfig:
    cameras = tuple(Camera(*size, *pixels) for size, pixels in zip(CAMERAS.values(), PIXELS, strict=True))
    sizes: dict[str, Any] = {"state_dim": STATE, "action_dim": ACTIONS, "action_horizon": HORIZON, **SIZES}
    return ActConfig(**{"cameras": cameras, **sizes, **changes})


def libero_config() -> ActConfig:
    """LIBERO's robot, with a chunk as long as the evaluation executes."""
    small = config_of(state_dim=8, action_dim=7, action_horizon=10)
    return replace(small, cameras=tuple(replace(one, height=224, width=224) for one in small.cameras))


def tiny_model(config: ActConfig | None = None, seed: int = 0) -> Act:
    return copy.deepcopy(_drawn(config or config_of(), seed))


@functools.lru_cache(4)
def _drawn(config: ActConfig, seed: int) -> Act:
    """The image encoder is as large as the published one, and is drawn for one test after another."""
    return drawn_model(Act, config, seed=seed, device="cpu", dtype=torch.float32, drawn=DrawnAct).whole()


def observation(seed: int = 0, *, libero: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    cameras = CAMERAS if not libero else {"observation/image": (224, 224), "observation/wrist_image": (224, 224)}
    images = {key: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for key, size in cameras.items()}
    key, count = ("observation/state", 8) if libero else ("observation.state", STATE)
    return {**images, key: rng.normal(size=count)}


def statistics(config: ActConfig, keys: list[str]) -> dict[str, dict[str, Any]]:
    """By feature; those of state and actions are 0, 1, … and 1, 2, …"""
    found: dict[str, dict[str, Any]] = {
        key: {"mean": np.reshape(mean, (3, 1, 1)), "std": np.reshape(deviation, (3, 1, 1))}
        for key, (mean, deviation) in zip(keys, PIXELS, strict=True)
    }
    for key, count in (("observation.state", config.state_dim), ("action", config.action_dim)):
        found[key] = {"mean": np.arange(count), "std": np.arange(1, count + 1)}
    return found


def write_lerobot(
    folder: Path, change: Change = lambda files: None, *, release: str = "0.6.1", buffers: bool = False,
    libero: bool = False,
) -> Path:  # fmt: skip
    """Write a folder, with some tensors that only training reads. `buffers`: as lerobot 0.3, with the statistics among
    the weights; `change` then edits config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    config, cameras = (libero_config(), LIBERO_CAMERAS) if libero else (config_of(), CAMERAS)
    table = statistics(config, list(cameras))
    features: dict[str, Any] = {key: {"type": "VISUAL", "shape": [3, *size]} for key, size in cameras.items()}
    features["observation.state"] = {"type": "STATE", "shape": [config.state_dim]}
    features["action"] = {"type": "ACTION", "shape": [config.action_dim]}
    files = saved(
        "act", release, features, MODES, chunk_size=config.action_horizon, n_action_steps=config.action_horizon,
        dim_model=config.width, n_heads=config.heads, dim_feedforward=config.mlp_dim,
        n_encoder_layers=config.encoder_depth, latent_dim=config.latent_dim,
    )  # fmt: skip
    tensors = {f"model.{name}": value.clone() for name, value in tiny_model(config).state_dict().items()}
    for name in ("vae_encoder_cls_embed.weight", "vae_encoder_pos_enc"):
        tensors[f"model.{name}"] = torch.zeros(1, 64)
    if buffers:
        files |= dict.fromkeys(("policy_preprocessor", "policy_postprocessor"))
        tensors |= buffer_tensors(table)
    write_saved(folder, files, {} if buffers else table, change)
    save_file(tensors, folder / "model.safetensors")
    return folder
