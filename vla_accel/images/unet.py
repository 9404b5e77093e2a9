"""Stable Diffusion's `UNet2DConditionModel` as a module of tensors only, and what is known of its sizes.

The module is diffusers' own, so eager and exported engines compute what diffusers computes. Knows nothing of engines
or schedulers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.errors import CheckpointError

UNET = "UNet2DConditionModel"
TEXT_TOKENS = 77
"""CLIP's context, padding included."""


class Unet(nn.Module):
    """sample (2 B, 4, H/8, W/8), timestep () int64, encoder_hidden_states (2 B, 77, D) to noise like the sample.

    The first B entries are unconditional, the last B conditional, of the same latents (classifier-free guidance);
    `paired` promises that, and lets the native program compute once what both share.
    """

    def __init__(self, unet: nn.Module, *, paired: bool = True) -> None:
        super().__init__()
        if type(unet).__name__ != UNET:
            raise CheckpointError(f"unet: expected a {UNET}, got {type(unet).__name__}")
        self.unet, self.paired = unet, paired

    @property
    def config(self) -> Any:
        return self.unet.config

    @property
    def dtype(self) -> torch.dtype:
        return next(self.unet.parameters()).dtype

    @property
    def multiple(self) -> int:
        """What a latent's height and width are multiples of if every level halves evenly, as in an engine file."""
        return 2 ** (len(self.config.block_out_channels) - 1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return self.unet(sample, timestep, encoder_hidden_states, return_dict=False)[0]
