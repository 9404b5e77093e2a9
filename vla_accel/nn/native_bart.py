"""BART's encoder in fused operations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.choice import choose
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.attention.ops import attend
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import products_by
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import post_norm
from vla_accel.nn.bart import BartConfig
from vla_accel.nn.network import Network
from vla_accel.nn.weights import Affine
from vla_accel.runtime import current

_EPS = 1e-5


@dataclass(frozen=True)
class BartLayerWeights:
    """A layer, with the norms after attention and MLP."""

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    norms: tuple[Affine, Affine]


@dataclass(frozen=True)
class BartWeights:
    """The layers, the positions of the rows (rows, W) in the compute dtype, and the norm of the input."""

    layers: tuple[BartLayerWeights, ...]
    positions: Tensor
    norm: Affine

    @classmethod
    def of(cls, model: Network, name: str, config: BartConfig, positions: Tensor) -> BartWeights:
        """Prepare the encoder `name` of a model."""
        read = model.weight

        def linear(part: str) -> Linear:
            return make_linear(read(f"{part}.weight"), read(f"{part}.bias"), positions.dtype)

        def norm(part: str) -> Affine:
            return read(f"{part}.weight").float().clone(), read(f"{part}.bias").float().clone()

        layers = tuple(
            BartLayerWeights(
                linear(f"{layer}.qkv_proj"),
                linear(f"{layer}.out_proj"),
                linear(f"{layer}.fc1"),
                linear(f"{layer}.fc2"),
                (norm(f"{layer}.norm1"), norm(f"{layer}.norm2")),
            )
            for layer in (f"{name}.layers.{index}" for index in range(config.depth))
        )
        return cls(layers, positions, norm(f"{name}.norm"))


class NativeBart:
    """The encoder on rows `x` (B * rows, W), which are its input and then its output."""

    def __init__(self, weights: BartWeights, config: BartConfig, batch: int, attention: str) -> None:
        self.weights, self.config, self.batch, count = weights, config, batch, len(weights.positions)
        rows = batch * count

        def buffer(columns: int) -> Tensor:
            return weights.positions.new_empty(rows, columns)

        self.x, self.y, self.context = (buffer(config.width) for _ in range(3))
        self.qkv, self.hidden = buffer(3 * config.width), buffer(config.mlp_dim)
        self.positions, head_dim = weights.positions.repeat(batch, 1), config.width // config.heads
        sizes = AttentionShape(
            batch, count, count, config.heads, config.heads, head_dim, self.x.dtype, padded=False, quantised=False
        )
        self.attention = choose(attention, sizes, current(self.x.device))
        first = weights.layers[0]
        kinds = {"qkv": first.qkv, "out": first.out, "fc1": first.up, "fc2": first.down}
        text, early = products_by(
            rows, {n: (w, Activation.GELU_ERF if w is first.up else Activation.NONE) for n, w in kinds.items()}
        )
        self.detail = f"fused ops, {self.x.dtype}, {self.attention.detail}{text}"
        self.chain = Chain(current(self.x.device).gpu, early)

    def run(self) -> None:
        """Enqueue the encoder."""
        with self.chain:
            self._run()

    def _run(self) -> None:
        self._norm(self.positions, self.weights.norm)
        for layer, following in zip_longest(self.weights.layers, self.weights.layers[1:]):
            gemm(self.x, layer.qkv, self.qkv, Epilogue(prefetch=layer.up.prefetchable))
            rows = self.batch, len(self.weights.positions)
            q, k, v = self.qkv.view(*rows, 3, self.config.heads, -1).unbind(2)
            attend(self.attention.backend, q, k, v, self.context.view(*rows, -1), None, tile=self.attention.tile)
            gemm(self.context, layer.out, self.y, Epilogue(prefetch=layer.down.prefetchable))
            self._norm(self.y, layer.norms[0])
            up = Epilogue(activation=Activation.GELU_ERF, prefetch=following and following.qkv.prefetchable)
            gemm(self.x, layer.up, self.hidden, up, workspace=(self.hidden,))
            gemm(self.hidden, layer.down, self.y)
            self._norm(self.y, layer.norms[1])

    def _norm(self, y: Tensor, norm: Affine) -> None:
        post_norm(self.x, y, *norm, self.x, eps=_EPS)
