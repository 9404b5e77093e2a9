"""Transforms of observations that are the model's inputs already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.transforms.processing import Inputs


class PreparedTransforms:
    """Return each observation, an `Inputs`, and each chunk of actions as they are (`families.family.Transforms`).

    Attributes:
        action_dim: Numbers of the model's action.
    """

    def __init__(self, action_dim: int) -> None:
        self.action_dim = action_dim

    def observe(self, observation: Any) -> Inputs:
        return observation

    def resized(self, seen: Inputs) -> Inputs:
        return seen

    def encode(self, seen: Inputs) -> Inputs:
        return seen

    def prepare(self, observation: Any) -> Inputs:
        return observation

    def unnormalize_actions(self, actions: np.ndarray, inputs: Inputs) -> np.ndarray:
        return actions.astype(np.float64)

    def normalize_actions(self, actions: Any, inputs: Inputs, name: str = "prev_chunk") -> np.ndarray:
        """Pad actions (k, n) with zeros to the model's."""
        chunk = np.asarray(actions, np.float32)[:, : self.action_dim]
        return np.pad(chunk, ((0, 0), (0, self.action_dim - chunk.shape[1])))

    def example(self, prompt: str | None = None) -> Mapping[str, Any]:
        raise ConfigError("example: expected no warm-up of a policy whose observations are the model's inputs")


def prompt_tokens(ids: Tensor, mask: Tensor, name: str) -> list[np.ndarray]:
    """Return the tokens int64 (n,) of each prompt without its padding, which follows it or comes before it."""
    rows, kept = ids.cpu().numpy().astype(np.int64), mask.cpu().numpy().astype(bool)
    # Between two kept tokens there is no other: the mask changes at most twice.
    if (np.diff(np.pad(kept, ((0, 0), (1, 1))).astype(int)).clip(0).sum(1) != 1).any():
        raise ConfigError(f"{name}: expected padding on one side of each prompt, got it between tokens")
    return [row[one] for row, one in zip(rows, kept, strict=True)]


def finite_state(state: Tensor, size: int, name: str) -> np.ndarray:
    """Return normalized states (B, n) as float32 (B, size). Raises ObservationError for numbers that are not finite and
    for states that are longer."""
    values = state.float().cpu().numpy()
    if values.ndim != 2 or values.shape[1] > size or not np.isfinite(values).all():
        raise ObservationError(f"{name}: expected finite numbers of shape (B, n), n at most {size}, got {values.shape}")
    return np.pad(values, ((0, 0), (0, size - values.shape[1])))
