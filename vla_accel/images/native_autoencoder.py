"""The native program of an autoencoder half: the same mathematics with fewer and larger GPU kernels.

Images are (B, H, W, C) throughout. The norm that follows adds biases, shortcuts and residuals; upsampling is folded
into its convolution; the wide attention head takes the fastest of several ways, measured on first use. Runs anywhere,
but pays off only on a GPU, inside a CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.component import Program
from vla_accel.errors import EngineError
from vla_accel.images import native
from vla_accel.images.autoencoder import (
    Downsample,
    Half,
    ResBlock,
    SpatialAttention,
    Stage,
    Upsample,
    from_patches,
    patches,
)
from vla_accel.images.native import NormAct, bias_of, laid_out, padded
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.ops import Sum

Layer = Callable[[Sum], Sum]


class NativeHalf:
    """`program(inputs, outputs)`: reads the first input and writes the first output.

    Holds a copy of the weights, laid out for the GPU. One instance serves every size.

    Args:
        dtype: to compute in, instead of the half's. float16 has eight times finer steps than bfloat16 at the same
            speed, if the range suffices.

    Raises:
        EngineError: a weight exceeds the range of `dtype`, or a block is unknown.
    """

    def __init__(self, half: Half, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype != half.dtype:
            half = copy.deepcopy(half).to(dtype)
            large = next((name for name, weight in half.named_parameters() if not weight.isfinite().all()), None)
            if large is not None:
                raise EngineError(f"native autoencoder: weight {large} does not fit {dtype}; use bfloat16 or float32")
        self.half, self.dtype = half, half.dtype
        self.choices = native.Choices()
        self.detail = self._describe()
        self.conv_in = padded(half.conv_in.weight, 1)
        self.conv_out = padded(half.conv_out.weight, 0)
        self.layers = [self._layer(block) for block in half.blocks]
        self.shift_in, self.norm_out = bias_of(half.conv_in), NormAct(half.norm_out)
        bias = bias_of(half.conv_out)
        if half.last is not None:
            # A 1x1 convolution after a convolution is one convolution.
            last = half.last.weight.flatten(1).float()
            merged = torch.einsum("po,ochw->pchw", last.double(), half.conv_out.weight.double())
            self.conv_out = padded(merged.to(self.dtype), 0)
            bias = last @ bias + bias_of(half.last)
        self.bias_out = bias.to(self.dtype)[:, None, None]

    def _describe(self) -> str:
        chosen = (f"{key} {way}" for key, way in self.choices.items())
        return native.describe(self.dtype, "fused norms, folded upsampling", chosen)

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (source,), (target,) = inputs.values(), outputs.values()
        if self.half.frames:
            source, target = source[:, :, 0], target[:, :, 0]
        with native.fast_convolutions():
            y = self._run(source.to(self.dtype))
        if self.half.patch > 1 and self.half.decodes:
            inside = y.new_empty(len(y), len(self.bias_out), *y.shape[1:3])
            native.write(y, self.bias_out, inside)
            target.copy_(from_patches(inside, self.half.patch))
        else:
            native.write(y, self.bias_out, target)
        if self.half.clamp:
            target.clamp_(-1.0, 1.0)
        self.detail = self._describe()

    def _run(self, x: Tensor) -> Tensor:
        first = self.half.first
        if self.half.patch > 1 and not self.half.decodes:
            x = patches(x, self.half.patch)
        if first is not None:
            x = F.linear(x.permute(0, 2, 3, 1), first.weight.flatten(1), first.bias).permute(0, 3, 1, 2)
        x = native.channels_last(x, self.conv_in.shape[1])
        state = Sum(ops.conv(x, self.conv_in, padding=1), shift=self.shift_in)
        for layer in self.layers:
            state = layer(state)
        _, h = self.norm_out(state, keep=False)
        return ops.conv(h, self.conv_out, padding=1)

    def _layer(self, block: nn.Module) -> Layer:
        if isinstance(block, SpatialAttention):
            return _Attention(block, self.choices)
        if isinstance(block, Stage):
            return _Stage(block, [self._layer(inner) for inner in block.blocks])
        if isinstance(block, nn.Sequential):
            return _Chain([self._layer(inner) for inner in block])
        kinds: dict[type, Callable[[Any], Layer]] = {ResBlock: _Res, Downsample: _Down, Upsample: _Up}
        if type(block) not in kinds:
            raise EngineError(f"native autoencoder: unknown block {type(block).__name__}")
        return kinds[type(block)](block)


class CompiledHalf:
    """torch.compile of the half in its channels-last, two-dimensional form."""

    def __init__(self, half: Half, backend: str = "inductor") -> None:
        self.detail = f"torch.compile ({backend}) of the channels-last form"
        half = half.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self._run, self._dtype = torch.compile(half, backend=backend, dynamic=False), half.dtype

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (source,), (target,) = inputs.values(), outputs.values()
        with native.fast_convolutions():
            target.copy_(self._run(source.to(self._dtype)))


class QuickestHalf:
    """The fastest of several programs at each size, measured at the size's first call; `detail` has all times."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.programs = dict(programs)
        self.chosen: dict[tuple[int, ...], str] = {}
        self.detail = f"the fastest of {', '.join(self.programs)}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (source,) = inputs.values()
        size = tuple(source.shape)
        if size not in self.chosen:
            ways = {n: lambda p=p: p(inputs, outputs) for n, p in self.programs.items()}
            found = native.measure(ways, source, repeats=3)
            self.chosen[size] = found.candidate
            taken = [f"{n} {ms:.2f} ms" for n, ms in found.times.items()] or ["not measured"]
            taken += [f"{n} out: {reason}" for n, reason in found.rejected.items()]
            self.detail = f"{found.candidate} ({', '.join(taken)}): {self.programs[found.candidate].detail}"
        self.programs[self.chosen[size]](inputs, outputs)


