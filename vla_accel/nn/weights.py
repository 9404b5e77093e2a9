"""Weights of a model, prepared for the kernels: read by name, norms folded in, cast or quantised.

The weights come straight from the model's origin (`Network.weight`); no module holds them in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.fp8 import E4M3, FORMATS, Format, Products, Scales, no_scales
from vla_accel.kernels.gemm.weights import Linear, make_linear, pair, with_sums
from vla_accel.nn.block import Block, Norm
from vla_accel.nn.network import Network
from vla_accel.numeric import DTYPES, round_up

Affine = tuple[Tensor, Tensor]
"""Weight and bias of a norm, float32."""
_ROWS = 2048
_NONE = Products(())


@dataclass(frozen=True)
class Precision:
    """How products are stored: `name` is fp32, bf16, fp16, fp8 or int8.

    FP8 and INT8 apply to `products`; the rest is BF16. Unless only weights are stored in one byte
    (`Products.activations`), the inputs of these products need calibrated `scales`.
    """

    name: str
    products: Products = _NONE
    scales: Scales | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of everything but the FP8 or INT8 products."""
        return compute_dtype(self.name)

    @property
    def format(self) -> Format:
        """The format of the FP8 or INT8 products."""
        return FORMATS.get(self.name, E4M3)

    def narrow(self, product: str) -> bool:
        """Whether a product, by its name in a block, is stored in FP8 or INT8."""
        return self.name in FORMATS and product in self.products.names

    def stored(self, product: str) -> torch.dtype:
        """The dtype of a product's weight."""
        return self.format.dtype if self.narrow(product) else self.dtype

    def linear(self, name: str, weight: Tensor, bias: Tensor | None, pad_k: int = 0, pad_n: int = 0) -> Linear:
        """Prepare the product `name`, for example "vision.layers.3.fc1". Raises EngineError without its scale."""
        amax = None
        if self.narrow(name.rpartition(".")[2]):
            if not self.products.activations:
                amax = self.format.largest  # the input is taken as it is
            elif self.scales is None:
                raise EngineError(no_scales(self.name))
            else:
                amax = self.scales.of(name)
        return make_linear(weight, bias, self.dtype, amax, pad_k, pad_n, form=self.format)


@dataclass(frozen=True)
class BlockWeights:
    """The four products of a block, and the norms of its heads (d,) float32."""

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def __iter__(self) -> Iterator[Linear]:
        return iter((self.qkv, self.out, self.up, self.down))


@dataclass(frozen=True)
class StackWeights:
    """Blocks of one kind. `last_kv`: keys and values of one more block, whose output is not needed, with the norm of
    its keys' heads, `last_norm`."""

    block: Block
    blocks: tuple[BlockWeights, ...]
    dtype: torch.dtype
    last_kv: Linear | None = None
    last_norm: Tensor | None = None

    @property
    def products(self) -> list[Linear]:
        """All products."""
        return [p for block in self.blocks for p in block] + ([] if self.last_kv is None else [self.last_kv])

    @property
    def bytes(self) -> int:
        """Bytes of the weights of all products."""
        return sum(p.bytes for p in self.products)


def stack_weights(
    model: Network, name: str, block: Block, depth: int, precision: Precision, *, paired: bool = True,
    keys_values_last: bool = False,
) -> StackWeights:  # fmt: skip
    """Prepare the blocks `name`.0, `name`.1, …

    Args:
        paired: whether the rows of gate and up alternate (`kernels.gemm.weights.pair`). This is fastest for many rows;
            ops for few rows do not support it.
        keys_values_last: whether the last block has only keys and values.
    """
    full = depth - 1 if keys_values_last else depth
    blocks = tuple(block_weights(model, f"{name}.{i}", block, precision, paired=paired) for i in range(full))
    last = norm = None
    if keys_values_last:
        part = f"{name}.{full}"
        weight, bias = product_of(model, f"{part}.{block.names.qkv}", block)
        weight, bias = with_norm(model, f"{part}.{block.names.norm}", block, weight, bias)
        queries = block.heads * block.head_dim
        last = make_linear(weight[queries:], None if bias is None else bias[queries:], precision.dtype)
        norm = model.weight(f"{part}.k_norm.weight").float().clone() if block.qk_norm else None
    return StackWeights(block, blocks, precision.dtype, last, norm)


