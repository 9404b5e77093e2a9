"""Qwen3-VL's vision tower in fused ops: uint8 images to image tokens and deepstack features.

Exact savings: the normalisation of the pixels is folded into the patch embedding, and the weights of every LayerNorm,
also of the mergers, into the next product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.gemm.ops import gemm, patch_product
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import add_norm, gelu, patchify
from vla_accel.nn.native_vision import patch_embedding
from vla_accel.nn.network import Network
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.qwen_vision import PatchMerger, QwenVisionConfig, patch_rope, place_embedding
from vla_accel.nn.weights import Precision, StackWeights, fold, stack_weights


@dataclass(frozen=True)
class MergerWeights:
    """The two products of a merger, with its norm folded. `late`: the norm applies to the joined patches."""

    fc1: Linear
    fc2: Linear
    late: bool

    @classmethod
    def of(cls, model: Network, name: str, dtype: torch.dtype) -> MergerWeights:
        merger = model.get_submodule(name)
        assert isinstance(merger, PatchMerger)
        read = {n: model.weight(f"{name}.{n}") for n, _ in merger.named_parameters()}
        times = merger.joined // len(read["norm.weight"])
        # Unless the norm is late, every patch of a token has the same norm.
        factor, shift = (read[f"norm.{n}"].double().repeat(times) for n in ("weight", "bias"))
        fc1 = make_linear(*fold(read["fc1.weight"], read["fc1.bias"], factor, shift), dtype)
        return cls(fc1, make_linear(read["fc2.weight"], read["fc2.bias"], dtype), times == 1)


@dataclass(frozen=True)
class TowerWeights:
    """The folded weights of the tower.

    `patch` (W, 2 * stride): the embedding in two halves; `offset` (1, W) float32: its bias; `table` (positions, W)
    float32: position embeddings. The last merger is that of the tower itself.
    """

    patch: Tensor
    offset: Tensor
    table: Tensor
    stack: StackWeights
    mergers: tuple[MergerWeights, ...]
    config: QwenVisionConfig

    @classmethod
    def of(cls, model: Network, precision: str) -> TowerWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        stored, config = Precision(precision), model.config.vision
        stack = stack_weights(model, "vision.layers", config.block, config.depth, stored)
        # The frames of an image are equal, so that their weights add up.
        weight = model.weight("vision.patch_embedding.weight").double().sum(2)
        zero = torch.zeros(1, config.width, device=weight.device)
        patch, offset = patch_embedding(weight, model.weight("vision.patch_embedding.bias"), zero, precision)
        table = model.weight("vision.position_embedding").float().clone()
        names = [*(f"vision.deepstack.{i}" for i in range(len(config.deepstack))), "vision.merger"]
        mergers = tuple(MergerWeights.of(model, name, stored.dtype) for name in names)
        return cls(patch, offset, table, stack, mergers, config)


class NativeTower:
    """The vision program. Input `images` uint8 (B, V, H, W, 3); outputs `image_tokens` (B, I, W), `deepstack` (n, B, I,
    W).
    """

    def __init__(self, weights: TowerWeights, batch: int, layout: Layout, attention: str) -> None:
        config, device, dtype = weights.config, weights.patch.device, weights.stack.dtype
        self.weights, self.config = weights, config
        images, patches = batch * layout.views, layout.view_tokens * config.merge**2
        cos, sin = (table[:, 0].contiguous() for table in patch_rope(config, layout.grid, device, torch.float32))
        self.stack = StackPlan(weights.stack, Rows(images, patches), attention, (cos, sin), normed_outside=(0,))
        self.attention = self.stack.attention
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"
        self.place = (weights.offset + place_embedding(weights.table, layout.grid, config.merge)).contiguous()
        rows, joined = images * patches, config.width * config.merge**2
        self.patches = torch.empty(rows, weights.patch.shape[1], dtype=weights.patch.dtype, device=device)
        self.embedded = torch.empty(rows, config.width, dtype=torch.float32, device=device)
        self.normed = torch.empty(rows // config.merge**2, joined, dtype=dtype, device=device)
        self.hidden = torch.empty_like(self.normed)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        stack, config = self.stack, self.config
        patchify(inputs["images"].flatten(0, 1), self.patches, config.patch_size, config.merge)
        patch_product(self.patches, self.weights.patch, self.embedded)

        def after(index: int) -> None:
            if index in config.deepstack:
                level = config.deepstack.index(index)
                self._merge(self.weights.mergers[level], outputs["deepstack"][level])

        with stack.chain:
            stack.enter(self.embedded, self.place)
            stack.enter(stack.x)
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
        gelu(self.hidden, self.hidden, inverse_scale=None, exact=True)
        gemm(self.hidden, merger.fc2, out.flatten(0, 1))
