"""The native program of an autoencoder half: the same mathematics with fewer and larger GPU kernels.

Images are (B, H, W, C) throughout. Biases, shortcuts and residuals are added by the norm that follows; upsampling is
folded into its convolution; the one wide attention head is matrix products where that is faster (measured on the
spot). Runs anywhere; it is worth it on a GPU, inside a CUDA graph. Knows nothing of engines or graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.component import Program
from vla_accel.errors import EngineError
from vla_accel.images.autoencoder import ChannelRms, Downsample, Half, Norm, ResBlock, SpatialAttention, Upsample
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import fastest
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.ops import Sum
from vla_accel.runtime import current

_MULTIPLE = 8
"""Tensor cores want channels in multiples of 8: the 3 of a picture are padded with zeros."""
Layer = Callable[[Sum], Sum]


class NativeHalf:
    """`program(inputs, outputs)`: reads the first input, writes the first output; both stay the caller's.

    Holds its own copy of the weights, laid out for the GPU, in the half's dtype or another one to compute in: float16
    holds eight times finer steps than bfloat16 at the same speed, where the range allows. One instance serves every
    size; the choices it measures are made once for each. Raises EngineError for weights beyond the dtype's range.
    """

    def __init__(self, half: Half, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype != half.dtype:
            half = copy.deepcopy(half).to(dtype)
            large = next((name for name, weight in half.named_parameters() if not weight.isfinite().all()), None)
            if large is not None:
                raise EngineError(f"native autoencoder: weight {large} does not fit {dtype}; use bfloat16 or float32")
        self.half, self.dtype = half, half.dtype
        self.choices: dict[str, str] = {}
        self.detail = self._describe()
        self.conv_in = padded(half.conv_in.weight, 1)
        self.conv_out = padded(half.conv_out.weight, 0)
        self.layers = [self._layer(block) for block in half.blocks]
        self.shift_in, self.norm_out = _bias(half.conv_in), _Norm(half.norm_out)
        last = half.last.weight.flatten(1).float() if half.last is not None else None
        bias = _bias(half.conv_out)
        if last is not None and half.last is not None:
            # A 1x1 convolution after a convolution is one convolution.
            merged = torch.einsum("po,ochw->pchw", last.double(), half.conv_out.weight.double())
            self.conv_out = padded(merged.to(self.dtype), 0)
            bias = last @ bias + _bias(half.last)
        self.bias_out = bias.to(self.dtype)[:, None, None]

    def _describe(self) -> str:
        chosen = ", ".join(f"{k} {v}" for k, v in self.choices.items())
        return f"channels-last {str(self.dtype).removeprefix('torch.')}, fused norms, folded upsampling" + (
            f"; measured: {chosen}" if chosen else ""
        )

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (source,), (target,) = inputs.values(), outputs.values()
        if self.half.frames:
            source, target = source[:, :, 0], target[:, :, 0]
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            y = self._run(source.to(self.dtype).permute(0, 2, 3, 1))
        torch.add(y[..., : target.shape[1]].permute(0, 3, 1, 2), self.bias_out, out=target)
        if self.half.clamp:
            target.clamp_(-1.0, 1.0)
        self.detail = self._describe()

    def _run(self, x: Tensor) -> Tensor:
        half = self.half
        if half.first is not None:
            x = F.linear(x, half.first.weight.flatten(1), half.first.bias)
        channels = self.conv_in.shape[1]
        wide = x.new_zeros((*x.shape[:-1], channels)) if x.shape[-1] < channels else None
        if wide is not None:
            wide[..., : x.shape[-1]] = x
        state = Sum(ops.conv(x.contiguous() if wide is None else wide, self.conv_in, padding=1), shift=self.shift_in)
        for layer in self.layers:
            state = layer(state)
        _, h = self.norm_out(state, activation=Activation.SILU, keep=False)
        return ops.conv(h, self.conv_out, padding=1)

    def _layer(self, block: nn.Module) -> Layer:
        if isinstance(block, ResBlock):
            return _Res(block)
        if isinstance(block, SpatialAttention):
            return _Attention(block, self.choices)
        if isinstance(block, Downsample):
            return _Down(block)
        if isinstance(block, Upsample):
            return _Up(block)
        raise EngineError(f"native autoencoder: unknown block {type(block).__name__}")


class CompiledHalf:
    """The half as torch.compile makes it from our channels-last, two-dimensional form."""

    def __init__(self, half: Half, backend: str = "inductor") -> None:
        self.detail = f"torch.compile ({backend}) of the channels-last form"
        half = half.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self._run, self._dtype = torch.compile(half, backend=backend, dynamic=False), half.dtype

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (source,), (target,) = inputs.values(), outputs.values()
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            target.copy_(self._run(source.to(self._dtype)))


class QuickestHalf:
    """Several programs of one half: at each size the quickest, measured at its first call, and no other from then on.

    So Inductor runs where it wins and nowhere else; `detail` says what every program took.
    """

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.programs = dict(programs)
        self.chosen: dict[tuple[int, ...], str] = {}
        self.detail = f"the quickest of {', '.join(self.programs)}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (source,) = inputs.values()
        size = tuple(source.shape)
        if size not in self.chosen:
            if source.is_cuda and torch.cuda.is_current_stream_capturing():
                raise EngineError("native autoencoder: run once at this size before the graph is captured")
            ways = {n: lambda p=p: p(inputs, outputs) for n, p in self.programs.items()}
            found = fastest(ways, current(source), repeats=3)
            self.chosen[size] = found.candidate
            taken = [f"{n} {ms:.2f} ms" for n, ms in found.times.items()] or ["not measured"]
            taken += [f"{n} out: {reason}" for n, reason in found.rejected.items()]
            self.detail = f"{found.candidate} ({', '.join(taken)}): {self.programs[found.candidate].detail}"
        self.programs[self.chosen[size]](inputs, outputs)


class _Norm:
    def __init__(self, norm: Norm) -> None:
        self.gamma = norm.gamma.float() if isinstance(norm, ChannelRms) else None
        self.group = None
        if isinstance(norm, nn.GroupNorm):
            self.group = ops.GroupNorm(norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)

    def __call__(self, x: Sum, *, activation: Activation, keep: bool) -> tuple[Tensor, Tensor]:
        if self.gamma is not None:
            return ops.rms_act(x, self.gamma, activation=activation, keep=keep)
        assert self.group is not None
        return ops.group_act(x, self.group, activation=activation, keep=keep)


class _Res:
    def __init__(self, block: ResBlock) -> None:
        self.norm1, self.norm2 = _Norm(block.norm1), _Norm(block.norm2)
        self.conv1, self.conv2 = laid_out(block.conv1.weight), laid_out(block.conv2.weight)
        self.shift1, self.shift2 = _bias(block.conv1), _bias(block.conv2)
        self.shortcut = None
        if block.shortcut is not None:
            self.shortcut = block.shortcut.weight.flatten(1)
            self.shift2 = self.shift2 + _bias(block.shortcut)

    def __call__(self, x: Sum) -> Sum:
        y, h = self.norm1(x, activation=Activation.SILU, keep=True)
        h = ops.conv(h, self.conv1, padding=1)
        _, h = self.norm2(Sum(h, shift=self.shift1), activation=Activation.SILU, keep=False)
        h = ops.conv(h, self.conv2, padding=1)
        return Sum(h, y if self.shortcut is None else F.linear(y, self.shortcut), self.shift2)


class _Attention:
    def __init__(self, block: SpatialAttention, choices: dict[str, str]) -> None:
        self.norm, self.choices = _Norm(block.norm), choices
        self.qkv, self.proj = block.qkv, block.proj.weight
        self.shift = _bias(block.proj)

    def __call__(self, x: Sum) -> Sum:
        y, h = self.norm(x, activation=Activation.NONE, keep=True)
        batch, height, width, channels = h.shape
        q, k, v = self.qkv(h.reshape(batch, height * width, channels)).chunk(3, dim=-1)
        name = f"attention {height * width}x{channels}"
        if name not in self.choices:
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                raise EngineError("native autoencoder: run once at this size before the graph is captured")
            ways = {w: lambda w=w: ops.attend(q, k, v, how=w) for w in (*ops.SCORES, *ops.FLASH, "sdpa")}
            self.choices[name] = fastest(ways, current(q), repeats=3).candidate
        out = F.linear(ops.attend(q, k, v, how=self.choices[name]), self.proj)
        return Sum(out.view(y.shape), y, self.shift)


class _Down:
    def __init__(self, block: Downsample) -> None:
        self.weight, self.shift = laid_out(block.conv.weight), _bias(block.conv)

    def __call__(self, x: Sum) -> Sum:
        return Sum(ops.conv(ops.add_up(x, pad=True), self.weight, stride=2), shift=self.shift)


class _Up:
    def __init__(self, block: Upsample) -> None:
        self.weight, self.shift = ops.phase_weights(block.conv.weight), _bias(block.conv)

    def __call__(self, x: Sum) -> Sum:
        return Sum(ops.conv_phases(ops.add_up(x), self.weight).value, shift=self.shift, phased=True)


def _bias(conv: nn.Conv2d | nn.Linear) -> Tensor:
    assert conv.bias is not None
    return conv.bias.float()


def laid_out(weight: Tensor) -> Tensor:
    """A convolution's weight as the GPU's libraries read it: output, row, column, input."""
    return weight.contiguous(memory_format=torch.channels_last)


def padded(weight: Tensor, dim: int) -> Tensor:
    """The same with zeros appended to the output (0) or input (1) channels, up to a multiple of 8."""
    missing = -weight.shape[dim] % _MULTIPLE
    sizes = (0, 0, 0, 0, 0, missing) if dim == 1 else (0, 0, 0, 0, 0, 0, 0, missing)
    return laid_out(F.pad(weight, sizes) if missing else weight)
