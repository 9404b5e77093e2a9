"""Serve a folder of ACT or Diffusion Policy by lerobot's own code, to compare success with it in paired episodes.

    python -m eval.lerobot.serve runs/lerobot/act/checkpoints/last/pretrained_model --port 8100
    python -m eval.libero --policy ws://localhost:8100 --tasks 0 --trials 200 --starts runs/lerobot/held_out

Takes LIBERO's observations, as this package's own policies do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from eval.lerobot.train import CAMERAS, lerobot_without_datasets
from eval.script import run_script
from vla_accel.cli.options import Argument, Seed, Within
from vla_accel.files import content_hash
from vla_accel.server import ServerConfig, serve

KEYS = {
    "observation/image": CAMERAS[0],
    "observation/wrist_image": CAMERAS[1],
    "observation/state": "observation.state",
}


@dataclass(frozen=True)
class Arguments:
    """Serve a folder by lerobot's code."""

    folder: Annotated[Path, Argument("FOLDER", positional=True)]
    """What lerobot's trainer saved (pretrained_model)."""
    port: Annotated[int, Within(1, 65535)] = 8100
    """Of the websocket."""
    device: str = "cuda"
    """Where it runs."""
    seed: Seed = 0
    """Of the noise; every episode begins with it."""


class LerobotPolicy:
    """lerobot's policy with the interface of this package's."""

    def __init__(self, folder: Path, device: str, seed: int) -> None:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies import factory

        config = PreTrainedConfig.from_pretrained(folder)
        config.device = device
        self.policy = factory.get_policy_class(config.type).from_pretrained(folder, config=config).eval().to(device)
        overrides = {"device_processor": {"device": device}}
        self.before, self.after = factory.make_pre_post_processors(
            config, pretrained_path=str(folder), preprocessor_overrides=overrides
        )  # fmt: skip
        self.seed, self.history = seed, config.n_obs_steps
        size = config.input_features[CAMERAS[0]].shape[1]
        *images, state = KEYS
        steps = getattr(config, "num_inference_steps", 1) or config.num_train_timesteps
        self.metadata = {
            "policy": str(folder), "weights": content_hash(folder / "model.safetensors"),
            "model": {"kind": f"lerobot {config.type}"}, "image_size": size, "num_steps": steps,
            "action_horizon": len(config.action_delta_indices), "action_dim": 7,
            "robot": {"images": images, "state": [state]}, **({"history": self.history} if self.history > 1 else {}),
        }  # fmt: skip
        self.reset()

    def reset(self) -> None:
        torch.manual_seed(self.seed)

    @torch.no_grad()
    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        batch = {name: self._tensor(np.asarray(observation[key])) for key, name in KEYS.items()}
        return {"actions": self.after(self.policy.predict_action_chunk(self.before(batch)))[0].cpu().double().numpy()}

    def _tensor(self, value: np.ndarray) -> torch.Tensor:
        """A batch of one: the last observations, of fewer than the policy reads the oldest several times."""
        axes = 3 if value.dtype == np.uint8 else 1
        rows = value if value.ndim > axes else value[None]
        rows = np.concatenate([rows[:1]] * (self.history - len(rows)) + [rows])
        found = torch.from_numpy(rows).float()
        found = found.movedim(-1, -3) / 255 if axes == 3 else found
        return found[None] if self.history > 1 else found


def run(chosen: Arguments) -> None:
    """Serve until interrupted."""
    with lerobot_without_datasets():
        serve(LerobotPolicy(chosen.folder, chosen.device, chosen.seed), ServerConfig(port=chosen.port))


if __name__ == "__main__":
    sys.exit(run_script("eval.lerobot.serve", Arguments, run, None))
