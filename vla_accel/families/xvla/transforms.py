"""Observations to X-VLA's inputs and its outputs to robot actions.

Source: lerobot 0.6.1's processors of X-VLA (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.xvla.network import XvlaConfig, fitted_size
from vla_accel.transforms.images import to_uint8
from vla_accel.transforms.observations import Observed
from vla_accel.transforms.processing import ORDINARY, Inputs, PromptTransforms, ScalingTransforms
from vla_accel.transforms.robots import Pose
from vla_accel.transforms.tokenizer import checked_length, checked_prompt

_POSE = slice(3), slice(3, 9), slice(9, 10)
"""Position, rotation and gripper in the first numbers of an action."""
_TINY = 1e-6


@dataclass(frozen=True, kw_only=True)
class XvlaProcessor(ScalingTransforms, PromptTransforms):
    """lerobot's transforms. The network normalises images and resizes them, in fractions of a level.

    Missing views are those at the end: those that an observation has move up, as in lerobot.

    Attributes:
        config: The network's sizes.
        frame_shape: Height and width of an example's images, if the network does not say.
        resizes: Whether images may have another size than the network's.
    """

    poses: ClassVar[tuple[Pose, ...]] = ("model", "axis_angle")
    config: XvlaConfig
    frame_shape: tuple[int, int] = (224, 224)
    resizes: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset.state_dim > self.config.state_dim:
            raise ConfigError(
                f"preset: expected at most the model's {self.config.state_dim} numbers of state, got "
                f"{self.preset.state_dim}"
            )
        if len(self.preset.images) > self.config.views:
            raise ConfigError(
                f"preset.images: expected at most the model's {self.config.views} views, got {len(self.preset.images)}"
            )

    @property
    def image_shape(self) -> tuple[int, int]:
        return self.config.fitted(self.frame_shape)

    @property
    def image_size(self) -> int | None:
        """Pixels along a side of the images that the policy is sent; None unless they are square."""
        height, width = self.frame_shape if self.resizes else self.image_shape
        return height if height == width else None

    def ordinary_prompt(self) -> str:
        counts = {prompt: len(self.tokenizer.encode(prompt, add_bos=True)) for prompt in ORDINARY}
        return next((p for p, count in counts.items() if count <= self.max_token_len), ORDINARY[-1])

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen, size = self._reader.read(observation), self.config.image_size
        images = {key: to_uint8(image, key) for key, image in seen.views.items()}
        for key, image in images.items():
            height, width = image.shape[:2]
            if size is not None and not self.resizes and (height, width) != size:
                raise ObservationError(
                    f"{key}: expected shape {(*size, 3)}, because X-VLA's own project resizes by another filter than "
                    f"lerobot, got {image.shape}"
                )
            if size is not None and 0 in fitted_size((height, width), size):
                raise ObservationError(f"{key}: expected a shape that can be resized to {size}, got {image.shape}")
        if size is None:
            self._check_one_size(images)
        return replace(seen, images=tuple(images.values()))

    def _check_one_size(self, images: Mapping[str, np.ndarray]) -> None:
        if len(sizes := {(image.shape[0], image.shape[1]) for image in images.values()}) > 1:
            raise ObservationError(f"{', '.join(images)}: expected images of one shape, got {sorted(sizes)}")
        try:
            self.config.check_size(*sizes)
        except ConfigError as error:
            raise ObservationError(str(error)) from error

    def encode(self, seen: Observed) -> Inputs:
        normalised = self.state.normalise(self._model_state(seen.state))
        state = self._padded_state(normalised, self.config.state_dim, seen.state)
        prompt = checked_prompt(seen.prompt, self.preset.prompt)
        return Inputs(seen.images, self._cached(prompt, lambda: self._tokenized(prompt)), state, seen.state)

    def unnormalize_actions(self, actions: np.ndarray, inputs: Any) -> np.ndarray:
        if self.preset.pose == "axis_angle":
            position, rotation, gripper = (actions[:, part].astype(np.float64) for part in _POSE)
            actions = np.concatenate((position, axis_angles(rotation), np.where(gripper > 0.5, 1.0, -1.0)), 1)
        return super().unnormalize_actions(actions, inputs)

    def _model_actions(self, actions: Any, inputs: Any, name: str) -> np.ndarray:
        robot = super()._model_actions(actions, inputs, name)
        if self.preset.pose == "axis_angle":
            raise ConfigError(f"{name}: poses in axis-angle cannot be converted back")
        return robot

    def _tokenized(self, prompt: str) -> np.ndarray:
        most = self.max_token_len
        ids = checked_length(self.tokenizer.encode(prompt, add_bos=True), prompt, most, self.preset.prompt)
        return np.pad(ids, (0, most - len(ids)), constant_values=self.config.pad_token)


def axis_angles(columns: np.ndarray) -> np.ndarray:
    """Rotations as axis times angle, in [0, pi], float64 (n, 3), from two columns of their matrices (n, 6), which need
    be neither of length one nor orthogonal."""
    first, second = columns[:, :3], columns[:, 3:]
    x = first / (np.linalg.norm(first, axis=1, keepdims=True) + _TINY)
    y = second - (x * second).sum(1, keepdims=True) * x
    y = y / (np.linalg.norm(y, axis=1, keepdims=True) + _TINY)
    m = np.stack((x, y, np.cross(x, y)), -1)
    # The quaternion (x, y, z, w) of the nearest rotation is an eigenvector (Bar-Itzhack 2000).
    k = np.zeros((len(m), 4, 4))
    k[:, :3, :3] = m + m.transpose(0, 2, 1)
    trace = np.trace(m, axis1=1, axis2=2)
    k[:, :3, :3] -= trace[:, None, None] * np.eye(3)
    k[:, 3, :3] = k[:, :3, 3] = np.stack((m[:, 2, 1] - m[:, 1, 2], m[:, 0, 2] - m[:, 2, 0], m[:, 1, 0] - m[:, 0, 1]), 1)
    k[:, 3, 3] = trace
    quaternion = np.linalg.eigh(k)[1][:, :, -1]
    quaternion = np.where(quaternion[:, 3:] < 0, -quaternion, quaternion)
    sine = np.linalg.norm(quaternion[:, :3], axis=1, keepdims=True)
    angle = 2.0 * np.arctan2(sine, quaternion[:, 3:])
    return quaternion[:, :3] * np.divide(angle, sine, out=np.full_like(sine, 2.0), where=sine > 1e-12)
