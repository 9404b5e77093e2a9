"""ACT in fused operations: images to tokens, and tokens to actions.

Exact savings: batch norms are folded into convolutions; positions are further columns of the rows, with weights of
their own, so that queries, keys and values are one product; and as the decoder starts from zeros, its first
self-attention is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.act.network import Act, ActConfig
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.choice import Choice, choose
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.attention.ops import attend
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import HOPPER, has_hopper_gemm
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import post_norm, project_normed
from vla_accel.nn.resnet import NativeResNet, ResNetWeights, convolutions_by
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import Affine, compute_dtype, fold
from vla_accel.runtime import current

_EPS = 1e-5


class ActStore(NativeStore[Act]):
    """Prepared weights of one ACT."""

    def vision(self, batch: int, spec: EngineSpec) -> Program:
        """The program of the cameras' images."""
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: VisionWeights.of(self.model, compute_dtype(precision)))
        return NativeVision(weights, self.model.config, batch)

    def transformer(self, batch: int, spec: EngineSpec) -> Program:
        """The program of encoder and decoder."""
        precision = self.precision("transformer", spec)
        key = ("transformer", precision)
        weights = self.weights(key, lambda: TransformerWeights.of(self.model, compute_dtype(precision)))
        return NativeTransformer(weights, self.model.config, batch, spec.attention)


# -- images -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VisionWeights:
    """`scales` (cameras, 2, 3) float32: factor and shift of each camera's levels; `projection`: of a map's pixels."""

    resnet: ResNetWeights
    projection: Linear
    scales: Tensor

    @classmethod
    def of(cls, model: Act, dtype: torch.dtype) -> VisionWeights:
        """Prepare the weights of a model."""
        weight, bias = (model.weight(f"encoder_img_feat_input_proj.{part}") for part in ("weight", "bias"))
        means, deviations = (
            torch.tensor([getattr(camera, name) for camera in model.config.cameras], dtype=torch.float64)
            for name in ("mean", "deviation")
        )
        scales = torch.stack((1.0 / (255.0 * deviations), -means / deviations), 1).float().to(weight.device)
        resnet = ResNetWeights.of(model, "backbone", model.config.backbone, dtype)
        return cls(resnet, make_linear(weight.flatten(1), bias, dtype), scales)