class _Res(native.Residual):
    def __init__(self, block: ResBlock) -> None:
        super().__init__(block, block.shortcut)
        self.first = bias_of(block.conv1)

    def __call__(self, x: Sum) -> Sum:
        return self.run(x, self.first, lambda h, weight: ops.conv(h, weight, padding=1))[1]


class _Attention:
    def __init__(self, block: SpatialAttention, choices: native.Choices) -> None:
        self.norm, self.choices = NormAct(block.norm, Activation.NONE), choices
        self.qkv, self.proj = block.qkv, block.proj.weight
        self.shift = bias_of(block.proj)

    def __call__(self, x: Sum) -> Sum:
        y, h = self.norm(x, keep=True)
        batch, height, width, channels = h.shape
        q, k, v = self.qkv(h.reshape(batch, height * width, channels)).chunk(3, dim=-1)
        ways = {w: lambda w=w: ops.attend(q, k, v, how=w) for w in (*ops.SCORES, *ops.FLASH, "sdpa")}
        how = self.choices.pick(f"attention {height * width}x{channels}", ways, q, repeats=3)
        out = F.linear(ops.attend(q, k, v, how=how), self.proj)
        return Sum(out.view(y.shape), y, self.shift)


class _Down:
    def __init__(self, block: Downsample) -> None:
        self.weight, self.shift = laid_out(block.conv.weight), bias_of(block.conv)

    def __call__(self, x: Sum) -> Sum:
        return Sum(ops.conv(ops.add_up(x, pad=True), self.weight, stride=2), shift=self.shift)


class _Chain:
    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers

    def __call__(self, x: Sum) -> Sum:
        for layer in self.layers:
            x = layer(x)
        return x


class _Stage(_Chain):
    def __init__(self, stage: Stage, layers: list[Layer]) -> None:
        super().__init__(layers)
        self.stage = stage

    def __call__(self, x: Sum) -> Sum:
        first = ops.add_up(x)
        y = ops.add_up(super().__call__(Sum(first)))
        around = self.stage.shortcut(first.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return Sum(y, around.contiguous())


class _Up:
    def __init__(self, block: Upsample) -> None:
        self.weight, self.shift = ops.phase_weights(block.conv.weight), bias_of(block.conv)

    def __call__(self, x: Sum) -> Sum:
        return native.upsample(ops.add_up(x), self.weight, self.shift)
