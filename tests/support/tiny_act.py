"""A small ACT with random weights, and its folders as lerobot saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.lerobot_saved import Change, saved, write_saved
from vla_accel.families.act.bench import DrawnAct
from vla_accel.families.act.network import Act, ActConfig, Camera
from vla_accel.nn.random_weights import drawn_model

CAMERAS = {"observation.images.front": (40, 70), "observation.images.wrist": (64, 33)}
STATE, ACTIONS, HORIZON = 6, 5, 7
MODES = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
SIZES = {"width": 64, "heads": 4, "mlp_dim": 96, "encoder_depth": 2, "latent_dim": 8}
STATISTICS: dict[str, dict[str, Any]] = {
    "observation.images.front": {"mean": [[[0.2]], [[0.3]], [[0.4]]], "std": [[[0.1]], [[0.2]], [[0.3]]]},
    "observation.images.wrist": {"mean": [[[0.7]], [[0.6]], [[0.5]]], "std": [[[0.4]], [[0.3]], [[0.5]]]},
    "observation.state": {"mean": np.arange(6.0), "std": np.arange(1.0, 7.0)},
    "action": {"mean": np.arange(5.0), "std": np.arange(2.0, 7.0)},
}


def config_of(**changes: Any) -> ActConfig:
    cameras = tuple(
        Camera(*size, *(tuple(np.ravel(STATISTICS[key][name]).tolist()) for name in ("mean", "std")))  # type: ignore[arg-type]
        for key, size in CAMERAS.items()
    )
    sizes: dict[str, Any] = {"state_dim": STATE, "action_dim": ACTIONS, "action_horizon": HORIZON, **SIZES}
    return ActConfig(**{"cameras": cameras, **sizes, **changes})


def tiny_model(config: ActConfig | None = None, seed: int = 0) -> Act:
    return drawn_model(
        Act, config or config_of(), seed=seed, device="cpu", dtype=torch.float32, drawn=DrawnAct
    ).whole()  # fmt: skip


def observation(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    images = {key: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for key, size in CAMERAS.items()}
    return {**images, "observation.state": rng.normal(size=STATE)}


def write_lerobot(
    folder: Path, change: Change = lambda files: None, *, release: str = "0.6.1", buffers: bool = False
) -> Path:
    """Write a folder, with what only training reads. `buffers`: as lerobot 0.3, with the statistics among the weights;
    `change` then edits config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    features: dict[str, Any] = {key: {"type": "VISUAL", "shape": [3, *size]} for key, size in CAMERAS.items()}
    features |= {
        "observation.state": {"type": "STATE", "shape": [STATE]},
        "action": {"type": "ACTION", "shape": [ACTIONS]},
    }
    files = saved(
        "act", release, features, MODES, chunk_size=HORIZON, n_action_steps=HORIZON, dim_model=SIZES["width"],
        n_heads=SIZES["heads"], dim_feedforward=SIZES["mlp_dim"], n_encoder_layers=SIZES["encoder_depth"],
        latent_dim=SIZES["latent_dim"],
    )  # fmt: skip
    tensors = {f"model.{name}": value.clone() for name, value in tiny_model().state_dict().items()}
    tensors |= {
        "model.vae_encoder_cls_embed.weight": torch.zeros(1, 64),
        "model.vae_encoder_pos_enc": torch.zeros(1, 9, 64),
    }
    if buffers:
        files |= dict.fromkeys(("policy_preprocessor", "policy_postprocessor"))
        for key, table in STATISTICS.items():
            layers = ("normalize_targets", "unnormalize_outputs") if key == "action" else ("normalize_inputs",)
            tensors |= {
                f"{layer}.buffer_{key.replace('.', '_')}.{name}": torch.as_tensor(np.asarray(value, np.float32))
                for layer in layers for name, value in table.items()
            }  # fmt: skip
    write_saved(folder, files, {} if buffers else STATISTICS, change)
    save_file(tensors, folder / "model.safetensors")
    return folder
