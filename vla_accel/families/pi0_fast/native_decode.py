"""Decoding of tokens in fused ops, one token of each row at a time. Every token reads all weights.

A layer is five kernels, as in the denoise loop; then follow the head, the largest logit and a few counters. All of it
runs on the GPU: tokens do not pass through the host. After `TURN` tokens the program reports whether every row has its
stop token. Exact savings: norm weights are folded into q/k/v and gate/up, and the
weights are those of the prefix if it computes in the same precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig, last_tokens
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.loop import ExpertSpec
from vla_accel.kernels.rows.rows import add_norm
from vla_accel.nn.loop import CachedLoop, Inputs
from vla_accel.nn.native_prefix import PrefixWeights
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.weights import BlockWeights, Precision, block_weights, weights_in

TURN = 4
"""Tokens of a turn. The next turn is enqueued before the host knows whether the last one was the end, so up to twice as
many tokens are decoded and ignored."""


@dataclass(frozen=True)
class DecodeWeights:
    """Gemma's weights for decoding.

    `table` (vocabulary, W): the unscaled token embedding; `head`: the same storage if they are tied; `norm` (W,)
    float32: the factor of the last norm; `precision`: of the layers' weights.
    """

    layers: tuple[BlockWeights, ...]
    table: Tensor
    head: Linear
    norm: Tensor
    dtype: torch.dtype
    precision: str

    @classmethod
    def of(cls, model: Pi0Fast, precision: str, prefix: PrefixWeights | None = None) -> DecodeWeights:
        """Prepare the weights of a model.

        `precision`: fp32, bf16, or fp8 or int8 for the weights of the layers; `prefix`: weights that may be shared.
        """
        config, stored = model.config.prefix, Precision(precision, QUANTISED["decode"]["native"])
        # The prefix's last layer has keys and values alone.
        there = [None] * config.depth if prefix is None else [*prefix.stack.blocks, None]
        layers = tuple(
            block_weights(model, f"prefix.layers.{i}", config.block(), stored, paired=False, shared=there[i])
            for i in range(config.depth)
        )
        if prefix is not None and prefix.table.device.type == model.device.type:
            table = prefix.table
        else:
            table = model.weight("embed.weight")
        head = Linear(table) if model.config.tied else make_linear(model.weight("head.weight"), None, stored.dtype)
        norm = (1.0 + model.weight("norm.weight").double()).float().contiguous()
        return cls(layers, table, head, norm, stored.dtype, precision)


class NativeDecode(CachedLoop):
    """The decode program: the loop of one step for the next token of each row.

    Inputs `tokens` (B, L) int64, `keys`, `values` (depth, B, S, kv_heads, d), `lengths` (B,) int32; output
    `action_tokens` (B, steps) int64, 0 after the turn in which the last row had its stop token.
    """

    weights: DecodeWeights

    def __init__(
        self, weights: DecodeWeights, config: Pi0FastConfig, batch: int, prefix_tokens: int, tokens: int
    ) -> None:
        """`tokens`: to decode, the most."""
        self.config, self.prefix_tokens, self.tokens, self.turns = config, prefix_tokens, tokens, -(-tokens // TURN)
        stack, capacity = config.prefix, prefix_tokens + self.turns * TURN
        spec = ExpertSpec(
            stack.width, stack.mlp_dim, stack.heads, stack.kv_heads, stack.head_dim, stack.depth, 1, 1, 0, False,
            stack.eps, stack.width,
        )  # fmt: skip
        x = torch.zeros(batch, stack.width, dtype=weights.dtype, device=weights.table.device)
        # The keys and values of all layers go to the cache together, after the last one.
        super().__init__(weights, spec, 1, x, capacity, kept=stack.depth)
        self.normed, self.h = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(x)
        self.keys = x.new_zeros(stack.depth, batch, capacity, stack.kv_heads, stack.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.logits = torch.zeros(batch, config.vocab_size, device=x.device)
        self.token, self.counts = (torch.zeros(n, dtype=torch.int64, device=x.device) for n in (batch, batch + 1))
        self.places, self.step = self.counts[:batch], self.counts[batch:]
        self.positions = torch.zeros(batch, dtype=torch.int32, device=x.device)
        self.written = torch.zeros(batch, self.turns * TURN, dtype=torch.int64, device=x.device)
        self.done, self.finished = (torch.zeros(n, dtype=torch.bool, device=x.device) for n in (batch, 1))
        self.rows = torch.arange(batch, device=x.device)
        self.choose_kernels()
        self.choices.product("head", gemm_sizes(self.h, weights.head), self._head)
        self.detail = f"fused ops, {weights_in(weights.precision)}, {TURN} tokens a turn{self.choices.detail}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Run the whole program. This waits for the GPU after every turn."""
        self.begin(inputs)
        for _ in range(self.turns):
            self.advance()
            if bool(self.finished):
                break
        self.end(outputs)

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        first, lengths = last_tokens(inputs["tokens"], self.prefix_tokens, inputs["lengths"])
        self.token.copy_(first)
        self.places.copy_(lengths - 1)
        self.keys[:, :, : self.prefix_tokens].copy_(inputs["keys"])
        self.values[:, :, : self.prefix_tokens].copy_(inputs["values"])
        for tensor in (self.step, self.written, self.done, self.finished):
            tensor.zero_()

    def advance(self) -> None:
        for _ in range(TURN):
            self.decode_next()
        if self.config.stop_token is not None:
            self.finished.copy_(self.done.all())

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        outputs["action_tokens"].copy_(self.written[:, : self.tokens])

    def decode_next(self) -> None:
        """Decode the next token of every row."""
        # Each token attends to the `positions` keys before it, and to itself.
        self.run({"keys": self.keys, "values": self.values, "lengths": self.positions}, None, self.written)

    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        del inputs, state_token
        w = self.weights
        if step == 0:
            self.positions.copy_(self.places)
            torch.mul(w.table[self.token], math.sqrt(w.table.shape[1]), out=self.x)
            return
        self.keys[:, self.rows, self.places] = self.k[:, :, 0]
        self.values[:, self.rows, self.places] = self.v[:, :, 0]
        self.chain.restart()
        add_norm(self.x, None, self.x, self.normed, layer=False, eps=self.config.prefix.eps, inverse_scale=None)
        torch.mul(self.normed, w.norm, out=self.h)
        self.chain.restart()
        self._head()
        torch.argmax(self.logits, -1, out=self.token)
        actions.index_copy_(1, self.step, self.token[:, None])
        if self.config.stop_token is not None:
            self.done |= self.token == self.config.stop_token
        self.counts += 1

    def _head(self) -> None:
        gemm(self.h, self.weights.head, self.logits, **self.choices["head"].options)
