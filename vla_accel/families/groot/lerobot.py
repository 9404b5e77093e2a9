"""lerobot's own GR00T N1.7 as a baseline: used where it is installed (`lerobot` 0.6.1 from the package index, on Python
3.12; CONTRIBUTING has what it needs)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import DependencyError

MODES: dict[str, str | None] = {"lerobot-eager": None, "lerobot-compile": "default"}
"""Names that `bench` knows, with torch.compile's mode."""
_LEAD, _END = (151_644, 872, 198), (151_645, 198)
_TEXT = 15
"""Tokens of an instruction such as the stand-in's."""


def sampler(horizon: int, device: str, name: str, steps: int) -> Callable[[Mapping[str, Any]], Any]:
    """`infer(observation)` of one of `MODES`. Raises DependencyError without lerobot."""
    return _model(horizon, device).sampler(MODES[name], steps)


@functools.lru_cache(maxsize=1)
def _model(horizon: int, device: str) -> _Lerobot:
    return _Lerobot(horizon, device)


class _Lerobot:
    """lerobot's `GR00TN17` with random weights, as its policy runs it: FP32 weights under BF16 autocast. Images are
    normalised and cut into patches on the device, which is less work than its own processor does."""

    def __init__(self, horizon: int, device: str) -> None:
        try:
            from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config
        except ImportError as error:
            raise DependencyError(
                f"lerobot's GR00T is not installed: pip install lerobot==0.6.1 ({error})"
            ) from error  # fmt: skip
        self.device = torch.device(device)
        with self.device:
            model = GR00TN17(GR00TN17Config(action_horizon=horizon), load_backbone_weights=False)
        self.model: Any = model.float().eval()
        self.image: int = self.model.backbone.model.config.image_token_id

    def sampler(self, mode: str | None, steps: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """`infer(observation)` through eager code, or torch.compile in `mode`."""
        method = self.model.get_action
        call = method if mode is None else torch.compile(method, mode=mode)

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            views = np.stack([v for k, v in observation.items() if "image" in k])
            self.model.action_head.num_inference_timesteps = steps
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                found = call(self._inputs(views, observation["observation/state"]))
            return {"actions": found["action_pred"].float().cpu().numpy()}

        return infer

    def _inputs(self, views: np.ndarray, state: np.ndarray) -> dict[str, Tensor]:
        count, height, width = views.shape[:3]
        slots = [self.image] * (height * width // 1024)
        ids = [*_LEAD, *([151_652, *slots, 151_653] * count), *range(1000, 1000 + _TEXT), *_END]
        tokens = torch.tensor([ids], device=self.device)
        pixels = torch.from_numpy(views).to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        # Qwen's rows: every frame twice, in blocks of 2 x 2 patches of 16 pixels.
        split = pixels[:, None].expand(-1, 2, -1, -1, -1).reshape(count, 2, 3, height // 32, 2, 16, width // 32, 2, 16)
        padded = np.zeros((1, 1, self.model.config.max_state_dim), np.float32)
        padded[0, 0, : len(state)] = state
        return {
            "input_ids": tokens, "attention_mask": torch.ones_like(tokens),
            "pixel_values": split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * height * width // 256, -1),
            "image_grid_thw": torch.tensor([[1, height // 16, width // 16]] * count, device=self.device),
            "state": torch.from_numpy(padded).to(self.device),
            "embodiment_id": torch.full((1,), 2, device=self.device),
        }  # fmt: skip
