"""The native programs of Multi-task DiT: CLIP's encoders, and all denoising steps in one program.

Exact savings: what depends on the step alone is a table; the observation's part of all modulations is one product of a
call; the weights of CLIP's norms are folded into the products after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.diffusion_policy.network import ALIGNED, centre, filled
from vla_accel.families.diffusion_policy.scheduler import Step
from vla_accel.families.multi_task_dit.network import EPS, MultiTaskDit, MultiTaskDitConfig
from vla_accel.fp8 import Products
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.ops import attention
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.conv1d.ops import Film, Target, modulate, scheduler_step
from vla_accel.kernels.gemm.config import default, gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import post_norm, rotate
from vla_accel.nn.clip import last_rows
from vla_accel.nn.flow import Schedule
from vla_accel.nn.kernel_choices import Choice, KernelChoices
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import (
    BlockWeights,
    Precision,
    StackWeights,
    compute_dtype,
    plain_input,
    stack_weights,
    weights_in,
)
from vla_accel.numeric import round_up
from vla_accel.runtime import current

QUANTISED = {"denoise": {"native": Products(("qkv_proj", "out_proj", "fc1", "fc2"), activations=False)}}
"""By component, then engine. All other products are computed in the policy's precision."""


class MultiTaskDitStore(NativeStore[MultiTaskDit]):
    """Prepared weights of one Multi-task DiT."""

    def vision(self, batch: int, spec: EngineSpec) -> Program:
        """The program of the frames."""
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: VisionWeights.of(self.model, precision))
        return NativeVision(weights, self.model.config, batch, spec.attention)

    def kv_cache(self, batch: int, spec: EngineSpec) -> Program:
        """The program of the instruction."""
        precision = self.precision("kv_cache", spec)
        weights = self.weights(("kv_cache", precision), lambda: TextWeights.of(self.model, precision))
        return NativeText(weights, batch, spec.attention)

    def denoise(self, batch: int, schedule: Schedule, spec: EngineSpec) -> Program:
        """The program of all steps. Its FP8 and INT8 are of weights alone and need no scales."""
        precision, config = self.precision("denoise", spec, QUANTISED["denoise"]["native"]), self.model.config
        steps = config.steps(schedule)

        def tables() -> Tensor:
            times = self.model.times(steps).flatten(1).float()
            return torch.cat((torch.ones(len(times), config.width, device=times.device), times), 1)

        # They depend on the steps alone, whatever the precision.
        constants = self.weights(("denoise", "times", schedule), tables)
        weights = self.weights(("denoise", precision), lambda: HeadWeights.of(self.model, precision))
        return NativeHead(weights, constants, steps, config, batch)


# -- frames -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TowerWeights:
    """The weights of an image encoder: `patch` (W, 3 · patch²) and `positions` (rows, W) float32, with the class
    token in the first row; weight and bias (W,) float32 of the norm before the blocks."""

    patch: Tensor
    positions: Tensor
    norm: tuple[Tensor, Tensor]
    stack: StackWeights


@dataclass(frozen=True)
class VisionWeights:
    """The image encoders; `factor` and `shift` (V, 1, 1, 3) float32 of each frame's levels."""

    towers: tuple[TowerWeights, ...]
    factor: Tensor
    shift: Tensor

    @classmethod
    def of(cls, model: MultiTaskDit, precision: str) -> VisionWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        config, towers = model.config.vision, []
        for index in range(len(model.encoders)):

            def read(name: str, start: str = f"encoders.{index}.") -> Tensor:
                return model.weight(start + name).float().clone()

            first = read("class_token") + read("class_position")
            norm = read("pre_layernorm.weight"), read("pre_layernorm.bias")
            positions = torch.cat((first, read("position_embedding")))
            stack = stack_weights(model, f"encoders.{index}.layers", config.block, config.depth, Precision(precision))
            towers.append(TowerWeights(read("patch_embedding.weight").flatten(1), positions, norm, stack))
        mean, deviation = (part.double().permute(0, 2, 3, 1) for part in model.pixel_scales())
        return cls(tuple(towers), (1.0 / (255.0 * deviation)).float(), (-mean / deviation).float())


