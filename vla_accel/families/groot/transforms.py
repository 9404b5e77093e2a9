"""Observations to GR00T's inputs and its outputs to robot actions, for one embodiment of a checkpoint.

Source: lerobot 0.6.1's processor of Isaac-GR00T's checkpoints (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.groot.images import Cropping
from vla_accel.families.groot.modalities import Groups
from vla_accel.families.groot.releases import Prompt
from vla_accel.nn.qwen_language import Arrangement
from vla_accel.transforms.images import frames
from vla_accel.transforms.observations import Observed, Reader, real_numbers
from vla_accel.transforms.processing import Inputs, PromptTransforms
from vla_accel.transforms.tokenizer import checked_length, checked_prompt

EMPTY_PROMPT = "Perform the task."
"""What an empty prompt means to lerobot's processor; a missing one is an error here, as for other models."""


@dataclass(frozen=True, kw_only=True)
class GrootProcessor(PromptTransforms):
    """One embodiment's transforms. A missing view is left out.

    Attributes:
        cropping: How images become the model's.
        form: The release's prompts.
        arrangement: Where the model expects the images in a prompt.
        state_dim: Numbers of the model's state.
        rows: Actions of a chunk that the robot gets.
        moments: Control steps of the images of each view, ascending; 0 is the present one. Of a shorter history, the
            oldest image is repeated.
        formal: Whether prompts lose capitals and punctuation.
        gripper: Whether the last action is a gripper's opening in [0, 1]; LIBERO's is -1 for open, 1 for closed.
        exclude_state: Whether the model's state is zero. Relative actions still refer to the robot's.
    """

    state: Groups
    actions: Groups
    cropping: Cropping
    form: Prompt
    arrangement: Arrangement
    state_dim: int
    rows: int
    moments: tuple[int, ...] = (0,)
    formal: bool = True
    gripper: bool = False
    exclude_state: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, groups, most in (("state", self.state, self.state_dim), ("action", self.actions, self.action_dim)):
            if groups.width > most:
                raise CheckpointError(f"{name}: expected at most {most} numbers, got {groups.width}")
            expected = getattr(self.preset, f"{name}_dim")
            if groups.size != expected:
                raise CheckpointError(f"{name}: expected statistics of {expected} numbers, got {groups.size}")
        for name in ("delta_actions", "flipped", "gripper_dims"):
            if own := getattr(self.preset, name):
                raise ConfigError(f"preset.{name}: expected none in addition to a GR00T checkpoint's own, got {[*own]}")

    @property
    def history(self) -> int:
        """The control steps that the images come from."""
        return 1 - self.moments[0]

    def _make_reader(self) -> Reader:
        return Reader(self.preset, self.default_prompt, history=self.history)

    @property
    def image_shape(self) -> tuple[int, int]:
        return self.cropping.target

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen = self._reader.read(observation)
        counts = {key: len(image) if np.ndim(image) == 4 else 1 for key, image in seen.views.items()}
        if len(set(counts.values())) > 1:
            raise ObservationError(
                f"{', '.join(counts)}: expected the same number of images for each key, got {[*counts.values()]}"
            )
        views = [frames(image, key, self.history) for key, image in seen.views.items()]
        # All views of a moment, then those of the next one.
        images = tuple(self.cropping(view[moment - 1]) for moment in self.moments for view in views)
        sizes = {image.shape[:2] for image in images}
        if len(sizes) > 1:
            raise ObservationError(f"{', '.join(seen.views)}: expected images of one shape, got {sorted(sizes)}")
        return replace(seen, images=images, state=np.atleast_2d(seen.state)[-1])

    def encode(self, seen: Observed) -> Inputs:
        normalised = np.zeros(0) if self.exclude_state else self.state.normalise(seen.state)
        prompt, images = checked_prompt(seen.prompt, self.preset.prompt, self._cleaned), len(seen.images)
        tokens = self._cached((prompt, images), lambda: self._tokenized(prompt, images))
        return Inputs(seen.images, tokens, self._padded_state(normalised, self.state_dim, seen.state), seen.state)

    def returned(self, horizon: int) -> int:
        return min(horizon, self.rows)

    def unnormalize_actions(self, actions: np.ndarray, inputs: Inputs) -> np.ndarray:
        """Convert the model's actions (H, action_dim) to the robot's, float64 (rows, robot's)."""
        robot = self.actions.restore(actions[: self.rows], self.state.split(inputs.raw_state))
        if self.gripper:
            robot[:, -1] = -np.sign(2.0 * robot[:, -1] - 1.0)
        return robot

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        """Return a robot's state (n,) with these normalised numbers, one for each of its own; angles as they are."""
        parts = self.state.split(normalised)
        return np.concatenate(
            [parts[g.name] if g.scaling == "sin_cos" else g.restore(parts[g.name][None])[0] for g in self.state.groups]
        )

    def _model_actions(self, actions: Any, inputs: Inputs, name: str) -> np.ndarray:
        robot = real_numbers(actions, name)
        if robot.ndim != 2 or not 0 < len(robot) <= self.rows or robot.shape[1] != self.actions.size:
            raise ObservationError(
                f"{name}: expected shape (k, {self.actions.size}), k from 1 to {self.rows}, got {robot.shape}"
            )
        if self.gripper:
            robot[:, -1] = (1.0 - np.sign(robot[:, -1])) / 2.0
        return self.actions.before_scaling(robot, self.state.split(inputs.raw_state))

    def _cleaned(self, prompt: str) -> str:
        text = prompt or EMPTY_PROMPT
        return "".join(c for c in text.lower() if c.isalnum() or c.isspace() or c == "_") if self.formal else text

    def _tokenized(self, prompt: str, images: int) -> np.ndarray:
        ids, slots = self.form.ids(prompt, images, self.tokenizer)
        at = self.arrangement
        step = at.between + 1
        first = len(ids) - at.edge - (images - 1) * step - 1 if at.text_first else at.edge
        if slots != [first + view * step for view in range(images)]:
            raise CheckpointError(
                f"tokenizer: expected the images of a prompt {step} tokens apart, the first at {first}, got {slots}"
            )
        for place in reversed(slots):
            del ids[place]
        # In the order of `Layout.text_rows`.
        return checked_length(ids[::-1] if at.text_first else ids, prompt, self.max_token_len, self.preset.prompt)
