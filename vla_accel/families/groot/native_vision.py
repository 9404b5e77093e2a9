"""GR00T's vision tower in fused ops: uint8 images to image tokens and deepstack features.

Exact savings: the normalisation of the pixels is folded into the patch embedding, and the weights of every LayerNorm,
also of the mergers, into the next product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from vla_accel.families.groot.language import Layout
from vla_accel.families.groot.network import Groot
from vla_accel.families.groot.vision import PatchMerger, place_embedding
from vla_accel.kernels.gemm.ops import gemm, patch_product
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import add_norm
from vla_accel.kernels.rows.sequence import exact_gelu, patchify_blocks
from vla_accel.nn.fold import fold_norm
from vla_accel.nn.native_vision import VisionLayer, patch_embedding
from vla_accel.nn.stack import Stack, StackSizes, stack_weights
from vla_accel.nn.store import compute_dtype


@dataclass(frozen=True)
class MergerWeights:
    """The two products of a merger, with its norm folded. `late`: the norm applies to the joined patches."""

    fc1: Linear
    fc2: Linear
    late: bool

    @classmethod
    def of(cls, merger: PatchMerger, dtype: torch.dtype) -> MergerWeights:
        norm, late = merger.norm, merger.norm.normalized_shape[0] == merger.joined
        if not late:
            # Every patch of a token has the same norm.
            times = merger.joined // norm.normalized_shape[0]
            norm = torch.nn.LayerNorm(merger.joined, eps=norm.eps, device="meta")
            norm.weight = torch.nn.Parameter(merger.norm.weight.repeat(times), requires_grad=False)
            norm.bias = torch.nn.Parameter(merger.norm.bias.repeat(times), requires_grad=False)
        return cls(
            make_linear(*fold_norm(merger.fc1, norm), dtype),
            make_linear(merger.fc2.weight, merger.fc2.bias, dtype),
            late,
        )


@dataclass(frozen=True)
class TowerWeights:
    """The folded weights of the tower.

    `patch` (W, 2 * stride): the embedding in two halves; `offset` (1, W) float32: its bias; `table` (positions, W)
    float32: position embeddings. The last merger is that of the tower itself.
    """

    patch: Tensor
    offset: Tensor
    table: Tensor
    layers: tuple[VisionLayer, ...]
    mergers: tuple[MergerWeights, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Groot, precision: str) -> TowerWeights:
        """Prepare from a model; `precision` fp32 or bf16."""
        dtype, vision = compute_dtype(precision), model.vision
        layers = stack_weights(model, "vision.layers", list(vision.layers), dtype)
        with model.present("vision.patch_embedding", "vision.position_embedding"):
            convolution = SimpleNamespace(
                weight=vision.patch_embedding.weight.double().sum(2), bias=vision.patch_embedding.bias
            )
            zero = torch.zeros(1, vision.config.width, device=vision.position_embedding.device)
            patch, offset = patch_embedding(convolution, zero, precision)
            table = vision.position_embedding.detach().float().clone()
        with model.present("vision.merger", "vision.deepstack"):
            mergers = [m for m in (*vision.deepstack, vision.merger) if isinstance(m, PatchMerger)]
            return cls(patch, offset, table, layers, tuple(MergerWeights.of(m, dtype) for m in mergers), dtype)


class NativeTower:
    """The vision program. Input `images` uint8 (B, V, H, W, 3); outputs `image_tokens` (B, I, W), `deepstack` (n, B, I,
    W).
    """

    def __init__(self, weights: TowerWeights, model: Groot, batch: int, layout: Layout, attention: str) -> None:
        config, device, dtype = model.config.vision, weights.patch.device, weights.dtype
        self.weights, self.config = weights, config
        images, patches = batch * layout.views, layout.view_tokens * config.merge**2
        placed = model.vision.rope(layout.grid, device, torch.float32)
        rope = tuple(table[:, 0].contiguous() for table in placed)
        sizes = StackSizes(images, patches, config.heads, config.eps)
        self.stack = Stack(weights.layers, sizes, dtype, attention, rope)  # type: ignore[arg-type]
        self.attention = self.stack.attention
        self.detail = f"fused ops, {dtype}{self.stack.detail}"
        self.place = (weights.offset + place_embedding(weights.table, layout.grid, config.merge)).contiguous()
        rows, joined = images * patches, config.width * config.merge**2
        self.patches = torch.empty(rows, weights.patch.shape[1], dtype=weights.patch.dtype, device=device)
        self.embedded = torch.empty(rows, config.width, dtype=torch.float32, device=device)
        self.normed = torch.empty(rows // config.merge**2, joined, dtype=dtype, device=device)
        self.hidden = torch.empty_like(self.normed)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        stack, config = self.stack, self.config
        patchify_blocks(inputs["images"].flatten(0, 1), self.patches, config.patch_size, config.merge)
        patch_product(self.patches, self.weights.patch, self.embedded)

        def after(index: int) -> None:
            if index in config.deepstack:
                level = config.deepstack.index(index)
                self._merge(self.weights.mergers[level], outputs["deepstack"][level])

        with stack.chain:
            add_norm(self.embedded, self.place, stack.x, stack.h, layer=True, eps=config.eps, inverse_scale=None)
            stack.run(after=after)
            self._merge(self.weights.mergers[-1], outputs["image_tokens"])

    def _merge(self, merger: MergerWeights, out: Tensor) -> None:
        x, normed = self.stack.x, self.normed
        if merger.late:
            x = x.view(normed.shape)
        else:
            normed = normed.view(x.shape)
        add_norm(x, None, x, normed, layer=True, eps=self.config.eps, inverse_scale=None)
        gemm(self.normed, merger.fc1, self.hidden)
        exact_gelu(self.hidden)
        gemm(self.hidden, merger.fc2, out.flatten(0, 1))
