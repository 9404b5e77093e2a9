"""What of a robot's observation a preset names: its images, state and prompt, found, joined and checked.

Knows nothing of sizes of images, of statistics or of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel.transforms.robots import Preset
from vla_accel.transforms.unknown_images import unknown_images
from vla_accel.transforms.unknown_prompts import unknown_prompts


@dataclass(frozen=True)
class Observed:
    """One observation: `views` that are there, by key, in the preset's order, as the robot gave them; `state` float64
    (state_dim,); `prompt`: text, or whatever was given instead."""

    views: dict[str, Any]
    state: np.ndarray
    prompt: Any


class Reader:
    """Reads observations by a preset."""

    def __init__(self, preset: Preset, default_prompt: str | None = None) -> None:
        self.preset, self.default_prompt = preset, default_prompt
        # Keys that are no misspelt cameras.
        self._known = (*preset.images, *preset.ignored_images, *preset.state, preset.prompt)

    def read(self, observation: Mapping[str, Any]) -> Observed:
        """Raises ObservationError that names the key of what is missing, unknown or of the wrong kind."""
        if not isinstance(observation, Mapping):
            raise ObservationError(f"observation: expected a mapping, got {type(observation).__name__}")
        preset = self.preset
        views = self.views(observation)
        states = [_find(observation, k) for k in preset.state]
        prompt = self._prompt(observation)
        if prompt is None or len(views) < len(preset.images) or any(s is _ABSENT for s in states):
            self._report_missing(observation, views.keys(), prompt)
        if len(views) < len(preset.images):
            self._refuse_unknown_images(observation, views)
        return Observed(views, self._state(states), _text(prompt, preset.prompt))

    def views(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """The views that are there, by key, in the preset's order; not checked."""
        return {k: image for k in self.preset.images if (image := _find(observation, k)) is not _ABSENT}

    def _prompt(self, observation: Mapping[str, Any]) -> Any:
        """The instruction, or the default one where the robot sends none. Raises ObservationError for another
        instruction under an unknown key, which the default one would replace."""
        prompt = _find(observation, self.preset.prompt)
        if prompt is not _ABSENT:
            return prompt
        for key, text in unknown_prompts(observation, self.preset.prompt) if self.default_prompt is not None else ():
            if text != self.default_prompt:
                raise ObservationError(
                    f"observation: expected the instruction at {self.preset.prompt}, got {text!r:.60} at {key}; rename "
                    f"that key, or leave it out to run the configuration's default_prompt, {self.default_prompt!r:.60}"
                )
        return self.default_prompt

    def _report_missing(self, observation: Mapping[str, Any], present: Any, prompt: Any) -> None:
        preset = self.preset
        missing = [k for k in preset.images if k not in present and k not in preset.optional_images]
        if not present and not missing:
            missing.append(" or ".join(preset.images))
        missing += [k for k in preset.state if _find(observation, k) is _ABSENT]
        if prompt is None and _find(observation, preset.prompt) is _ABSENT:
            missing.append(preset.prompt)
        if missing:
            found = ", ".join(map(str, observation)) or "nothing"
            other = f"; {preset.prompt} may also be the configuration's default_prompt" if prompt is None else ""
            raise ObservationError(f"observation: missing {', '.join(missing)}; got {found}{other}")

    def _refuse_unknown_images(self, observation: Mapping[str, Any], views: Mapping[str, Any]) -> None:
        """Raise ObservationError for an image under an unknown key while an optional camera is missing: the key may be
        misspelt, and a masked camera costs success without an error."""
        unknown = sorted(unknown_images(observation, self._known))
        if unknown:
            missing = ", ".join(key for key in self.preset.images if key not in views)
            raise ObservationError(
                f"observation: expected an image at {missing}, got one at {', '.join(unknown)}; "
                "if the model never sees that image, name its key in the preset's ignored_images"
            )

    def _state(self, values: list[Any]) -> np.ndarray:
        keys, count = self.preset.state, self.preset.state_dim
        parts = [real_numbers(v, k) for v, k in zip(values, keys, strict=True)]
        name = " and ".join(keys)
        if len(parts) == 1:
            raw = parts[0]
        elif all(p.ndim <= 1 for p in parts):
            raw = np.concatenate([np.atleast_1d(p) for p in parts])
        else:
            shapes = ", ".join(str(p.shape) for p in parts)
            raise ObservationError(f"{name}: expected one axis each, got shapes {shapes}")
        if raw.shape != (count,):
            raise ObservationError(f"{name}: expected shape ({count},), got {raw.shape}")
        return raw


class _Absent:
    """What `_find` returns for a key that is not there; None is a value."""


_ABSENT = _Absent()


def _find(observation: Mapping[str, Any], key: str) -> Any:
    """The value at a key, or at a path of keys joined by slashes."""
    value = observation.get(key, _ABSENT)
    if value is not _ABSENT or "/" not in key:
        return value
    value = observation
    for part in key.split("/"):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _text(prompt: Any, key: str) -> Any:
    """A prompt that has travelled as bytes (DROID's clients) or through msgpack, as a str; anything else as it is."""
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
    """`value` (an array, a scalar, nested lists) as a new float64 array of its shape. NumPy would read text,
    booleans, dates and complex values as numbers, in silence.

    Raises ObservationError that names `name` for anything but integers and floats, and for NaN, infinity and masked
    numbers, whose mask NumPy would drop.
    """
    if np.ma.is_masked(value):
        raise ObservationError(f"{name}: expected numbers without a mask, got {np.ma.count_masked(value)} masked ones")
    try:
        given = np.asarray(value)
    except (TypeError, ValueError) as error:  # lists of unequal length, a tensor that lies on a GPU
        raise ObservationError(f"{name}: expected numbers, got a {type(value).__name__} ({error})") from error
    if given.dtype.kind not in "iuf":
        raise ObservationError(f"{name}: expected numbers, got dtype {given.dtype}")
    numbers = np.array(given, np.float64)
    if not np.isfinite(numbers).all():
        raise ObservationError(f"{name}: expected finite numbers, got NaN or infinity")
    return numbers
