"""The observation's part of the conditions of all blocks: one product of a call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.families.diffusion_policy.network import DiffusionPolicy, DiffusionPolicyConfig, filled


class Conditions:
    """`own` (B, n) float32 of the last observations; a block's columns follow those of the block before."""

    def __init__(self, films: Tensor, config: DiffusionPolicyConfig, batch: int) -> None:
        """`films`: as of `weights`."""
        self.films, self.history = films, config.history
        self.condition = torch.zeros(batch, films.shape[1], dtype=films.dtype, device=films.device)
        self.own = torch.zeros(batch, len(films), device=films.device)

    @staticmethod
    def weights(model: DiffusionPolicy, dtype: torch.dtype) -> Tensor:
        """Return the weights (n, condition_dim) of a model, filled up with zeros."""
        names, first = model.unet.names, model.config.time_dim
        films = torch.cat([model.weight(f"unet.{name}.film.weight")[:, first:] for name in names])
        return filled(films).to(dtype).contiguous()

    def update(self, inputs: Mapping[str, Tensor]) -> None:
        """Enqueue the product of `features` (B, V, n) and `state` (B, history, state_dim)."""
        features = inputs["features"].unflatten(1, (self.history, -1)).flatten(2)
        condition = torch.cat((inputs["state"].to(features.dtype), features), 2).flatten(1)
        self.condition[:, : condition.shape[1]] = F.mish(condition)
        self.own.copy_(F.linear(self.condition, self.films))
