"""Observations to GR00T N1.7's inputs and its outputs to robot actions, for one embodiment of a checkpoint.

Everything is checked here, before the device sees it. Knows nothing about models or engines. Source: lerobot 0.6.1's
processor of Isaac-GR00T's checkpoints (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.groot.images import Cropping
from vla_accel.families.groot.modalities import Groups
from vla_accel.transforms.images import to_uint8
from vla_accel.transforms.normalisation import Range
from vla_accel.transforms.observations import Observed, Reader, real_numbers
from vla_accel.transforms.robots import Preset
from vla_accel.transforms.tokenizer import Tokenizer

EMPTY_PROMPT = "Perform the task."
"""What an empty prompt means to lerobot's processor; a missing one is an error here, as for other models."""
_VIEW = "<|vision_start|><|vision_end|>"
_KEPT_PROMPTS = 1024


@dataclass(frozen=True)
class GrootInputs:
    """One observation, ready: images uint8 (H, W, 3) each, all of one size, of the views that are there; tokens int64
    (L,) of the text around and behind them; state float32 (state_dim,) normalised and padded; raw_state float64 as the
    robot gave it."""

    images: tuple[np.ndarray, ...]
    tokens: np.ndarray
    state: np.ndarray
    raw_state: np.ndarray


@dataclass(frozen=True)
class GrootProcessor:
    """One robot's transforms around a model.

    `state_dim`, `action_dim`, `max_token_len`: the model's; `rows`: actions of a chunk that the robot gets;
    `lead`: tokens before the first image (who speaks, and a newline); `frames`:
    images that each view brings, oldest first (of fewer, the oldest is repeated); `formal`: prompts lose capitals and
    punctuation; `gripper`: the last action is a gripper's opening in [0, 1] and LIBERO's is -1 for open, 1 for closed;
    `exclude_state`: the model gets zeros for its state, and relative actions still refer to the robot's.
    A view that is missing is left out.
    """

    tokenizer: Tokenizer
    state: Groups
    actions: Groups
    preset: Preset
    cropping: Cropping
    state_dim: int
    action_dim: int
    max_token_len: int
    rows: int
    lead: int
    frames: int = 1
    formal: bool = True
    gripper: bool = False
    exclude_state: bool = False
    default_prompt: str | None = None
    _prompts: dict[tuple[str, int], np.ndarray] = field(init=False, repr=False, compare=False, default_factory=dict)
    _reader: Reader = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, groups, most in (("state", self.state, self.state_dim), ("action", self.actions, self.action_dim)):
            if groups.width > most:
                raise CheckpointError(f"{name}: {groups.width} numbers do not fit a model of {most}")
            given = getattr(self.preset, f"{name}_dim")
            if groups.size != given:
                raise CheckpointError(f"{name}: expected statistics of {given} numbers, got {groups.size}")
        for name in ("delta_actions", "flipped", "gripper_dims"):
            if given := getattr(self.preset, name):
                raise ConfigError(f"preset.{name}: expected none beside a GR00T checkpoint's own, got {[*given]}")
        object.__setattr__(self, "_reader", Reader(self.preset, self.default_prompt))

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        """Read, check and crop an observation's images. Raises ObservationError that names the key."""
        seen = self._reader.read(observation)
        views = [self._history(image, key) for key, image in seen.views.items()]
        # All views of a moment, then those of the next one.
        images = tuple(self.cropping(view[frame]) for frame in range(self.frames) for view in views)
        sizes = {image.shape[:2] for image in images}
        if len(sizes) > 1:
            raise ObservationError(f"{', '.join(seen.views)}: expected images of one shape, got {sorted(sizes)}")
        return replace(seen, images=images)

    def resized(self, seen: Observed) -> Observed:
        """The images are in the model's size from the start."""
        return seen

    def encode(self, seen: Observed) -> GrootInputs:
        """Normalise the state and tokenize the prompt. Raises ObservationError that names the key."""
        state = np.zeros(self.state_dim, np.float32)
        if not self.exclude_state:
            with np.errstate(over="ignore"):
                state[: self.state.width] = self.state.normalise(seen.state)
        if not np.isfinite(state).all():
            name = " and ".join(self.preset.state)
            raise ObservationError(
                f"{name}: expected a state in the checkpoint's range, got up to {abs(seen.state).max():g}"
            )
        return GrootInputs(seen.images, self._tokens(seen.prompt, len(seen.images)), state, seen.state)

    def prepare(self, observation: Mapping[str, Any]) -> GrootInputs:
        """Check and convert one observation."""
        return self.encode(self.observe(observation))

    def unnormalize_actions(self, actions: np.ndarray, inputs: GrootInputs) -> np.ndarray:
        """Normalised actions (H, action_dim) to the robot's, float64 (rows, robot's)."""
        robot = self.actions.restore(actions[: self.rows], self.state.split(inputs.raw_state))
        if self.gripper:
            robot[:, -1] = -np.sign(2.0 * robot[:, -1] - 1.0)
        return robot

    def normalize_actions(self, actions: Any, inputs: GrootInputs, name: str = "prev_chunk") -> np.ndarray:
        """Convert robot actions (k, robot's) to the model's, float32 (k, action_dim), padded with zeros.

        The inverse of `unnormalize_actions`; relative actions become relative to the state of `inputs`. Raises
        ObservationError that names `name`.
        """
        robot = self._model_actions(actions, name)
        padded = np.zeros((len(robot), self.action_dim), np.float32)
        padded[:, : self.actions.width] = self.actions.normalise(robot, self.state.split(inputs.raw_state))
        return padded

    @property
    def ranges(self) -> dict[str, Range]:
        """What the checkpoint's statistics expect of `before_scaling`, by the same names."""
        return {"state": self.state.range, "actions": self.actions.range}

    def before_scaling(self, inputs: GrootInputs, actions: Any = None) -> dict[str, np.ndarray]:
        """Return numbers in the units of the statistics.

        Args:
            inputs: A prepared observation.
            actions: The robot's, (k, robot's), where there are some.

        Returns:
            `state` (1, n) and, with actions, `actions` (k, n), float64; relative actions are relative to the state.
        """
        found = {"state": inputs.raw_state[None]}
        if actions is None:
            return found
        robot = self._model_actions(actions, "actions")
        return {**found, "actions": self.actions.before_scaling(robot, self.state.split(inputs.raw_state))}

    def example(self, prompt: str | None = None) -> dict[str, Any]:
        """A valid observation with every view: black images and the middle of each state's range. `prompt`: instead of
        an ordinary one."""
        height, width = self.cropping.target
        observation: dict[str, Any] = {k: np.zeros((height, width, 3), np.uint8) for k in self.preset.images}
        prompt = prompt or self.default_prompt or "pick up the black bowl on the stove and place it on the plate"
        state = self.state_at(np.zeros(self.state.size))
        return {**observation, **self.preset.split(state), self.preset.prompt: prompt}

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        """Return a robot's state (n,) with these normalised numbers, one for each of its own; angles as they are."""
        parts = self.state.split(normalised)
        return np.concatenate(
            [parts[g.name] if g.scaling == "sin_cos" else g.restore(parts[g.name][None])[0] for g in self.state.groups]
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _model_actions(self, actions: Any, name: str) -> np.ndarray:
        """The robot's actions (k, robot's) in the model's conventions, before normalisation."""
        robot = real_numbers(actions, name)
        if robot.ndim != 2 or not 0 < len(robot) <= self.rows or robot.shape[1] != self.actions.size:
            raise ObservationError(
                f"{name}: expected shape (k, {self.actions.size}), k from 1 to {self.rows}, got {robot.shape}"
            )
        if self.gripper:
            robot[:, -1] = (1.0 - np.sign(robot[:, -1])) / 2.0
        return robot

    def _history(self, image: Any, key: str) -> list[np.ndarray]:
        """A view's images, oldest first, `frames` of them."""
        if np.ndim(image) != 4:
            return [to_uint8(image, key)] * self.frames
        if not 1 <= len(image) <= self.frames:
            some = "one image" if self.frames == 1 else f"1 to {self.frames} images"
            raise ObservationError(f"{key}: expected {some}, got {len(image)}")
        found = [to_uint8(one, key) for one in image]
        return [found[0]] * (self.frames - len(found)) + found

    def _tokens(self, prompt: Any, images: int) -> np.ndarray:
        if not isinstance(prompt, str):
            raise ObservationError(f"{self.preset.prompt}: expected a str, got {type(prompt).__name__}")
        known = self._prompts.get((prompt, images))
        if known is None:
            known = self._encoded(prompt, images)
            if len(self._prompts) >= _KEPT_PROMPTS:
                self._prompts.clear()
            self._prompts[prompt, images] = known
        return known

    def _encoded(self, prompt: str, images: int) -> np.ndarray:
        text = prompt or EMPTY_PROMPT
        if self.formal:
            text = "".join(c for c in text.lower() if c.isalnum() or c.isspace() or c == "_")
        if not text.replace("_", " ").strip():  # blanks or punctuation, which is not the robot's empty text
            raise ObservationError(
                f"{self.preset.prompt}: expected an instruction, or an empty text, got {prompt!r:.60}"
            )
        whole = f"<|im_start|>user\n{_VIEW * images}{text}<|im_end|>\n"
        ids = self.tokenizer.encode(whole, add_bos=False)
        view = self.tokenizer.encode(_VIEW, add_bos=False)
        if len(view) != 2 or ids[self.lead : self.lead + 2 * images] != view * images:
            raise CheckpointError(
                f"tokenizer: expected Qwen3-VL's, with {self.lead} tokens before the first view and two for each, got "
                f"another model's: {ids[: self.lead + 2 * images]}"
            )
        if len(ids) > self.max_token_len:
            raise ObservationError(
                f"{self.preset.prompt}: expected at most {self.max_token_len} tokens (max_token_len), got {len(ids)} "
                f"from {text[:60]!r}"
            )
        tokens = np.asarray(ids, np.int64)
        tokens.setflags(write=False)
        return tokens
