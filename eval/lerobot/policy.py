"""lerobot's own code as a policy of the evaluation: `python -m eval.libero --policy lerobot:FOLDER`.

Preprocessor, network and postprocessor are lerobot's, in FP32 and eager mode. Observations are LIBERO's, as this
package's own policies read them, and so is the noise of Diffusion Policy, so that runs of both play the same episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.lerobot.train import CAMERAS, lerobot_without_datasets
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.files import content_hash

KEYS = {
    "observation/image": CAMERAS[0],
    "observation/wrist_image": CAMERAS[1],
    "observation/state": "observation.state",
}


class LerobotPolicy:
    """lerobot's policy with the interface of this package's.

    Args:
        folder: What lerobot's trainer saved (pretrained_model) of ACT or Diffusion Policy.
        device: Where it runs.

    Raises CheckpointError for another kind of policy.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        with lerobot_without_datasets():
            from lerobot.configs.policies import PreTrainedConfig
            from lerobot.policies import factory

            config = PreTrainedConfig.from_pretrained(folder)
            if config.type not in ("act", "diffusion"):
                raise CheckpointError(f"{folder}: expected a policy of type act or diffusion, got {config.type}")
            config.device = device.type
            kind = factory.get_policy_class(config.type)
            self.policy = kind.from_pretrained(folder, config=config).eval().to(device)
            self.before, self.after = factory.make_pre_post_processors(
                config,
                pretrained_path=str(folder),
                preprocessor_overrides={"device_processor": {"device": str(device)}},
            )
        self.device, self.history, self.noisy = device, config.n_obs_steps, config.type == "diffusion"
        *images, state = KEYS
        engine = {
            "component": "policy", "requested": "lerobot", "used": "lerobot", "reason": "", "fell_back": False,
            "detail": f"lerobot {version('lerobot')}, torch {torch.__version__}, eager",
        }  # fmt: skip
        self.metadata: dict[str, Any] = {
            "policy": str(folder), "weights": content_hash(folder / "model.safetensors"),
            "model": {"kind": f"lerobot {config.type}"}, "engines": [engine], "device": str(device), "dtype": "float32",
            "image_size": config.input_features[CAMERAS[0]].shape[1],
            "num_steps": (config.num_inference_steps or config.num_train_timesteps) if self.noisy else 1,
            "action_horizon": len(config.action_delta_indices), "action_dim": 7,
            "returned_actions": config.n_action_steps if self.noisy else config.chunk_size,
            "robot": {"images": images, "state": [state]}, **({"history": self.history} if self.history > 1 else {}),
        }  # fmt: skip

    def with_steps(self, num_steps: int) -> LerobotPolicy:
        """Return this policy. Raises ConfigError for other denoising steps than the folder's."""
        if num_steps != (own := self.metadata["num_steps"]):
            raise ConfigError(f"steps: lerobot's policy runs with the {own} of its folder, got {num_steps}")
        return self

    def reset(self) -> None:
        """Do nothing: the caller keeps the history of an episode."""

    def infer(self, observation: Mapping[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        """Return `actions` (k, 7) float64. `noise` (action_horizon, 7) is used by Diffusion Policy."""
        return self.infer_batch([observation], noise=None if noise is None else noise[None])[0]

    @torch.no_grad()
    def infer_batch(
        self, observations: Sequence[Mapping[str, Any]], *, noise: np.ndarray | None = None
    ) -> list[dict[str, Any]]:
        """Return the answer to each observation, as `infer` does. `noise` (batch, action_horizon, 7)."""
        batch = {name: torch.stack([self._tensor(one[key]) for one in observations]) for key, name in KEYS.items()}
        drawn = {"noise": torch.from_numpy(noise).to(self.device)} if self.noisy and noise is not None else {}
        actions = self.after(self.policy.predict_action_chunk(self.before(batch), **drawn))
        return [{"actions": rows} for rows in actions.cpu().double().numpy()]

    def _tensor(self, value: Any) -> torch.Tensor:
        """The last `history` observations, the oldest several times if there are fewer; one without an axis for it."""
        found = np.asarray(value)
        axes = 3 if found.dtype == np.uint8 else 1
        rows = torch.from_numpy(found if found.ndim > axes else found[None]).float()
        rows = torch.cat([rows[:1]] * (self.history - len(rows)) + [rows])
        rows = rows.movedim(-1, -3) / 255 if axes == 3 else rows
        return rows if self.history > 1 else rows[0]
