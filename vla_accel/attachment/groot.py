"""lerobot's GR00T N1.7 and N1.5: their processors turn images into patches or pixels, and prompts into tokens with a
slot for each image token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.attachment.batches import finite_state, pixels, prompt_tokens
from vla_accel.attachment.prepared import PreparedReader, one_length, one_number
from vla_accel.attachment.weights import ModuleWeights
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.groot.checkpoint import infer_config, load_groot
from vla_accel.families.groot.network import Groot
from vla_accel.families.groot.releases import N15, N17, release_of
from vla_accel.families.groot.settings import flat_config
from vla_accel.nn.qwen_language import Arrangement, Layout
from vla_accel.transforms.processing import Inputs

_MERGED, _PATCH, _FRAMES = 2, 16, 2
"""Qwen3-VL's patches along each side of a token, pixels of a patch, and equal frames of an image."""
_N15 = ("backbone_cfg", "action_head_cfg", "action_horizon", "action_dim")


class GrootReader(PreparedReader):
    """A `GrootPolicy` of lerobot (`calls.Reader`)."""

    title = "embodiment_id"

    def __init__(self, policy: Any, settings: PolicyConfig) -> None:
        self._weights, name = ModuleWeights(policy), type(policy).__name__
        release = release_of(self._weights.shapes)
        if release not in (N17, N15):
            got = release and release.title
            raise ConfigError(f"policy: expected {N17.title} or {N15.title}, got {got}: load its folder instead")
        self._release, model = release, policy._groot_model
        backbone, stated = model.backbone, model.config.to_dict()
        if release is N15:
            stated = flat_config({key: stated[key] for key in _N15}, name, release)
            self._slot, self._prefix = int(backbone.eagle_model.image_token_index), "eagle_"
        else:
            self._slot, self._prefix = int(backbone.model.config.image_token_id), ""
        stated = {name: value for name, value in stated.items() if value is not None}
        steps = int(model.action_head.num_inference_timesteps)
        self._sizes = replace(infer_config(self._weights.shapes, stated, name), num_steps=steps)
        super().__init__(policy, settings, release.family)

    def _network(self, batch: Mapping[str, Any] | None) -> Groot:
        if batch is not None:
            self._sizes = replace(self._sizes, arrangement=self._arrangement(self._prompts(batch)[0]))
        return load_groot(self._weights, self._sizes, self.variant or 0, type(self.owner).__name__)

    def _arrangement(self, tokens: np.ndarray) -> Arrangement:
        """Return where the images are in prompts like this one."""
        at = np.flatnonzero(tokens == self._slot)
        gaps, known = np.diff(at)[np.diff(at) > 1] - 1, self._sizes.arrangement
        if not len(at):
            return known
        return replace(known, edge=int(at[0]), between=int(gaps[0]) if len(gaps) else known.between)

    def _variant(self, batch: Mapping[str, Any]) -> int:
        return one_number(batch["embodiment_id"], "embodiment_id")

    def _rtc(self, policy: Any) -> Any:
        # Its execution horizon counts even if it is switched off.
        return getattr(policy.config, "rtc_config", None)

    def _previous(self, chunk: Tensor) -> Tensor | None:
        if getattr(self.owner.config, "use_relative_actions", False):
            return None
        chunk = chunk if chunk.ndim == 3 else chunk[None]
        used = chunk.abs().sum((0, 2)).nonzero()  # lerobot fills short chunks up with zeros
        return chunk[:, : int(used[-1]) + 1] if len(used) else None

    def _inputs(self, batch: Mapping[str, Any]) -> list[Inputs]:
        prompts, images = self._prompts(batch), self._images(batch)
        state = batch["state"]
        states = finite_state(state[:, -1] if state.ndim == 3 else state, self.config.state_dim, "state")
        views, found = len(images) // len(prompts), []
        for row, (tokens, numbers) in enumerate(zip(prompts, states, strict=True)):
            own, text = tuple(images[row * views : (row + 1) * views]), tokens[tokens != self._slot]
            self._check_layout(tokens, own, len(text))
            found.append(Inputs(own, text, numbers, numbers))
        return found

    def _prompts(self, batch: Mapping[str, Any]) -> list[np.ndarray]:
        ids, mask = (self._prefix + name for name in ("input_ids", "attention_mask"))
        prompts = prompt_tokens(batch[ids], batch[mask], mask)
        # In N1.5 the padding of shorter prompts changes the actions.
        return one_length(prompts, mask) if self._release is N15 else prompts

    def _images(self, batch: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the images uint8 (H, W, 3) of all prompts in order."""
        values = batch[f"{self._prefix}pixel_values"]
        if self._release is N15:
            return list(pixels(values.float() * 0.5 + 0.5, "eagle_pixel_values"))
        grids = batch["image_grid_thw"].tolist()
        if any(frames != 1 for frames, _, _ in grids) or batch.get("pixel_values_videos") is not None:
            raise ConfigError("image_grid_thw: expected images, got videos")
        parts = values.split([rows * columns for _, rows, columns in grids])
        return [_image(part, rows, columns) for part, (_, rows, columns) in zip(parts, grids, strict=True)]

    def _check_layout(self, tokens: np.ndarray, images: tuple[np.ndarray, ...], text: int) -> None:
        """Raise ConfigError if the images of a prompt are not where this package puts them."""
        sizes = {(image.shape[0], image.shape[1]) for image in images}
        if len(sizes) != 1:
            raise ConfigError(f"pixel_values: expected images of one size, got {sorted(sizes)}")
        grid = self.config.vision.grid(*sizes.pop())
        rows = Layout(len(images), grid, text, self.config.arrangement).image_rows().numpy()
        if not np.array_equal(np.flatnonzero(tokens == self._slot), np.sort(rows)):
            raise ConfigError(f"{self._prefix}input_ids: expected the images where GR00T's own prompts have them")


def _image(patches: Tensor, rows: int, columns: int) -> np.ndarray:
    """Return uint8 (H, W, 3) of an image's normalized patches (rows * columns, 3 * frames * side * side)."""
    blocks = (rows // _MERGED, columns // _MERGED, _MERGED, _MERGED, 3, _FRAMES, _PATCH, _PATCH)
    one = patches.view(blocks)[..., 0, :, :]
    image = one.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * _PATCH, columns * _PATCH)
    return pixels(image.to(torch.float32) * 0.5 + 0.5, "pixel_values")
