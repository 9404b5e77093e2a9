"""Observations to model inputs and model outputs to actions, as openpi's LIBERO policy does it.

Everything is checked here, before the device sees it. Knows nothing about models or engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_accel.errors import CheckpointError, ObservationError
from vla_accel.tokenizer import Tokenizer, tokenize_prompt

NormKind = Literal["quantile", "mean_std"]
IMAGE_KEYS = ("observation/image", "observation/wrist_image")
STATE_KEY = "observation/state"
STATE_DIM = 8
ROBOT_ACTION_DIM = 7


@dataclass(frozen=True)
class Statistics:
    """One quantity's statistics, float64 (n,) each; a pair that the checkpoint does not give is None."""

    mean: np.ndarray | None
    std: np.ndarray | None
    q01: np.ndarray | None
    q99: np.ndarray | None


@dataclass(frozen=True)
class Normaliser:
    """(x - q01) / (q99 - q01 + 1e-6) * 2 - 1 for quantiles (π0.5), (x - mean) / (std + 1e-6) otherwise (π0).

    Written in openpi's order of operations: x == q01 must give exactly -1, the edge of the first state bin.
    """

    kind: NormKind
    low: np.ndarray
    span: np.ndarray

    @classmethod
    def of(cls, statistics: Statistics, kind: NormKind, name: str) -> Normaliser:
        """Raises CheckpointError if the statistics that `kind` needs are missing."""
        if kind == "quantile":
            low, high, needed = statistics.q01, statistics.q99, "q01 and q99"
        else:
            low, high, needed = statistics.mean, statistics.std, "mean and std"
        if low is None or high is None:
            raise CheckpointError(f"norm_stats.{name}: expected {needed} for {kind} normalisation, got none")
        if low.shape != high.shape:
            raise CheckpointError(
                f"norm_stats.{name}: expected {needed} of one length, got {low.shape} and {high.shape}"
            )
        return cls(kind, low, (high - low if kind == "quantile" else high) + 1e-6)

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """x (..., n) to float64 (..., n)."""
        if x.shape[-1] != len(self.low):
            raise CheckpointError(f"norm_stats: expected {x.shape[-1]} values, got {len(self.low)}")
        scaled = (x - self.low) / self.span
        return scaled * 2.0 - 1.0 if self.kind == "quantile" else scaled

    def restore(self, x: np.ndarray) -> np.ndarray:
        """Inverse of `normalise`, on the first n of the last axis; what is beyond is cut off."""
        x = x[..., : len(self.low)]
        return (x + 1.0) / 2.0 * self.span + self.low if self.kind == "quantile" else x * self.span + self.low


def load_statistics(path: Path) -> dict[str, Statistics]:
    """openpi's `norm_stats.json`: statistics of `state` and `actions`. Raises CheckpointError, never returns none."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"statistics: expected {path}, found no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"statistics {path}: expected JSON, got: {error}") from error
    table = content.get("norm_stats", content) if isinstance(content, dict) else None
    if not isinstance(table, dict):
        raise CheckpointError(f"statistics {path}: expected a mapping, got {type(content).__name__}")
    result = {}
    for name in ("state", "actions"):
        if not isinstance(table.get(name), dict):
            raise CheckpointError(f"statistics {path}: expected norm_stats.{name}, found {sorted(table)}")
        values = {k: _array(table[name].get(k), f"{path}: {name}.{k}") for k in ("mean", "std", "q01", "q99")}
        result[name] = Statistics(**values)
    return result


def _array(value: Any, where: str) -> np.ndarray | None:
    if value is None:
        return None
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"statistics {where}: expected a list of finite numbers, got {value!r}") from error
    if array.ndim != 1 or not np.isfinite(array).all():
        raise CheckpointError(f"statistics {where}: expected a list of finite numbers, got {value!r}")
    return array


@dataclass(frozen=True)
class Inputs:
    """One observation, ready: images uint8 (views, size, size, 3); tokens int64 (L,); state float32 (action_dim,)
    normalised and padded; raw_state float64 (8,)."""

    images: np.ndarray
    tokens: np.ndarray
    state: np.ndarray
    raw_state: np.ndarray


@dataclass(frozen=True)
class Processor:
    """LIBERO's transforms around a model.

    The model's third view is always masked on LIBERO; a masked view is dropped, so two remain.
    """

    tokenizer: Tokenizer
    state: Normaliser
    actions: Normaliser
    image_size: int
    action_dim: int
    max_token_len: int
    discrete_state: bool
    default_prompt: str | None = None

    def prepare(self, observation: Mapping[str, Any]) -> Inputs:
        """Check and convert one observation. Raises ObservationError that names the key."""
        if not isinstance(observation, Mapping):
            raise ObservationError(f"observation: expected a mapping, got {type(observation).__name__}")
        prompt: Any = observation.get("prompt", self.default_prompt)
        missing = [k for k in (*IMAGE_KEYS, STATE_KEY) if k not in observation]
        if prompt is None:
            missing.append("prompt")
        if missing:
            raise ObservationError(f"observation: missing {', '.join(missing)}; got {', '.join(map(str, observation))}")
        images = np.stack([self._image(observation[k], k) for k in IMAGE_KEYS])
        raw = _numbers(observation[STATE_KEY], STATE_KEY, STATE_DIM)
        normalised = self.state.normalise(raw)
        if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
            prompt = prompt.item()  # a str that has travelled through msgpack
        tokens = tokenize_prompt(
            self.tokenizer, prompt, normalised if self.discrete_state else None, self.max_token_len
        )
        padded = np.zeros(self.action_dim, np.float32)
        count = min(len(normalised), self.action_dim)
        padded[:count] = normalised[:count]
        return Inputs(images, tokens, padded, raw)

    def finish(self, actions: np.ndarray) -> np.ndarray:
        """Normalised actions (H, action_dim) to the robot's, float64 (H, 7)."""
        return self.actions.restore(actions.astype(np.float64))[:, :ROBOT_ACTION_DIM]

    def _image(self, image: Any, key: str) -> np.ndarray:
        image = np.asarray(image)
        if image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]):
            raise ObservationError(
                f"{key}: expected shape ({self.image_size}, {self.image_size}, 3), got {image.shape}"
            )
        if image.shape[-1] != 3:
            image = np.moveaxis(image, 0, -1)
        if np.issubdtype(image.dtype, np.floating):
            # openpi accepts floats in [0, 1].
            if not np.isfinite(image).all() or image.min() < 0 or image.max() > 1:
                raise ObservationError(f"{key}: expected uint8, or floats in [0, 1], got values outside of it")
            image = (255 * image).astype(np.uint8)
        if image.dtype != np.uint8:
            raise ObservationError(f"{key}: expected dtype uint8, got {image.dtype}")
        if image.shape[:2] != (self.image_size, self.image_size):
            raise ObservationError(
                f"{key}: expected shape ({self.image_size}, {self.image_size}, 3), got {image.shape}"
            )
        return image


def _numbers(value: Any, key: str, count: int) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ObservationError(f"{key}: expected {count} numbers, got {value!r}") from error
    if array.shape != (count,):
        raise ObservationError(f"{key}: expected shape ({count},), got {array.shape}")
    if not np.isfinite(array).all():
        raise ObservationError(f"{key}: expected finite numbers, got {array}")
    return array
