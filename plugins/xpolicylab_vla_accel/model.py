"""XPolicyLab's `Model`: its observations in, chunks of its action dictionaries out."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError, DependencyError, ObservationError
from vla_accel.remote.inference import actions_of
from vla_accel.remote.metadata import ROBOT, ensemble_of, history_of, starts_warm

CAMERAS = {
    "cam_head": ("cam_head", "cam_high"),
    "cam_left_wrist": ("cam_left_wrist",),
    "cam_right_wrist": ("cam_right_wrist",),
}
"""XPolicyLab's cameras, and how the policy's keys of them end."""
ARMS = {"joint": ("arm_joint_state", "joint_state"), "ee": ("ee_pose",)}
"""By action type: keys of an arm, the first of which actions have."""
HAND = "ee_joint_state"
CHECKPOINTS, SERVERS = ("config", "device", "num_steps"), ("policy", "api_key_file", "tls_ca")
"""Settings of one kind of policy only."""


class Model:
    """A checkpoint on vla_accel's engines, or the policy of a server.

    Args:
        model_cfg: The settings of `deploy.yml`.

    Raises:
        ConfigError: a setting that is wrong, a policy that needs more than the newest observation, or one whose cameras
            are unknown.
        VlaAccelError: the policy could not be opened.
    """

    def __init__(self, model_cfg: Mapping[str, Any]) -> None:
        action_type = model_cfg.get("action_type")
        if action_type not in ARMS:
            raise ConfigError(f"action_type: expected one of {', '.join(ARMS)}, got {action_type!r}")
        self.action_type: str = action_type
        self.policy = open_policy(model_cfg)
        self.actions_per_chunk = actions_per_chunk(self.policy.metadata, model_cfg.get("actions_per_chunk"))
        for name, found in (("a history of observations", history_of), ("warm starts", starts_warm),
                            ("temporal ensembling", ensemble_of)):  # fmt: skip
            if found(self.policy):
                raise ConfigError(f"ckpt_name: expected a policy without {name}: XPolicyLab executes whole chunks")
        robot = dict(self.policy.metadata.get(ROBOT) or {})
        if len(robot.get("state", ())) != 1:
            raise ConfigError(f"ckpt_name: expected a policy with one key for the state, got {robot.get('state')!r}")
        self.state, self.prompt = robot["state"][0], robot["prompt"]
        self.cameras = camera_keys(robot["images"], model_cfg.get("cameras"))
        self.newest: dict[int, Mapping[str, Any]] = {}

    def update_obs(self, obs: Mapping[str, Any]) -> None:
        """Keep an observation for `get_action`."""
        self.update_obs_batch([obs])

    def update_obs_batch(self, obs_list: Sequence[Mapping[str, Any]]) -> None:
        """Keep the observations of several environments, by their `env_idx`."""
        self.newest = {int(obs.get("env_idx", index)): obs for index, obs in enumerate(obs_list)}

    def get_action(self) -> list[dict[str, np.ndarray]]:
        """The chunk for the newest observation, an action dictionary for each control step."""
        return self.get_action_batch()[0]

    def get_action_batch(self, env_idx_list: Sequence[int] | None = None) -> list[list[dict[str, np.ndarray]]]:
        """The chunks for the newest observations of these environments, in one pass. None: of all.

        Raises:
            ObservationError: an environment without an observation, or a part of an observation is missing.
            ConfigError: the policy's actions are not those of this robot.
        """
        indices = [*self.newest] if env_idx_list is None else [int(index) for index in env_idx_list]
        if not indices or (missing := [index for index in indices if index not in self.newest]):
            raise ObservationError(f"env_idx: expected an observation for {missing if indices else 'any'}, got none")
        kept = [self.newest[index] for index in indices]
        seen = [self.observation(obs) for obs in kept]
        results = [self.policy.infer(seen[0])] if len(seen) == 1 else self.policy.infer_batch(seen)
        return [self.actions(actions_of(one), obs) for one, obs in zip(results, kept, strict=True)]

    def reset(self) -> None:
        """Begin an episode."""
        self.newest = {}
        getattr(self.policy, "reset", lambda: None)()

    def observation(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """An observation of XPolicyLab under the policy's keys."""
        vision = obs.get("vision") or {}
        if absent := [name for name in self.cameras if name not in vision]:
            raise ObservationError(f"vision: expected {', '.join(absent)}, got {', '.join(vision) or 'none'}")
        images = {key: picture(vision[name], name) for name, key in self.cameras.items()}
        state = np.concatenate([np.asarray(obs["state"][key], np.float64) for key in self.parts(obs).values()])
        text = obs.get("instruction")
        text = text[0] if isinstance(text, (list, tuple)) and text else text
        return {**images, self.state: state, **({} if text is None else {self.prompt: text})}

    def actions(self, chunk: np.ndarray, obs: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
        """A chunk (n, action_dim) as action dictionaries of the robot whose observation this is."""
        sizes = {name: len(obs["state"][key]) for name, key in self.parts(obs).items()}
        if chunk.shape[1] != sum(sizes.values()):
            raise ConfigError(f"ckpt_name: expected actions of {sizes} numbers, got {chunk.shape[1]}")
        ends = np.cumsum([*sizes.values()])[:-1]
        columns = np.split(chunk[: self.actions_per_chunk].astype(np.float32), ends, axis=1)
        return [dict(zip(sizes, row, strict=True)) for row in zip(*columns, strict=True)]

    def parts(self, obs: Mapping[str, Any]) -> dict[str, str]:
        """Each key of an action and its key in the state, in the order of the numbers: an arm, its hand."""
        state = obs.get("state") or {}
        found = {}
        for side in ("left_", "right_") if f"left_{HAND}" in state else ("",):
            arms = [f"{side}{name}" for name in ARMS[self.action_type]]
            arm = next((name for name in arms if name in state), None)
            if arm is None or f"{side}{HAND}" not in state:
                raise ObservationError(f"state: expected {arms[0]} and {side}{HAND}, got {', '.join(state) or 'none'}")
            found |= {arms[0]: arm, f"{side}{HAND}": f"{side}{HAND}"}
        return found


def open_policy(model_cfg: Mapping[str, Any]) -> Any:
    """Load the checkpoint of `ckpt_name`, or connect to a server. Raises ConfigError for settings of the other kind."""
    where = model_cfg.get("ckpt_name")
    if not isinstance(where, str) or not where:
        raise ConfigError(f"ckpt_name: expected a checkpoint or ws://host:port, got {where!r}")
    remote = "://" in where
    kind, others = ("a server's address", CHECKPOINTS) if remote else ("a checkpoint", SERVERS)
    if wrong := [name for name in others if model_cfg.get(name) is not None]:
        raise ConfigError(f"{', '.join(wrong)}: expected null with {kind} as ckpt_name, got {model_cfg[wrong[0]]!r}")
    if remote:
        from vla_accel.client import PolicyClient, read_key

        file = model_cfg.get("api_key_file")
        key = None if file is None else read_key(file)
        return PolicyClient(where, policy=model_cfg.get("policy"), api_key=key, tls_ca=model_cfg.get("tls_ca"))
    from vla_accel.policy import OptimizedPolicy

    config, device, num_steps, seed = (model_cfg.get(name) for name in (*CHECKPOINTS, "seed"))
    return OptimizedPolicy.from_pretrained(where, config, device=device, num_steps=num_steps, seed=seed)


def actions_per_chunk(metadata: Mapping[str, Any], count: Any) -> int | None:
    """The executed actions of a chunk; None: all. Raises ConfigError for more than the policy returns."""
    most = metadata.get("returned_actions", metadata.get("action_horizon", math.inf))
    if count is not None and (type(count) is not int or not 1 <= count <= most):
        raise ConfigError(f"actions_per_chunk: expected an integer from 1 to {most}, got {count!r}")
    return count


def camera_keys(images: Sequence[str], mapping: Mapping[str, str | None] | None) -> dict[str, str]:
    """The policy's key of each camera. Raises ConfigError unless the mapping has each key once, or a null instead."""
    if mapping is None:
        ends = [(name, end) for name, endings in CAMERAS.items() for end in endings]
        mapping = {name: key for key in images for name, end in ends if key.endswith(end)}
    named = mapping if isinstance(mapping, Mapping) else {}
    used = {name: key for name, key in named.items() if key is not None}
    missing = [key for key in images if key not in used.values()]
    if len(used) + len(missing) != len(images) or len(missing) > len(named) - len(used):
        each = f"{{NAME: KEY}} with each of {', '.join(images)} once, such as {{cam_head: {(*images, 'KEY')[0]}}}"
        raise ConfigError(f"cameras: expected {each}, or NAME: null to leave one out, got {mapping!r}")
    return used


def picture(camera: Any, name: str) -> np.ndarray:
    """The image uint8 (height, width, 3), RGB, of a camera: an array, or a JPEG or PNG file as bytes."""
    color = camera.get("color", camera.get("rgb")) if isinstance(camera, Mapping) else camera
    packed = isinstance(color, (bytes, bytearray)) or (isinstance(color, np.ndarray) and color.ndim == 1)
    if not packed:
        if color is None:
            raise ObservationError(f"vision.{name}: expected color, got {', '.join(camera)}")
        return np.asarray(color)
    try:
        from PIL import Image
    except ImportError as error:
        raise DependencyError("compressed images: expected Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(bytes(color))) as image:
            return np.array(image.convert("RGB"))
    except OSError as error:
        raise ObservationError(f"vision.{name}: expected an image in JPEG or PNG, got {error}") from error