def block_weights(
    model: Network, name: str, block: Block, precision: Precision, *, paired: bool = True,
    shared: BlockWeights | None = None,
) -> BlockWeights:  # fmt: skip
    """Prepare the block `name`. An MLP width that is slow on tensor cores (4304) is padded.

    `shared`: products of the same block, which are used here if they are stored in the same way.
    """
    names, gated = block.names, block.activation.gated
    extra = 0 if gated else round_up(block.mlp_dim, 64) - block.mlp_dim

    def product(
        short: str, part: str, norm: str | None = None, scale: str | None = None, pad_k: int = 0, pad_n: int = 0
    ) -> Linear:
        there: Linear | None = None if shared is None else getattr(shared, short)
        if there is not None and there.weight.dtype == precision.stored(part) and not there.paired:
            return there
        weight, bias = product_of(model, f"{name}.{part}", block)
        if scale is not None and block.layer_scale:
            factor = model.weight(f"{name}.{scale}").float()
            weight, bias = weight.float() * factor[:, None], None if bias is None else bias.float() * factor
        if norm is not None:
            weight, bias = with_norm(model, f"{name}.{norm}", block, weight, bias)
        made = precision.linear(f"{name}.{part}", weight, bias, pad_k, pad_n)
        del weight
        made = pair(made) if part == names.up and gated and paired else made
        return with_sums(made) if norm is not None and block.layer_norm else made

    heads = [model.weight(f"{name}.{n}.weight").float().clone() for n in ("q_norm", "k_norm") if block.qk_norm]
    return BlockWeights(
        product("qkv", block.first, names.norm), product("out", names.out, scale="layer_scale1"),
        product("up", names.up, names.mlp_norm, pad_n=extra),
        product("down", names.down, scale="layer_scale2", pad_k=extra), *heads,
    )  # fmt: skip


def product_of(model: Network, name: str, block: Block) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the product `name`."""
    biased = block.has_bias(name.rpartition(".")[2])
    return model.weight(f"{name}.weight"), model.weight(f"{name}.bias") if biased else None


def with_norm(
    model: Network, norm: str, block: Block, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a product with the weights of the norm before it, `norm`, folded in: formed in float64,
    float32.

    LayerNorm: W diag(γ), b + W β. RMSNorm: W diag(1 + w) in Gemma, W diag(w) otherwise. An adaptive norm has none.
    """
    if block.norm in (Norm.ADAPTIVE_RMS, Norm.ADAPTIVE_LAYER):
        return weight, bias
    factor = model.weight(f"{norm}.weight").double()
    if block.norm is Norm.LAYER:
        return fold(weight, bias, factor, model.weight(f"{norm}.bias"))
    return fold(weight, bias, factor + 1.0 if block.norm is Norm.GEMMA else factor)


def fold(
    weight: Tensor, bias: Tensor | None, factor: Tensor, shift: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, float32, of W (x · factor + shift) + b as a product of x."""
    bias = None if bias is None else bias.double()
    if shift is not None:
        moved = weight.double() @ shift.double()
        bias = moved if bias is None else bias + moved
    folded = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    # A part of the rows at a time: all of a large product in float64 would be four times its bytes.
    for rows, place in zip(weight.split(_ROWS), folded.split(_ROWS), strict=True):
        place.copy_(rows.double() * factor)
    return folded, None if bias is None else bias.float()


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of everything but the FP8 or INT8 products of a precision."""
    return DTYPES.get(precision, torch.bfloat16)


def format_of(precision: str) -> Format:
    """The format of the quantised products of a precision."""
    return FORMATS.get(precision, E4M3)


def plain_input(precision: str, weight: Tensor, bias: Tensor | None = None, pad_k: int = 0, pad_n: int = 0) -> Linear:
    """Prepare a product that takes its input as it is, padded as by `make_linear`.

    In FP8 and INT8 only its weight has one byte, and is widened in registers. Nothing is calibrated, and the scale of
    the input is one.
    """
    form = format_of(precision)
    amax = form.largest if precision in FORMATS else None
    return make_linear(weight, bias, compute_dtype(precision), amax, pad_k, pad_n, form=form)


def weights_in(precision: str) -> str:
    """The dtype of the products of `plain_input`, for the ledger."""
    return f"{precision.upper()} weights" if precision in FORMATS else str(compute_dtype(precision))