class NativeVision:
    """The program. Inputs `image0`, … uint8 (B, height, width, 3); output `image_tokens` (B, N, W). Cameras of one size
    are one batch."""

    def __init__(self, weights: VisionWeights, config: ActConfig, batch: int) -> None:
        self.weights, self.batch, self.width = weights, batch, config.width
        sizes = [(camera.height, camera.width) for camera in config.cameras]
        self.groups = [[index for index, its in enumerate(sizes) if its == size] for size in dict.fromkeys(sizes)]
        counts = [*map(math.prod, config.feature_sizes)]
        self.slices = [slice(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
        self.resnets = [NativeResNet(weights.resnet, (batch, len(group)), sizes[group[0]]) for group in self.groups]
        dtype = weights.projection.weight.dtype
        self.chain = Chain(current(weights.scales.device).gpu)
        self.detail = f"fused ops, {dtype}, folded norms, {convolutions_by(self.resnets)}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        with self.chain:
            for cameras, resnet in zip(self.groups, self.resnets, strict=True):
                for index, camera in enumerate(cameras):
                    scale = self.weights.scales[camera : camera + 1]
                    resnet.see(inputs[f"image{camera}"][:, None], scale, slice(index, index + 1))
                self._project(resnet().flatten(0, 2), cameras, outputs["image_tokens"])

    def _project(self, features: Tensor, cameras: list[int], tokens: Tensor) -> None:
        """Write the tokens of the pixels of some cameras' feature maps."""
        if len(self.groups) == 1:
            gemm(features, self.weights.projection, tokens.view(-1, self.width))
            return
        made = tokens.new_empty(len(features), self.width)
        gemm(features, self.weights.projection, made)
        made = made.view(self.batch, len(cameras), -1, self.width)
        for index, camera in enumerate(cameras):
            tokens[:, self.slices[camera]] = made[:, index]


# -- tokens to actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerWeights:
    """A layer. The inputs of `qkv`, `query` and `keys_values` are rows of a token and its position; the last three are
    of attention to the encoder's rows."""

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    norms: tuple[Affine, ...]
    query: Linear | None = None
    keys_values: Linear | None = None
    cross_out: Linear | None = None

    @classmethod
    def of(cls, model: Act, name: str, dtype: torch.dtype, norms: int) -> LayerWeights:
        """Prepare the layer `name`."""

        def read(part: str) -> Tensor:
            return model.weight(f"{name}.{part}")

        def linear(part: str) -> Linear:
            return make_linear(read(f"{part}.weight"), read(f"{part}.bias"), dtype)

        def placed(part: str, rows: slice, values: int) -> Linear:
            """Rows of an attention's products, of which the last `values` do not see positions."""
            weight, bias = read(f"{part}.in_proj_weight")[rows], read(f"{part}.in_proj_bias")[rows]
            positions = weight.clone()
            positions[len(weight) - values :] = 0
            return make_linear(torch.cat((weight, positions), 1), bias, dtype)

        width, cross, part = model.config.width, {}, "multihead_attn"
        if norms == 3:
            cross = {
                "query": placed(part, slice(0, width), 0),
                "keys_values": placed(part, slice(width, None), width),
                "cross_out": linear(f"{part}.out_proj"),
            }
        numbers = range(1, norms + 1)
        affine = tuple((read(f"norm{n}.weight").float(), read(f"norm{n}.bias").float()) for n in numbers)
        return cls(
            placed("self_attn", slice(None), width), linear("self_attn.out_proj"), linear("linear1"),
            linear("linear2"), affine, **cross,
        )  # fmt: skip


@dataclass(frozen=True)
class TransformerWeights:
    """Encoder, decoder and what surrounds them.

    `vectors` (n * W, vector_dim) and `vectors_bias` (n * W,) float32: of the tokens of latent, state and environment;
    `positions` (S, W), `queries` (H, W): of the encoder's and the decoder's rows; `start` (1, W) and `start_query`
    (H, W): the decoder's rows after its first self-attention and their queries; `head` and `head_bias` float32, for
    rows without their norm's weights.
    """

    encoder: tuple[LayerWeights, ...]
    decoder: tuple[LayerWeights, ...]
    vectors: Tensor
    vectors_bias: Tensor
    positions: Tensor
    queries: Tensor
    start: Tensor
    start_query: Tensor
    head: Tensor
    head_bias: Tensor

    @classmethod
    def of(cls, model: Act, dtype: torch.dtype) -> TransformerWeights:
        """Prepare the weights of a model."""
        config, w = model.config, model.weight
        encoder, decoder = (
            tuple(LayerWeights.of(model, f"{name}.layers.{i}", dtype, norms) for i in range(depth))
            for name, depth, norms in (("encoder", config.encoder_depth, 2), ("decoder", config.decoder_depth, 3))
        )
        latent = w("encoder_latent_input_proj.bias").float()
        # The latent is zero: its token is the bias alone.
        products = [latent.new_zeros(config.width, 0), *(w(f"{name}.weight").float() for name, _ in config.vectors)]
        vectors = torch.block_diag(*products)
        biases = [latent, *(w(f"{name}.bias").float() for name, _ in config.vectors)]
        queries, first = w("decoder_pos_embed.weight"), "decoder.layers.0."
        start, start_query = _start(model, first, queries.double())
        head, head_bias = fold(
            w("action_head.weight"), w("action_head.bias"), w("decoder.norm.weight").double(), w("decoder.norm.bias")
        )
        assert head_bias is not None
        return cls(
            encoder, decoder, vectors, torch.cat(biases), model.positions().to(dtype), queries.to(dtype),
            start.to(dtype), start_query.to(dtype), head, head_bias,
        )  # fmt: skip


def _start(model: Act, first: str, queries: Tensor) -> tuple[Tensor, Tensor]:
    """The decoder's rows after the first self-attention, whose values are all the same bias, and their queries."""
    read, width = (lambda part: model.weight(first + part).double()), model.config.width
    value = read("self_attn.in_proj_bias")[2 * width :]
    attended = F.linear(value, read("self_attn.out_proj.weight"), read("self_attn.out_proj.bias"))
    row = F.layer_norm(attended, (width,), read("norm1.weight"), read("norm1.bias"), _EPS)[None]
    weight, bias = (read(f"multihead_attn.in_proj_{part}")[:width] for part in ("weight", "bias"))
    return row, F.linear(row + queries, weight, bias)


class Rows:
    """The rows of a stack, each with its position in further columns, and the buffers of its layers."""

    def __init__(self, config: ActConfig, batch: int, positions: Tensor, attention: str) -> None:
        (self.tokens, width), count = positions.shape, batch * len(positions)
        self.config, self.batch, self.width = config, batch, width

        def buffer(columns: int) -> Tensor:
            return positions.new_empty(count, columns)

        self.placed, self.qkv = buffer(2 * width), buffer(3 * width)
        self.placed[:, width:] = positions.repeat(batch, 1)
        self.x = self.placed[:, :width]
        self.context, self.y, self.hidden = buffer(width), buffer(width), buffer(config.mlp_dim)
        self.activation = Activation.RELU if config.activation == "relu" else Activation.GELU_ERF
        self.attention = self.choose(attention, self.tokens)

    def choose(self, requested: str, source: int) -> Choice:
        """Choose the kernel of attention to so many keys."""
        c = self.config
        sizes = AttentionShape(
            self.batch, self.tokens, source, c.heads, c.heads, c.width // c.heads, self.x.dtype, padded=False,
            quantised=False,
        )  # fmt: skip
        return choose(requested, sizes, current(self.x.device))

    def heads(self, rows: Tensor, tokens: int, count: int) -> tuple[Tensor, ...]:
        """`count` products side by side in a buffer, each (B, tokens, heads, d)."""
        return rows.view(self.batch, tokens, count, self.config.heads, -1).unbind(2)

    def attend(self, choice: Choice, q: Tensor, k: Tensor, v: Tensor, out: Linear) -> None:
        """Enqueue attention and its output product, to `y`."""
        attend(choice.backend, q, k, v, self.context.view(self.batch, self.tokens, -1), None, tile=choice.tile)
        gemm(self.context, out, self.y)

    def attend_to_itself(self, layer: LayerWeights) -> None:
        """Enqueue self-attention and its norm, on `x`."""
        gemm(self.placed, layer.qkv, self.qkv)
        q, k, v = self.heads(self.qkv, self.tokens, 3)
        self.attend(self.attention, q, k, v, layer.out)
        self.norm(self.x, layer.norms[0], self.x)

    def norm(self, x: Tensor, affine: Affine, out: Tensor) -> None:
        """Enqueue the norm of `x` and the last product, `y`."""
        weight, bias = affine
        post_norm(x, self.y, weight, bias, out, eps=_EPS)

    def mlp(self, layer: LayerWeights, out: Tensor) -> None:
        """Enqueue the MLP and its norm, from `x` to `out`."""
        gemm(self.x, layer.up, self.hidden, Epilogue(activation=self.activation), workspace=(self.hidden,))
        gemm(self.hidden, layer.down, self.y)
        self.norm(self.x, layer.norms[-1], out)


class NativeTransformer:
    """The program. Inputs `vectors` (B, vector_dim) float32 and `image_tokens` (B, N, W); output `actions` (B, H, A)
    float32."""

    def __init__(self, weights: TransformerWeights, config: ActConfig, batch: int, attention: str) -> None:
        self.weights, self.config, self.batch = weights, config, batch
        self.encoder = Rows(config, batch, weights.positions, attention)
        self.decoder = Rows(config, batch, weights.queries, attention)
        self.attention = self.encoder.attention
        self.cross = self.decoder.choose(attention, config.tokens)
        self.keys_values = weights.positions.new_empty(batch * config.tokens, 2 * config.width)
        self.query = torch.empty_like(self.decoder.y)
        self.start, self.start_query = weights.start.expand(len(self.query), -1), weights.start_query.repeat(batch, 1)
        self.last = torch.empty_like(self.decoder.y)
        own = self._own_products()
        self.chain = Chain(current(self.last.device).gpu, early=bool(own))
        self.detail = f"fused ops, {self.last.dtype}, {self.attention.detail}"
        self.detail += f", {HOPPER}: {', '.join(own)}" if own else ""

    def _own_products(self) -> list[str]:
        """Return the products that the Hopper GEMM runs."""
        if self.last.dtype == torch.float32:
            return []
        (first, *_), (*_, last), c = self.weights.encoder, self.weights.decoder, self.config
        rows, queries = self.batch * c.tokens, self.batch * c.action_horizon
        up, none = self.encoder.activation, Activation.NONE
        products = {
            "qkv": (rows, first.qkv, none), "out": (rows, first.out, none), "up": (rows, first.up, up),
            "down": (rows, first.down, none), "cross keys and values": (rows, last.keys_values, none),
            "cross out": (queries, last.cross_out, none), "last up": (queries, last.up, up),
            "last down": (queries, last.down, none),
        }  # fmt: skip
        return [
            name for name, (count, weights, activation) in products.items()
            if weights is not None and has_hopper_gemm(count, weights, activation)
        ]  # fmt: skip

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        w, encoder = self.weights, self.encoder
        rows = encoder.x.view(self.batch, encoder.tokens, -1)
        vectors = torch.addmm(w.vectors_bias, inputs["vectors"], w.vectors.T).view(self.batch, -1, encoder.width)
        rows[:, : vectors.shape[1]] = vectors
        rows[:, vectors.shape[1] :] = inputs["image_tokens"]
        with self.chain:
            for layer in w.encoder:
                encoder.attend_to_itself(layer)
                encoder.mlp(layer, encoder.x)
            for index, layer in enumerate(w.decoder):
                self._decode(layer, first=index == 0, last=index + 1 == len(w.decoder))
            project_normed(self.last, w.head, w.head_bias, outputs["actions"].view(len(self.last), -1), eps=_EPS)

    def _decode(self, layer: LayerWeights, *, first: bool, last: bool) -> None:
        assert layer.query is not None and layer.keys_values is not None and layer.cross_out is not None
        decoder, x, query = self.decoder, self.start, self.start_query
        if not first:
            decoder.attend_to_itself(layer)
            gemm(decoder.placed, layer.query, self.query)
            x, query = decoder.x, self.query
        gemm(self.encoder.placed, layer.keys_values, self.keys_values)
        (q,), (k, v) = decoder.heads(query, decoder.tokens, 1), decoder.heads(self.keys_values, self.encoder.tokens, 2)
        decoder.attend(self.cross, q, k, v, layer.cross_out)
        decoder.norm(x, layer.norms[1], decoder.x)
        decoder.mlp(layer, self.last if last else decoder.x)
