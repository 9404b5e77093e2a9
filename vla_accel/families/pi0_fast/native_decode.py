"""Decoding of tokens in fused ops, one token of each row at a time. Every token reads all weights.

A layer is five kernels, as in the denoise loop of few rows (`native.expert`); then follow the head, the largest logit
and a few counters. All of it runs on the GPU: tokens do not pass through the host. After `TURN` tokens the program
reports whether every row has its stop token. Exact savings: norm weights are folded into q/k/v and gate/up, and the
weights are those of the prefix if it computes in the same precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vla_accel.component import TurnedProgram
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig, last_tokens
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import SuffixShape
from vla_accel.kernels.attention.suffix import suffix_attention
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation
from vla_accel.kernels.gemm.moments import Moments, measure
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.rows import add_norm, rope_tables
from vla_accel.nn.kernel_choices import KernelChoices
from vla_accel.nn.native_prefix import PrefixWeights
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.weights import BlockWeights, Precision, block_weights, weights_in
from vla_accel.runtime import current

TURN = 4
"""Tokens of a turn. Another turn is always on its way while one is asked whether all is done, so that up to twice as
many are decoded for nothing."""


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


class NativeDecode(TurnedProgram):
    """The decode program.

    Inputs `tokens` (B, L) int64, `keys`, `values` (depth, B, S, kv_heads, d), `lengths` (B,) int32; output
    `action_tokens` (B, steps) int64, 0 after the turn in which the last row had its stop token.
    """

    def __init__(
        self, weights: DecodeWeights, config: Pi0FastConfig, batch: int, prefix_tokens: int, steps: int
    ) -> None:
        self.weights, self.config = weights, config
        self.prefix_tokens, self.steps, self.turns = prefix_tokens, steps, -(-steps // TURN)
        stack, device, dtype = config.prefix, weights.table.device, weights.dtype
        self.chain = Chain(current(device).gpu)
        capacity = prefix_tokens + self.turns * TURN

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.x, self.normed = buffer(batch, stack.width), buffer(batch, stack.width, kind=torch.float32)
        self.h = buffer(batch, stack.width)
        self.q = buffer(batch, 1, stack.heads, stack.head_dim)
        # Of all layers: they go to the cache together, after the last one.
        self.k = buffer(stack.depth, batch, 1, stack.kv_heads, stack.head_dim)
        self.v = torch.zeros_like(self.k)
        self.keys = buffer(stack.depth, batch, capacity, stack.kv_heads, stack.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.context = buffer(batch, stack.heads * stack.head_dim)
        self.active = buffer(batch, stack.mlp_dim)
        self.logits = buffer(batch, config.vocab_size, kind=torch.float32)
        self.token, self.places = buffer(batch, kind=torch.int64), buffer(batch, kind=torch.int64)
        self.positions = buffer(batch, kind=torch.int32)
        self.step = buffer(1, kind=torch.int64)
        self.written = buffer(batch, self.turns * TURN, kind=torch.int64)
        self.done, self.finished = buffer(batch, kind=torch.bool), buffer(1, kind=torch.bool)
        self.rows = torch.arange(batch, device=device)
        self.cos, self.sin = rope_tables(capacity, stack.head_dim, device)
        self.choices = KernelChoices(device, self.chain)
        self.first = Moments.like(self.x, stack.width, False)
        self._cut(SuffixShape(batch, 1, capacity, stack.heads, stack.kv_heads, stack.head_dim, dtype.itemsize))
        kind = weights_in(weights.precision)
        self.detail = f"fused ops, {kind}, {TURN} tokens a turn{self.choices.detail}"

    def _cut(self, sizes: SuffixShape) -> None:
        """Choose the tile configs of the products and of attention."""
        layers, head = self.weights.layers, self.weights.head

        def every(op: Callable[[int], None]) -> None:
            for index in range(len(layers)):
                op(index)

        products = {
            "o": gemm_sizes(self.context, layers[0].out),
            "down": gemm_sizes(self.active, layers[0].down),
            "qkv": gemm_sizes(self.x, layers[0].qkv, Heads(self.q, self.k[0], self.v[0])),
            "gate_up": gemm_sizes(self.x, layers[0].up, gated=True),
        }
        ops = {"o": self._o, "down": self._down, "qkv": self._qkv, "gate_up": self._gate_up}
        # What writes moments comes before what reads them.
        for name, product in products.items():
            moments = partial(Moments.like, self.x, scaled=False) if name in ("o", "down") else None
            self.choices.product(name, product, partial(every, ops[name]), moments=moments)
        self.choices.attention("attention", sizes, lambda: self._attend(0))
        self.choices.product("head", gemm_sizes(self.h, head), self._head)

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
            self._next()
        if self.config.stop_token is not None:
            self.finished.copy_(self.done.all())

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        outputs["action_tokens"].copy_(self.written[:, : self.steps])

    def _next(self) -> None:
        """Decode the next token of every row."""
        w = self.weights
        self.positions.copy_(self.places)
        self.x.copy_(w.table[self.token] * math.sqrt(w.table.shape[1]))
        with self.chain:
            if self.choices["down"].moments is not None:
                measure(self.x, None, self.first)
            for index in range(len(w.layers)):
                self._qkv(index)
                self._attend(index)
                self._o(index)
                self._gate_up(index)
                self._down(index)
        self.keys[:, self.rows, self.places] = self.k[:, :, 0]
        self.values[:, self.rows, self.places] = self.v[:, :, 0]
        add_norm(self.x, None, self.x, self.normed, layer=False, eps=self.config.prefix.eps, inverse_scale=None)
        self.h.copy_(self.normed * w.norm)
        self._head()
        self.token.copy_(self.logits.argmax(-1))
        self.written.index_copy_(1, self.step, self.token[:, None])
        if self.config.stop_token is not None:
            self.done |= self.token == self.config.stop_token
        self.places += 1
        self.step += 1

    def _qkv(self, index: int) -> None:
        written = self.choices["down"].moments
        norm = Norm(self.config.prefix.eps, self.first if index == 0 and written is not None else written)
        heads, rope = Heads(self.q, self.k[index], self.v[index]), Rotation(self.cos, self.sin, self.positions)
        gemm(self.x, self.weights.layers[index].qkv, heads, Epilogue(rope=rope), norm, **self.choices["qkv"].options)

    def _attend(self, index: int) -> None:
        """Attend to the `positions` keys before each token, and to the token itself."""
        suffix_attention(
            self.q, self.keys[index], self.values[index], self.k[index], self.v[index], self.positions, self.context,
            state_first=False, **self.choices["attention"].options,
        )  # fmt: skip

    def _o(self, index: int) -> None:
        epilogue, choice = Epilogue(residual=True, moments=self.choices["o"].moments), self.choices["o"]
        gemm(self.context, self.weights.layers[index].out, self.x, epilogue, **choice.options)

    def _gate_up(self, index: int) -> None:
        norm = Norm(self.config.prefix.eps, self.choices["o"].moments)
        epilogue, weights = Epilogue(activation=Activation.GEGLU), self.weights.layers[index].up
        gemm(self.x, weights, self.active, epilogue, norm, **self.choices["gate_up"].options)

    def _down(self, index: int) -> None:
        last, choice = index + 1 == len(self.weights.layers), self.choices["down"]
        epilogue = Epilogue(residual=True, moments=None if last else choice.moments)
        gemm(self.active, self.weights.layers[index].down, self.x, epilogue, **choice.options)

    def _head(self) -> None:
        self.chain.restart()
        gemm(self.h, self.weights.head, self.logits, **self.choices["head"].options)
