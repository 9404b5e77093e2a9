"""lerobot's MolmoAct2: its processors turn images into patches, and prompts into tokens with those of the images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vla_accel.attachment.batches import pixels, prompt_tokens
from vla_accel.attachment.calls import enabled_rtc, saved_config
from vla_accel.attachment.prepared import PreparedReader, one_length, one_number
from vla_accel.attachment.weights import ModuleWeights
from vla_accel.checkpoints.lerobot import read_settings
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.molmoact2.checkpoint import (
    MODEL_TYPE,
    authors_folder,
    hidden_tokens,
    load_network,
    merged,
    sees_whole_prompt,
)
from vla_accel.families.molmoact2.network import MolmoAct2, MolmoAct2Config
from vla_accel.families.molmoact2.robot import with_steps
from vla_accel.transforms.processing import Inputs

_NO_STATE = np.zeros(0, np.float32)
"""The state is in the prompt."""


class MolmoAct2Reader(PreparedReader):
    """A `MolmoAct2Policy` of lerobot (`calls.Reader`)."""

    title, known = "action_dim_is_pad", ("tokenizer",)

    def __init__(self, policy: Any, settings: PolicyConfig) -> None:
        self._stated = policy.model.config
        with saved_config(policy) as folder:
            path = folder / "config.json"
            content = read_settings(path, (MODEL_TYPE,))
            self._weights = merged(content, ModuleWeights(policy), path)
            _, config = authors_folder(content, path, settings)
            # lerobot's main branch hides tokens as the authors do unless the policy comes from a folder.
            guided = enabled_rtc(policy) is not None or getattr(policy, "_checkpoint_action_mode", None) is not None
            self._whole = guided and sees_whole_prompt(content)
            self._sizes = with_steps(replace(config, action_horizon=policy.config.chunk_size), content, path)
        super().__init__(policy, settings, MODEL_TYPE)

    def _network(self, batch: Mapping[str, Any] | None) -> MolmoAct2:
        config = self._sizes
        if batch is not None:
            config = replace(self._laid_out(self._prompts(batch)[0]), real_actions=self.variant)
        return load_network(self._weights, config, type(self.owner).__name__, "model.")

    def _laid_out(self, ids: np.ndarray) -> MolmoAct2Config:
        """Return the sizes with where the images are in prompts like this one, and which tokens the expert skips."""
        starts = np.flatnonzero(ids == self._sizes.markers.start)
        if not len(starts):
            raise ConfigError("input_ids: expected images in the prompt, got none")
        made = replace(self._sizes, hidden=self._hidden(ids))
        if len(starts) == 1:
            return made
        return replace(made, edge=int(starts[0]), between=int(starts[1] - starts[0]) - made.image_tokens)

    def _hidden(self, ids: np.ndarray) -> tuple[int, ...]:
        eos = self._stated.eos_token_id if self._stated.action_mode == "both" and not self._whole else None
        return hidden_tokens(ids.tolist(), eos)

    def _variant(self, batch: Mapping[str, Any]) -> int:
        columns = batch.get("action_dim_is_pad", torch.zeros(1, self._sizes.action_dim, dtype=torch.bool))
        real = one_number((~columns).sum(-1), self.title)
        if columns[:, :real].any():
            raise ConfigError(f"{self.title}: expected the columns of padding last, got them before others")
        return real

    def _prompts(self, batch: Mapping[str, Any]) -> list[np.ndarray]:
        mask = batch.get("attention_mask")
        mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
        prompts, positions = prompt_tokens(batch["input_ids"], mask, "attention_mask"), batch.get("position_ids")
        if positions is None:
            # lerobot 0.6.1 counts the positions of shorter prompts from their padding.
            return one_length(prompts, "attention_mask")
        if not torch.equal(positions, (mask.long().cumsum(-1) - 1).clamp(min=0)):
            raise ConfigError("position_ids: expected the positions of each prompt from 0 on, without its padding")
        return prompts

    def _inputs(self, batch: Mapping[str, Any]) -> list[Inputs]:
        if batch.get("pixel_values_videos") is not None:
            raise ConfigError("pixel_values_videos: expected images, got videos")
        vision, prompts, values = self.config.vision, self._prompts(batch), batch["pixel_values"]
        side, patch, views = vision.side, vision.patch_size, len(values) // len(prompts)
        patches = values.float().view(len(values), side, side, patch, patch, 3)
        images = pixels(patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3) * 0.5 + 0.5, "pixel_values")
        frame, found = np.array(self.config.frame()), []
        for row, ids in enumerate(prompts):
            is_image = self.config.is_image(views, len(ids)).numpy()
            text = ids[~is_image]
            if not np.array_equal(ids[is_image], np.tile(frame, views)) or self._hidden(text) != self.config.hidden:
                raise ConfigError("input_ids: expected the images where MolmoAct2's own prompts have them")
            found.append(Inputs(tuple(images[row * views : (row + 1) * views]), text, _NO_STATE, _NO_STATE))
        return found
