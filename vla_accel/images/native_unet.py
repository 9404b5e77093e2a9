"""The native program of Stable Diffusion's UNet: the same mathematics with fewer and larger GPU kernels.

Against the eager module: images are channels-last throughout; group norm, SiLU, bias, time embedding, residual and
the concatenation of skips are one pass; q, k, v are one product; keys and values of the text for all layers are one
product; every time embedding is looked up in a table made at the start; upsampling is folded into its convolution; the
last feed-forward product is merged with the projection after it; what the two halves of classifier-free guidance
share, up to the first cross-attention, is computed once. Convolutions of small images and attention take the quickest
of several ways, measured on the spot. Knows nothing of engines or graphs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vla_accel.errors import EngineError
from vla_accel.images.native_autoencoder import laid_out, padded
from vla_accel.images.unet import Unet
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import fastest
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.ops import GroupNorm, Sum
from vla_accel.runtime import current

TRAIN_TIMESTEPS = 1000
_EXPECTED = {
    "class_embed_type": None,
    "addition_embed_type": None,
    "encoder_hid_dim_type": None,
    "time_embedding_type": "positional",
    "time_embedding_act_fn": None,
    "timestep_post_act": None,
    "time_cond_proj_dim": None,
    "resnet_time_scale_shift": "default",
    "resnet_skip_time_act": False,
    "resnet_out_scale_factor": 1.0,
    "act_fn": "silu",
    "center_input_sample": False,
    "only_cross_attention": False,
    "dual_cross_attention": False,
    "cross_attention_norm": None,
    "attention_type": "default",
    "mid_block_scale_factor": 1,
    "downsample_padding": 1,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
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
    """A sum that some kernel adds up when it comes by; the skips of the up path find it done."""

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
    """`program(inputs, outputs)` with the names of the component `unet`; see the module's docstring.

    Raises EngineError for a UNet with parts that are not known here, named.
    """

    def __init__(self, module: Unet) -> None:
        unet: Any = module.unet
        config = module.config
        for key, expected in _EXPECTED.items():
            if config.get(key, expected) != expected:
                raise EngineError(f"native unet: expected {key} {expected!r}, got {config[key]!r}")
        for name in (*config.down_block_types, config.mid_block_type, *config.up_block_types):
            if name not in _BLOCKS:
                raise EngineError(f"native unet: unknown block {name}; known are {', '.join(_BLOCKS)}")
        self.dtype, self.paired = module.dtype, module.paired
        self.choices: dict[str, str] = {}
        self.detail = self._describe()
        self._tables = _Tables()
        self.conv_in = padded(unet.conv_in.weight, 1)
        self.shift_in = unet.conv_in.bias.float()
        self.down = [_Level(self, b) for b in unet.down_blocks]
        self.mid = _Level(self, unet.mid_block)
        self.up = [_Level(self, b) for b in unet.up_blocks]
        self.norm_out = _group_norm(unet.conv_norm_out)
        self.conv_out = padded(unet.conv_out.weight, 0)
        self.bias_out = unet.conv_out.bias[:, None, None]
        self.time_table = self._tables.times(unet)
        self.text = self._tables.text()

    def form(self, paired: bool) -> NativeUnet:
        """The program for guided (`paired`) or single batches; weights and choices are shared."""
        if paired == self.paired:
            return self
        other = copy.copy(self)
        other.paired = paired
        return other

    def _describe(self) -> str:
        ways: dict[str, list[str]] = {}
        for key, way in self.choices.items():
            ways.setdefault(f"{key.split()[0]} {way}", []).append(key)
        chosen = ", ".join(f"{k} x{len(v)}" for k, v in sorted(ways.items()))
        return f"channels-last {str(self.dtype).removeprefix('torch.')}, fused norms, one text product" + (
            f"; measured: {chosen}" if chosen else ""
        )

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        sample, timestep = inputs["sample"], inputs["timestep"]
        states, target = inputs["encoder_hidden_states"], outputs["noise"]
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            y = self._run(sample, timestep, states)
        torch.add(y[..., : target.shape[1]].permute(0, 3, 1, 2), self.bias_out, out=target)
        self.detail = self._describe()

    def _run(self, sample: Tensor, timestep: Tensor, states: Tensor) -> Tensor:
        batch = sample.shape[0]
        call = _Call(self, batch, self.time_table.index_select(0, timestep.reshape(1))[0], F.linear(states, self.text))
        once = sample[: batch // 2] if self.paired else sample
        x = once.new_zeros((once.shape[0], *once.shape[2:], self.conv_in.shape[1]))
        x[..., : once.shape[1]] = once.permute(0, 2, 3, 1)
        state = _Lazy(Sum(ops.conv(x, self.conv_in, padding=1), shift=self.shift_in))
        skips = [state]
        for level in self.down:
            state = level.go_down(call, state, skips)
        state = self.mid.go_through(call, state)
        for level in self.up:
            state = level.go_up(call, state, skips)
        _, h = ops.group_act(state.sum(), self.norm_out, activation=Activation.SILU, keep=False)
        return self.conv(h, self.conv_out)

    # -- the measured parts -----------------------------------------------------------------------------------------

    def conv(self, x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
        """A 3x3 convolution with padding 1, the quickest way."""
        if x.shape[1] * x.shape[2] > _SMALL:
            return ops.conv(x, weight, stride, 1)
        ways = {"library": ops.conv, "product": ops.conv_product}
        key = f"conv {tuple(x.shape)} {weight.shape[0]} /{stride}"
        run = ways[self._choose(key, {n: lambda f=f: f(x, weight, stride, 1) for n, f in ways.items()}, x)]
        return run(x, weight, stride, 1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """q (B, N, C), k and v (B, S, C), each a view with any row stride; (B, N, C) contiguous."""
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        key = f"attention {tuple(q.shape)} {k.shape[2]}"
        ways = {n: lambda b=b: _sdpa(q, k, v, b) for n, b in _BACKENDS.items()} if q.is_cuda else {}
        chosen = self._choose(key, ways or {"default": lambda: None}, q)
        return _sdpa(q, k, v, _BACKENDS.get(chosen)).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    def _choose(self, key: str, ways: Mapping[str, Any], like: Tensor) -> str:
        if key not in self.choices:
            if like.is_cuda and torch.cuda.is_current_stream_capturing():
                raise EngineError("native unet: run once at this size before the graph is captured")
            self.choices[key] = fastest(ways, current(like)).candidate
        return self.choices[key]


class _Call:
    """What one call hands down: the time row, the text's keys and values, and whether the halves are still one."""

    def __init__(self, net: NativeUnet, batch: int, times: Tensor, text: Tensor) -> None:
        self.net, self.batch, self.times, self.text = net, batch, times, text

    def whole(self, x: Tensor) -> Tensor:
        """`x` for both halves of the guidance, if it was computed for one."""
        return x if x.shape[0] == self.batch else torch.cat((x, x))


