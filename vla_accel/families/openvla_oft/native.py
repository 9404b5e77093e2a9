"""The native programs of OpenVLA-OFT: both towers with the projector, and the language model with the head.

Exact savings: the normalisation of the pixels, norms and LayerScale are folded into the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.openvla_oft.network import STOP, Layout, OpenVlaOft, OpenVlaOftConfig, TowerConfig
from vla_accel.fp8 import Products
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm, patch_product
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import patchify, rope_tables
from vla_accel.nn.mlp_head import NativeMlpHead
from vla_accel.nn.native_vision import patch_embedding
from vla_accel.nn.overlap import at_once
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import Precision, StackWeights, stack_weights

QUANTISED = {"decode": {"native": Products(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))}}
"""The products of the language model, 90 % of all work."""
_GELU = Epilogue(activation=Activation.GELU_ERF)


@dataclass(frozen=True)
class TowerWeights:
    """The folded weights of a tower.

    `patch` (W, 2 * stride): the embedding in two halves, for bytes; `positions` (rows, W) float32: class token and
    registers, and positions and bias of the patches.
    """

    patch: Tensor
    positions: Tensor
    stack: StackWeights
    config: TowerConfig

    @classmethod
    def of(cls, model: OpenVlaOft, name: str, precision: str) -> TowerWeights:
        """Prepare the tower `name` of a model. `precision`: fp32 or bf16."""
        config: TowerConfig = getattr(model.config, name)
        weight, bias = (model.weight(f"{name}.patch_embedding.{n}").double() for n in ("weight", "bias"))
        mean, deviation = (torch.tensor(x, dtype=torch.float64, device=weight.device)[:, None, None]
                           for x in (config.mean, config.deviation))  # fmt: skip
        # (p / 255 - mean) / deviation, as numbers of p / 127.5 - 1.
        bias = bias + (weight * (0.5 - mean) / deviation).sum((1, 2, 3))
        patch, positions = patch_embedding(
            weight / (2.0 * deviation), bias, model.weight(f"{name}.position_embedding"), precision
        )
        if config.registers:
            first = [model.weight(f"{name}.{n}").float() for n in ("class_token", "register_tokens")]
            positions = torch.cat((*first, positions))
        stack = stack_weights(model, f"{name}.layers", config.block, config.depth, Precision(precision))
        return cls(patch, positions, stack, config)


class NativeTower:
    """The launches of a tower: uint8 images (N, S, S, 3) to features (N * tokens, W)."""

    def __init__(self, weights: TowerWeights, images: int, attention: str) -> None:
        config, (rows, width), device = weights.config, weights.positions.shape, weights.patch.device
        self.weights, self.images = weights, images
        self.stack = StackPlan(weights.stack, Rows(images, rows), attention)
        self.patches = torch.empty(
            images * config.tokens, weights.patch.shape[1], dtype=weights.patch.dtype, device=device
        )
        self.embedded = torch.empty(images * config.tokens, width, device=device)
        # The rows of class token and registers stay zero.
        self.rows = torch.zeros(images, rows, width, device=device)

    def __call__(self, images: Tensor, out: Tensor) -> None:
        config, stack = self.weights.config, self.stack
        patchify(images, self.patches, config.patch_size)
        patch_product(self.patches, self.weights.patch, self.embedded)
        self.rows[:, config.registers :] = self.embedded.view(self.images, config.tokens, -1)
        with stack.chain:
            stack.enter(self.rows.flatten(0, 1), self.weights.positions)
            stack.run()
        rows = stack.x.view(self.images, -1, stack.x.shape[1])
        out.copy_(rows[:, config.registers :].flatten(0, 1))


@dataclass(frozen=True)
class VisionWeights:
    """The folded weights of both towers, and the projector's products."""

    towers: tuple[TowerWeights, ...]
    projector: tuple[Linear, ...]

    @classmethod
    def of(cls, model: OpenVlaOft, precision: str) -> VisionWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        towers, dtype = [TowerWeights.of(model, name, precision) for name in ("dino", "siglip")], Precision(precision)
        names = (f"projector.fc{index}" for index in (1, 2, 3))
        linear = [make_linear(model.weight(f"{n}.weight"), model.weight(f"{n}.bias"), dtype.dtype) for n in names]
        return cls(tuple(towers), tuple(linear))


