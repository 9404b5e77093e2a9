"""lerobot's GR00T N1.7: its processors turn images into patches, and prompts into tokens with a slot for each patch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.attachment.calls import Call
from vla_accel.attachment.lerobot import guidance, pixels
from vla_accel.attachment.prepared import PreparedTransforms, finite_state, prompt_tokens
from vla_accel.attachment.weights import ModuleWeights
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.family import family_named
from vla_accel.families.groot.checkpoint import infer_config, load_groot
from vla_accel.families.groot.releases import N17, release_of
from vla_accel.families.loading import Checkpoint
from vla_accel.nn.qwen_language import Layout
from vla_accel.transforms.processing import Inputs

_MERGED, _PATCH, _FRAMES = 2, 16, 2
"""Qwen3-VL's patches along each side of a token, pixels of a patch, and equal frames of an image."""


class GrootReader:
    """A `GrootPolicy` of lerobot (`calls.Reader`). The embodiment is that of the first batch."""

    method, takes_noise = "predict_action_chunk", False

    def __init__(self, policy: Any, settings: PolicyConfig) -> None:
        self.owner = policy
        self._weights = ModuleWeights(policy, {})
        if (release := release_of(self._weights.shapes)) is not N17:
            raise ConfigError(f"policy: expected {N17.title}, got {release and release.title}: load its folder instead")
        self._model, self._name = policy._groot_model, type(policy).__name__
        stated = {name: value for name, value in self._model.config.to_dict().items() if value is not None}
        config = infer_config(self._weights.shapes, stated, self._name)
        steps = int(self._model.action_head.num_inference_timesteps)
        self._config, self._embodiment = replace(config, num_steps=steps), -1
        self._slot = int(self._model.backbone.model.config.image_token_id)
        requested, family = getattr(policy.config, "rtc_config", None), family_named(N17.family)
        rtc = settings.rtc if requested is None else guidance(requested, family, config.action_horizon)
        self.settings = replace(settings, rtc=rtc)
        self.checkpoint = self._checkpoint(0)

    def _checkpoint(self, embodiment: int) -> Checkpoint:
        network = load_groot(self._weights, self._config, embodiment, self._name)
        transforms = PreparedTransforms(self._config.action_dim)
        return Checkpoint(self._name, family_named(N17.family), network, transforms, settings=self.settings)

    def call(
        self,
        batch: Mapping[str, Any],
        *,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        **others: Any,
    ) -> Call:
        """Read a batch (`calls.Reader`)."""
        if unknown := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"{self.method}: expected none of {', '.join(unknown)}")
        numbers = set(batch["embodiment_id"].flatten().tolist())
        if self._embodiment < 0 and len(numbers) == 1:
            (self._embodiment,) = numbers
            self.checkpoint = self._checkpoint(self._embodiment)
        if numbers != {self._embodiment}:
            raise ConfigError(f"embodiment_id: expected {self._embodiment} in every call, got {sorted(numbers)}")
        chunk = None if getattr(self.owner.config, "use_relative_actions", False) else prev_chunk_left_over
        if chunk is not None:
            chunk = chunk if chunk.ndim == 3 else chunk[None]
            used = chunk.abs().sum((0, 2)).nonzero()  # lerobot fills short chunks up with zeros
            chunk = chunk[:, : int(used[-1]) + 1] if len(used) else None
        inputs: list[Any] = self._inputs(batch)
        if chunk is not None and len(chunk) == 1:
            chunk = chunk.expand(len(inputs), -1, -1)
        return Call(inputs, None, chunk, inference_delay or 0)

    def _inputs(self, batch: Mapping[str, Any]) -> list[Inputs]:
        prompts = prompt_tokens(batch["input_ids"], batch["attention_mask"], "attention_mask")
        grids = [tuple(grid) for grid in batch["image_grid_thw"].tolist()]
        if any(frames != 1 for frames, _, _ in grids) or batch.get("pixel_values_videos") is not None:
            raise ConfigError("image_grid_thw: expected images, got videos")
        sizes = [rows * columns for _, rows, columns in grids]
        parts = batch["pixel_values"].split(sizes)
        images = [_image(part, rows, columns) for part, (_, rows, columns) in zip(parts, grids, strict=True)]
        state = batch["state"]
        states = finite_state(state[:, -1] if state.ndim == 3 else state, self._config.state_dim, "state")
        views = len(images) // len(prompts)
        found = []
        for row, (ids, numbers) in enumerate(zip(prompts, states, strict=True)):
            own = grids[row * views : (row + 1) * views]
            tokens = ids[ids != self._slot]
            self._check_places(ids, own, len(tokens))
            found.append(Inputs(tuple(images[row * views : (row + 1) * views]), tokens, numbers, numbers))
        return found

    def _check_places(self, ids: np.ndarray, grids: list[tuple[int, ...]], text: int) -> None:
        """Raise ConfigError if the images of a prompt are not where this package puts them."""
        if len({grid for grid in grids}) != 1:
            raise ConfigError(f"image_grid_thw: expected images of one size, got {grids}")
        _, rows, columns = grids[0]
        layout = Layout(len(grids), (rows // _MERGED, columns // _MERGED), text, self._config.arrangement)
        places = layout.image_rows().cpu().numpy()
        if not np.array_equal(np.flatnonzero(ids == self._slot), np.sort(places)):
            raise ConfigError("input_ids: expected the images where GR00T's own prompts have them")


def _image(patches: Tensor, rows: int, columns: int) -> np.ndarray:
    """Return uint8 (H, W, 3) of an image's normalized patches (rows * columns, 3 * frames * side * side)."""
    blocks = (rows // _MERGED, columns // _MERGED, _MERGED, _MERGED, 3, _FRAMES, _PATCH, _PATCH)
    one = patches.view(blocks)[..., 0, :, :]
    image = one.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * _PATCH, columns * _PATCH)
    return pixels(image.to(torch.float32) * 0.5 + 0.5, "pixel_values")
