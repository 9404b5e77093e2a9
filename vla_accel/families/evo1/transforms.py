"""Observations to Evo-1's inputs and its outputs to robot actions.

Source: lerobot 0.6.1's processors and embedder of Evo-1 (Apache-2.0).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.evo1.network import Evo1Config
from vla_accel.nn.qwen_language import Arrangement
from vla_accel.pictures import Cameras, Resampling
from vla_accel.transforms.images import resample, to_uint8
from vla_accel.transforms.observations import Observed
from vla_accel.transforms.processing import Inputs, PromptTransforms, ScalingTransforms
from vla_accel.transforms.tokenizer import Tokenizer, checked_length, checked_prompt

_START, _END, _SLOT = "<img>", "</img>", "<IMG_CONTEXT>"


def prompt_ids(tokenizer: Tokenizer, slots: int, text: str) -> list[int]:
    """Return the tokens of a prompt of so many images, whose own tokens are left out."""
    images = "".join(f"Image-{number}: {_START}{_END}\n" for number in range(1, slots + 1))
    return tokenizer.encode(images + text.strip(), add_bos=False)


def arrangement_of(tokenizer: Tokenizer, slots: int) -> Arrangement:
    """Return where the images are in a prompt. Raises CheckpointError for the tokenizer of another model."""
    start, end = (tokenizer.encode(word, add_bos=False) for word in (_START, _END))
    ids = prompt_ids(tokenizer, slots, "")
    starts = [index for index, token in enumerate(ids) if [token] == start]
    steps = {after - before for before, after in itertools.pairwise(starts)}
    if len(start) != 1 or len(starts) != slots or len(steps) > 1 or any(ids[i + 1 : i + 2] != end for i in starts):
        raise CheckpointError(
            f"tokenizer: expected InternVL's, with one token each for {_START} and {_END}, got another model's: {ids}"
        )
    return Arrangement(starts[0] + 1, steps.pop() if steps else 2, flat=True, slots=slots)


@dataclass(frozen=True)
class Gripper:
    """One number of the actions, which becomes `above` beyond a threshold and `below` up to it."""

    dim: int
    threshold: float
    below: float
    above: float


@dataclass(frozen=True, kw_only=True)
class Evo1Processor(ScalingTransforms, PromptTransforms):
    """lerobot's transforms. The images of missing views are left out; views that are there come first.

    Attributes:
        config: The network's sizes.
        gripper: The gripper's command, if it has two values.
        most_missing: How many cameras may be missing; None: as many as the preset allows.
    """

    config: Evo1Config
    gripper: Gripper | None = None
    most_missing: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        slots, most = self.config.arrangement.slots, self.config.state_dim
        if len(self.preset.images) > slots:
            raise ConfigError(f"preset.images: expected at most the model's {slots}, got {len(self.preset.images)}")
        if self.preset.state_dim > most:
            raise ConfigError(f"state: expected at most the model's {most} numbers, got {self.preset.state_dim}")

    @property
    def image_shape(self) -> tuple[int, int]:
        return self.config.vision.side, self.config.vision.side

    @property
    def _resampling(self) -> Resampling:
        return Resampling(None, self.image_shape)

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen = self._reader.read(observation)
        missing = [key for key in self.preset.images if key not in seen.views]
        if self.most_missing is not None and len(missing) > self.most_missing:
            raise ObservationError(
                f"observation: expected at most {self.most_missing} missing cameras (empty_cameras of config.json, "
                f"without those that lerobot added), got {len(missing)}: {', '.join(missing)}"
            )
        images = tuple(to_uint8(image, key) for key, image in seen.views.items())
        sizes = tuple((image.shape[0], image.shape[1]) for image in images)
        kept = all(self._resampling.keeps(*size) for size in sizes)
        return replace(seen, images=images, cameras=None if kept else Cameras(sizes, self._resampling))

    def resized(self, seen: Observed) -> Observed:
        return replace(seen, images=tuple(resample(i, self._resampling) for i in seen.images), cameras=None)

    def encode(self, seen: Observed) -> Inputs:
        state = self.state.normalise(self._model_state(seen.state))
        prompt = checked_prompt(seen.prompt, self.preset.prompt)
        tokens = self._cached(prompt, lambda: self._tokens(prompt))
        padded = self._padded_state(state, self.config.state_dim, seen.state)
        return Inputs(seen.images, tokens, padded, seen.state, seen.cameras)

    def unnormalize_actions(self, actions: np.ndarray, inputs: Inputs) -> np.ndarray:
        robot = super().unnormalize_actions(actions, inputs)
        if (gripper := self.gripper) is not None:
            above = robot[:, gripper.dim] > gripper.threshold
            robot[:, gripper.dim] = np.where(above, gripper.above, gripper.below)
        return robot

    def _model_actions(self, actions: Any, inputs: Inputs, name: str) -> np.ndarray:
        robot = super()._model_actions(actions, inputs, name)
        if (gripper := self.gripper) is not None:
            values = robot[:, gripper.dim]
            above = abs(values - gripper.above) < abs(values - gripper.below)
            # The usual threshold lies between the 0 and 1 of the training.
            robot[:, gripper.dim] = gripper.threshold + np.where(above, 0.5, -0.5)
        return robot

    def _tokens(self, prompt: str) -> np.ndarray:
        key = self.preset.prompt
        if any(word in prompt for word in (_START, _END, _SLOT)):
            raise ObservationError(f"{key}: expected no special tokens, got {prompt!r:.60}")
        ids = prompt_ids(self.tokenizer, self.config.arrangement.slots, prompt)
        return checked_length(ids, prompt, self.max_token_len, key)