class _Level:
    """One resolution: residual blocks, each perhaps with a transformer, then perhaps a change of resolution."""

    def __init__(self, net: NativeUnet, block: Any) -> None:
        self.net = net
        attentions = list(getattr(block, "attentions", None) or [])
        self.resnets = [_Res(net, r) for r in block.resnets]
        self.transformers = [_Transformer(net, a) for a in attentions]
        self.down = [(laid_out(s.conv.weight), s.conv.bias.float()) for s in getattr(block, "downsamplers", None) or []]
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
        assert conv.bias is not None
        self.weight, self.phases, self.shift = conv.weight, ops.phase_weights(conv.weight), conv.bias.float()

    def __call__(self, x: Tensor, size: tuple[int, ...]) -> _Lazy:
        height, width = size
        if (height, width) == (2 * x.shape[1], 2 * x.shape[2]):
            return _Lazy(Sum(ops.conv_phases(x, self.phases).value, shift=self.shift, phased=True))
        doubled = x.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :height, :width].contiguous()
        return _Lazy(Sum(ops.conv(doubled, self.weight, padding=1), shift=self.shift))


class _Res:
    def __init__(self, net: NativeUnet, part: Any) -> None:
        self.net = net
        self.norm1, self.norm2 = _group_norm(part.norm1), _group_norm(part.norm2)
        self.conv1, self.conv2 = laid_out(part.conv1.weight), laid_out(part.conv2.weight)
        # The time embedding's table has this block's first bias in it.
        self.times = net._tables.add_times(part.time_emb_proj, part.conv1.bias)
        self.shift = part.conv2.bias.float()
        self.shortcut = None
        if part.conv_shortcut is not None:
            self.shortcut = part.conv_shortcut.weight.flatten(1)
            self.shift = self.shift + part.conv_shortcut.bias.float()

    def __call__(self, call: _Call, x: _Lazy, skip: Tensor | None) -> _Lazy:
        y, h = ops.group_act(x.sum(), self.norm1, activation=Activation.SILU, keep=True, skip=skip)
        if skip is None:
            x.done = y
        h = self.net.conv(h, self.conv1)
        _, h = ops.group_act(Sum(h, shift=call.times[self.times]), self.norm2, activation=Activation.SILU, keep=False)
        h = self.net.conv(h, self.conv2)
        return _Lazy(Sum(h, y if self.shortcut is None else F.linear(y, self.shortcut), self.shift))


