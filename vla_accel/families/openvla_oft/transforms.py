"""Observations to OpenVLA-OFT's inputs and its outputs to robot actions, as openvla-oft's evaluation (MIT) does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_accel.errors import ConfigError
from vla_accel.kernels.image.resize import fit, fit_of
from vla_accel.pictures import Cameras, CentreCrop
from vla_accel.transforms.images import filtered, to_uint8
from vla_accel.transforms.observations import Observed
from vla_accel.transforms.processing import Inputs, PromptTransforms, ScalingTransforms
from vla_accel.transforms.tokenizer import checked_length, checked_prompt

BOS, EMPTY = 1, 29_871
"""Llama's first token, and its token of an empty word, with which every prompt ends."""
CROP = float(np.sqrt(np.float32(0.9)))
"""The part of each side that is left of an image: nine tenths of its area."""
CAMERA = (256, 256)
"""Height and width of LIBERO's images."""


def centre_crop(image: np.ndarray, method: CentreCrop) -> np.ndarray:
    """Return uint8 (H, W, 3) resized and cropped on the host, as the device does it."""
    out = torch.empty(method.size, method.size, 3, dtype=torch.uint8)
    fit(torch.tensor(image), fit_of(*image.shape[:2], method.size, method, out.device), out)
    return out.numpy()


@dataclass(frozen=True, kw_only=True)
class OftProcessor(ScalingTransforms, PromptTransforms):
    """openvla-oft's transforms.

    Attributes:
        side: Of the model's images, pixels.
        state_dim: Numbers of the model's state; 0 for a model without one.
        gripper: The number of the action that becomes -1 (open) above a half and 1 (closed) below; None for none.
        before: Side of the square that cameras become first by Pillow's bicubic filter; None for none.
    """

    side: int
    state_dim: int
    gripper: int | None = None
    before: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dim not in (0, self.preset.state_dim):
            raise ConfigError(f"preset.state_dim: expected the model's {self.state_dim}, got {self.preset.state_dim}")
        for name in ("optional_images", "delta_actions", "flipped", "gripper_dims"):
            if own := getattr(self.preset, name):
                raise ConfigError(f"preset.{name}: expected none for this model, got {[*own]}")

    @property
    def image_size(self) -> int:
        """Side of the images that clients send, pixels."""
        return CAMERA[0]

    @property
    def image_shape(self) -> tuple[int, int]:
        return CAMERA

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen, method = self._reader.read(observation), CentreCrop(self.side, CROP)
        images = tuple(to_uint8(image, key) for key, image in seen.views.items())
        if self.before is not None:
            kept = {(self.side, self.side), (self.before, self.before)}
            images = tuple(
                image if image.shape[:2] in kept else filtered(image, self.before, self.before, bicubic=True)
                for image in images
            )
        sizes = tuple((image.shape[0], image.shape[1]) for image in images)
        return replace(seen, images=images, cameras=Cameras(sizes, method))

    def resized(self, seen: Observed) -> Observed:
        if seen.cameras is None or not isinstance(seen.cameras.method, CentreCrop):
            return seen
        images = tuple(centre_crop(image, seen.cameras.method) for image in seen.images)
        return replace(seen, images=images, cameras=None)

    def encode(self, seen: Observed) -> Inputs:
        prompt = checked_prompt(seen.prompt, self.preset.prompt)
        tokens = self._cached(prompt, lambda: self._tokenized(prompt))
        normalised = self.state.normalise(seen.state).clip(-1.0, 1.0)
        state = self._padded_state(normalised, self.state_dim, seen.state)
        return Inputs(seen.images, tokens, state, seen.state, seen.cameras)

    def unnormalize_actions(self, actions: np.ndarray, inputs: Inputs) -> np.ndarray:
        """Convert the model's actions (H, action_dim) to the robot's, float64."""
        robot = super().unnormalize_actions(actions, inputs)
        if self.gripper is not None:
            robot[:, self.gripper] = -np.sign(2.0 * robot[:, self.gripper] - 1.0)
        return robot

    def _model_actions(self, actions: Any, inputs: Inputs, name: str) -> np.ndarray:
        robot = super()._model_actions(actions, inputs, name)
        if self.gripper is not None:
            robot[:, self.gripper] = (1.0 - robot[:, self.gripper]) / 2.0
        return robot

    def _tokenized(self, prompt: str) -> np.ndarray:
        text = f"In: What action should the robot take to {prompt.lower()}?\nOut:"
        ids = self.tokenizer.encode(text, add_bos=True)
        return checked_length(
            ids if ids[-1] == EMPTY else [*ids, EMPTY], prompt, self.max_token_len, self.preset.prompt
        )
