"""Observations to the inputs of models that read camera frames of one size and the state, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.transforms.images import frames
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.observations import Observed, Reader
from vla_accel.transforms.processing import ScalingTransforms


@dataclass(frozen=True)
class FrameInputs:
    """One observation, ready for the model.

    Attributes:
        images: uint8 (H, W, 3) each: all cameras of the oldest moment, then those of the next one. An image that needed
            no conversion is the observation's own array or a view of it: copy it to keep it.
        state: float32 (history, state_dim), normalised, oldest first.
        raw_state: float64 (state_dim,), the newest, in the robot's units.
    """

    images: tuple[np.ndarray, ...]
    state: np.ndarray
    raw_state: np.ndarray
    cameras: None = None


@dataclass(frozen=True, kw_only=True)
class FrameProcessor(ScalingTransforms):
    """Transforms of camera frames, which keep their size, and of the state. A camera may not be missing.

    Attributes:
        frame_shapes: Height and width of each camera's frames, as the policy was trained.
        cameras: How the images of each camera, in [0, 1], are normalised by channel, in the order of the preset.
        history: Moments that the model reads. Images (k, H, W, 3) and a state (k, state_dim) are the last k of them,
            oldest first; of fewer than `history`, the oldest is repeated.
        first: First row of the model's actions that the robot gets.
        temporal_ensemble: c of the temporal ensembling with which episodes run (`remote.ensemble`); None: without.
    """

    frame_shapes: tuple[tuple[int, int], ...]
    cameras: tuple[Normaliser, ...]
    history: int = 1
    first: int = 0
    temporal_ensemble: float | None = None

    def __post_init__(self) -> None:
        # A camera that the model reads is never masked.
        object.__setattr__(self, "preset", replace(self.preset, optional_images=()))
        super().__post_init__()
        cameras, expected = len(self.preset.images), len(self.cameras)
        if cameras != expected:
            raise ConfigError(f"preset: expected {expected} cameras, as the checkpoint was trained, got {cameras}")
        for key, camera in zip(self.preset.images, self.cameras, strict=True):
            if len(camera.low) != 3:
                raise CheckpointError(f"{key}: expected statistics of 3 channels, got {len(camera.low)}")

    def _make_reader(self) -> Reader:
        return Reader(self.preset, prompted=False, history=self.history)

    @property
    def image_shapes(self) -> tuple[tuple[int, int], ...]:
        return self.frame_shapes

    @property
    def image_size(self) -> int | None:
        """Side of the images if all cameras have the same square ones, else None."""
        (height, width), *others = {*self.frame_shapes}
        return height if not others and height == width else None

    @property
    def pixel_scales(self) -> np.ndarray:
        """float32 (cameras, 2, 3): the mean of each channel and what the rest is divided by, of pixels in [0, 1]."""
        # Minimum and maximum become -1 and 1, mean and deviation 0 and 1.
        scales = [(c.low + c.span / 2, c.span / 2) if c.kind == "quantile" else (c.low, c.span) for c in self.cameras]
        return np.asarray(scales, np.float32)

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen = self._reader.read(observation)
        views = {key: frames(image, key, self.history) for key, image in seen.views.items()}
        for key, shape in zip(self.preset.images, self.frame_shapes, strict=True):
            images, expected = views[key], (*shape, 3)
            if wrong := [image.shape for image in images if image.shape != expected]:
                raise ObservationError(f"{key}: expected shape {expected}, as the policy was trained, got {wrong[0]}")
        states = np.atleast_2d(seen.state)
        if self.history > 1:
            states = self._with_history(states, seen.views)
        images = tuple(view[moment] for moment in range(self.history) for view in views.values())
        return replace(seen, state=states, images=images)

    def _with_history(self, states: np.ndarray, views: Mapping[str, Any]) -> np.ndarray:
        """Repeat the oldest state until there are `history` of them; refuse other counts of images than of states."""
        counts = {key: len(image) if np.ndim(image) == 4 else 1 for key, image in views.items()}
        counts |= {" and ".join(self.preset.state): len(states)}
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{count} of {key}" for key, count in counts.items())
            raise ObservationError(f"observation: expected the same number of time steps for each key, got {found}")
        return np.concatenate([states[:1]] * (self.history - len(states)) + [states])

    def encode(self, seen: Observed) -> FrameInputs:
        normalised = self.state.normalise(self._model_state(seen.state))
        state = self._padded_state(normalised, seen.state.shape[1], seen.state)
        return FrameInputs(seen.images, state, seen.state[-1])

    def returned(self, horizon: int) -> int:
        return horizon - self.first

    def unnormalize_actions(self, actions: np.ndarray, inputs: Any) -> np.ndarray:
        return super().unnormalize_actions(actions[self.first :], inputs)