class _Transformer:
    def __init__(self, net: NativeUnet, part: Any) -> None:
        self.net = net
        self.norm = _group_norm(part.norm)
        self.proj_in = part.proj_in.weight.flatten(1), part.proj_in.bias
        self.blocks = [_Block(net, b) for b in part.transformer_blocks]
        # proj_out (x + W g + b) = proj_out x + (proj_out W) g + proj_out b: one product and one addition fewer.
        last = part.transformer_blocks[-1].ff.net[2]
        out = part.proj_out.weight.flatten(1)
        self.proj_out = out
        self.merged = (out.double() @ last.weight.double()).to(out.dtype)
        self.shift = part.proj_out.bias.float() + out.float() @ last.bias.float()

    def __call__(self, call: _Call, x: _Lazy) -> _Lazy:
        y, h = ops.group_act(x.sum(), self.norm, activation=Activation.NONE, keep=True)
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
    """Self-attention, cross-attention and the gate of the feed-forward; its last product is the transformer's."""

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
        self.keys, self.values = net._tables.add_text(cross.to_k.weight), net._tables.add_text(cross.to_v.weight)
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
        # The text is the first thing in which the two halves of the guidance differ.
        q = call.whole(F.linear(n, self.query))
        hidden = call.whole(hidden)
        keys, values = call.text[..., self.keys], call.text[..., self.values]
        cross = F.linear(self.net.attention(q, keys, values, self.cross_heads), self.cross_out[0])
        hidden, n = ops.add_layer_norm(cross, hidden, self.cross_out[1], *self.norms[2])
        return hidden, ops.geglu_erf(F.linear(n, *self.gate))


class _Tables:
    """Collects every block's time projection and text projections, to make one table and one product of them."""

    def __init__(self) -> None:
        self._times: list[tuple[nn.Linear, Tensor]] = []
        self._text: list[Tensor] = []

    def add_times(self, projection: nn.Linear, bias: Tensor) -> slice:
        begin = sum(b.numel() for _, b in self._times)
        self._times.append((projection, bias))
        return slice(begin, begin + bias.numel())

    def add_text(self, weight: Tensor) -> slice:
        begin = sum(w.shape[0] for w in self._text)
        self._text.append(weight)
        return slice(begin, begin + weight.shape[0])

    def text(self) -> Tensor:
        return torch.cat(self._text)

    @torch.inference_mode()
    def times(self, unet: Any) -> Tensor:
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


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)


def _group_norm(norm: nn.GroupNorm) -> GroupNorm:
    return GroupNorm(norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)
