"""Stable Diffusion's UNet and text encoder as components for one size, or the UNet for a range of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.images.autoencoder import SCALE
from vla_accel.images.native_unet import NativeUnet
from vla_accel.numeric import round_up

UNET = "UNet2DConditionModel"
TEXT_TOKENS = 77
"""CLIP's context, padding included."""
SMALLEST, LARGEST = 256, 1024
"""Height and width of an engine file, in pixels."""
MOST_IMAGES = 4


class Unet(nn.Module):
    """diffusers' UNet: sample (2 B, 4, H/8, W/8), timestep () int64, encoder_hidden_states (2 B, 77, D) to noise.

    `paired`: the last B samples equal the first B (classifier-free guidance), so the native program computes once.
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


class TextEncoder(nn.Module):
    """ids (B, 77) int64 to CLIP's last hidden state (B, 77, D)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(ids)[0]


class ModuleProgram:
    """A module as a native program: nothing is fused, but a CUDA graph saves its many launches."""

    detail = "the module as it is"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (target,) = outputs.values()
        target.copy_(self.module(*inputs.values()))


def check_size(size: tuple[int, int], multiple: int = SCALE) -> None:
    """Raise ConfigError unless (height, width) in pixels are multiples, as diffusers requires."""
    if any(n % multiple or n < multiple for n in size):
        larger = "x".join(str(max(multiple, round_up(n, multiple))) for n in reversed(size))
        got = f"got {size[1]}x{size[0]}; the smallest that holds it is {larger}"
        raise ConfigError(f"image size: expected height and width in multiples of {multiple}, {got}")


def check_file_size(unet: Unet, size: tuple[int, int]) -> None:
    """Raise ConfigError for a size that an engine file of `build-unet` does not have."""
    check_size(size, SCALE * unet.multiple)
    if not all(SMALLEST <= n <= LARGEST for n in size):
        expected = f"expected {SMALLEST} to {LARGEST} pixels a side for an engine file"
        raise ConfigError(f"image size: {expected}, got {size[1]}x{size[0]}")


def unet_component(
    unet: Unet, size: tuple[int, int], *, batch: int, dynamic: bool = False, program: NativeUnet | None = None
) -> Component:
    """Return `unet` for one size.

    Args:
        size: (height, width) in pixels, multiples of 8.
        batch: images, times two with guidance.
        dynamic: batch, height and width range over what an engine file serves; the shape is then the example.
        program: the native program of another size, whose weights all sizes share.
    """
    check_size(size)
    batches = {0: (1, 2 * MOST_IMAGES)} if dynamic else {}
    ranges = {**batches, **({d: (SMALLEST // SCALE, LARGEST // SCALE) for d in (2, 3)} if dynamic else {})}
    sides = size[0] // SCALE, size[1] // SCALE
    states = (batch, TEXT_TOKENS, unet.config.cross_attention_dim)
    return Component(
        "unet",
        unet,
        inputs=(
            TensorSpec("sample", (batch, unet.config.in_channels, *sides), unet.dtype, ranges),
            TensorSpec("timestep", (), torch.int64),
            TensorSpec("encoder_hidden_states", states, unet.dtype, batches),
        ),
        outputs=(TensorSpec("noise", (batch, unet.config.out_channels, *sides), unet.dtype, ranges),),
        native=lambda _: program or NativeUnet(unet),
    )


def text_component(encoder: Any, batch: int) -> Component:
    """Return `text_encoder` for a fixed number of prompts."""
    module = TextEncoder(encoder)
    tokens, width = encoder.config.max_position_embeddings, encoder.config.hidden_size
    return Component(
        "text_encoder",
        module,
        inputs=(TensorSpec("ids", (batch, tokens), torch.int64),),
        outputs=(TensorSpec("states", (batch, tokens, width), next(encoder.parameters()).dtype),),
        native=lambda _: ModuleProgram(module),
    )
