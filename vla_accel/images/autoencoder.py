"""diffusers' image autoencoders as plain encoder and decoder modules for engines and export.

For one image all temporal padding of a causal 3-D convolution is zero, so it equals a 2-D convolution with the last
temporal slice of its kernel: a third of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import CheckpointError
from vla_accel.nn.network import weightless

Kind = Literal["qwen", "kl"]
AUTOENCODERS: dict[str, Kind] = {"AutoencoderKLQwenImage": "qwen", "AutoencoderKLWan": "qwen", "AutoencoderKL": "kl"}
"""Classes of diffusers by kind. Wan 2.1's autoencoder is Qwen-Image's; Wan 2.2's has `Stage` and patches."""
SCALE = 8
"""Pixels per latent, in height and in width, without patches (`Half.scale`)."""


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


class Stage(nn.Module):
    """The blocks of one resolution of Wan 2.2, plus a shortcut without weights around them: of one frame.

    Going down, the shortcut is the mean over `side` x `side` pixels and, with `frames` of 2, over an empty frame before
    the only one; going up, its transpose up to a factor. `width`: output channels.
    """

    def __init__(self, blocks: list[nn.Module], width: int, side: int, frames: int, *, up: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.width, self.side, self.frames, self.up = width, side, frames, up

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return y + self.shortcut(x)

    def shortcut(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, `width`, H / side, W / side), or times `side` going up."""
        (batch, channels, height, wide), side = x.shape, self.side
        if self.up:
            x = x.repeat_interleave(self.width * self.frames * side * side // channels, 1)
            x = x.view(batch, self.width, self.frames, side, side, height, wide)[:, :, -1]
            return x.permute(0, 1, 4, 2, 5, 3).reshape(batch, self.width, height * side, wide * side)
        x = x.view(batch, channels, height // side, side, wide // side, side).permute(0, 1, 3, 5, 2, 4)
        x = F.pad(x[:, :, None], (0, 0) * 4 + (self.frames - 1, 0))
        return x.reshape(batch, self.width, -1, height // side, wide // side).mean(2)


def patches(x: Tensor, side: int) -> Tensor:
    """(B, C, H, W) to (B, C * side * side, H / side, W / side): by channel, column in the patch, row in it."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // side, side, width // side, side).permute(0, 1, 5, 3, 2, 4)
    return x.reshape(batch, channels * side * side, height // side, width // side)


def from_patches(x: Tensor, side: int) -> Tensor:
    """The inverse of `patches`."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, -1, side, side, height, width).permute(0, 1, 4, 3, 5, 2)
    return x.reshape(batch, channels // (side * side), height * side, width * side)


class Half(nn.Module):
    """One half of an autoencoder: a first convolution, blocks, norm, SiLU, a last convolution.

    Encoder: image (B, 3, H, W) in -1..1 to moments (B, 2 z, H/s, W/s): mean, then log variance; s is `scale`. Decoder:
    latents (B, z, H/s, W/s) to image (B, 3, H, W). `first` and `last` are 1x1 quantisation convolutions; with `frames`
    input and output have a frame axis of length 1 after the channels; `patch`: side of the squares of pixels that are
    one pixel inside (Wan 2.2).
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
        patch: int = 1,
    ) -> None:
        super().__init__()
        self.conv_in, self.norm_out, self.conv_out = conv_in, norm_out, conv_out
        self.blocks = nn.ModuleList(blocks)
        self.first, self.last = first, last
        self.frames, self.clamp, self.patch = frames, clamp, patch
        self.decodes = any(isinstance(module, Upsample) for block in blocks for module in block.modules())

    @property
    def scale(self) -> int:
        """Pixels per latent, in height and in width."""
        return SCALE * self.patch

    @property
    def dtype(self) -> torch.dtype:
        return self.conv_in.weight.dtype

    @property
    def channels(self) -> tuple[int, int]:
        inside, outside = (self.first or self.conv_in).in_channels, (self.last or self.conv_out).out_channels
        square = self.patch**2
        return (inside, outside // square) if self.decodes else (inside // square, outside)

    def forward(self, x: Tensor) -> Tensor:
        # Not squeeze: an exported graph must keep four axes for every size.
        x = x[:, :, 0] if self.frames else x
        if self.patch > 1 and not self.decodes:
            x = patches(x, self.patch)
        if self.first is not None:
            x = self.first(x)
        x = self.conv_in(x)
        for block in self.blocks:
            x = block(x)
        x = self.conv_out(F.silu(self.norm_out(x)))
        if self.last is not None:
            x = self.last(x)
        if self.patch > 1 and self.decodes:
            x = from_patches(x, self.patch)
        if self.clamp:
            x = x.clamp(-1.0, 1.0)
        return x[:, :, None] if self.frames else x


@dataclass(frozen=True)
class WanEncoderConfig:
    """Sizes of Wan 2.2's encoder: `base` times `multipliers` are the widths of the stages, the first of the first
    convolution; `temporal`: which steps down also halve the frames of a video; `latent`: channels of a latent."""

    base: int = 160
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    temporal: tuple[bool, ...] = (False, True, True)
    latent: int = 48
    patch: int = 2

    @property
    def scale(self) -> int:
        """Pixels per latent, in height and in width."""
        return self.patch * 2 ** len(self.temporal)


def wan_encoder(config: WanEncoderConfig) -> Half:
    """Return Wan 2.2's encoder of one frame, with weights of torch's own initialization."""
    widths = [config.base * factor for factor in (1, *config.multipliers)]

    def conv(inside: int, outside: int, side: int = 3, stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(inside, outside, side, stride, padding=side // 2 if stride == 1 else 0)

    def norm(width: int) -> ChannelRms:
        return ChannelRms(torch.ones(width))

    def residual(inside: int, outside: int) -> ResBlock:
        shortcut = conv(inside, outside, 1) if inside != outside else None
        return ResBlock(norm(inside), conv(inside, outside), norm(outside), conv(outside, outside), shortcut)

    stages: list[nn.Module] = []
    for index, (inside, outside) in enumerate(pairwise(widths)):
        blocks: list[nn.Module] = [residual(inside if i == 0 else outside, outside) for i in range(config.blocks)]
        down = index < len(config.temporal)
        blocks += [Downsample(conv(outside, outside, stride=2))] if down else []
        stages.append(Stage(blocks, outside, 1 + down, 1 + (down and config.temporal[index])))
    last, moments = widths[-1], 2 * config.latent
    attention = SpatialAttention(norm(last), nn.Linear(last, 3 * last), nn.Linear(last, last))
    middle: list[nn.Module] = [residual(last, last), attention, residual(last, last)]
    return Half(
        conv(3 * config.patch**2, widths[0]), stages + middle, norm(last), conv(last, moments),
        last=conv(moments, moments, 1), patch=config.patch,
    )  # fmt: skip


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
    patch = getattr(vae.config, "patch_size", None) or 1
    halves = (
        _half(encoder, down, last=_conv2d(vae.quant_conv), frames=frames, patch=patch),
        _half(decoder, up, first=_conv2d(vae.post_quant_conv), frames=frames, clamp=frames, patch=patch),
    )
    for half in halves:
        half.eval().requires_grad_(False)
    return halves


def _half(part: Any, blocks: list[Any], **options: Any) -> Half:
    norm = part.norm_out if options["frames"] else part.conv_norm_out
    made = [_block(block) for block in blocks]
    return Half(_conv2d(part.conv_in), made, _norm(norm), _conv2d(part.conv_out), **options)


def _parts(stage: Any, samplers: str) -> list[Any]:
    """The blocks of one resolution; Qwen-Image's encoder has them in one list without stages, Wan 2.2's stages are
    blocks."""
    if hasattr(stage, "avg_shortcut"):
        return [stage]
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
        case "WanResidualDownBlock" | "WanResidualUpBlock" as name:
            return _stage(part, up=name == "WanResidualUpBlock")
        case "QwenImageResidualBlock" | "WanResidualBlock" | "ResnetBlock2D" as name:
            if name == "ResnetBlock2D" and (part.time_emb_proj is not None or part.output_scale_factor != 1):
                raise CheckpointError("autoencoder: unknown residual block with a time embedding or a scale")
            shortcut = None if isinstance(part.conv_shortcut, nn.Identity) else _conv2d(part.conv_shortcut)
            return ResBlock(_norm(part.norm1), _conv2d(part.conv1), _norm(part.norm2), _conv2d(part.conv2), shortcut)
        case "QwenImageAttentionBlock" | "WanAttentionBlock":
            return SpatialAttention(_norm(part.norm), _linear(part.to_qkv), _linear(part.proj))
        case "Attention":
            if part.heads != 1 or part.group_norm is None or part.rescale_output_factor != 1:
                raise CheckpointError(f"autoencoder: expected one attention head and a group norm, got {part.heads}")
            return SpatialAttention(part.group_norm, _linear(part.to_q, part.to_k, part.to_v), part.to_out[0])
        # The temporal convolutions of a resampler run from the second frame on only.
        case "QwenImageResample" | "WanResample" if part.mode.startswith("downsample"):
            return Downsample(part.resample[1])
        case "QwenImageResample" | "WanResample" if part.mode.startswith("upsample"):
            return Upsample(part.resample[1])
        case "Downsample2D":
            if part.padding != 0:
                raise CheckpointError(f"autoencoder: expected downsampler padding 0, got {part.padding}")
            return Downsample(part.conv)
        case "Upsample2D":
            return Upsample(part.conv)
        case name:
            raise CheckpointError(f"autoencoder: unknown block {name}")


def _stage(part: Any, *, up: bool) -> nn.Module:
    """A stage of Wan 2.2; its last one going up has no shortcut."""
    sampler = part.upsampler if up else part.downsampler
    blocks = [_block(block) for block in (*part.resnets, *(() if sampler is None else (sampler,)))]
    if (around := part.avg_shortcut) is None:
        return nn.Sequential(*blocks)
    return Stage(blocks, around.out_channels, around.factor_s, around.factor_t, up=up)


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
