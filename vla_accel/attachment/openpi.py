"""openpi's PyTorch model, `PI0Pytorch`: its inputs are observations that openpi's transforms have prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vla_accel.attachment.batches import finite_state, pixels, prompt_tokens
from vla_accel.attachment.calls import Call, check_settings
from vla_accel.attachment.prepared import PreparedTransforms
from vla_accel.attachment.weights import ModuleWeights
from vla_accel.checkpoints.paligemma import dialect_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.family import family_named
from vla_accel.families.loading import Checkpoint
from vla_accel.families.pi0.checkpoint import Stated, infer_config, load_weights
from vla_accel.transforms.processing import Inputs

_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


class OpenpiReader:
    """openpi's π0 or π0.5 (`calls.Reader`). The denoising steps are those of the configuration or the first call."""

    method, takes_noise = "sample_actions", True

    def __init__(self, model: Any, settings: PolicyConfig) -> None:
        self.owner, self.settings = model, settings
        weights, name, config = ModuleWeights(model), type(model).__name__, model.config
        stated = Stated(
            kind="pi05" if config.pi05 else "pi0",
            action_dim=config.action_dim,
            action_horizon=config.action_horizon,
            max_token_len=config.max_token_len,
        )
        self._config = infer_config(weights.shapes, dialect_of(weights.shapes)[1], stated, name)
        family = family_named(self._config.kind)
        check_settings(family, settings, chunking=False)
        network, transforms = load_weights(weights, self._config, name), PreparedTransforms(config.action_dim)
        self.checkpoint = Checkpoint(name, family, network, transforms, settings=settings)
        self._steps = settings.num_steps

    def call(self, device: Any, observation: Any, noise: Tensor | None = None, num_steps: int = 10) -> Call:
        """Read an observation (`calls.Reader`)."""
        if self._steps is None:
            self._steps, self.settings = num_steps, replace(self.settings, num_steps=num_steps)
        if num_steps != self._steps:
            raise ConfigError(
                f"num_steps: expected {self._steps}, as in the configuration or the first call, got {num_steps}"
            )
        images, side = [], self._config.vision.image_size
        for key in _CAMERAS:
            masks = set(observation.image_masks[key].flatten().tolist())
            if len(masks) > 1:
                raise ConfigError(f"image_masks: {key}: expected one value for the whole batch, got both")
            if masks != {True}:
                continue
            image = observation.images[key]
            image = image if image.shape[1] == 3 else image.movedim(-1, 1)
            if tuple(image.shape[1:]) != (3, side, side):
                raise ConfigError(f"{key}: expected images of {side} x {side}, got {tuple(image.shape[1:])}")
            images.append(pixels(image if image.dtype == torch.uint8 else (image.float() + 1.0) / 2.0, key))
        mask = observation.tokenized_prompt_mask
        prompts = prompt_tokens(observation.tokenized_prompt, mask, "tokenized_prompt_mask")
        states = finite_state(observation.state, self._config.action_dim, "state")
        rows: list[Any] = [
            Inputs(tuple(view[row] for view in images), tokens, state, state)
            for row, (tokens, state) in enumerate(zip(prompts, states, strict=True))
        ]
        return Call(rows, noise)