class NativeTower:
    """The launches of an image encoder: normalised frames (N, S, S, 3) float32 to the class tokens' rows (N, W)."""

    def __init__(self, weights: TowerWeights, images: int, patch: int, attention: str) -> None:
        (rows, width), device = weights.positions.shape, weights.positions.device
        self.weights, self.shape, self.patch = weights, (images, rows, width), patch
        self.stack = StackPlan(weights.stack, Rows(images, rows), attention)
        self.start = torch.zeros(images * rows, width, device=device)  # the rows of class tokens stay zero
        self.positions = weights.positions.repeat(images, 1)

    def __call__(self, frames: Tensor) -> Tensor:
        patches = frames.unflatten(2, (-1, self.patch)).unflatten(1, (-1, self.patch)).permute(0, 1, 3, 5, 2, 4)
        rows = F.linear(patches.reshape(len(frames), -1, self.weights.patch.shape[1]), self.weights.patch)
        self.start.view(self.shape)[:, 1:] = rows
        with self.stack.chain:
            post_norm(self.start, self.positions, *self.weights.norm, self.stack.x, eps=self.weights.stack.block.eps)
            self.stack.enter(self.stack.x)
            self.stack.run()
        return self.stack.x.view(self.shape)[:, 0]


class NativeVision:
    """The program of the frames: `images` (B, V, H, W, 3) uint8 to `features` (B, V, W)."""

    def __init__(self, weights: VisionWeights, config: MultiTaskDitConfig, batch: int, attention: str) -> None:
        self.weights, self.config = weights, config
        images = batch * config.views // len(weights.towers)
        self.towers = [NativeTower(tower, images, config.vision.patch_size, attention) for tower in weights.towers]
        self.stack = stack = self.towers[0].stack
        self.attention, self.detail = stack.attention, f"fused ops, {stack.kind}, {stack.detail}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        config, images, features = self.config, inputs["images"], outputs["features"]
        if config.resize is None:  # the rest of the frames is never read
            images = centre(images.permute(0, 1, 4, 2, 3), config.seen).permute(0, 1, 3, 4, 2)
        frames = torch.addcmul(self.weights.shift, images.float(), self.weights.factor)
        if config.resize is not None:
            small = frames.flatten(0, 1).permute(0, 3, 1, 2)
            small = F.interpolate(small, config.resize, mode="bilinear", antialias=True, align_corners=False)
            frames = centre(small, config.seen).permute(0, 2, 3, 1).unflatten(0, features.shape[:2])
        count = len(self.towers)
        for index, tower in enumerate(self.towers):
            rows = features[:, index::count]
            rows.copy_(tower(frames[:, index::count].flatten(0, 1)).view(rows.shape))


# -- instruction --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextWeights:
    """The weights of the text encoder: `table` (vocabulary, W); `positions` (L, W) float32; weight and bias of the
    last norm and of the projection."""

    table: Tensor
    positions: Tensor
    stack: StackWeights
    norm: tuple[Tensor, Tensor]
    projection: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, model: MultiTaskDit, precision: str) -> TextWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        config, dtype = model.config.text, compute_dtype(precision)
        norm, projection = (
            (model.weight(f"text.{name}.weight"), model.weight(f"text.{name}.bias"))
            for name in ("final_norm", "projection")
        )
        stack = stack_weights(model, "text.layers", config.block, config.depth, Precision(precision))
        return cls(
            model.weight("text.embed.weight").to(dtype), model.weight("text.positions").float(), stack,
            (norm[0].float(), norm[1].float()), (projection[0].to(dtype), projection[1].to(dtype)),
        )  # fmt: skip


