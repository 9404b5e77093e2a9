"""Diffusion components: the UNet for one size or a range of them, and the text encoder in front of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, Program, TensorSpec
from vla_accel.config import EngineSpec
from vla_accel.errors import ConfigError
from vla_accel.images.autoencoder import SCALE
from vla_accel.images.native_unet import NativeUnet
from vla_accel.images.unet import TEXT_TOKENS, Unet
from vla_accel.numeric import round_up

SMALLEST, LARGEST = 256, 1024
"""Pixels a side that a dynamic UNet engine takes."""
MOST_IMAGES = 4


def check_size(size: tuple[int, int], multiple: int = SCALE) -> None:
    """Raise ConfigError unless (height, width) in pixels are multiples: of 8, as diffusers wants them."""
    if any(n % multiple or n < multiple for n in size):
        larger = "x".join(str(max(multiple, round_up(n, multiple))) for n in reversed(size))
        raise ConfigError(
            f"image size: expected height and width in multiples of {multiple}, got {size[1]}x{size[0]}; "
            f"the smallest that holds it is {larger}"
        )


def check_file_size(unet: Unet, size: tuple[int, int]) -> None:
    """Raise ConfigError for a size that an engine file of `build-unet` does not have."""
    check_size(size, SCALE * unet.multiple)
    if not all(SMALLEST <= n <= LARGEST for n in size):
        raise ConfigError(
            f"image size: expected {SMALLEST} to {LARGEST} pixels a side for an engine file, got {size[1]}x{size[0]}"
        )


def unet_component(
    unet: Unet, size: tuple[int, int], *, batch: int, dynamic: bool = False, program: NativeUnet | None = None
) -> Component:
    """`unet`: sample (batch, 4, H/8, W/8), timestep () int64, encoder_hidden_states (batch, 77, D) to noise.

    Args:
        size: (height, width) in pixels, multiples of 8.
        batch: images, times two with guidance.
        dynamic: batch, height and width range over what an engine file serves; the shape is then the example.
        program: the native program to use, if one exists for another size: sizes share its weights.

    Raises:
        ConfigError: a size that diffusers does not take.
    """
    check_size(size)
    channels, width = unet.config.in_channels, unet.config.cross_attention_dim
    batches = {0: (1, 2 * MOST_IMAGES)} if dynamic else {}
    sides = {d: (SMALLEST // SCALE, LARGEST // SCALE) for d in (2, 3)} if dynamic else {}
    latents = (batch, channels, size[0] // SCALE, size[1] // SCALE)
    out = (batch, unet.config.out_channels, *latents[2:])
    return Component(
        "unet",
        unet,
        inputs=(
            TensorSpec("sample", latents, unet.dtype, {**batches, **sides}),
            TensorSpec("timestep", (), torch.int64),
            TensorSpec("encoder_hidden_states", (batch, TEXT_TOKENS, width), unet.dtype, batches),
        ),
        outputs=(TensorSpec("noise", out, unet.dtype, {**batches, **sides}),),
        native=lambda _: program or NativeUnet(unet),
    )


class TextEncoder(nn.Module):
    """ids (B, 77) int64 to text states (B, 77, D): CLIP's last hidden state, as Stable Diffusion 1 uses it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(ids)[0]


class ModuleProgram:
    """A module as a native program: nothing is fused, but a CUDA graph takes its many small launches away."""

    detail = "the module as it is"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (target,) = outputs.values()
        target.copy_(self.module(*inputs.values()))


def text_component(encoder: Any, batch: int) -> Component:
    """`text_encoder` for a fixed number of prompts."""
    module = TextEncoder(encoder)
    dtype = next(encoder.parameters()).dtype
    tokens, width = encoder.config.max_position_embeddings, encoder.config.hidden_size

    def native(_: EngineSpec) -> Program:
        return ModuleProgram(module)

    return Component(
        "text_encoder",
        module,
        inputs=(TensorSpec("ids", (batch, tokens), torch.int64),),
        outputs=(TensorSpec("states", (batch, tokens, width), dtype),),
        native=native,
    )
