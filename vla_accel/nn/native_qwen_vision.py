"""Vision towers of Qwen3-VL and Eagle in fused ops: uint8 images to image tokens and deepstack features.

Exact savings: the normalisation of the pixels is folded into the patch embedding, and the weights of every LayerNorm,
also of the mergers, into the next product, unless another norm follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm, patch_product
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import add_norm, patchify
from vla_accel.nn.native_vision import patch_embedding
from vla_accel.nn.network import Network
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.qwen_vision import PatchMerger, QwenVisionConfig, patch_rope
from vla_accel.nn.weights import Precision, StackWeights, fold, stack_weights


@dataclass(frozen=True)
class MergerWeights:
    """The products of a merger, with a norm before them folded; Eagle 2.5 has one. `eps` and `late` of the norm:
    whether it applies to the joined patches."""

    fc1: Linear
    fc2: Linear | None
    late: bool
    eps: float

    @classmethod
    def of(cls, model: Network, name: str, dtype: torch.dtype) -> MergerWeights:
        merger = model.get_submodule(name)
        assert isinstance(merger, PatchMerger)
        read = {n: model.weight(f"{name}.{n}") for n, _ in merger.named_parameters()}
        norm, eps = "vision.post_layernorm", model.config.vision.eps  # of a merger without one, the tower's last
        if merger.norm is not None:
            norm, eps = f"{name}.norm", merger.norm.eps
        affine = [model.weight(f"{norm}.{n}").double() for n in ("weight", "bias")]
        # Unless the norm is late, every patch of a token has the same norm.
        factor, shift = (x.repeat(merger.joined // len(x)) for x in affine)
        weight = read["fc1.weight"]
        if merger.by_channel:
            weight, factor, shift = (_by_patch(x, merger.patches) for x in (weight, factor, shift))
        fc1 = make_linear(*fold(weight, read["fc1.bias"], factor, shift), dtype)
        fc2 = None if merger.fc2 is None else make_linear(read["fc2.weight"], read["fc2.bias"], dtype)
        return cls(fc1, fc2, len(affine[0]) == merger.joined, eps)


def _by_patch(x: Tensor, patches: int) -> Tensor:
    """Numbers (..., width * patches) of joined patches, stored channel by channel, patch by patch."""
    return x.unflatten(-1, (-1, patches)).transpose(-1, -2).flatten(-2)


@dataclass(frozen=True)
class TowerWeights:
    """The folded weights of the tower.

    `patch` (W, 2 * stride): the embedding in two halves; `offset` (1, W) float32: its bias; `table` (positions, W)
    float32: position embeddings; `last_norm`: weight and bias (W,) float32 of a tower's last norm that another one
    follows; `class_row` (1, W) float32: the class token, if there is one. The last merger is that of the tower itself.
    """

    patch: Tensor
    offset: Tensor
    table: Tensor
    stack: StackWeights
    mergers: tuple[MergerWeights, ...]
    last_norm: tuple[Tensor, Tensor] | None
    class_row: Tensor | None
    config: QwenVisionConfig

    @classmethod
    def of(cls, model: Network, precision: str) -> TowerWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        stored, config = Precision(precision), model.config.vision
        stack = stack_weights(model, "vision.layers", config.block, config.depth, stored)
        parts = (model.weight(f"vision.patch_embedding.{n}").double() for n in ("weight", "bias"))
        weight, bias = config.patch_product(*parts)
        zero = torch.zeros(1, config.width, device=weight.device)
        patch, offset = patch_embedding(weight, bias, zero, precision)
        table = model.weight("vision.position_embedding").float().clone()
        first = table[:1] + model.weight("vision.class_embedding").float() if config.class_token else None
        names = [*(f"vision.deepstack.{i}" for i in range(len(config.deepstack))), "vision.merger"]
        mergers = tuple(MergerWeights.of(model, name, stored.dtype) for name in names)
        tower, last = model.get_submodule("vision"), None
        if tower.post_layernorm is not None and tower.merger.norm is not None:  # type: ignore[union-attr]
            weight, bias = (model.weight(f"vision.post_layernorm.{n}").float().clone() for n in ("weight", "bias"))
            last = weight, bias
        return cls(patch, offset, table, stack, mergers, last, first, config)


class NativeTower:
    """The vision program. Input `images` uint8 (B, V, H, W, 3); outputs `image_tokens` (B, I, W) and, of towers with
    it, `deepstack` (n, B, I, W).
    """

    def __init__(self, weights: TowerWeights, batch: int, layout: Layout, attention: str) -> None:
        config, device, dtype = weights.config, weights.patch.device, weights.stack.dtype
        self.weights, self.config = weights, config
        images, patches = batch * layout.views, layout.view_tokens * config.merge**2
        rope = None
        if config.rotates:
            cos, sin = (table[:, 0].contiguous() for table in patch_rope(config, layout.grid, device, torch.float32))
            rope = cos, sin
        each = patches + config.class_token
        self.stack = StackPlan(weights.stack, Rows(images, each), attention, rope, normed_outside=(0,))
        self.attention = self.stack.attention
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"
        place = weights.offset + config.place_embedding(weights.table, layout.grid)
        self.place = place.contiguous() if weights.class_row is None else torch.cat((place, weights.class_row))
        rows, joined = images * patches, config.width * config.merge**2
        self.patches = torch.empty(rows, weights.patch.shape[1], dtype=weights.patch.dtype, device=device)
        self.embedded = torch.empty(rows, config.width, dtype=torch.float32, device=device)
        self.start = self.embedded
        if config.class_token:
            self.start = torch.zeros(images * each, config.width, dtype=torch.float32, device=device)
        self.kept = torch.empty(rows, config.width, dtype=dtype, device=device) if config.class_token else self.stack.x
        self.shape = (images, each, config.width)
        self.normed = torch.empty(rows // config.merge**2, joined, dtype=dtype, device=device)
        self.hidden = torch.empty(len(self.normed), len(weights.mergers[-1].fc1.weight), dtype=dtype, device=device)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        stack, config = self.stack, self.config
        patchify(inputs["images"].flatten(0, 1), self.patches, config.patch_size, config.merge)
        patch_product(self.patches, self.weights.patch, self.embedded)
        if config.class_token:
            self._patches(self.start).copy_(self.embedded.view(self.shape[0], -1, config.width))

        def after(index: int) -> None:
            if index in config.deepstack:
                level = config.deepstack.index(index)
                self._merge(self.weights.mergers[level], outputs["deepstack"][level])

        with stack.chain:
            stack.enter(self.start, self.place)
            stack.enter(stack.x)
            stack.run(after=after)
            if self.weights.last_norm is not None:
                weight, bias = self.weights.last_norm
                self._norm(stack.x, stack.x, config.eps)
                stack.x.copy_(torch.addcmul(bias, stack.x, weight))
            if config.class_token:
                self.kept.view(self.shape[0], -1, config.width).copy_(self._patches(stack.x))
                stack.chain.restart()
            self._merge(self.weights.mergers[-1], outputs["image_tokens"])

    def _patches(self, rows: Tensor) -> Tensor:
        """The rows of patches of a buffer with class tokens, (images, patches, W)."""
        return rows.view(self.shape)[:, :-1]

    def _norm(self, x: Tensor, out: Tensor, eps: float) -> None:
        add_norm(x, None, x, out, layer=True, eps=eps, inverse_scale=None)

    def _merge(self, merger: MergerWeights, out: Tensor) -> None:
        x, normed, tokens = self.kept, self.normed, out.flatten(0, 1)
        if merger.late:
            x = x.view(normed.shape)
        else:
            normed = normed.view(x.shape)
        self._norm(x, normed, merger.eps)
        if merger.fc2 is None:
            return gemm(self.normed, merger.fc1, tokens)
        gemm(self.normed, merger.fc1, self.hidden, Epilogue(activation=Activation.GELU_ERF), workspace=(self.hidden,))
        gemm(self.hidden, merger.fc2, tokens)
