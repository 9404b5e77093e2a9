"""Observations to model inputs, and model outputs to robot actions: openpi's transforms, driven by a preset.

Checks everything before the device sees it. Needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.pictures import Cameras, PixelValues, placed
from vla_accel.transforms.images import resize, to_uint8
from vla_accel.transforms.normalisation import Normaliser, Range
from vla_accel.transforms.observations import Observed, Reader, real_numbers
from vla_accel.transforms.robots import LIBERO, Pose, Preset
from vla_accel.transforms.tokenizer import STATE_BINS, Tokenizer, tokenize_fast, tokenize_line, tokenize_prompt

_KEPT_PROMPTS = 1024
ORDINARY = ("pick up the black bowl on the stove and place it on the plate", "pick up the bowl", "pick")
"""Instructions of different lengths, the longest first."""
PromptForm = Literal["cleaned", "line", "fast"]
_TOKENIZE: dict[PromptForm, Callable[..., np.ndarray]] = {
    "cleaned": tokenize_prompt,
    "line": tokenize_line,
    "fast": tokenize_fast,
}


@dataclass(frozen=True)
class Inputs:
    """One observation, ready for the model.

    Attributes:
        images: uint8 (H, W, 3) each, of the views that the robot sent. An image that needed no conversion is the
            observation's own array or a view of it: copy it to keep it.
        tokens: int64 (L,).
        state: float32 (action_dim,), normalised and padded.
        raw_state: float64 (state_dim,), in the robot's units.
        cameras: As `Observed.cameras`.
        pixel_maps: As `Observed.pixel_maps`.
    """

    images: tuple[np.ndarray, ...]
    tokens: np.ndarray
    state: np.ndarray
    raw_state: np.ndarray
    cameras: Cameras | None = None
    pixel_maps: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class RobotTransforms:
    """One robot's transforms around a model: what all families share.

    Attributes:
        state: Scales the robot's state.
        actions: Scales the robot's actions.
        action_dim: Numbers of the model's action.
        preset: The robot's conventions.
        poses: The forms of `Preset.pose` that the transforms have.
    """

    poses: ClassVar[tuple[Pose, ...]] = ("model",)
    state: Any
    actions: Any
    action_dim: int
    preset: Preset = LIBERO
    _reader: Reader = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.preset.pose not in self.poses:
            raise ConfigError(f"preset.pose: expected {' or '.join(self.poses)}, got {self.preset.pose}")
        object.__setattr__(self, "_reader", self._make_reader())

    def _make_reader(self) -> Reader:
        return Reader(self.preset, prompted=False)

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of an example's images."""
        raise NotImplementedError

    @property
    def image_shapes(self) -> tuple[tuple[int, int], ...]:
        """Those of each camera of the preset."""
        return (self.image_shape,) * len(self.preset.images)

    def observe(self, observation: Mapping[str, Any]) -> Any:
        """Read and check an observation's images, state and keys. Raises ObservationError that names the key."""
        raise NotImplementedError

    def resized(self, seen: Any) -> Any:
        """Resize the images to the model's size on the host."""
        return seen

    def encode(self, seen: Any) -> Any:
        """Normalise the state, and tokenize the prompt if there is one. Raises ObservationError that names the key."""
        raise NotImplementedError

    def prepare(self, observation: Mapping[str, Any]) -> Any:
        """Check and convert an observation, its images resized on the host."""
        return self.encode(self.resized(self.observe(observation)))

    def normalize_actions(self, actions: Any, inputs: Any, name: str = "prev_chunk") -> np.ndarray:
        """Convert robot actions (k, robot's) to the model's, float32 (k, action_dim), padded with zeros.

        The inverse of `unnormalize_actions`. Deltas become relative to the state of `inputs`, even if the actions were
        computed for an earlier state. Raises ObservationError that names `name`.
        """
        robot = self._model_actions(actions, inputs, name)
        with np.errstate(over="ignore", invalid="ignore"):
            return _padded(self.actions.invert(robot), self.action_dim, name, "actions", robot)

    def returned(self, horizon: int) -> int:
        """Return how many of a chunk's actions the robot gets."""
        return horizon

    @property
    def ranges(self) -> dict[str, Range]:
        """The ranges that the checkpoint's statistics give to the numbers of `before_scaling`, by name."""
        return {"state": self.state.range, "actions": self.actions.range}

    def before_scaling(self, inputs: Any, actions: Any = None) -> dict[str, np.ndarray]:
        """Return `state` (1, n) and, with the robot's actions (k, robot's), `actions` (k, n), float64, in the units of
        the statistics."""
        found = {"state": self._model_state(inputs.raw_state)[None]}
        return found if actions is None else {**found, "actions": self._model_actions(actions, inputs, "actions")}

    def example(self, prompt: str | None = None) -> dict[str, Any]:
        """Return a valid observation with every view: black images, an ordinary state, and `prompt` if given."""
        preset = self.preset
        # The middle of each range, so that a prompt with the state in it has its usual length.
        state = self.state_at(np.zeros(preset.state_dim))
        shapes = zip(preset.images, self.image_shapes, strict=True)
        images = {key: np.zeros((*shape, 3), np.uint8) for key, shape in shapes}
        return {**images, **preset.split(state), **({} if prompt is None else {preset.prompt: prompt})}

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        """Return a robot's state (n,) with these normalised numbers (n,)."""
        raise NotImplementedError

    def _model_state(self, raw: np.ndarray) -> np.ndarray:
        """The robot's state in the model's conventions, before normalisation."""
        return raw

    def _model_actions(self, actions: Any, inputs: Any, name: str) -> np.ndarray:
        """Robot actions (k, robot's) in the model's conventions, before normalisation."""
        raise NotImplementedError

    def _padded_state(self, normalised: np.ndarray, size: int, raw: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return _padded(normalised, size, " and ".join(self.preset.state), "a state", raw)


def _padded(values: np.ndarray, size: int, name: str, what: str, raw: np.ndarray) -> np.ndarray:
    """Return values (..., n) as float32 (..., size), cut or padded with zeros."""
    padded = np.zeros((*values.shape[:-1], size), np.float32)
    padded[..., : values.shape[-1]] = values[..., :size]
    if not np.isfinite(padded).all():
        raise ObservationError(f"{name}: expected {what} in the checkpoint's range, got up to {abs(raw).max():g}")
    return padded


@dataclass(frozen=True, kw_only=True)
class PromptTransforms(RobotTransforms):
    """Transforms of a model with an instruction.

    Attributes:
        tokenizer: Encodes prompts.
        max_token_len: Most tokens of a prompt.
        default_prompt: Instruction for observations without one.
    """

    tokenizer: Tokenizer
    max_token_len: int
    default_prompt: str | None = None
    _prompts: dict[Any, np.ndarray] = field(init=False, repr=False, compare=False, default_factory=dict)

    def _make_reader(self) -> Reader:
        return Reader(self.preset, self.default_prompt)

    def example(self, prompt: str | None = None) -> dict[str, Any]:
        return super().example(prompt or self.default_prompt or self.ordinary_prompt())

    def ordinary_prompt(self) -> str:
        """Return an instruction for `example`."""
        return ORDINARY[0]

    def _cached(self, key: Any, tokenize: Callable[[], np.ndarray]) -> np.ndarray:
        """Tokenize a prompt, or return its tokens of an earlier call."""
        known = self._prompts.get(key)
        if known is None:
            known = tokenize()
            known.setflags(write=False)
            if len(self._prompts) >= _KEPT_PROMPTS:
                self._prompts.clear()
            self._prompts[key] = known
        return known


@dataclass(frozen=True, kw_only=True)
class ScalingTransforms(RobotTransforms):
    """Transforms with one scaling of the state and one of the actions, in the preset's conventions."""

    state: Normaliser
    actions: Normaliser

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in (("state", self.preset.state_dim), ("actions", self.preset.action_dim)):
            object.__setattr__(self, name, getattr(self, name).cut(count, self.action_dim, name))

    def unnormalize_actions(self, actions: np.ndarray, inputs: Any) -> np.ndarray:
        """Convert the model's actions (H, action_dim) for the observation `inputs` to the robot's, float64."""
        robot, preset = self.actions.restore(actions.astype(np.float64)), self.preset
        deltas, grippers = list(preset.delta_actions), list(preset.gripper_dims)
        if deltas:
            robot[:, deltas] += self._model_state(inputs.raw_state)[deltas]
        if preset.flipped:
            robot[:, list(preset.flipped)] *= -1.0
        if preset.gripper == "aloha":
            robot[:, grippers] = _aloha_gripper_command(robot[:, grippers])
        return robot

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        """Return a robot's state with these normalised numbers (state_dim,) and half-open grippers."""
        state = self.state.restore(normalised)
        state[list(self.preset.flipped)] *= -1.0
        state[list(self.preset.gripper_dims)] = 0.5
        return state

    def _model_state(self, raw: np.ndarray) -> np.ndarray:
        state, grippers = raw.copy(), list(self.preset.gripper_dims)
        if self.preset.flipped:
            state[..., list(self.preset.flipped)] *= -1.0
        if self.preset.gripper == "aloha":
            state[..., grippers] = _aloha_gripper_angle(state[..., grippers])
        return state

    def _model_actions(self, actions: Any, inputs: Any, name: str) -> np.ndarray:
        preset = self.preset
        robot = real_numbers(actions, name)
        if robot.ndim != 2 or not len(robot) or robot.shape[1] != preset.action_dim:
            raise ObservationError(f"{name}: expected shape (k, {preset.action_dim}), k at least 1, got {robot.shape}")
        deltas, grippers = list(preset.delta_actions), list(preset.gripper_dims)
        if preset.gripper == "aloha":
            robot[:, grippers] = _aloha_gripper_output(robot[:, grippers])
        robot[:, list(preset.flipped)] *= -1.0
        if deltas:
            robot[:, deltas] -= self._model_state(inputs.raw_state)[deltas]
        return robot


@dataclass(frozen=True, kw_only=True)
class Processor(ScalingTransforms, PromptTransforms):
    """openpi's and lerobot's transforms.

    openpi masks a missing view; dropping it is exact, so `Inputs.images` may have fewer views than the preset.

    Attributes:
        image_size: Side of the model's images, pixels.
        discrete_state: Whether the state is part of the prompt.
        prompt_state_dim: Numbers to which the state is padded with zeros before it enters the prompt (lerobot); None
            for no padding.
        padded_state: Numbers of `Inputs.state`; None for `action_dim`.
        prompt_form: "cleaned" as in openpi, "line" for the instruction and a newline, "fast" for π0-FAST.
        pixels: Pixel values of the checkpoint's training; None for byte / 127.5 - 1 and black bars.
    """

    image_size: int
    discrete_state: bool
    prompt_state_dim: int | None = None
    padded_state: int | None = None
    prompt_form: PromptForm = "cleaned"
    pixels: PixelValues | None = None
    _counts: dict[str, tuple[int, int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        scaled, cameras = 0 if self.pixels is None else len(self.pixels.cameras), len(self.preset.images)
        if scaled not in (0, cameras):
            raise ConfigError(f"preset: expected {scaled} cameras, whose images the checkpoint scales, got {cameras}")

    @property
    def image_shape(self) -> tuple[int, int]:
        return self.image_size, self.image_size

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        preset, size = self.preset, self.image_size
        seen = self._reader.read(observation)
        images = {key: to_uint8(image, key) for key, image in seen.views.items()}
        sizes = tuple((image.shape[0], image.shape[1]) for image in images.values())
        for key, (height, width) in zip(images, sizes, strict=True):
            placed(height, width, size, preset.resize, key)  # refuses shapes that cannot be resized
        maps = None
        if self.pixels is not None:
            rows = [(preset.images.index(key), *hw) for key, hw in zip(images, sizes, strict=True)]
            maps = self.pixels.maps(rows, size, preset.resize)
        cameras = None if set(sizes) == {(size, size)} else Cameras(sizes, preset.resize)
        return replace(seen, images=tuple(images.values()), cameras=cameras, pixel_maps=maps)

    def resized(self, seen: Observed) -> Observed:
        if seen.cameras is None:
            return seen
        views = zip(seen.views, seen.images, strict=True)
        images = tuple(resize(image, self.image_size, self.preset.resize, key) for key, image in views)
        return replace(seen, images=images, cameras=None)

    def encode(self, seen: Observed) -> Inputs:
        normalised = self.state.normalise(self._model_state(seen.state))
        state = self._padded_state(normalised, self.padded_state or self.action_dim, seen.state)
        prompt, most = seen.prompt, self.max_token_len
        if self.discrete_state:
            tokens = self._tokenized(prompt, normalised, most)
        else:
            key = prompt if isinstance(prompt, str) else None
            tokens = self._cached(key, lambda: self._tokenized(prompt, None, most))
        return Inputs(seen.images, tokens, state, seen.state, seen.cameras, seen.pixel_maps)

    def ordinary_prompt(self, *preferred: str) -> str:
        """Return the first of `preferred` and of some ever shorter instructions that fits `max_token_len` with every
        state; the shortest if none does."""
        prompts = (*preferred, *ORDINARY)
        return next((p for p in prompts if self.token_counts(p)[1] <= self.max_token_len), prompts[-1])

    def token_counts(self, prompt: str) -> tuple[int, int]:
        """Return the smallest and the largest number of tokens of a prompt over all states, ignoring `max_token_len`.

        A state in the prompt is written as numbers of one to three digits.
        """
        known = self._counts.get(prompt)
        if known is None:
            # All dimensions in the same bin, for each bin and for values below the first.
            bins = np.linspace(-1, 1, STATE_BINS + 1) - 1 / STATE_BINS
            states = [np.full(self.preset.state_dim, x) for x in bins] if self.discrete_state else [None]
            counts = [len(self._tokenized(prompt, state)) for state in states]
            known = self._counts[prompt] = min(counts), max(counts)
        return known

    def _tokenized(self, prompt: Any, state: np.ndarray | None, most: int = sys.maxsize) -> np.ndarray:
        """At most `most` tokens of a prompt, with the normalised state in it unless that is None."""
        if state is not None and self.prompt_state_dim is not None:
            state = np.pad(state, (0, max(0, self.prompt_state_dim - len(state))))
        return _TOKENIZE[self.prompt_form](self.tokenizer, prompt, state, most, self.preset.prompt)


# ALOHA reports a gripper's linear opening, scaled to [0, 1] between these two (metres); π0 was trained on the angle of
# the servo behind it, scaled between these two (radians). Commands go to the leader's joint, which has its own range.
_LINEAR = (0.01844, 0.05800)
_ANGLE = (0.5476, 1.6296)
_COMMAND = (-0.6213, 1.4910)
_HORN, _ARM = 0.022, 0.036


def _aloha_gripper_angle(opening: np.ndarray) -> np.ndarray:
    """Convert a scaled linear opening to the scaled angle of a crank of radius `_HORN` and arm `_ARM` (metres)."""
    linear = opening * (_LINEAR[1] - _LINEAR[0]) + _LINEAR[0]
    with np.errstate(divide="ignore"):
        sine = (_HORN**2 + linear**2 - _ARM**2) / (2 * _HORN * linear)
    return (np.arcsin(sine.clip(-1.0, 1.0)) - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0])


def _aloha_gripper_command(angle: np.ndarray) -> np.ndarray:
    """Convert the model's gripper output, radians above the angle's lower end, to ALOHA's scaled command."""
    return (angle + _ANGLE[0] - _COMMAND[0]) / (_COMMAND[1] - _COMMAND[0])


def _aloha_gripper_output(command: np.ndarray) -> np.ndarray:
    """The inverse of `_aloha_gripper_command`."""
    return command * (_COMMAND[1] - _COMMAND[0]) + _COMMAND[0] - _ANGLE[0]
