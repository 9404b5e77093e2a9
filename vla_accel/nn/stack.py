"""A stack of pre-norm blocks in fused ops: GR00T's vision tower and its vision-language attention.

The weights of every LayerNorm are folded into the next product; q, k and v are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.attending import Sizes, attend, choose
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import can_be_inside, products_by, with_sums
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import make_linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import add_norm
from vla_accel.kernels.rows.sequence import norm_rope
from vla_accel.nn.fold import fold_norm
from vla_accel.nn.native_vision import VisionLayer
from vla_accel.nn.network import Network
from vla_accel.nn.siglip import PreNormLayer


def stack_weights(model: Network, name: str, layers: Sequence[object], dtype: torch.dtype) -> tuple[VisionLayer, ...]:
    """Prepare the products of a model's blocks, named `name`.0, `name`.1, …"""
    made = []
    for index, layer in enumerate(layers):
        assert isinstance(layer, PreNormLayer)
        with model.present(f"{name}.{index}"):
            block = VisionLayer(
                with_sums(make_linear(*fold_norm(layer.qkv_proj, layer.layer_norm1), dtype)),
                make_linear(layer.out_proj.weight, layer.out_proj.bias, dtype),
                with_sums(make_linear(*fold_norm(layer.fc1, layer.layer_norm2), dtype)),
                make_linear(layer.fc2.weight, layer.fc2.bias, dtype),
            )
        made.append(block)
    return tuple(made)


@dataclass(frozen=True)
class StackSizes:
    """`batch` sequences of `tokens` rows; `padded`: some sequences have fewer real rows, which come first."""

    batch: int
    tokens: int
    heads: int
    eps: float
    padded: bool = False


class Stack:
    """Blocks over rows (batch * tokens, W), which stay in `x`."""

    def __init__(
        self, layers: Sequence[VisionLayer], sizes: StackSizes, dtype: torch.dtype, asked: str,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`asked`: the requested attention backend; `rope`: cos and sin (tokens, head_dim / 2) float32."""
        self.layers, self.sizes, self.rope = layers, sizes, rope
        first, device = layers[0], layers[0].qkv.weight.device
        width, rows = first.qkv.weight.shape[1], sizes.batch * sizes.tokens
        self.head_dim = width // sizes.heads
        attention = Sizes(
            sizes.batch, sizes.tokens, sizes.tokens, sizes.heads, sizes.heads, self.head_dim, dtype,
            padded=sizes.padded, quantised=False,
        )  # fmt: skip
        self.attention = choose(asked, attention, device)
        four = {
            "qkv": (first.qkv, Activation.NONE),
            "out": (first.out, Activation.NONE),
            "fc1": (first.fc1, Activation.GELU),
            "fc2": (first.fc2, Activation.NONE),
        }
        self.norms_inside = can_be_inside(rows, width, *four.values())
        products, early = products_by(rows, four, four if self.norms_inside else ())
        self.chain = Chain(Gpu.of(device), early)
        self.detail = f", {self.attention.detail}{products}"
        if self.norms_inside:
            self.detail += ", norms inside"

        def buffer(columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        self.x, self.y, self.h, self.context = (buffer(width) for _ in range(4))
        self.moments = Moments.like(self.x)
        self.qkv, self.hidden = buffer(3 * width), buffer(first.fc1.weight.shape[0])

    def run(self, lengths: Tensor | None = None, after: Callable[[int], None] = lambda index: None) -> None:
        """Enqueue all blocks on `x`. The caller opens `chain`.

        Args:
            lengths: (B,) int32, the real rows of each sequence, or None for all.
            after: called with each block's index after it is enqueued; `x` then holds its output.
        """
        norm = {"layer": True, "eps": self.sizes.eps, "inverse_scale": None}
        add_norm(self.x, None, self.x, self.h, **norm)  # type: ignore[arg-type]
        for index, layer in enumerate(self.layers):
            if self.norms_inside and index:
                gemm(self.x, layer.qkv, self.qkv, norm=Norm(self.sizes.eps, self.moments, sums=layer.qkv.sums))
            else:
                gemm(self.h, layer.qkv, self.qkv)
            self._attend(lengths)
            self._mlp(layer, norm)
            after(index)

    def _attend(self, lengths: Tensor | None) -> None:
        s = self.sizes
        if self.rope is not None:
            norm_rope(self.qkv, None, None, *self.rope, s.heads, s.heads, eps=0.0)
        q, k, v = self.qkv.view(s.batch, s.tokens, 3, s.heads, self.head_dim).unbind(2)
        attend(self.attention.way, q, k, v, self.context, lengths, tile=self.attention.tile)

    def _mlp(self, layer: VisionLayer, norm: dict[str, object]) -> None:
        """Output projection, residual, MLP, residual."""
        if self.norms_inside:
            residual = Epilogue(residual=True, moments=self.moments)
            inside = Norm(self.sizes.eps, self.moments, sums=layer.fc1.sums)
            gemm(self.context, layer.out, self.x, residual)
            gemm(self.x, layer.fc1, self.hidden, Epilogue(activation=Activation.GELU), inside)
            gemm(self.hidden, layer.fc2, self.x, residual)
            return
        gemm(self.context, layer.out, self.y)
        add_norm(self.x, self.y, self.x, self.h, **norm)  # type: ignore[arg-type]
        gemm(self.h, layer.fc1, self.hidden, Epilogue(activation=Activation.GELU))
        gemm(self.hidden, layer.fc2, self.y)
        # The next block's normed rows; behind the last one nobody reads them.
        add_norm(self.x, self.y, self.x, self.h, **norm)  # type: ignore[arg-type]
