"""A pre-norm transformer block as data. `nn.reference` computes it in torch, `nn.plan` with fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vla_accel.kernels.activation import Activation


class Norm(Enum):
    """The norm before attention and before the MLP.

    LAYER is LayerNorm. RMS computes x / rms(x) times its weight, GEMMA the same times 1 + its weight. The adaptive
    norms take scale and shift from a condition. ADAPTIVE_RMS also takes the gate of the next residual. ADAPTIVE_LAYER
    precedes attention only: the norm before the MLP has no weights.
    """

    LAYER = "layer"
    RMS = "rms"
    GEMMA = "gemma"
    ADAPTIVE_RMS = "adaptive_rms"
    ADAPTIVE_LAYER = "adaptive_layer"


class Attention(Enum):
    """What the queries of a block attend to: all rows, the rows up to their own, rows whose keys and values go to a
    cache, or the keys and values of another sequence."""

    SELF = "self"
    CAUSAL = "causal"
    CACHED = "cached"
    CROSS = "cross"


@dataclass(frozen=True)
class Names:
    """Names of a block's modules, which are the keys of a checkpoint."""

    norm: str
    qkv: str
    out: str
    mlp_norm: str
    up: str
    down: str


VIT = Names("layer_norm1", "qkv_proj", "out_proj", "layer_norm2", "fc1", "fc2")
LLAMA = Names("input_layernorm", "qkv_proj", "o_proj", "post_attention_layernorm", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Block:
    """x += out(attention(rope(qkv(norm(x))))), then x += down(activation(up(norm(x)))).

    q, k and v are one product, and so are gate and up of a gated MLP.

    Args:
        bias: whether the products have biases.
        qkv_bias: whether the first product has one, whatever the others have.
        layer_scale: whether attention and MLP are multiplied by learned factors before they are added (LayerScale).
        qk_norm: whether the heads of q and k are normed (RMSNorm) before they are rotated.
        rope: whether q and k are rotated.
        wide_rope: whether the reference rotates in at least float32, whatever the dtype of the rows.
    """

    width: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    norm: Norm
    activation: Activation
    attention: Attention = Attention.SELF
    bias: bool = False
    qkv_bias: bool = False
    layer_scale: bool = False
    qk_norm: bool = False
    rope: bool = True
    wide_rope: bool = False
    names: Names = LLAMA

    @property
    def qkv_dim(self) -> int:
        """Outputs of the first product: q, k and v, or q alone if keys and values come from another sequence."""
        others = 0 if self.attention is Attention.CROSS else 2 * self.kv_heads
        return (self.heads + others) * self.head_dim

    @property
    def first(self) -> str:
        """The name of the first product."""
        return "q_proj" if self.attention is Attention.CROSS else self.names.qkv

    def has_bias(self, product: str) -> bool:
        """Whether a product, by its name in the block, has a bias."""
        return self.bias or (self.qkv_bias and product == self.first)

    @property
    def layer_norm(self) -> bool:
        """Whether the norm subtracts the mean."""
        return self.norm in (Norm.LAYER, Norm.ADAPTIVE_LAYER)


def vit_block(width: int, heads: int, mlp_dim: int, eps: float, *, rope: bool = False) -> Block:
    """The block of vision transformers: LayerNorm, attention of all rows to all rows, an MLP with tanh-GELU."""
    return Block(
        width, mlp_dim, heads, heads, width // heads, eps, Norm.LAYER, Activation.GELU, bias=True, rope=rope, names=VIT
    )
