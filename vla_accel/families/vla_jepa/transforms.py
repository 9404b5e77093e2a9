"""Observations to VLA-JEPA's inputs and its outputs to robot actions.

Source: lerobot 0.6.1's processors of VLA-JEPA and Qwen3-VL's of transformers (both Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.qwen import user_turn
from vla_accel.families.vla_jepa.network import Size, VlaJepaConfig
from vla_accel.pictures import Cameras, Resampling
from vla_accel.transforms.images import resample, to_uint8
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.observations import Observed, real_numbers
from vla_accel.transforms.processing import Inputs, PromptTransforms
from vla_accel.transforms.tokenizer import checked_length, checked_prompt


@dataclass(frozen=True)
class Gripper:
    """A threshold on one number of the actions."""

    dim: int
    threshold: float


@dataclass(frozen=True, kw_only=True)
class VlaJepaProcessor(PromptTransforms):
    """lerobot's transforms. A missing view is left out.

    Attributes:
        config: The network's sizes.
        template: The prompt, with `{instruction}`.
        condition: The token whose outputs the network reads; None for all.
        clipped: Whether normalized actions are clipped to [-1, 1].
        clip_state: The largest number of a normalized state, by magnitude; None for no limit.
        binary_state: The number of the state that becomes 1 above 0.5 and 0 up to it; None for none.
        snap: The gripper's normalized action becomes 1 from its threshold on and 0 below.
        binarize: The gripper's action becomes -1 above its threshold and 1 up to it.
    """

    state: Normaliser
    actions: Normaliser
    config: VlaJepaConfig
    template: str
    condition: int | None
    clipped: bool = True
    clip_state: float | None = None
    binary_state: int | None = None
    snap: Gripper | None = None
    binarize: Gripper | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count, most in (
            ("state", self.preset.state_dim, self.config.state_dim),
            ("actions", self.preset.action_dim, self.action_dim),
        ):
            object.__setattr__(self, name, getattr(self, name).cut(count, most, name))
        if self.config.head.state and self.preset.state_dim > self.config.state_dim:
            raise ConfigError(
                f"state: expected at most the model's {self.config.state_dim} numbers, got {self.preset.state_dim}"
            )
        for name in ("flipped", "gripper_dims"):
            if own := getattr(self.preset, name):
                raise ConfigError(f"preset.{name}: expected none for this model, got {[*own]}")

    @property
    def image_shape(self) -> Size:
        return self.config.image_size((256, 256))

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen = self._reader.read(observation)
        images = tuple(to_uint8(image, key) for key, image in seen.views.items())
        sizes = tuple((image.shape[0], image.shape[1]) for image in images)
        wanted = {self.config.image_size(size) for size in sizes}
        if len(wanted) > 1:
            raise ObservationError(f"{', '.join(seen.views)}: expected images of one shape, got {sorted({*sizes})}")
        (size,) = wanted
        method = Resampling(self.config.resize, size, self.config.filter)
        kept = all(method.keeps(*size) for size in set(sizes))
        return replace(seen, images=images, cameras=None if kept else Cameras(sizes, method))

    def resized(self, seen: Observed) -> Observed:
        if seen.cameras is None or not isinstance(seen.cameras.method, Resampling):
            return seen
        images = tuple(resample(image, seen.cameras.method) for image in seen.images)
        return replace(seen, images=images, cameras=None)

    def encode(self, seen: Observed) -> Inputs:
        prompt, images = checked_prompt(seen.prompt, self.preset.prompt), len(seen.images)
        tokens = self._cached((prompt, images), lambda: self._tokenized(prompt, images))
        state = self._padded_state(self._normalized_state(seen.state), self.config.state_dim, seen.state)
        return Inputs(seen.images, tokens, state, seen.state, seen.cameras)

    def _normalized_state(self, state: np.ndarray) -> np.ndarray:
        found = self.state.normalise(state)
        if self.clip_state is not None:
            found = found.clip(-self.clip_state, self.clip_state)
        if self.binary_state is not None:
            found[..., self.binary_state] = state[..., self.binary_state] > 0.5
        return found

    def unnormalize_actions(self, actions: np.ndarray, inputs: Inputs) -> np.ndarray:
        """Convert the model's actions (H, action_dim) to the robot's, float64."""
        robot = actions.astype(np.float64)
        robot = robot.clip(-1.0, 1.0) if self.clipped else robot
        if self.snap is not None:
            robot[:, self.snap.dim] = robot[:, self.snap.dim] >= self.snap.threshold
        robot = self.actions.restore(robot)
        deltas = list(self.preset.delta_actions)
        robot[:, deltas] += inputs.raw_state[deltas]
        if self.binarize is not None:
            robot[:, self.binarize.dim] = 1.0 - 2.0 * (robot[:, self.binarize.dim] > self.binarize.threshold)
        return robot

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        return self.state.restore(normalised)

    def _model_actions(self, actions: Any, inputs: Inputs, name: str) -> np.ndarray:
        robot = real_numbers(actions, name)
        if robot.ndim != 2 or not len(robot) or robot.shape[1] != self.preset.action_dim:
            expected = (self.preset.action_dim, robot.shape)
            raise ObservationError(f"{name}: expected shape (k, {expected[0]}), k at least 1, got {expected[1]}")
        if self.binarize is not None:
            robot[:, self.binarize.dim] = robot[:, self.binarize.dim] < 0
        deltas = list(self.preset.delta_actions)
        robot[:, deltas] -= inputs.raw_state[deltas]
        return robot

    def _tokenized(self, prompt: str, images: int) -> np.ndarray:
        key = self.preset.prompt
        ids = user_turn(self.tokenizer, images, self.template.replace("{instruction}", prompt))
        if self.condition is None:
            return checked_length(ids, prompt, self.max_token_len, key)
        found = [place for place, token in enumerate(ids) if token == self.condition]
        if len(found) != self.config.condition:
            raise ObservationError(f"{key}: expected no special tokens, got {prompt!r:.60}")
        # No token sees a later one: what follows the last one that is read changes nothing.
        return checked_length(ids[: found[-1] + 1], prompt, self.max_token_len, key)