class NativeText:
    """The program of the instruction: `tokens` (B, L) int64 to `text` (B, width)."""

    attention = None

    def __init__(self, weights: TextWeights, batch: int, attention: str) -> None:
        self.weights, self.stack = weights, StackPlan(weights.stack, Rows(batch, len(weights.positions)), attention)
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        tokens, w, x = inputs["tokens"], self.weights, self.stack.x
        embedded = w.table[tokens.flatten()]
        with self.stack.chain:
            self.stack.enter(embedded, w.positions)
            self.stack.run()
        ends = last_rows(x.view(*tokens.shape, -1), tokens).float()
        normed = F.layer_norm(ends, w.norm[0].shape, *w.norm, w.stack.block.eps)
        outputs["text"].copy_(F.linear(normed.to(x.dtype), *w.projection))


# -- denoising ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadWeights:
    """The weights of a step.

    Attributes:
        layers: The products of each block.
        action_in: Of a chunk's rows, filled up with zeros.
        action_out: To a step's output.
        start: What is added to the first product, (T, W) float32: the positions, or zeros.
        own: (depth · 6 · W, condition_dim), of the observation's part of all modulations; filled up with zeros.
        precision: Of the blocks' products.
    """

    layers: tuple[BlockWeights, ...]
    action_in: Linear
    action_out: Linear
    start: Tensor
    own: Tensor
    precision: str

    @classmethod
    def of(cls, model: MultiTaskDit, precision: str) -> HeadWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or for the blocks fp8 or int8."""
        config, dtype = model.config, compute_dtype(precision)

        def read(name: str) -> tuple[Tensor, Tensor]:
            return model.weight(f"head.{name}.weight"), model.weight(f"head.{name}.bias")

        names = [f"layers.{index}" for index in range(config.depth)]

        def block(name: str) -> BlockWeights:
            parts = QUANTISED["denoise"]["native"].names
            qkv, out, up, down = (plain_input(precision, *read(f"{name}.{part}")) for part in parts)
            return BlockWeights(qkv, out, up, down)

        weight, bias = read("action_in")
        own = torch.cat([read(f"{name}.modulation")[0][:, config.time_dim :] for name in names])
        start = torch.zeros(config.action_horizon, config.width, device=weight.device)
        if config.positions:
            start.copy_(model.weight("head.positions"))
        return cls(
            tuple(map(block, names)), make_linear(filled(weight), bias, dtype),
            make_linear(*read("action_out"), dtype), start, filled(own).to(dtype).contiguous(), precision,
        )  # fmt: skip


class NativeHead:
    """The program of the steps: `noise`, `features` (B, V, n), `text` (B, W) and `state` (B, history, state_dim) to
    `actions` (B, T, A) float32."""

    def __init__(
        self, weights: HeadWeights, tables: Tensor, steps: Sequence[Step], config: MultiTaskDitConfig, batch: int
    ) -> None:
        """`tables` (steps, (1 + 6 · depth) · W) float32: ones, and the time's part of the modulations of all blocks. So
        every `modulate` reads its gate, shift and scale as three parts next to each other."""
        self.weights, self.tables, self.config, self.batch = weights, tables, config, batch
        self.sizes = [step.sizes(config.clip) for step in steps]
        width, horizon, device = config.width, config.action_horizon, tables.device
        rows, dtype = batch * horizon, compute_dtype(weights.precision)
        self.condition = torch.zeros(batch, weights.own.shape[1], dtype=dtype, device=device)
        self.own = torch.zeros(batch, tables.shape[1], device=device)
        self.x = torch.zeros(rows, width, device=device)
        self.y, self.h, self.context = (torch.zeros(rows, width, dtype=dtype, device=device) for _ in range(3))
        self.active, self.qkv = self.y.new_zeros(rows, 4 * width), self.y.new_zeros(rows, 3 * width)
        self.rope: tuple[Tensor, Tensor] | None = None
        if config.rope_base is not None:
            positions = torch.arange(horizon, device=device)
            cos, sin = reference.rope_tables(positions, config.head_dim, torch.float32, config.rope_base)
            self.rope = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        aligned = round_up(config.action_dim, ALIGNED)
        self.first = Target(self.y.new_zeros(rows, aligned), aligned)
        self.output = torch.zeros(rows, config.action_dim, device=device)
        self.chain = Chain(current(device).gpu)
        self.choices = KernelChoices(device, self.chain)
        self._choose()
        launches = 4 + (7 if self.rope is None else 8) * config.depth
        self.detail = f"fused ops, {weights_in(weights.precision)}, {launches} launches a step{self.choices.detail}"

    def _choose(self) -> None:
        """Choose the kernels of the products."""
        layer, gpu = self.weights.layers[0], current(self.tables.device).gpu
        for name, x, product in (
            ("action_in", self.first.rows, self.weights.action_in), ("action_out", self.h, self.weights.action_out),
            ("qkv", self.h, layer.qkv), ("out", self.context, layer.out), ("up", self.h, layer.up),
            ("down", self.active, layer.down),
        ):  # fmt: skip
            sizes = gemm_sizes(x, product)
            if name.startswith("action"):
                self.choices.chosen[name] = Choice(default(gpu, sizes))
            else:
                self.choices.product(name, sizes, partial(self._products, name))

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        noise, actions, width = inputs["noise"], outputs["actions"], self.config.width
        draws = noise[:, None] if noise.dim() == 3 else noise
        condition = self.config.condition(*(inputs[name] for name in ("features", "text", "state")))
        self.condition[:, : condition.shape[1]] = F.silu(condition)
        self.own[:, width:] = F.linear(self.condition, self.weights.own)
        with self.chain:
            scheduler_step(draws[:, 0], None, None, actions, self.sizes[0], [self.first])
            for index, sizes in enumerate(self.sizes):
                self._evaluate(index)
                more, ends = index + 1 < draws.shape[1], index + 1 == len(self.sizes)
                z = draws[:, index + 1] if more else None
                scheduler_step(actions, self.output, z, actions, sizes, [] if ends else [self.first])

    def _evaluate(self, step: int) -> None:
        """The network of a step: `first` to `output`."""
        gemm(self.first.rows, self.weights.action_in, self.y, **self.choices["action_in"].options)
        self._modulate(step, 0, self.weights.start)
        for index, layer in enumerate(self.weights.layers):
            self._product("qkv", layer)
            self._attend()
            self._product("out", layer)
            self._modulate(step, 2 * index + 1, self.x)
            self._product("up", layer)
            self._product("down", layer)
            self._modulate(step, 2 * index + 2, self.x)
        gemm(self.h, self.weights.action_out, self.output, **self.choices["action_out"].options)

    def _modulate(self, step: int, index: int, x: Tensor) -> None:
        """Add the last product to x, and norm the rows for the next one; the last one takes them as they are."""
        ends = index == 2 * self.config.depth
        columns = slice(3 * index * self.config.width, (3 * index + (1 if ends else 3)) * self.config.width)
        film = Film(self.tables[step, columns], self.own[:, columns])
        modulate(x, self.y, self.x, self.h, film, eps=None if ends else EPS)

    def _attend(self) -> None:
        config = self.config
        if self.rope is not None:
            rotate(self.qkv, *self.rope, config.heads)
        q, k, v = self.qkv.view(self.batch, -1, 3, config.heads, config.head_dim).unbind(2)
        attention(q, k, v, self.context, None)

    def _products(self, name: str) -> None:
        for layer in self.weights.layers:
            self._product(name, layer)

    def _product(self, name: str, layer: BlockWeights) -> None:
        options = self.choices[name].options
        if name == "qkv":
            gemm(self.h, layer.qkv, self.qkv, **options)
        elif name == "out":
            gemm(self.context, layer.out, self.y, **options)
        elif name == "up":
            gemm(self.h, layer.up, self.active, Epilogue(layer.up.bias, Activation.GELU), **options)
        else:
            gemm(self.active, layer.down, self.y, **options)
