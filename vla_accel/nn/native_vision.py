"""SigLIP and the projector in fused ops: uint8 images to image tokens.

Exact savings: the pixels' normalisation and every LayerNorm's weights are folded into the product that follows, q, k
and v are one product, and an MLP width that the tensor cores dislike (4304) is padded once, at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_accel.fp8 import Scales, named
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.attending import Sizes, attend, choose
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import can_be_inside, products_by, with_sums
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm, patch_product
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import add_norm, by_squares, patchify
from vla_accel.nn.fold import fold_norm
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.siglip import SiglipLayer
from vla_accel.nn.store import amax_of, compute_dtype, format_of
from vla_accel.numeric import round_up


@dataclass(frozen=True)
class VisionLayer:
    """One block's four products."""

    qkv: Linear
    out: Linear
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class VisionWeights:
    """The tower's weights, folded. `patch` (W, 2 * stride): the embedding in two BF16 halves; `place` (T, W) float32:
    position embedding and bias. `square`: patches along each side of the square that becomes one token; patches lie
    square by square, so that those are side by side."""

    patch: Tensor
    place: Tensor
    layers: tuple[VisionLayer, ...]
    projector: Linear
    dtype: torch.dtype
    heads: int
    eps: float
    image_size: int
    patch_size: int
    square: int

    @classmethod
    def of(cls, model: PrefixNetwork, precision: str, scales: Scales | None, keep: Sequence[str] = ()) -> VisionWeights:
        """Prepare from a model; `precision` fp32, bf16, fp16, or fp8 or int8 (what `QUANTISED` names, but for `keep`,
        in it, the rest BF16)."""
        config, narrow = model.config.vision, QUANTISED["vision"]["native"].without(keep)
        dtype, form = compute_dtype(precision), format_of(precision)
        layers = []
        for index, layer in enumerate(model.vision.layers):
            assert isinstance(layer, SiglipLayer)
            amax = amax_of(scales, precision, f"vision.layers.{index}", narrow)
            hidden = round_up(config.mlp_dim, 64)
            extra = hidden - config.mlp_dim
            with model.present(f"vision.layers.{index}"):
                made = VisionLayer(
                    with_sums(
                        make_linear(*fold_norm(layer.qkv_proj, layer.layer_norm1), dtype, amax("qkv_proj"), form=form)
                    ),
                    make_linear(layer.out_proj.weight, layer.out_proj.bias, dtype, amax("out_proj"), form=form),
                    with_sums(
                        make_linear(
                            *fold_norm(layer.fc1, layer.layer_norm2), dtype, amax("fc1"), pad_n=extra, form=form
                        )
                    ),
                    make_linear(layer.fc2.weight, layer.fc2.bias, dtype, amax("fc2"), pad_k=extra, form=form),
                )
            layers.append(made)
        with model.present("vision.patch_embedding", "vision.position_embedding"):
            patch, place = patch_embedding(model.vision.patch_embedding, model.vision.position_embedding, precision)
        with model.present("projector", "vision.post_layernorm"):
            projector = make_linear(*_projector(model), dtype)
        square = model.config.shuffle
        place = place[by_squares(config.image_size // config.patch_size, square).to(place.device)].contiguous()
        return cls(
            patch, place, tuple(layers), projector, dtype, config.heads, config.eps, config.image_size,
            config.patch_size, square,
        )  # fmt: skip


def _projector(model: PrefixNetwork) -> tuple[Tensor, Tensor | None]:
    """Weight and bias for features without their norm's weights, and for image tokens as the prefix takes them."""
    projector, norm, config = model.projector, model.vision.post_layernorm, model.config
    if config.shuffle == 1:
        weight, bias = fold_norm(projector, norm)
    else:
        each = projector.weight.double().unflatten(1, (config.shuffle**2, -1))
        weight, bias = (each * norm.weight.double()).flatten(1).float(), (each @ norm.bias.double()).sum(1).float()
        bias = bias if projector.bias is None else bias + projector.bias
    return weight * config.image_scale, None if bias is None else bias * config.image_scale


def patch_embedding(convolution: Any, position: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Weights for raw bytes (of a convolution's `weight` and `bias`): W (p / 127.5 - 1) + b = (W / 127.5) p + (b - ΣW).

    openpi keeps the embedding in float32. Bytes are exact in BF16, and a weight in two BF16 halves keeps 16 bits.
    """
    weight = convolution.weight.flatten(1).double()
    assert convolution.bias is not None
    offset = convolution.bias.double() - weight.sum(1)
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
    """The program. Inputs `images` uint8 (B, V, S, S, 3) and, where the component has them, `pixel_maps` float32
    (B, V, `pictures.MAP_WIDTH`); output `image_tokens` (B, V * T, W) in the prefix's dtype."""

    def __init__(self, weights: VisionWeights, batch: int, views: int, attention: str = "own") -> None:
        self.weights = weights
        self.images = batch * views
        first = weights.layers[0]
        narrow = [p for p in (first.qkv, first.out, first.fc1, first.fc2) if p.weight_scale is not None]
        quantised = bool(narrow)
        self.detail = f"fused ops, {named(narrow[0].weight.dtype) if quantised else weights.dtype}"
        rows, width = self.images * weights.place.shape[0], weights.place.shape[1]
        device, dtype = weights.patch.device, weights.dtype

        def buffer(columns: int, like: Linear | None = None) -> Tensor:
            kind = dtype if like is None or like.weight_scale is None else like.weight.dtype
            return torch.empty(rows, columns, dtype=kind, device=device)

        sizes = Sizes(
            self.images, weights.place.shape[0], weights.place.shape[0], weights.heads, weights.heads,
            width // weights.heads, dtype, padded=False, quantised=first.out.weight_scale is not None,
            stored=first.out.weight.dtype,
        )  # fmt: skip
        self.attention = choose(attention, sizes, device)
        self.detail += f", {self.attention.detail}"
        none = Activation.NONE
        four = {
            "qkv": (first.qkv, none),
            "out": (first.out, none),
            "fc1": (first.fc1, Activation.GELU),
            "fc2": (first.fc2, none),
        }
        self.norms_inside = not quantised and can_be_inside(rows, width, *four.values())
        products, early = products_by(rows, four, four if self.norms_inside else ())
        self.chain = Chain(Gpu.of(device), early)
        self.detail += products
        if self.norms_inside:
            self.detail += ", norms inside"
        self.patches = torch.empty(rows, weights.patch.shape[1], dtype=weights.patch.dtype, device=device)
        self.embedded = torch.empty(rows, width, dtype=torch.float32, device=device)
        self.x, self.y = buffer(width), buffer(width)
        self.moments, self.normed = Moments.like(self.x), Moments.of_normed(self.x, weights.eps)
        self.h, self.context = buffer(width, first.qkv), buffer(width, first.out)
        # What fc1 multiplies; q/k/v's rows unless only one of the two is in FP8.
        alike = (first.qkv.weight_scale is None) == (first.fc1.weight_scale is None)
        self.h_mlp = self.h if alike else buffer(width, first.fc1)
        self.last = buffer(width)
        self.qkv = buffer(3 * width)
        self.hidden = buffer(first.fc1.weight.shape[0])
        self.active = self.hidden if first.fc2.weight_scale is None else buffer(first.fc2.weight.shape[1], first.fc2)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        w, images = self.weights, inputs["images"]
        norm: dict[str, Any] = {"layer": True, "eps": w.eps}
        maps = inputs.get("pixel_maps")
        patchify(
            images.flatten(0, 1), self.patches, w.patch_size, w.square, None if maps is None else maps.flatten(0, 1)
        )
        patch_product(self.patches, w.patch, self.embedded)
        first = w.layers[0].qkv
        with self.chain:
            add_norm(self.embedded, w.place, self.x, self.h, inverse_scale=first.inverse_scale, **norm)
            if self.norms_inside:
                self._layers_norms_inside()
                add_norm(self.x, None, self.x, self.last, inverse_scale=None, **norm)
            else:
                self._layers(norm)
        tokens = outputs["image_tokens"].flatten(0, 1)
        last = self.last.view(len(tokens), -1)
        if tokens.dtype == last.dtype:
            gemm(last, w.projector, tokens)
        else:
            # The cast bridge: an FP16 tower before a BF16 prefix.
            tokens.copy_(torch.addmm(w.projector.bias, last, w.projector.weight.t()))  # type: ignore[arg-type]

    def _attend(self, layer: VisionLayer) -> None:
        heads = self.qkv.view(self.images, self.weights.place.shape[0], 3, self.weights.heads, -1)
        q, k, v = heads.unbind(2)
        attend(
            self.attention.way, q, k, v, self.context, None, inverse_scale=layer.out.inverse_scale,
            tile=self.attention.tile,
        )  # fmt: skip

    def _layers_norms_inside(self) -> None:
        """Products that add to the residual write its moments, and those after them norm with these."""
        eps, x, moments = self.weights.eps, self.h, self.normed
        residual, gelu = Epilogue(residual=True, moments=self.moments), Epilogue(activation=Activation.GELU)
        for layer in self.weights.layers:
            gemm(x, layer.qkv, self.qkv, norm=Norm(eps, moments, sums=layer.qkv.sums))
            self._attend(layer)
            x, moments = self.x, self.moments
            gemm(self.context, layer.out, x, residual)
            gemm(x, layer.fc1, self.active, gelu, Norm(eps, moments, sums=layer.fc1.sums))
            gemm(self.active, layer.fc2, x, residual)

    def _layers(self, norm: dict[str, Any]) -> None:
        w = self.weights
        for index, layer in enumerate(w.layers):
            gemm(self.h, layer.qkv, self.qkv)
            self._attend(layer)
            gemm(self.context, layer.out, self.y)
            add_norm(self.x, self.y, self.x, self.h_mlp, inverse_scale=layer.fc1.inverse_scale, **norm)
            gelu = Epilogue(activation=Activation.GELU, quantize=layer.fc2.inverse_scale)
            gemm(self.h_mlp, layer.fc1, self.active, gelu, workspace=(self.hidden,))
            gemm(self.active, layer.fc2, self.y)
            final = index + 1 == len(w.layers)
            following = None if final else w.layers[index + 1].qkv.inverse_scale
            add_norm(self.x, self.y, self.x, self.last if final else self.h, inverse_scale=following, **norm)
