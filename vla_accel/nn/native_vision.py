"""SigLIP and the projector in fused ops: uint8 images to image tokens.

Exact savings: the pixels' normalisation and every LayerNorm's weights are folded into the product that follows, q, k
and v are one product, and an MLP width that is slow on tensor cores (4304) is padded once, at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.fp8 import Scales
from vla_accel.kernels.gemm.ops import gemm, patch_product
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import by_squares, patchify
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.weights import Precision, StackWeights, fold, stack_weights
from vla_accel.numeric import round_up


@dataclass(frozen=True)
class VisionWeights:
    """The folded weights of the tower.

    `patch` (W, 2 * stride): the embedding in two BF16 halves; `place` (T, W) float32: position embedding and bias.
    `square`: patches along each side of the square that becomes one token. The patches of a square are consecutive
    rows.
    """

    patch: Tensor
    place: Tensor
    stack: StackWeights
    projector: Linear
    image_size: int
    patch_size: int
    square: int

    @classmethod
    def of(cls, model: PrefixNetwork, precision: str, scales: Scales | None, keep: Sequence[str] = ()) -> VisionWeights:
        """Prepare the weights of a model.

        `precision`: fp32, bf16, fp16, or fp8 or int8, which apply to the products in `QUANTISED` except `keep`.
        """
        config, square = model.config.vision, model.config.shuffle
        stored = Precision(precision, QUANTISED["vision"]["native"].without(keep), scales)
        stack = stack_weights(model, "vision.layers", config.block, config.depth, stored)
        weight, bias = (model.weight(f"vision.patch_embedding.{n}") for n in ("weight", "bias"))
        patch, place = patch_embedding(weight, bias, model.weight("vision.position_embedding"), precision)
        place = place[by_squares(config.image_size // config.patch_size, square).to(place.device)].contiguous()
        projector = make_linear(*_projector(model), stored.dtype)
        return cls(patch, place, stack, projector, config.image_size, config.patch_size, square)


def _projector(model: PrefixNetwork) -> tuple[Tensor, Tensor | None]:
    """Weight and bias for features without their norm's weights, and for image tokens as the prefix takes them."""
    config, weight = model.config, model.weight("projector.weight")
    bias = None if model.projector.bias is None else model.weight("projector.bias")
    factor, shift = (model.weight(f"vision.post_layernorm.{n}").double() for n in ("weight", "bias"))
    # The patches of a token have the same norm.
    weight, bias = fold(weight, bias, *(x.repeat(config.shuffle**2) for x in (factor, shift)))
    return weight * config.image_scale, None if bias is None else bias * config.image_scale


def patch_embedding(weight: Tensor, bias: Tensor, position: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """The weights of a convolution for raw bytes: W (p / 127.5 - 1) + b = (W / 127.5) p + (b - ΣW).

    openpi keeps the embedding in float32. Bytes are exact in BF16, and a weight in two BF16 halves keeps 16 bits.
    """
    weight = weight.flatten(1).double()
    offset = bias.double() - weight.sum(1)
    scaled = weight / 127.5
    stride = round_up(weight.shape[1], 16)
    scaled = torch.nn.functional.pad(scaled, (0, stride - weight.shape[1]))
    if precision == "fp32":
        halves = torch.cat((scaled, torch.zeros_like(scaled)), 1).float()
    else:
        high = scaled.to(torch.bfloat16)
        halves = torch.cat((high, (scaled - high.double()).to(torch.bfloat16)), 1)
    return halves.contiguous(), (position.double() + offset).float().contiguous()


class NativeVision:
    """The program. Inputs `images` uint8 (B, V, S, S, 3) and, if the component has them, `pixel_maps` float32
    (B, V, `pictures.MAP_WIDTH`); output `image_tokens` (B, V * T, W) in the prefix's dtype."""

    def __init__(self, weights: VisionWeights, batch: int, views: int, attention: str = "own") -> None:
        (patches, width), device = weights.place.shape, weights.patch.device
        self.weights, rows = weights, batch * views * patches
        self.stack = StackPlan(weights.stack, Rows(batch * views, patches), attention)
        self.attention, self.chain = self.stack.attention, self.stack.chain
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"
        self.patches = torch.empty(rows, weights.patch.shape[1], dtype=weights.patch.dtype, device=device)
        self.embedded = torch.empty(rows, width, dtype=torch.float32, device=device)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        w, images, stack = self.weights, inputs["images"], self.stack
        maps = inputs.get("pixel_maps")
        patchify(
            images.flatten(0, 1), self.patches, w.patch_size, w.square, None if maps is None else maps.flatten(0, 1)
        )
        patch_product(self.patches, w.patch, self.embedded)
        with self.chain:
            stack.enter(self.embedded, w.place)
            stack.run()
            features = stack.output()
        tokens = outputs["image_tokens"].flatten(0, 1)
        features = features.view(len(tokens), -1)
        if tokens.dtype == features.dtype:
            gemm(features, w.projector, tokens)
        else:
            # The cast bridge: an FP16 tower before a BF16 prefix.
            tokens.copy_(torch.addmm(w.projector.bias, features, w.projector.weight.t()))  # type: ignore[arg-type]
