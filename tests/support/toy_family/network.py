"""The toy's sizes and network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_accel.nn.network import Network


@dataclass(frozen=True)
class ToyConfig:
    """Sizes. Every family's config has `action_horizon`, `action_dim` and `num_steps`."""

    width: int = 8
    action_horizon: int = 3
    action_dim: int = 2
    num_steps: int = 10


class Toy(Network):
    """frame (B, 4, 4, 3) uint8 → latents (B, 4, width) → actions (B, H, A), by Euler steps towards a linear target."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.encoder, self.head = nn.Linear(12, width), nn.Linear(width + 2, config.action_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.weight.dtype

    def encode(self, frame: Tensor, mask: Tensor) -> Tensor:
        """Return latents of the four rows of a frame; `mask` (B, 4) float32 is 0 for padding."""
        return torch.tanh(self.encoder(frame.flatten(2).to(self.dtype) / 255)) * mask[..., None].to(self.dtype)

    def act(self, noise: Tensor, latents: Tensor, mask: Tensor, joints: Tensor, steps: int) -> Tensor:
        """Return normalized actions (B, H, A) float32 from noise of the same shape and joints (B, 2)."""
        mean = latents.sum(1) / mask.sum(1, keepdim=True).to(self.dtype)
        target = self.head(torch.cat((mean, joints.to(self.dtype)), 1)).float()[:, None]
        for step in range(steps):
            noise = noise + (target - noise) / (steps - step + 1)
        return noise