class NativeVision:
    """The program of the towers. Input `images` uint8 (B, V, S, S, 3); output `image_tokens` (B, V * tokens, width)."""

    def __init__(self, weights: VisionWeights, batch: int, views: int, attention: str) -> None:
        self.weights, images = weights, batch * views
        self.towers = [NativeTower(tower, images, attention) for tower in weights.towers]
        stacks = [tower.stack for tower in self.towers]
        self.attention = stacks[0].attention
        details = "; ".join(stack.detail for stack in stacks)
        self.detail = f"fused ops, {stacks[0].kind}, two towers at once, {details}"
        rows, dtype, device = images * weights.towers[0].config.tokens, stacks[0].x.dtype, stacks[0].x.device
        self.widths = [stack.x.shape[1] for stack in stacks]

        def buffer(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        self.features = buffer(sum(self.widths))
        self.hidden = [buffer(len(product.weight)) for product in weights.projector[:-1]]

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        images = inputs["images"].flatten(0, 1)
        # Neither tower fills a large GPU.
        (dino, siglip), (first, second) = self.towers, self.features.split(self.widths, 1)
        with at_once(images.device, partial(dino, images, first)):
            siglip(images, second)
        rows = self.features
        for product, hidden in zip(self.weights.projector, self.hidden, strict=False):
            gemm(rows, product, hidden, _GELU, workspace=(hidden,))
            rows = hidden
        gemm(rows, self.weights.projector[-1], outputs["image_tokens"].flatten(0, 1))


@dataclass(frozen=True)
class DecoderWeights:
    """The weights of language model, embedding of the state, and head. `table` (vocabulary, W): token embeddings;
    `state`: weights and biases of two products, float32; `norm` (W,): of the final norm."""

    table: Tensor
    state: tuple[Tensor, ...]
    stack: StackWeights
    norm: Tensor
    head: NativeMlpHead
    config: OpenVlaOftConfig

    @classmethod
    def of(cls, model: OpenVlaOft, stored: Precision) -> DecoderWeights:
        """Prepare the weights of a model."""
        config = model.config.language
        stack = stack_weights(model, "language.layers", config.block, config.depth, stored)
        names = [f"state.fc{index}.{n}" for index in (1, 2) for n in ("weight", "bias")]
        state = tuple(model.weight(name).float() for name in names) if model.config.state_dim else ()
        norm = model.weight("language.norm.weight").to(stored.dtype)
        return cls(model.weight("embed.weight"), state, stack, norm, NativeMlpHead.of(model, stored.dtype),
                   model.config)  # fmt: skip


class NativeDecoder:
    """The program of language model and head. Inputs as those of `Decode`; output `actions` (B, H, A) float32."""

    def __init__(self, weights: DecoderWeights, batch: int, layout: Layout, attention: str) -> None:
        config, device = weights.config.language, weights.table.device
        self.weights, self.layout, self.batch = weights, layout, batch
        # Positions follow the lengths: a call takes its rows of these tables.
        self.tables = rope_tables(layout.rows, config.head_dim, device)
        self.rope = [torch.empty(batch * layout.rows, config.head_dim // 2, device=device) for _ in self.tables]
        rows = Rows(batch, layout.rows, padded=True)
        self.stack = StackPlan(weights.stack, rows, attention, (self.rope[0], self.rope[1]))
        self.attention = self.stack.attention
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"
        self.first = torch.arange(batch, device=device)[:, None] * layout.rows

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        stack, lengths, actions = self.stack, inputs["lengths"], outputs["actions"]
        positions = self.layout.positions(lengths).flatten()
        for table, taken in zip(self.tables, self.rope, strict=True):
            torch.index_select(table, 0, positions, out=taken)
        self._place(inputs)
        with stack.chain:
            stack.enter(stack.x)
            stack.run(lengths)
            hidden = stack.output()
        chosen = hidden[(self.layout.outputs(lengths) + self.first).flatten()] * self.weights.norm
        actions.copy_(self.weights.head(chosen.view(*actions.shape[:2], -1)))

    def _place(self, inputs: Mapping[str, Tensor]) -> None:
        """Write the rows of the language model."""
        layout, table, tokens = self.layout, self.weights.table, inputs["tokens"]
        rows = self.stack.x.view(self.batch, layout.rows, -1)
        rows[:, 0] = table[tokens[:, 0]]
        rows[:, 1 : 1 + layout.images] = inputs["image_tokens"]
        if self.weights.state:
            first, bias, second, last = self.weights.state
            rows[:, layout.zeros - 1] = F.linear(F.gelu(F.linear(inputs["state"], first, bias)), second, last)
        rows[:, layout.zeros : layout.fixed - 1] = 0.0
        rows[:, layout.fixed - 1] = table[STOP]
        rows[:, layout.fixed :] = table[tokens[:, 1:]]


class OftStore(NativeStore[OpenVlaOft]):
    """Prepared weights of one OpenVLA-OFT."""

    def vision(self, batch: int, views: int, spec: EngineSpec) -> Program:
        """The program of the towers."""
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: VisionWeights.of(self.model, precision))
        return NativeVision(weights, batch, views, spec.attention)

    def decode(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The program of language model and head."""
        products = QUANTISED["decode"]["native"]
        precision = self.precision("decode", spec, products)
        weights = self.weights(
            ("decode", precision, spec.keep),
            lambda: DecoderWeights.of(self.model, Precision(precision, products.without(spec.keep), self.scales)),
        )
        return NativeDecoder(weights, batch, layout, spec.attention)
