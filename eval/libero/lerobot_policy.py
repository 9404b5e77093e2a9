"""lerobot's own code as a policy of the evaluation: `python -m eval.libero --policy lerobot:FOLDER`.

Preprocessor, network and postprocessor are lerobot's, in FP32 and eager mode. Observations are LIBERO's, as this
package's own policies read them, and so is the noise of Diffusion Policy, so that runs of both play the same episodes.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from vla_accel.errors import CheckpointError, ConfigError, DependencyError
from vla_accel.files import content_hash

CAMERAS = ("observation.images.image", "observation.images.image2")
KEYS = {
    "observation/image": CAMERAS[0],
    "observation/wrist_image": CAMERAS[1],
    "observation/state": "observation.state",
}
OPTIONAL = ("datasets", "pandas", "pyarrow", "av", "cv2", "jsonlines")
"""Packages of lerobot's data sets on disk."""


class _Anything(types.ModuleType):
    """A module with every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for packages of `OPTIONAL` that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in OPTIONAL:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def lerobot_without_datasets() -> Iterator[Any]:
    """Import lerobot's trainer module without the packages of data sets on disk, and yield it.

    Raises DependencyError for an import that fails, also within the context.
    """
    sys.meta_path.append(_Empty())
    try:
        from lerobot.utils import import_utils

        require = import_utils.require_package

        def required(name: str, *rest: Any, **options: Any) -> None:
            if name not in OPTIONAL:
                require(name, *rest, **options)

        with mock.patch.object(import_utils, "require_package", required):
            from lerobot.scripts import lerobot_train

            yield lerobot_train
    except ImportError as error:
        raise DependencyError(f"lerobot is not installed as docs/evaluation.md describes it ({error})") from error


class LerobotPolicy:
    """lerobot's policy with the interface of this package's.

    Args:
        folder: What lerobot's trainer saved (pretrained_model) of ACT or Diffusion Policy.
        device: Where it runs.

    Raises:
        CheckpointError: A file is missing, the policy is of another kind, or the comparison would be unfair: DDPM draws
            noise of its own at each step, and temporal ensembling is not part of a predicted chunk.
        DependencyError: lerobot or a package that it needs is not installed.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder}: expected a policy that lerobot's trainer saved, found no {name}")
        with lerobot_without_datasets():
            from lerobot.configs.policies import PreTrainedConfig
            from lerobot.policies import factory

            config = PreTrainedConfig.from_pretrained(folder)
            if config.type not in ("act", "diffusion"):
                raise CheckpointError(f"{folder}: expected a policy of type act or diffusion, got {config.type}")
            if config.type == "diffusion" and config.noise_scheduler_type != "DDIM":
                raise CheckpointError(
                    f"{folder}: noise_scheduler_type: expected DDIM, whose only noise is the evaluation's, "
                    f"got {config.noise_scheduler_type}"
                )
            if config.type == "act" and config.temporal_ensemble_coeff is not None:
                raise CheckpointError(
                    f"{folder}: temporal_ensemble_coeff: expected none, because the evaluation executes chunks as they "
                    f"were predicted, got {config.temporal_ensemble_coeff}"
                )
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
