"""The weights of an action expert, prepared for its denoise loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.loop import ExpertSpec, Packed
from vla_accel.nn.network import Network
from vla_accel.nn.reference import TransformerBlock
from vla_accel.nn.weights import BlockWeights, compute_dtype, plain_input, with_norm


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of an expert. Its layers are stored once: as `layers`, or as `packed` for the streamed kernels.

    Args:
        w_out, b_out: (A, W) and (A,) float32, from rows to velocities.
        mix: (W, W), the second layer of the time MLP, or None.
        state: (W, A) float32, the projection of the state to a token, or None.
        precision: of the layers' weights.
    """

    layers: tuple[BlockWeights, ...]
    packed: Packed | None
    w_out: Tensor
    b_out: Tensor
    mix: Linear | None
    state: Linear | None
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return compute_dtype(self.precision)

    @property
    def mix_bias(self) -> Tensor | None:
        """The bias of `mix` in float32."""
        return None if self.mix is None or self.mix.bias is None else self.mix.bias.float().contiguous()

    def normed_products(self) -> Iterator[tuple[Linear, Linear]]:
        """Yield q/k/v and gate/up of each layer, the products after a norm. Packed weights yield copies."""
        if self.packed is None:
            yield from ((layer.qkv, layer.up) for layer in self.layers)
        else:
            yield from self.packed.normed_products()

    @classmethod
    def of(
        cls, model: Network, spec: ExpertSpec, precision: str, mix: Linear | None = None, state: Linear | None = None,
        *, streamed: bool = False,
    ) -> ExpertWeights:  # fmt: skip
        """Prepare `model.expert` and `model.action_out_proj`.

        Args:
            precision: fp32, bf16, or fp8 or int8 for the weights of the layers.
            mix: padded to `spec.width` if `streamed`.
        """
        pad = spec.width - spec.model_width if streamed else 0
        layers = (layer_weights(model, spec, i, precision, streamed=streamed) for i in range(spec.depth))
        packed = None
        if streamed:
            products = ((w.qkv, w.out, w.up, w.down) for w in layers)
            packed = Packed.of(products, None if mix is None else mix.weight, spec.head_dim, spec.depth)
        w_out = F.pad(model.weight("action_out_proj.weight").float(), (0, pad)).contiguous()
        b_out = model.weight("action_out_proj.bias").float().clone()
        return cls(tuple(layers), packed, w_out, b_out, mix, state, precision)


def layer_weights(model: Network, spec: ExpertSpec, index: int, precision: str, *, streamed: bool) -> BlockWeights:
    """Prepare a layer. `qkv` of a layer that attends to the prefix only has queries alone.

    Streamed weights are padded to `spec.width`, and have zeros for missing keys and values.
    """
    name = f"expert.layers.{index}"
    layer = model.get_submodule(name)
    assert isinstance(layer, TransformerBlock)
    block, names, crosses = layer.block, layer.block.names, spec.crosses(index)
    pad = spec.width - spec.model_width if streamed else 0
    missing = 2 * spec.kv_heads * spec.head_dim if crosses and streamed else 0

    def weight(product: str, norm: str | None = None) -> Tensor:
        found = model.weight(f"{name}.{product}.weight")
        return found if norm is None else with_norm(model, f"{name}.{norm}", block, found, None)[0]

    return BlockWeights(
        plain_input(precision, weight("q_proj" if crosses else names.qkv, names.norm), None, pad, missing),
        plain_input(precision, weight(names.out), pad_n=pad),
        plain_input(precision, weight(names.up, names.mlp_norm), None, pad),
        plain_input(precision, weight(names.down), pad_n=pad),
    )
