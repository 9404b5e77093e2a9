"""The native program of Stable Diffusion's UNet: the same mathematics with fewer and larger GPU kernels.

Compared with the eager module: images are channels-last throughout; group norm, SiLU, bias, time embedding, residual
and the concatenation of skips are one pass; q, k, v are one product, and so are the text's keys and values of all
layers; time embeddings come from a table; upsampling is folded into its convolution; the last feed-forward product is
merged with the projection after it; the two halves of classifier-free guidance share everything up to the first
cross-attention. Attention and convolutions of small images take the fastest of several ways, measured on first use.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vla_accel.errors import EngineError
from vla_accel.images import native
from vla_accel.images.native import NormAct, bias_of, laid_out, padded
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.ops import Sum

TRAIN_TIMESTEPS = 1000
_EXPECTED = {
    **dict.fromkeys(("class_embed_type", "addition_embed_type", "encoder_hid_dim_type", "cross_attention_norm")),
    **dict.fromkeys(("time_embedding_act_fn", "timestep_post_act", "time_cond_proj_dim")),
    **dict.fromkeys(("resnet_skip_time_act", "center_input_sample", "only_cross_attention"), False),
    **dict.fromkeys(("resnet_out_scale_factor", "mid_block_scale_factor", "downsample_padding"), 1),
    **dict.fromkeys(("resnet_time_scale_shift", "attention_type"), "default"),
    **dict.fromkeys(("conv_in_kernel", "conv_out_kernel"), 3),
    "dual_cross_attention": False,
    "time_embedding_type": "positional",
    "act_fn": "silu",
}
_BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D", "UNetMidBlock2DCrossAttn")
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_SMALL = 32 * 32
"""Pixels up to which a convolution as a product of gathered neighbourhoods is worth measuring."""


class _Lazy:
    """A sum that the first kernel which reads it adds up; the skips of the up path reuse the result."""

    def __init__(self, parts: Sum) -> None:
        self.parts = parts
        self.done: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.done is None:
            self.done = ops.add_up(self.parts)
        return self.done

    def sum(self) -> Sum:
        return self.parts if self.done is None else Sum(self.done)


class NativeUnet:
    """`program(inputs, outputs)` with the names of the component `unet`, made from a `unet.Unet`.

    Raises:
        EngineError: the UNet has an unknown part.
    """

    def __init__(self, module: Any) -> None:
        unet: Any = module.unet
        config = module.config
        for key, expected in _EXPECTED.items():
            if config.get(key, expected) != expected:
                raise EngineError(f"native unet: expected {key} {expected!r}, got {config[key]!r}")
        for name in (*config.down_block_types, config.mid_block_type, *config.up_block_types):
            if name not in _BLOCKS:
                raise EngineError(f"native unet: unknown block {name}; known are {', '.join(_BLOCKS)}")
        self.dtype, self.paired = module.dtype, module.paired
        self.choices = native.Choices()
        self.detail = self._describe()
        self._times: list[tuple[nn.Linear, Tensor]] = []
        self._text: list[Tensor] = []
        self.conv_in = padded(unet.conv_in.weight, 1)
        self.shift_in = bias_of(unet.conv_in)
        self.down = [_Level(self, b) for b in unet.down_blocks]
        self.mid = _Level(self, unet.mid_block)
        self.up = [_Level(self, b) for b in unet.up_blocks]
        self.norm_out = NormAct(unet.conv_norm_out)
        self.conv_out = padded(unet.conv_out.weight, 0)
        self.bias_out = unet.conv_out.bias[:, None, None]
        self.time_table = self._table_of_times(unet)
        self.text = torch.cat(self._text)

    def form(self, paired: bool) -> NativeUnet:
        """The program for guided (`paired`) or single batches; weights and choices are shared."""
        if paired == self.paired:
            return self
        other = copy.copy(self)
        other.paired = paired
        return other

    def add_times(self, projection: nn.Linear, bias: Tensor) -> slice:
        """Add a block's projection of the time embedding; return its columns of `time_table`."""
        begin = sum(b.numel() for _, b in self._times)
        self._times.append((projection, bias))
        return slice(begin, begin + bias.numel())

    def add_text(self, weight: Tensor) -> slice:
        """Add a projection of the text; return its columns of the product with `text`."""
        begin = sum(w.shape[0] for w in self._text)
        self._text.append(weight)
        return slice(begin, begin + weight.shape[0])

    @torch.inference_mode()
    def _table_of_times(self, unet: Any) -> Tensor:
        """(1000, all blocks' channels) float32: SiLU of the time embedding through every projection, plus biases."""
        proj, embedding = unet.time_proj, unet.time_embedding
        device = embedding.linear_1.weight.device
        half = proj.num_channels // 2
        steps = torch.arange(half, dtype=torch.float32, device=device)
        frequencies = torch.exp(-math.log(10_000) * steps / (half - proj.downscale_freq_shift)) * proj.scale
        angles = torch.arange(TRAIN_TIMESTEPS, device=device)[:, None] * frequencies
        parts = (angles.cos(), angles.sin()) if proj.flip_sin_to_cos else (angles.sin(), angles.cos())
        x = torch.cat(parts, dim=-1)
        for layer in (embedding.linear_1, embedding.linear_2):
            x = F.silu(F.linear(x, layer.weight.float(), layer.bias.float()))
        rows = [F.linear(x, p.weight.float(), p.bias.float() + b.float()) for p, b in self._times]
        return torch.cat(rows, dim=-1)

    def _describe(self) -> str:
        counts = Counter(f"{key.split()[0]} {way}" for key, way in self.choices.items())
        chosen = (f"{way} x{count}" for way, count in sorted(counts.items()))
        return native.describe(self.dtype, "fused norms, one text product", chosen)

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        with native.fast_convolutions():
            y = self._run(inputs["sample"], inputs["timestep"], inputs["encoder_hidden_states"])
        native.write(y, self.bias_out, outputs["noise"])
        self.detail = self._describe()

    def _run(self, sample: Tensor, timestep: Tensor, states: Tensor) -> Tensor:
        batch = sample.shape[0]
        call = _Call(batch, self.time_table.index_select(0, timestep.reshape(1))[0], F.linear(states, self.text))
        x = native.channels_last(sample[: batch // 2] if self.paired else sample, self.conv_in.shape[1])
        state = _Lazy(Sum(ops.conv(x, self.conv_in, padding=1), shift=self.shift_in))
        skips = [state]
        for level in self.down:
            state = level.go_down(call, state, skips)
        state = self.mid.go_through(call, state)
        for level in self.up:
            state = level.go_up(call, state, skips)
        _, h = self.norm_out(state.sum(), keep=False)
        return self.conv(h, self.conv_out)

    def conv(self, x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
        """A 3x3 convolution with padding 1, the fastest way."""
        if x.shape[1] * x.shape[2] > _SMALL:
            return ops.conv(x, weight, stride, 1)
        ways = {"library": ops.conv, "product": ops.conv_product}
        calls = {n: lambda f=f: f(x, weight, stride, 1) for n, f in ways.items()}
        way = self.choices.pick(f"conv {tuple(x.shape)} {weight.shape[0]} /{stride}", calls, x)
        return ways[way](x, weight, stride, 1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """q (B, N, C), k and v (B, S, C), each a view with any row stride; (B, N, C) contiguous."""
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        ways = {n: lambda b=b: _sdpa(q, k, v, b) for n, b in _BACKENDS.items()} if q.is_cuda else {}
        key = f"attention {tuple(q.shape)} {k.shape[2]}"
        way = self.choices.pick(key, ways or {"default": lambda: None}, q)
        return _sdpa(q, k, v, _BACKENDS.get(way)).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


@dataclass(frozen=True)
class _Call:
    """One call's batch, the time embeddings' row, and the text's keys and values."""

    batch: int
    times: Tensor
    text: Tensor

    def whole(self, x: Tensor) -> Tensor:
        """`x` for both halves of the guidance, if it was computed for one."""
        return x if x.shape[0] == self.batch else torch.cat((x, x))


class _Level:
    """One resolution: residual blocks, transformers after them if any, then a change of resolution if any."""

    def __init__(self, net: NativeUnet, block: Any) -> None:
        self.net = net
        attentions = list(getattr(block, "attentions", None) or [])
        self.resnets = [_Res(net, r) for r in block.resnets]
        self.transformers = [_Transformer(net, a) for a in attentions]
        self.down = [(laid_out(s.conv.weight), bias_of(s.conv)) for s in getattr(block, "downsamplers", None) or []]
        self.up = [_Up(s.conv) for s in getattr(block, "upsamplers", None) or []]

    def go_down(self, call: _Call, x: _Lazy, skips: list[_Lazy]) -> _Lazy:
        for i, resnet in enumerate(self.resnets):
            x = resnet(call, x, None)
            if self.transformers:
                x = self.transformers[i](call, x)
            skips.append(x)
        for weight, shift in self.down:
            x = _Lazy(Sum(self.net.conv(x.tensor(), weight, stride=2), shift=shift))
            skips.append(x)
        return x

    def go_through(self, call: _Call, x: _Lazy) -> _Lazy:
        x = self.resnets[0](call, x, None)
        for transformer, resnet in zip(self.transformers, self.resnets[1:], strict=True):
            x = resnet(call, transformer(call, x), None)
        return x

    def go_up(self, call: _Call, x: _Lazy, skips: list[_Lazy]) -> _Lazy:
        for i, resnet in enumerate(self.resnets):
            x = resnet(call, x, call.whole(skips.pop().tensor()))
            if self.transformers:
                x = self.transformers[i](call, x)
        for up in self.up:
            x = up(x.tensor(), skips[-1].sum().shape[1:3])
        return x


class _Up:
    """Every pixel doubled, then a convolution. An odd size loses the last row or column before the convolution."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.weight, self.phases, self.shift = conv.weight, ops.phase_weights(conv.weight), bias_of(conv)

    def __call__(self, x: Tensor, size: tuple[int, ...]) -> _Lazy:
        height, width = size
        if (height, width) == (2 * x.shape[1], 2 * x.shape[2]):
            return _Lazy(native.upsample(x, self.phases, self.shift))
        doubled = x.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :height, :width].contiguous()
        return _Lazy(Sum(ops.conv(doubled, self.weight, padding=1), shift=self.shift))


class _Res(native.Residual):
    def __init__(self, net: NativeUnet, part: Any) -> None:
        super().__init__(part, part.conv_shortcut)
        self.net = net
        # The table of time embeddings includes this block's first bias.
        self.times = net.add_times(part.time_emb_proj, part.conv1.bias)

    def __call__(self, call: _Call, x: _Lazy, skip: Tensor | None) -> _Lazy:
        y, result = self.run(x.sum(), call.times[self.times], self.net.conv, skip)
        if skip is None:
            x.done = y
        return _Lazy(result)


class _Transformer:
    def __init__(self, net: NativeUnet, part: Any) -> None:
        self.net = net
        self.norm = NormAct(part.norm, Activation.NONE)
        self.proj_in = part.proj_in.weight.flatten(1), part.proj_in.bias
        self.blocks = [_Block(net, b) for b in part.transformer_blocks]
        # proj_out (x + W g + b) = proj_out x + (proj_out W) g + proj_out b: one product and one addition fewer.
        last = part.transformer_blocks[-1].ff.net[2]
        out = part.proj_out.weight.flatten(1)
        self.proj_out = out
        self.merged = (out.double() @ last.weight.double()).to(out.dtype)
        self.shift = part.proj_out.bias.float() + out.float() @ last.bias.float()

    def __call__(self, call: _Call, x: _Lazy) -> _Lazy:
        y, h = self.norm(x.sum(), keep=True)
        x.done = y
        batch, height, width, channels = y.shape
        hidden = F.linear(h.view(batch, height * width, channels), *self.proj_in)
        feed: Tensor | None = None
        for i, block in enumerate(self.blocks):
            if feed is not None:
                hidden = hidden + F.linear(feed, *self.blocks[i - 1].out)
            hidden, feed = block(call, hidden)
        assert feed is not None
        out = F.linear(hidden, self.proj_out).flatten(0, 1)
        out = torch.addmm(out, feed.flatten(0, 1), self.merged.t())
        return _Lazy(Sum(out.view(call.batch, height, width, -1), call.whole(y), self.shift))


class _Block:
    """Self-attention, cross-attention and the gated feed-forward without its last product."""

    def __init__(self, net: NativeUnet, part: Any) -> None:
        for attention in (part.attn1, part.attn2):
            if attention.to_q.bias is not None or attention.rescale_output_factor != 1 or attention.norm_q is not None:
                raise EngineError("native unet: expected attention without biases, query norms or rescaling")
        self.net = net
        self.norms = [(n.weight.float(), n.bias.float(), n.eps) for n in (part.norm1, part.norm2, part.norm3)]
        own, cross = part.attn1, part.attn2
        self.qkv = torch.cat((own.to_q.weight, own.to_k.weight, own.to_v.weight))
        self.own_heads, self.cross_heads = own.heads, cross.heads
        self.own_out = own.to_out[0].weight, own.to_out[0].bias.float()
        self.query = cross.to_q.weight
        self.keys, self.values = net.add_text(cross.to_k.weight), net.add_text(cross.to_v.weight)
        self.cross_out = cross.to_out[0].weight, cross.to_out[0].bias.float()
        gate = part.ff.net[0]
        if type(gate).__name__ != "GEGLU":
            raise EngineError(f"native unet: expected a GEGLU feed-forward, got {type(gate).__name__}")
        self.gate = gate.proj.weight, gate.proj.bias
        self.out = part.ff.net[2].weight, part.ff.net[2].bias

    def __call__(self, call: _Call, hidden: Tensor) -> tuple[Tensor, Tensor]:
        _, n = ops.add_layer_norm(hidden, None, None, *self.norms[0])
        q, k, v = F.linear(n, self.qkv).chunk(3, dim=-1)
        own = F.linear(self.net.attention(q, k, v, self.own_heads), self.own_out[0])
        hidden, n = ops.add_layer_norm(own, hidden, self.own_out[1], *self.norms[1])
        # The two halves of the guidance differ from the text on.
        q = call.whole(F.linear(n, self.query))
        hidden = call.whole(hidden)
        keys, values = call.text[..., self.keys], call.text[..., self.values]
        cross = F.linear(self.net.attention(q, keys, values, self.cross_heads), self.cross_out[0])
        hidden, n = ops.add_layer_norm(cross, hidden, self.cross_out[1], *self.norms[2])
        return hidden, ops.geglu_erf(F.linear(n, *self.gate))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)
