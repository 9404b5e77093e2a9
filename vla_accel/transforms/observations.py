"""Find, join and check the images, state and prompt of an observation, as a preset names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel.pictures import Cameras
from vla_accel.transforms.robots import Preset
from vla_accel.transforms.unknown_keys import unknown_images, unknown_prompts


@dataclass(frozen=True)
class Observed:
    """One observation with its images read and its prompt not yet tokenized.

    Attributes:
        views: The images that the robot sent, by key, in the preset's order.
        state: float64 (state_dim,), in the robot's units; with a history (k, state_dim), oldest first.
        prompt: The instruction, unchecked.
        images: uint8 (H, W, 3) each, checked and converted. An image that needed no conversion is the robot's own
            array or a view of it.
        cameras: The sizes of `images` where they still have to be resized to the model's; None where they have it.
        pixel_maps: float32 (views, `pictures.MAP_WIDTH`); None where the pixels need no map.
    """

    views: dict[str, Any]
    state: np.ndarray
    prompt: Any
    images: tuple[np.ndarray, ...] = ()
    cameras: Cameras | None = None
    pixel_maps: np.ndarray | None = None


class Reader:
    """Reads observations by a preset.

    Args:
        preset: The robot's conventions.
        default_prompt: Instruction for observations without one.
        prompted: Whether the model reads an instruction. If not, observations need none, and one that is sent is
            ignored.
        history: The most states of an observation.
    """

    def __init__(
        self, preset: Preset, default_prompt: str | None = None, *, prompted: bool = True, history: int = 1
    ) -> None:
        self.preset, self.default_prompt, self.prompted, self.history = preset, default_prompt, prompted, history
        self._known = (*preset.images, *preset.ignored_images, *preset.state, preset.prompt)

    def read(self, observation: Mapping[str, Any]) -> Observed:
        """Return views, state and prompt.

        Raises:
            ObservationError: A key is missing or unknown, or the state has the wrong kind; names the key.
        """
        if not isinstance(observation, Mapping):
            raise ObservationError(f"observation: expected a mapping, got {type(observation).__name__}")
        preset = self.preset
        views = {k: image for k in preset.images if (image := find(observation, k)) is not ABSENT}
        states = [find(observation, k) for k in preset.state]
        prompt = self._prompt(observation)
        if prompt is None or len(views) < len(preset.images) or any(s is ABSENT for s in states):
            self._refuse_missing(observation, views, prompt)
        if len(views) < len(preset.images):
            self._refuse_unknown_images(observation, views)
        return Observed(views, self._state(states), _decoded(prompt, preset.prompt))

    def _prompt(self, observation: Mapping[str, Any]) -> Any:
        """The instruction, or the default one where the robot sends none."""
        if not self.prompted:
            return ""
        prompt = find(observation, self.preset.prompt)
        if prompt is not ABSENT:
            return prompt
        for key, text in unknown_prompts(observation, self.preset.prompt) if self.default_prompt is not None else ():
            if text != self.default_prompt:
                raise ObservationError(
                    f"observation: expected the instruction at {self.preset.prompt}, got {text!r:.60} at {key}; rename "
                    f"that key, or leave it out to run the configuration's default_prompt, {self.default_prompt!r:.60}"
                )
        return self.default_prompt

    def _refuse_missing(self, observation: Mapping[str, Any], views: Mapping[str, Any], prompt: Any) -> None:
        preset = self.preset
        missing = [k for k in preset.images if k not in views and k not in preset.optional_images]
        if not views and not missing:
            missing.append(" or ".join(preset.images))
        missing += [k for k in preset.state if find(observation, k) is ABSENT]
        if prompt is None and find(observation, preset.prompt) is ABSENT:
            missing.append(preset.prompt)
        if missing:
            found = ", ".join(map(str, observation)) or "nothing"
            other = f"; {preset.prompt} may also be the configuration's default_prompt" if prompt is None else ""
            raise ObservationError(f"observation: missing {', '.join(missing)}; got {found}{other}")

    def _refuse_unknown_images(self, observation: Mapping[str, Any], views: Mapping[str, Any]) -> None:
        # A masked camera costs success without an error, so a misspelt key must not mask one.
        unknown = sorted(unknown_images(observation, self._known))
        if unknown:
            missing = ", ".join(key for key in self.preset.images if key not in views)
            raise ObservationError(
                f"observation: expected an image at {missing}, got one at {', '.join(unknown)}; "
                "if the model does not need that image, remove it, or add its key to ignored_images of the preset"
            )

    def _state(self, values: list[Any]) -> np.ndarray:
        keys, count = self.preset.state, self.preset.state_dim
        parts = [real_numbers(v, k) for v, k in zip(values, keys, strict=True)]
        name, several = " and ".join(keys), self.history > 1 and all(p.ndim == 2 for p in parts)
        axes = 2 if several else 1
        if len(parts) > 1 and (any(p.ndim > axes for p in parts) or (several and len({len(p) for p in parts}) > 1)):
            shapes = ", ".join(str(p.shape) for p in parts)
            raise ObservationError(f"{name}: expected one axis each, got shapes {shapes}")
        raw = parts[0] if len(parts) == 1 else np.concatenate([np.atleast_1d(p) for p in parts], axis=-1)
        if raw.shape[axes - 1 :] != (count,) or (several and not 1 <= len(raw) <= self.history):
            rows = f" or (1 to {self.history}, {count})" if self.history > 1 else ""
            raise ObservationError(f"{name}: expected shape ({count},){rows}, got {raw.shape}")
        return raw


ABSENT = object()
"""Returned by `find` for a missing key; None is a value."""


def find(observation: Mapping[str, Any], key: str) -> Any:
    """The value at a key, or at a path of keys joined by slashes."""
    value = observation.get(key, ABSENT)
    if value is not ABSENT or "/" not in key:
        return value
    value = observation
    for part in key.split("/"):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _decoded(prompt: Any, key: str) -> Any:
    """A prompt sent as bytes (DROID's clients) or through msgpack, as a str; anything else unchanged."""
    try:
        if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
            prompt = prompt.item()
        if isinstance(prompt, bytes):
            return prompt.decode("utf-8")
        if isinstance(prompt, str):
            prompt.encode("utf-8")
    except UnicodeError as error:  # other bytes, or half of a character
        raise ObservationError(f"{key}: expected text in UTF-8, got {prompt!r:.60} ({error})") from error
    return prompt


def real_numbers(value: Any, name: str) -> np.ndarray:
    """Return an array, a scalar or nested lists as a new float64 array of the same shape.

    Raises:
        ObservationError: Anything but integers and floats (NumPy would also convert text, booleans, dates and complex
            numbers), and NaN, infinity or masked numbers; names `name`.
    """
    if np.ma.is_masked(value):
        raise ObservationError(f"{name}: expected numbers without a mask, got {np.ma.count_masked(value)} masked ones")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:  # lists of unequal length, a tensor on a GPU
        raise ObservationError(f"{name}: expected numbers, got a {type(value).__name__} ({error})") from error
    if array.dtype.kind not in "iuf":
        raise ObservationError(f"{name}: expected numbers, got dtype {array.dtype}")
    numbers = np.array(array, np.float64)
    if not np.isfinite(numbers).all():
        raise ObservationError(f"{name}: expected finite numbers, got NaN or infinity")
    return numbers
