"""Observations to model inputs and model outputs to robot actions: openpi's transforms, driven by a preset.

Everything is checked here, before the device sees it. Knows nothing about models or engines, and needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.pictures import Picture, PixelValues, Resize, placed
from vla_accel.transforms.images import resize, to_uint8
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.observations import Reader, real_numbers
from vla_accel.transforms.ranges import Range
from vla_accel.transforms.robots import LIBERO, Preset
from vla_accel.transforms.tokenizer import STATE_BINS, Tokenizer, tokenize_fast, tokenize_line, tokenize_prompt

_KEPT_PROMPTS = 1024
_ORDINARY = ("pick up the black bowl on the stove and place it on the plate", "pick up the bowl", "pick")
PromptForm = Literal["cleaned", "line", "fast"]
_TOKENIZE: dict[PromptForm, Callable[..., np.ndarray]] = {
    "cleaned": tokenize_prompt, "line": tokenize_line, "fast": tokenize_fast,
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """One observation, ready: images uint8 (size, size, 3) each, of the views that are there; tokens int64 (L,);
    state float32 (action_dim,) normalised and padded; raw_state float64 (state_dim,) as the robot gave it. `to_fit`:
    size and method by which images of other sizes are still to be fitted. `pixel_maps`: float32 (views,
    `pictures.MAP_WIDTH`), how the images' bytes become pixels; None where they need no map.

    An image that needs no conversion is the observation's own array (or a view of it): copy it to keep it.
    """

    images: tuple[np.ndarray, ...]
    tokens: np.ndarray
    state: np.ndarray
    raw_state: np.ndarray
    to_fit: tuple[int, Resize] | None = None
    pixel_maps: np.ndarray | None = None

    @property
    def vision(self) -> dict[str, Any]:
        """The inputs of vision by name: `images`, those that are still to be fitted as `Picture`s, and `pixel_maps`
        where the images need them."""
        images = list(self.images) if self.to_fit is None else [_to_fit(i, *self.to_fit) for i in self.images]
        return {"images": images} | ({} if self.pixel_maps is None else {"pixel_maps": self.pixel_maps})


@dataclass(frozen=True)
class Processor:
    """One robot's transforms around a model.

    A view that is missing is masked in openpi; a masked view is dropped here, which is exact, so `Inputs.images` may
    have fewer views than the preset. `state` and `actions` scale the robot's numbers; `prompt_state_dim`: the state
    is filled with zeros to so many numbers before it enters the prompt (lerobot), None leaves it as it is.
    `padded_state`: numbers of `Inputs.state`, None as many as of an action. `prompt_form`: "cleaned" as openpi
    does, "line", the instruction as it is and a newline, or "fast", π0-FAST's with the state. `pixels`: the pixels that
    the checkpoint was trained with; None for byte / 127.5 - 1 and black bars.
    """

    tokenizer: Tokenizer
    state: Normaliser
    actions: Normaliser
    image_size: int
    action_dim: int
    max_token_len: int
    discrete_state: bool
    default_prompt: str | None = None
    preset: Preset = LIBERO
    prompt_state_dim: int | None = None
    padded_state: int | None = None
    prompt_form: PromptForm = "cleaned"
    pixels: PixelValues | None = None
    _prompts: dict[str, np.ndarray] = field(init=False, repr=False, compare=False, default_factory=dict)
    _counts: dict[str, tuple[int, int]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _reader: Reader = field(init=False, repr=False, compare=False)
    # The preset's dimensions as NumPy indexes with them.
    _moving: np.ndarray = field(init=False, repr=False, compare=False)
    _flipped: np.ndarray = field(init=False, repr=False, compare=False)
    _grippers: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", self.state.cut(self.preset.state_dim, self.action_dim, "state"))
        object.__setattr__(self, "actions", self.actions.cut(self.preset.action_dim, self.action_dim, "actions"))
        object.__setattr__(self, "_moving", np.array(self.preset.delta_actions, np.intp))
        object.__setattr__(self, "_flipped", np.array(self.preset.flipped, np.intp))
        object.__setattr__(self, "_grippers", np.array(self.preset.gripper_dims, np.intp))
        object.__setattr__(self, "_reader", Reader(self.preset, self.default_prompt))
        scaled, cameras = 0 if self.pixels is None else len(self.pixels.cameras), len(self.preset.images)
        if scaled not in (0, cameras):
            raise ConfigError(f"preset: expected {scaled} cameras, whose images the checkpoint scales, got {cameras}")

    def prepare(self, observation: Mapping[str, Any], *, fitted: bool = True) -> Inputs:
        """Check and convert one observation. Raises ObservationError that names the key. `fitted`: images of other
        sizes than the model's are fitted here and now."""
        preset = self.preset
        seen = self._reader.read(observation)
        views = {key: to_uint8(image, key) for key, image in seen.views.items()}
        images = tuple(self._image(image, key, fitted) for key, image in views.items())
        to_fit = None if fitted else (self.image_size, preset.resize)
        raw = seen.state
        normalised = self.state.normalise(self._decoded(raw))
        padded = np.zeros(self.padded_state or self.action_dim, np.float32)
        count = min(len(normalised), len(padded))
        with np.errstate(over="ignore"):
            padded[:count] = normalised[:count]
        if not np.isfinite(padded).all():
            name = " and ".join(preset.state)
            raise ObservationError(f"{name}: expected a state in the checkpoint's range, got up to {abs(raw).max():g}")
        tokens = self._tokens(seen.prompt, normalised)
        return Inputs(images, tokens, padded, raw, to_fit, self._pixel_maps(views))

    def early_vision(self, observation: Mapping[str, Any]) -> dict[str, Any] | None:
        """What `prepare`, without fitting, has as `Inputs.vision`; None where an image is to be converted or does not
        fit."""
        if not isinstance(observation, Mapping):
            return None
        found: dict[str, np.ndarray] = {}
        for key, image in self._reader.views(observation).items():
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
                return None
            try:
                found[key] = self._image(to_uint8(image, key), key, fitted=False)
            except ObservationError:
                # `prepare` says what is wrong with it.
                return None
        images = [_to_fit(image, self.image_size, self.preset.resize) for image in found.values()]
        maps = self._pixel_maps(found)
        return {"images": images} | ({} if maps is None else {"pixel_maps": maps})

    def _pixel_maps(self, views: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The pixel maps of images (H, W, 3) in the cameras' own sizes, by key."""
        if self.pixels is None:
            return None
        sizes = [(self.preset.images.index(key), *image.shape[:2]) for key, image in views.items()]
        return self.pixels.maps(sizes, self.image_size, self.preset.resize)

    def _image(self, image: np.ndarray, key: str, fitted: bool) -> np.ndarray:
        size, method = self.image_size, self.preset.resize
        if fitted:
            return resize(image, size, method, key)
        placed(image.shape[0], image.shape[1], size, method, key)  # refuses what cannot be fitted
        return image

    def finish(self, actions: np.ndarray, inputs: Inputs | None = None) -> np.ndarray:
        """Normalised actions (H, action_dim) of the observation `inputs` to the robot's, float64 (H, robot's)."""
        robot = self.actions.restore(actions.astype(np.float64))
        if self._moving.size:
            assert inputs is not None
            robot[:, self._moving] += self._decoded(inputs.raw_state)[self._moving]
        if self._flipped.size:
            robot[:, self._flipped] *= -1.0
        if self.preset.gripper == "aloha":
            robot[:, self._grippers] = _aloha_gripper_command(robot[:, self._grippers])
        return robot

    def begin(self, actions: Any, inputs: Inputs, name: str = "prev_chunk") -> np.ndarray:
        """The inverse of `finish`: robot actions (k, robot's) to the model's, float32 (k, action_dim), padded with
        zeros. Deltas become relative to the state of `inputs`, whenever the actions were computed. Raises
        ObservationError, which calls them `name`."""
        robot = self._model_actions(actions, inputs, name)
        with np.errstate(over="ignore", invalid="ignore"):
            normalised = self.actions.invert(robot).astype(np.float32)
        if not np.isfinite(normalised).all():
            raise ObservationError(
                f"{name}: expected actions in the checkpoint's range, got up to {abs(robot).max():g}"
            )
        padded = np.zeros((len(robot), self.action_dim), np.float32)
        padded[:, : self.preset.action_dim] = normalised
        return padded

    @property
    def ranges(self) -> dict[str, Range]:
        """What the checkpoint's statistics expect of `before_scaling`, by the same names."""
        return {"state": self.state.range, "actions": self.actions.range}

    def before_scaling(self, inputs: Inputs, actions: Any = None) -> dict[str, np.ndarray]:
        """Return numbers in the units of the statistics.

        Args:
            inputs: A prepared observation.
            actions: The robot's, (k, robot's), where there are some.

        Returns:
            `state` (1, n) and, with actions, `actions` (k, n), float64.
        """
        found = {"state": self._decoded(inputs.raw_state)[None]}
        return found if actions is None else {**found, "actions": self._model_actions(actions, inputs, "actions")}

    def example(self, prompt: str | None = None) -> dict[str, Any]:
        """A valid observation with every view: black images and an ordinary state, to build and warm engines with.
        `prompt`: instead of an ordinary one."""
        preset, size = self.preset, self.image_size
        # The middle of each range, so that a prompt with the state in it has its usual length.
        state = self.state_at(np.zeros(preset.state_dim))
        observation: dict[str, Any] = {k: np.zeros((size, size, 3), np.uint8) for k in preset.images}
        prompt = prompt or self.default_prompt or self.ordinary_prompt()
        return {**observation, **preset.split(state), preset.prompt: prompt}

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        """Return a robot's state with these normalised numbers (state_dim,), its grippers half open."""
        state = self.state.restore(normalised)
        state[list(self.preset.flipped)] *= -1.0
        state[list(self.preset.gripper_dims)] = 0.5
        return state

    def ordinary_prompt(self, *preferred: str) -> str:
        """Return the first of `preferred` and of some instructions of decreasing length that fits the model's
        `max_token_len` with every state; the shortest if none does."""
        prompts = (*preferred, *_ORDINARY)
        return next((p for p in prompts if self.token_counts(p)[1] <= self.max_token_len), prompts[-1])

    def token_counts(self, prompt: str) -> tuple[int, int]:
        """Return the smallest and the largest number of tokens that a prompt may have, whatever the state.

        Where the state is part of the prompt, its numbers have one to three digits. `max_token_len` is not considered.
        """
        known = self._counts.get(prompt)
        if known is None:
            # All dimensions in the same bin, for each bin and for what is below the first.
            bins = np.linspace(-1, 1, STATE_BINS + 1) - 1 / STATE_BINS
            states = [np.full(self.preset.state_dim, x) for x in bins] if self.discrete_state else [None]
            counts = [len(self._tokenized(prompt, state)) for state in states]
            known = self._counts[prompt] = min(counts), max(counts)
        return known

    # -- inside ---------------------------------------------------------------------------------------------------

    def _decoded(self, raw: np.ndarray) -> np.ndarray:
        """The robot's state in the model's conventions, before normalisation."""
        if not self._flipped.size and self.preset.gripper == "none":
            return raw
        state = raw.copy()
        state[self._flipped] *= -1.0
        if self.preset.gripper == "aloha":
            state[self._grippers] = _aloha_gripper_angle(state[self._grippers])
        return state

    def _model_actions(self, actions: Any, inputs: Inputs, name: str) -> np.ndarray:
        """The robot's actions (k, robot's) in the model's conventions, before normalisation."""
        preset = self.preset
        robot = real_numbers(actions, name)
        if robot.ndim != 2 or not len(robot) or robot.shape[1] != preset.action_dim:
            raise ObservationError(f"{name}: expected shape (k, {preset.action_dim}), k at least 1, got {robot.shape}")
        if preset.gripper == "aloha":
            robot[:, self._grippers] = _aloha_gripper_output(robot[:, self._grippers])
        if self._flipped.size:
            robot[:, self._flipped] *= -1.0
        if self._moving.size:
            robot[:, self._moving] -= self._decoded(inputs.raw_state)[self._moving]
        return robot

    def _tokens(self, prompt: Any, state: np.ndarray) -> np.ndarray:
        if self.discrete_state:
            return self._tokenized(prompt, state, self.max_token_len)
        known = self._prompts.get(prompt) if isinstance(prompt, str) else None
        if known is None:
            known = self._tokenized(prompt, None, self.max_token_len)
            known.setflags(write=False)
            if len(self._prompts) >= _KEPT_PROMPTS:
                self._prompts.clear()
            self._prompts[prompt] = known
        return known

    def _tokenized(self, prompt: Any, state: np.ndarray | None, most: int = sys.maxsize) -> np.ndarray:
        """The tokens of a prompt, with the normalised state in it where there is one; at most `most`."""
        if state is not None and self.prompt_state_dim is not None:
            state = np.pad(state, (0, max(0, self.prompt_state_dim - len(state))))
        return _TOKENIZE[self.prompt_form](self.tokenizer, prompt, state, most, self.preset.prompt)


def _to_fit(image: np.ndarray, size: int, method: Resize) -> np.ndarray | Picture:
    return image if image.shape == (size, size, 3) else Picture(image, size, method)


# ALOHA reports a gripper's linear opening, scaled to [0, 1] between these two (metres); π0 was trained on the angle of
# the servo behind it, scaled between these two (radians). Commands go to the leader's joint, which has its own range.
_LINEAR = (0.01844, 0.05800)
_ANGLE = (0.5476, 1.6296)
_COMMAND = (-0.6213, 1.4910)
_HORN, _ARM = 0.022, 0.036


def _aloha_gripper_angle(opening: np.ndarray) -> np.ndarray:
    """Scaled linear opening to the scaled servo angle: a crank of radius `_HORN` and arm `_ARM` (metres)."""
    linear = opening * (_LINEAR[1] - _LINEAR[0]) + _LINEAR[0]
    with np.errstate(divide="ignore"):
        sine = (_HORN**2 + linear**2 - _ARM**2) / (2 * _HORN * linear)
    return (np.arcsin(sine.clip(-1.0, 1.0)) - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0])


def _aloha_gripper_command(angle: np.ndarray) -> np.ndarray:
    """The model's gripper output, radians from the angle's lower end, to ALOHA's scaled command."""
    return (angle + _ANGLE[0] - _COMMAND[0]) / (_COMMAND[1] - _COMMAND[0])


def _aloha_gripper_output(command: np.ndarray) -> np.ndarray:
    """The inverse of `_aloha_gripper_command`."""
    return command * (_COMMAND[1] - _COMMAND[0]) + _COMMAND[0] - _ANGLE[0]
