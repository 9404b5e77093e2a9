"""A small Diffusion Policy with random weights, and its folders as lerobot saves them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.lerobot_saved import Change, buffer_tensors, saved, write_saved
from vla_accel.families.diffusion_policy.bench import DrawnDiffusionPolicy
from vla_accel.families.diffusion_policy.checkpoint import stored_name
from vla_accel.families.diffusion_policy.network import DiffusionPolicy, DiffusionPolicyConfig
from vla_accel.nn.random_weights import drawn_model
from vla_accel.nn.resnet import Camera
from vla_accel.transforms.frames import FrameProcessor
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.robots import LIBERO, Preset

CAMERAS = ("observation.images.wrist", "observation.images.front")
FRAME, STATE, ACTIONS, HISTORY = (40, 56), 6, 5, 2
MODES: dict[str, str] = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
STATISTICS: dict[str, dict[str, Any]] = {
    CAMERAS[0]: {"mean": [[[0.2]], [[0.3]], [[0.4]]], "std": [[[0.1]], [[0.2]], [[0.3]]]},
    CAMERAS[1]: {"mean": [[[0.7]], [[0.6]], [[0.5]]], "std": [[[0.4]], [[0.3]], [[0.5]]]},
    "observation.state": {"min": -np.arange(1.0, 7.0), "max": np.arange(2.0, 8.0)},
    "action": {"min": -np.arange(1.0, 6.0), "max": np.arange(3.0, 8.0)},
}
SETTINGS: dict[str, Any] = {
    "n_obs_steps": HISTORY, "horizon": 8, "n_action_steps": 4, "crop_shape": [33, 49], "use_group_norm": True,
    "use_separate_rgb_encoder_per_camera": False, "spatial_softmax_num_keypoints": 8, "down_dims": [16, 24, 40],
    "diffusion_step_embed_dim": 16, "num_inference_steps": 4, "noise_scheduler_type": "DDPM",
}  # fmt: skip
"""Of config.json. No width of the U-Net is a power of two."""


SCALES = {key: [np.ravel(STATISTICS[key][name]).tolist() for name in ("mean", "std")] for key in CAMERAS}


def config_of(**changes: Any) -> DiffusionPolicyConfig:
    cameras = tuple(Camera(*FRAME, *map(tuple, SCALES[key])) for key in CAMERAS)  # type: ignore[arg-type]
    fields: dict[str, Any] = {
        "cameras": cameras, "crop": (33, 49), "keypoints": 8, "state_dim": STATE, "action_dim": ACTIONS,
        "action_horizon": 8, "widths": (16, 24, 40), "time_dim": 16, "num_steps": 4,
    }  # fmt: skip
    return DiffusionPolicyConfig(**(fields | changes))


def tiny_model(config: DiffusionPolicyConfig | None = None, seed: int = 0) -> DiffusionPolicy:
    return copy.deepcopy(_drawn(config or config_of(), seed))


@functools.lru_cache(4)
def _drawn(config: DiffusionPolicyConfig, seed: int) -> DiffusionPolicy:
    """The image encoder is as large as the published one, and is drawn for one test after another."""
    return drawn_model(
        DiffusionPolicy, config, seed=seed, device="cpu", dtype=torch.float32, drawn=DrawnDiffusionPolicy
    ).whole()


def transforms_of(config: DiffusionPolicyConfig) -> FrameProcessor:
    """The robot of `write_lerobot`, with statistics that change nothing."""
    pixels = (Normaliser("mean_std", np.array(c.mean), np.array(c.deviation)) for c in config.cameras)
    return FrameProcessor(
        preset=Preset(CAMERAS, ("observation.state",), STATE, ACTIONS, "task"), state=Normaliser.identity(STATE),
        actions=Normaliser.identity(ACTIONS), action_dim=ACTIONS, frame_shapes=(FRAME,) * 2, cameras=tuple(pixels),
        history=config.history, first=config.history - 1,
    )  # fmt: skip


def observation(seed: int = 0, moments: int | None = None) -> dict[str, Any]:
    """One moment, or several, oldest first."""
    rng, lead = np.random.default_rng(seed), () if moments is None else (moments,)
    images = {key: rng.integers(0, 256, (*lead, *FRAME, 3), dtype=np.uint8) for key in CAMERAS}
    return {**images, "observation.state": rng.uniform(-1, 2, (*lead, STATE))}


def libero_observation(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    images = {key: rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for key in LIBERO.images}
    return {**images, "observation/state": rng.uniform(-1, 2, 8), "prompt": "pick up the bowl"}


def write_libero(folder: Path) -> Path:
    """A folder of LIBERO's robot, whose frames of 224 x 224 pixels are resized; DDIM."""
    folder.mkdir(parents=True, exist_ok=True)
    features: dict[str, Any] = {
        **{f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 224, 224]} for name in ("image", "image2")},
        "observation.state": {"type": "STATE", "shape": [8]}, "action": {"type": "ACTION", "shape": [7]},
    }  # fmt: skip
    settings = {"resize_shape": [48, 48], "crop_ratio": 0.8, "crop_shape": None, "noise_scheduler_type": "DDIM"}
    statistics: dict[str, dict[str, Any]] = {
        key: dict.fromkeys(("mean", "std"), [[[0.5]]] * 3) if f["type"] == "VISUAL"
        else {"min": -np.ones(f["shape"][0]), "max": 2 * np.ones(f["shape"][0])}
        for key, f in features.items()
    }  # fmt: skip
    files = saved("diffusion", "0.6.1", features, MODES, **(SETTINGS | settings))
    write_saved(folder, files, statistics, lambda files: None)
    model = tiny_model(
        config_of(cameras=(Camera(224, 224),) * 2, resize=(48, 48), crop=(38, 38), state_dim=8, action_dim=7)
    )
    tensors = {stored_name(name, model.config): value.clone() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_lerobot(
    folder: Path, change: Change = lambda files: None, *, release: str = "0.6.1", buffers: bool = False, infix: str = ""
) -> Path:
    """Write a folder. `buffers`: as lerobot 0.3, with the statistics among the weights; `change` then edits config.json
    alone. `infix`: in the names of the U-Net's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    features: dict[str, Any] = {key: {"type": "VISUAL", "shape": [3, *FRAME]} for key in CAMERAS}
    features |= {
        "observation.state": {"type": "STATE", "shape": [STATE]},
        "action": {"type": "ACTION", "shape": [ACTIONS]},
    }
    files = saved("diffusion", release, features, MODES, **SETTINGS)
    model = tiny_model()
    names = {name: stored_name(name, model.config).replace("unet.", f"unet.{infix}") for name in model.state_dict()}
    tensors = {names[name]: value.clone() for name, value in model.state_dict().items()}
    tensors["diffusion.rgb_encoder.pool.pos_grid"] = torch.zeros(2 * 2, 2)
    if buffers:
        files |= dict.fromkeys(("policy_preprocessor", "policy_postprocessor"))
        tensors |= buffer_tensors(STATISTICS)
    write_saved(folder, files, {} if buffers else STATISTICS, change)
    save_file(tensors, folder / "model.safetensors")
    return folder
