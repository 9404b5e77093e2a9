"""vla-eval's model server around `OptimizedPolicy`: its observations to this package's, whole batches at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from vla_eval.model_servers.base import SessionContext
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.specs import (
    GRIPPER_CLOSE_POS,
    IMAGE_RGB,
    LANGUAGE,
    POSITION_DELTA,
    RAW,
    ROTATION_AA,
    STATE_EEF_POS_AA_GRIP,
    DimSpec,
)
from vla_eval.types import Action, Observation

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.policy import OptimizedPolicy
from vla_accel.remote.ensemble import TEMPORAL_ENSEMBLE
from vla_accel.transforms.robots import LIBERO, Preset

LIBERO_CAMERAS = {"agentview": LIBERO.images[0], "wrist": LIBERO.images[1]}
"""vla-eval's names of LIBERO's cameras, and this package's."""


class VlaAccelModelServer(PredictModelServer):
    """A checkpoint on vla_accel's engines. `policy`: the `OptimizedPolicy`."""

    def __init__(
        self,
        checkpoint: str,
        config: str | None = None,
        device: str | None = None,
        num_steps: int | None = None,
        lora: str | None = None,
        cameras: dict[str, str] | None = None,
        *,
        chunk_size: int | None = None,
        max_batch_size: int = 1,
        max_wait_time: float = 0.01,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            checkpoint: A folder, a bundled checkpoint (demo) or a name on the hub.
            config: A configuration by name (native_fp8) or file; by default `auto`.
            device: Where the engines run.
            num_steps: Denoising steps.
            lora: Folder or hub name of an adapter.
            cameras: The benchmark's name of each camera to the checkpoint's; known for LIBERO.
            chunk_size: Actions of a chunk that are executed before the next call; None is all of them.
            max_batch_size: Observations of different shards to run together.
            max_wait_time: Seconds that a batch waits to become full.
        """
        self.policy = OptimizedPolicy.from_pretrained(checkpoint, config, device=device, num_steps=num_steps, lora=lora)
        if (start := self.policy.config.warm_start) is not None:
            raise ConfigError(f"config: expected no warm_start, since vla-eval keeps no previous chunk, got {start}")
        if (coefficient := self.policy.metadata.get(TEMPORAL_ENSEMBLE)) is not None:
            raise ConfigError(
                "checkpoint: expected no temporal_ensemble_coeff, since vla-eval executes each chunk as it is, got "
                f"{coefficient}; null in its config.json runs it without"
            )
        self.preset: Preset = self.policy.processor.preset
        self.cameras = camera_names(self.preset, cameras)
        horizon = self.policy.metadata["action_horizon"]
        # GR00T: a robot may get fewer actions than the model computes.
        most = min(horizon, getattr(self.policy.processor, "rows", horizon))
        if chunk_size is not None and not 1 <= chunk_size <= most:
            raise ConfigError(f"chunk_size: expected 1 to {most}, a chunk of {checkpoint}, got {chunk_size}")
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size: expected at least 1, got {max_batch_size}")
        if not 0 <= max_wait_time < math.inf:
            raise ConfigError(f"max_wait_time: expected at least 0 seconds, got {max_wait_time}")
        super().__init__(
            chunk_size=chunk_size or most,
            max_batch_size=max_batch_size,
            max_wait_time=max_wait_time,
            **kwargs,
        )

    def predict_batch(self, obs_batch: list[Observation], ctx_batch: list[SessionContext]) -> list[Action]:
        """The chunks (rows, n) float64 of several sessions' observations, in one pass."""
        del ctx_batch
        results = self.policy.infer_batch([observation(o, self.preset, self.cameras) for o in obs_batch])
        return [{"actions": result["actions"]} for result in results]

    # -- what the harness asks for --------------------------------------------------------------------------------

    def get_observation_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"send_state": True}
        if len(self.cameras) > 1:
            params["send_wrist_image"] = True
        if self._is_libero:
            # q and -q are two rotations for policies that were trained on robosuite's own conversion.
            params["quat_no_antipodal"] = True
        return params

    def get_action_spec(self) -> dict[str, DimSpec]:
        if self._is_libero:
            return {"position": POSITION_DELTA, "rotation": ROTATION_AA, "gripper": GRIPPER_CLOSE_POS}
        return {"actions": RAW}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        spec = {**dict.fromkeys(self.cameras, IMAGE_RGB), "language": LANGUAGE}
        return {**spec, "state": STATE_EEF_POS_AA_GRIP} if self._is_libero else spec

    @property
    def _is_libero(self) -> bool:
        return self.preset.images == LIBERO.images and self.preset.action_dim == LIBERO.action_dim


def camera_names(preset: Preset, given: Mapping[str, str] | None) -> dict[str, str]:
    """The benchmark's names to the preset's. Raises ConfigError if they are neither passed nor LIBERO's, and where
    they are not the preset's."""
    if given is None:
        if preset.images != LIBERO.images:
            raise ConfigError(
                f"cameras: expected the benchmark's name of each of {', '.join(preset.images)}: "
                f'--args.cameras=\'{{"NAME": "{preset.images[0]}", ...}}\''
            )
        return LIBERO_CAMERAS
    unknown = [key for key in given.values() if key not in preset.images]
    missing = [key for key in preset.images if key not in given.values() and key not in preset.optional_images]
    if unknown or missing or not given:
        raise ConfigError(f"cameras: expected {', '.join(preset.images)}, got {', '.join(given.values()) or 'none'}")
    return dict(given)


def observation(given: Observation, preset: Preset, cameras: Mapping[str, str]) -> dict[str, Any]:
    """One of vla-eval's observations under the preset's keys. Raises ObservationError for what is missing."""
    images = given.get("images") or {}
    state = given.get("states", given.get("state"))
    absent = {name: key for name, key in cameras.items() if name not in images}
    # An unknown camera may be an optional one under another name, which would be masked.
    unknown = absent and any(name not in cameras for name in images)
    missing = [name for name, key in absent.items() if unknown or key not in preset.optional_images]
    if state is None:
        missing.append("states")
    if missing:
        raise ObservationError(
            f"observation: expected {', '.join(missing)}, got {', '.join((*images, *given))}; pass "
            "send_wrist_image and send_state to the benchmark"
        )
    seen = {key: np.asarray(images[name]) for name, key in cameras.items() if name in images}
    prompt = {preset.prompt: given["task_description"]} if given.get("task_description") else {}
    return {**seen, **preset.split(np.asarray(state, np.float64)), **prompt}
