"""Observations to FastWAM's inputs and its outputs to robot actions.

Source: lerobot 0.6.1's processors of FastWAM (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.fastwam.network import FastWamConfig
from vla_accel.families.fastwam.text import Prompts, TextEncoder
from vla_accel.transforms.images import to_uint8
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.observations import Observed, real_numbers
from vla_accel.transforms.processing import Inputs, PromptTransforms


@dataclass(frozen=True, kw_only=True)
class FastWamInputs(Inputs):
    """`text`: the prompt's rows, float32 (tokens, text_dim). There are no tokens."""

    text: np.ndarray


@dataclass(frozen=True, kw_only=True)
class FastWamProcessor(PromptTransforms):
    """lerobot's transforms. The network resizes images, in fractions of a level.

    Attributes:
        config: The network's sizes.
        prompts: The rows of instructions.
        toggled: Action dimensions that become -1 above 0.5 and 1 below it, after they are scaled back.
    """

    state: Normaliser
    actions: Normaliser
    config: FastWamConfig
    prompts: Prompts
    toggled: tuple[int, ...] = ()
    tokenizer: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count, most in (
            ("state", self.preset.state_dim, self.config.state_dim),
            ("actions", self.preset.action_dim, self.action_dim),
        ):
            object.__setattr__(self, name, getattr(self, name).cut(count, most, name))
        for name in ("delta_actions", "flipped", "gripper_dims"):
            if own := getattr(self.preset, name):
                raise ConfigError(f"preset.{name}: expected none for FastWAM, got {[*own]}")

    @property
    def image_shape(self) -> tuple[int, int]:
        height, width = self.config.image_size
        return height, width // len(self.preset.images)

    @property
    def encoder_weights(self) -> Sequence[Tensor]:
        """Weights of the text encoder, none unless it was loaded."""
        return self.prompts.encoder.weights if isinstance(self.prompts.encoder, TextEncoder) else ()

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen = self._reader.read(observation)
        # The other cameras would get its columns, in lerobot too: another picture than in training.
        if missing := [key for key in self.preset.images if key not in seen.views]:
            raise ObservationError(f"observation: missing {', '.join(missing)}: FastWAM needs every camera")
        images = tuple(to_uint8(image, key) for key, image in seen.views.items())
        if len(sizes := {image.shape[:2] for image in images}) > 1:
            raise ObservationError(f"{', '.join(seen.views)}: expected images of one shape, got {sorted(sizes)}")
        return replace(seen, images=images)

    def encode(self, seen: Observed) -> FastWamInputs:
        text = self.prompts.of(seen.prompt, self.preset.prompt)
        state = self._padded_state(self.state.normalise(seen.state), self.config.state_dim, seen.state)
        return FastWamInputs(seen.images, np.empty(0, np.int64), state, seen.state, text=text)

    def unnormalize_actions(self, actions: np.ndarray, inputs: Inputs) -> np.ndarray:
        """Convert the model's actions (H, action_dim) to the robot's, float64."""
        robot = self.actions.restore(actions.astype(np.float64))
        dims = list(self.toggled)
        robot[:, dims] = np.sign(1.0 - 2.0 * robot[:, dims])
        return robot

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        return self.state.restore(normalised)

    def ordinary_prompt(self) -> str:
        """Return an instruction whose rows are known, if there is one."""
        return next(iter(self.prompts.rows), super().ordinary_prompt())

    def _model_actions(self, actions: Any, inputs: Inputs, name: str) -> np.ndarray:
        robot = real_numbers(actions, name)
        if robot.ndim != 2 or not len(robot) or robot.shape[1] != self.preset.action_dim:
            expected = (self.preset.action_dim, robot.shape)
            raise ObservationError(f"{name}: expected shape (k, {expected[0]}), k at least 1, got {expected[1]}")
        dims = list(self.toggled)
        robot[:, dims] = (1.0 - robot[:, dims]) / 2.0
        return robot
