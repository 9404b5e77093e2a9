"""Image autoencoders as plain encoder and decoder modules, exact against diffusers and ready for export.

Reads `AutoencoderKLQwenImage` (RMS norms, causal 3-D convolutions) and `AutoencoderKL` (group norms). For one image
every causal convolution sees a single frame: all of its temporal padding is zero, so it equals a 2-D convolution with
the last temporal slice of its kernel, and a third of the arithmetic. Quantisation convolutions are inside. Knows
nothing of engines, sizes or sampling.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import CheckpointError

Kind = Literal["qwen", "kl"]
AUTOENCODERS: dict[str, Kind] = {"AutoencoderKLQwenImage": "qwen", "AutoencoderKL": "kl"}
"""diffusers' classes."""
SCALE = 8
"""Pixels a side of one latent."""


class ChannelRms(nn.Module):
    """Qwen-Image's norm: each pixel's channels to unit length, times sqrt(C) * gamma. x (B, C, H, W)."""

    def __init__(self, gamma: Tensor) -> None:
        super().__init__()
        self.gamma = nn.Parameter(gamma.detach().reshape(-1).clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        unit = F.normalize(wide, dim=1).to(x.dtype)
        return unit * self.gamma.numel() ** 0.5 * self.gamma[:, None, None]


Norm = ChannelRms | nn.GroupNorm


class ResBlock(nn.Module):
    """norm, SiLU, 3x3 convolution, twice; plus the input, through a 1x1 convolution where the width changes."""

    def __init__(self, norm1: Norm, conv1: nn.Conv2d, norm2: Norm, conv2: nn.Conv2d, shortcut: nn.Conv2d | None):
        super().__init__()
        self.norm1, self.conv1, self.norm2, self.conv2, self.shortcut = norm1, conv1, norm2, conv2, shortcut

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (x if self.shortcut is None else self.shortcut(x))


class SpatialAttention(nn.Module):
    """Single-head self-attention over all pixels; q, k and v are one product. x (B, C, H, W)."""

    def __init__(self, norm: Norm, qkv: nn.Linear, proj: nn.Linear) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = norm, qkv, proj

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens)[:, None].chunk(3, dim=-1)
        out = self.proj(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + out.transpose(1, 2).reshape(x.shape)


class Downsample(nn.Module):
    """A row and a column of zeros at the far edges, then a 3x3 convolution of stride 2."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Every pixel doubled in both directions, then a 3x3 convolution."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Half(nn.Module):
    """One half of an autoencoder: a first convolution, blocks, norm, SiLU, a last convolution.

    Encoder: image (B, 3, H, W) in -1..1 to moments (B, 2 z, H/8, W/8): mean, then log variance. Decoder: latents
    (B, z, H/8, W/8) to image (B, 3, H, W). With `frames` both ends have a frame axis of length 1 after the channels,
    as diffusers has for Qwen-Image. `first` and `last` are the 1x1 quantisation convolutions, if any. With `clamp`
    the output is held to -1..1.
    """

    def __init__(
        self,
        conv_in: nn.Conv2d,
        blocks: list[nn.Module],
        norm_out: Norm,
        conv_out: nn.Conv2d,
        *,
        first: nn.Conv2d | None = None,
        last: nn.Conv2d | None = None,
        frames: bool = False,
        clamp: bool = False,
    ) -> None:
        super().__init__()
        self.conv_in, self.norm_out, self.conv_out = conv_in, norm_out, conv_out
        self.blocks = nn.ModuleList(blocks)
        self.first, self.last = first, last
        self.frames, self.clamp = frames, clamp

    @property
    def dtype(self) -> torch.dtype:
        return self.conv_in.weight.dtype

    @property
    def channels(self) -> tuple[int, int]:
        """Channels in and out."""
        return (self.first or self.conv_in).in_channels, (self.last or self.conv_out).out_channels

    def forward(self, x: Tensor) -> Tensor:
        # Not squeeze: an exported graph must keep four axes for every size.
        x = x[:, :, 0] if self.frames else x
        if self.first is not None:
            x = self.first(x)
        x = self.conv_in(x)
        for block in self.blocks:
            x = block(x)
        x = self.conv_out(F.silu(self.norm_out(x)))
        if self.last is not None:
            x = self.last(x)
        if self.clamp:
            x = x.clamp(-1.0, 1.0)
        return x[:, :, None] if self.frames else x


def autoencoder_kind(vae: Any) -> Kind:
    """Which of the two families a diffusers autoencoder is. Raises CheckpointError for any other."""
    if (name := type(vae).__name__) not in AUTOENCODERS:
        raise CheckpointError(f"autoencoder: expected one of {', '.join(AUTOENCODERS)}, got {name}")
    return AUTOENCODERS[name]


def split_autoencoder(vae: Any) -> tuple[Half, Half]:
    """(encoder, decoder) from a diffusers autoencoder, in its dtype and on its device.

    Weights are shared where the shape stays; call `.to(dtype)` on the result to convert. Raises CheckpointError for
    an autoencoder with parts that are not known here.
    """
    builder = _QWEN if autoencoder_kind(vae) == "qwen" else _KL
    encoder, decoder = builder.encoder(vae), builder.decoder(vae)
    return encoder.eval().requires_grad_(False), decoder.eval().requires_grad_(False)


def _conv2d(conv: nn.Conv2d | nn.Conv3d) -> nn.Conv2d:
    """The 2-D convolution that a causal 3-D one is for a single frame; a 2-D one as it is."""
    if isinstance(conv, nn.Conv2d):
        return conv
    # Causal padding puts every frame before the only one to zero; spatial padding is kept by the diffusers module
    # beside the convolution, in the order of F.pad: (left, right, top, bottom, front, back).
    left, right, top, bottom = conv._padding[:4]  # type: ignore[attr-defined]
    if left != right or top != bottom:
        raise CheckpointError(f"autoencoder: expected symmetric padding, got {conv._padding}")
    _, height, width = conv.kernel_size
    with torch.device(conv.weight.device):
        flat = nn.Conv2d(
            conv.in_channels,
            conv.out_channels,
            (height, width),
            stride=tuple(conv.stride[1:]),  # type: ignore[arg-type]
            padding=(top, left),  # pyright: ignore[reportArgumentType]
            dtype=conv.weight.dtype,
        )
    with torch.no_grad():
        flat.weight.copy_(conv.weight[:, :, -1])
        assert flat.bias is not None and conv.bias is not None
        flat.bias.copy_(conv.bias)
    return flat


def _linear(weights: list[Tensor], biases: list[Tensor]) -> nn.Linear:
    weight = torch.cat([w.detach().flatten(1) for w in weights])
    with torch.device(weight.device):
        linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(torch.cat([b.detach() for b in biases]))
    return linear


class _QWEN:
    """Reading `AutoencoderKLQwenImage`."""

    @staticmethod
    def encoder(vae: Any) -> Half:
        part = vae.encoder
        blocks = [_QWEN.block(b) for b in part.down_blocks] + _QWEN.mid(part.mid_block)
        return _QWEN.half(part, blocks, last=_conv2d(vae.quant_conv))

    @staticmethod
    def decoder(vae: Any) -> Half:
        part = vae.decoder
        blocks = _QWEN.mid(part.mid_block)
        for stage in part.up_blocks:
            blocks += [_QWEN.block(b) for b in (*stage.resnets, *(stage.upsamplers or ()))]
        return _QWEN.half(part, blocks, first=_conv2d(vae.post_quant_conv), clamp=True)

    @staticmethod
    def half(part: Any, blocks: list[nn.Module], **options: Any) -> Half:
        norm = ChannelRms(part.norm_out.gamma)
        return Half(_conv2d(part.conv_in), blocks, norm, _conv2d(part.conv_out), frames=True, **options)

    @staticmethod
    def mid(part: Any) -> list[nn.Module]:
        blocks = [_QWEN.block(part.resnets[0])]
        for attention, resnet in zip(part.attentions, part.resnets[1:], strict=True):
            blocks += [_QWEN.block(attention), _QWEN.block(resnet)]
        return blocks

    @staticmethod
    def block(part: Any) -> nn.Module:
        name = type(part).__name__
        if name == "QwenImageResidualBlock":
            shortcut = None if isinstance(part.conv_shortcut, nn.Identity) else _conv2d(part.conv_shortcut)
            norms = ChannelRms(part.norm1.gamma), ChannelRms(part.norm2.gamma)
            return ResBlock(norms[0], _conv2d(part.conv1), norms[1], _conv2d(part.conv2), shortcut)
        if name == "QwenImageAttentionBlock":
            qkv = _linear([part.to_qkv.weight], [part.to_qkv.bias])
            return SpatialAttention(ChannelRms(part.norm.gamma), qkv, _linear([part.proj.weight], [part.proj.bias]))
        # The temporal convolutions of a resampler run from the second frame on only.
        if name == "QwenImageResample" and part.mode.startswith("downsample"):
            return Downsample(part.resample[1])
        if name == "QwenImageResample" and part.mode.startswith("upsample"):
            return Upsample(part.resample[1])
        raise CheckpointError(f"Qwen-Image autoencoder: unknown block {name}")


class _KL:
    """Reading `AutoencoderKL`."""

    @staticmethod
    def encoder(vae: Any) -> Half:
        part = vae.encoder
        blocks: list[nn.Module] = []
        for stage in part.down_blocks:
            blocks += [_KL.resnet(r) for r in stage.resnets]
            for sampler in stage.downsamplers or ():
                if sampler.padding != 0:
                    raise CheckpointError(f"autoencoder: expected a downsampler that pads itself, got {sampler}")
                blocks.append(Downsample(sampler.conv))
        blocks += _KL.mid(part.mid_block)
        return Half(part.conv_in, blocks, part.conv_norm_out, part.conv_out, last=vae.quant_conv)

    @staticmethod
    def decoder(vae: Any) -> Half:
        part = vae.decoder
        blocks = _KL.mid(part.mid_block)
        for stage in part.up_blocks:
            blocks += [_KL.resnet(r) for r in stage.resnets]
            blocks += [Upsample(s.conv) for s in stage.upsamplers or ()]
        return Half(part.conv_in, blocks, part.conv_norm_out, part.conv_out, first=vae.post_quant_conv)

    @staticmethod
    def mid(part: Any) -> list[nn.Module]:
        blocks: list[nn.Module] = [_KL.resnet(part.resnets[0])]
        for attention, resnet in zip(part.attentions, part.resnets[1:], strict=True):
            if attention is not None:
                blocks.append(_KL.attention(attention))
            blocks.append(_KL.resnet(resnet))
        return blocks

    @staticmethod
    def resnet(part: Any) -> ResBlock:
        if type(part).__name__ != "ResnetBlock2D" or part.time_emb_proj is not None or part.output_scale_factor != 1:
            raise CheckpointError(f"autoencoder: unknown residual block {type(part).__name__}")
        return ResBlock(part.norm1, part.conv1, part.norm2, part.conv2, part.conv_shortcut)

    @staticmethod
    def attention(part: Any) -> SpatialAttention:
        if part.heads != 1 or part.group_norm is None or part.rescale_output_factor != 1:
            raise CheckpointError(f"autoencoder: expected one attention head with a group norm, got {part.heads} heads")
        parts = part.to_q, part.to_k, part.to_v
        qkv = _linear([p.weight for p in parts], [p.bias for p in parts])
        return SpatialAttention(part.group_norm, qkv, part.to_out[0])
