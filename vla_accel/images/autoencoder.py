"""diffusers' image autoencoders as plain encoder and decoder modules for engines and export.

For one image all temporal padding of a causal 3-D convolution is zero, so it equals a 2-D convolution with the last
temporal slice of its kernel: a third of the arithmetic.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import CheckpointError
from vla_accel.nn.network import weightless

Kind = Literal["qwen", "kl"]
AUTOENCODERS: dict[str, Kind] = {"AutoencoderKLQwenImage": "qwen", "AutoencoderKL": "kl"}
SCALE = 8
"""Pixels per latent, in height and in width."""


class ChannelRms(nn.Module):
    """Qwen-Image's norm of (B, C, H, W): each pixel's channels to unit length, times sqrt(C) * gamma."""

    def __init__(self, gamma: Tensor) -> None:
        super().__init__()
        self.gamma = nn.Parameter(gamma.detach().reshape(-1).clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        unit = F.normalize(wide, dim=1).to(x.dtype)
        return unit * self.gamma.numel() ** 0.5 * self.gamma[:, None, None]


Norm = ChannelRms | nn.GroupNorm


class ResBlock(nn.Module):
    """Norm, SiLU and 3x3 convolution, twice; plus the input, through a 1x1 convolution where the width changes."""

    def __init__(self, norm1: Norm, conv1: nn.Conv2d, norm2: Norm, conv2: nn.Conv2d, shortcut: nn.Conv2d | None):
        super().__init__()
        self.norm1, self.conv1, self.norm2, self.conv2, self.shortcut = norm1, conv1, norm2, conv2, shortcut

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (x if self.shortcut is None else self.shortcut(x))


class SpatialAttention(nn.Module):
    """Single-head self-attention over all pixels of (B, C, H, W); q, k and v are one product."""

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
    (B, z, H/8, W/8) to image (B, 3, H, W). `first` and `last` are 1x1 quantisation convolutions; with `frames` input
    and output have a frame axis of length 1 after the channels.
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
    """Return the kind of a diffusers autoencoder. Raises CheckpointError for another class."""
    if (name := type(vae).__name__) not in AUTOENCODERS:
        raise CheckpointError(f"autoencoder: expected one of {', '.join(AUTOENCODERS)}, got {name}")
    return AUTOENCODERS[name]


def split_autoencoder(vae: Any) -> tuple[Half, Half]:
    """Return (encoder, decoder) of a diffusers autoencoder, with shared weights. Raises CheckpointError."""
    frames = autoencoder_kind(vae) == "qwen"
    encoder, decoder = vae.encoder, vae.decoder
    down = [b for stage in encoder.down_blocks for b in _parts(stage, "downsamplers")] + _middle(encoder)
    up = _middle(decoder) + [b for stage in decoder.up_blocks for b in _parts(stage, "upsamplers")]
    halves = (
        _half(encoder, down, last=_conv2d(vae.quant_conv), frames=frames),
        _half(decoder, up, first=_conv2d(vae.post_quant_conv), frames=frames, clamp=frames),
    )
    for half in halves:
        half.eval().requires_grad_(False)
    return halves


def _half(part: Any, blocks: list[Any], **options: Any) -> Half:
    norm = part.norm_out if options["frames"] else part.conv_norm_out
    made = [_block(block) for block in blocks]
    return Half(_conv2d(part.conv_in), made, _norm(norm), _conv2d(part.conv_out), **options)


def _parts(stage: Any, samplers: str) -> list[Any]:
    """The blocks of one resolution; Qwen-Image's encoder has them in one list without stages."""
    return [*stage.resnets, *(getattr(stage, samplers) or ())] if hasattr(stage, "resnets") else [stage]


def _middle(part: Any) -> list[Any]:
    first, *rest = part.mid_block.resnets
    pairs = zip(part.mid_block.attentions, rest, strict=True)
    return [first, *(block for pair in pairs for block in pair if block is not None)]


def _norm(norm: Any) -> Norm:
    return norm if isinstance(norm, nn.GroupNorm) else ChannelRms(norm.gamma)


def _block(part: Any) -> nn.Module:
    """One block of diffusers as one of ours. Raises CheckpointError for an unknown one."""
    match type(part).__name__:
        case "QwenImageResidualBlock" | "ResnetBlock2D" as name:
            if name == "ResnetBlock2D" and (part.time_emb_proj is not None or part.output_scale_factor != 1):
                raise CheckpointError("autoencoder: unknown residual block with a time embedding or a scale")
            shortcut = None if isinstance(part.conv_shortcut, nn.Identity) else _conv2d(part.conv_shortcut)
            return ResBlock(_norm(part.norm1), _conv2d(part.conv1), _norm(part.norm2), _conv2d(part.conv2), shortcut)
        case "QwenImageAttentionBlock":
            return SpatialAttention(_norm(part.norm), _linear(part.to_qkv), _linear(part.proj))
        case "Attention":
            if part.heads != 1 or part.group_norm is None or part.rescale_output_factor != 1:
                raise CheckpointError(f"autoencoder: expected one attention head and a group norm, got {part.heads}")
            return SpatialAttention(part.group_norm, _linear(part.to_q, part.to_k, part.to_v), part.to_out[0])
        # The temporal convolutions of a resampler run from the second frame on only.
        case "QwenImageResample" if part.mode.startswith("downsample"):
            return Downsample(part.resample[1])
        case "QwenImageResample" if part.mode.startswith("upsample"):
            return Upsample(part.resample[1])
        case "Downsample2D":
            if part.padding != 0:
                raise CheckpointError(f"autoencoder: expected downsampler padding 0, got {part.padding}")
            return Downsample(part.conv)
        case "Upsample2D":
            return Upsample(part.conv)
        case name:
            raise CheckpointError(f"autoencoder: unknown block {name}")


def _conv2d(conv: Any) -> Any:
    """The 2-D convolution that equals a causal 3-D one for a single frame; a 2-D one, or None, stays as it is."""
    if conv is None or isinstance(conv, nn.Conv2d):
        return conv
    # Causal padding sets every frame before the only one to zero. diffusers keeps the padding in the order of F.pad:
    # (left, right, top, bottom, front, back).
    left, right, top, bottom = conv._padding[:4]
    if left != right or top != bottom:
        raise CheckpointError(f"autoencoder: expected symmetric padding, got {conv._padding}")
    options: dict[str, Any] = {"stride": conv.stride[1:], "padding": (top, left)}
    with weightless():
        flat = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size[1:], **options)
    return _with(flat, conv.weight.detach()[:, :, -1].clone(), conv.bias.detach().clone())


def _linear(*layers: Any) -> nn.Linear:
    """Linear layers or 1x1 convolutions of the same input as one product."""
    weight = torch.cat([layer.weight.detach().flatten(1) for layer in layers])
    with weightless():
        linear = nn.Linear(weight.shape[1], weight.shape[0])
    return _with(linear, weight, torch.cat([layer.bias.detach() for layer in layers]))


def _with(layer: Any, weight: Tensor, bias: Tensor) -> Any:
    """Set the weights of a layer that was made without any. Random ones would come from the GPU's generator, which
    fails while another thread records a CUDA graph."""
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer
