"""The prefix in fused ops: image tokens and prompt to keys and values.

Exact savings: norm weights are folded into q/k/v and gate/up, prefix attention and the expert read the same copy of
keys and values, and nothing runs after the last layer's keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.fp8 import Scales
from vla_accel.kernels.rows.rows import embed_norm, rope_tables
from vla_accel.nn.overlap import Ahead
from vla_accel.nn.paligemma import PaliGemma
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.prefix_store import FlowStore
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.weights import Precision, StackWeights, stack_weights

N = TypeVar("N", bound=PaliGemma)


@dataclass(frozen=True)
class PrefixWeights:
    """The folded weights of the stack. `table` (vocabulary, W): the unscaled token embedding, on the GPU or in
    page-locked memory.
    """

    table: Tensor
    stack: StackWeights

    @classmethod
    def of(
        cls, model: PrefixNetwork, precision: str, scales: Scales | None, embeddings: Literal["gpu", "host"] = "gpu",
        keep: Sequence[str] = (), paired: bool = True,
    ) -> PrefixWeights:  # fmt: skip
        """Prepare the weights of a model.

        Args:
            precision: fp32, bf16, or fp8 or int8, which apply to the products in `QUANTISED` except `keep`.
            embeddings: where the token embedding stays (`config.NativeOptions`).
            paired: as in `stack_weights`.
        """
        config, products = model.config.prefix, QUANTISED["kv_cache"]["native"].without(keep)
        stored = Precision(precision, products, scales)
        stack = stack_weights(
            model, "prefix.layers", config.block(), config.depth, stored, paired=paired, keys_values_last=True
        )
        name = "embed.weight"
        return cls(model.on_host(name) if embeddings == "host" else model.weight(name), stack)


class NativePrefix:
    """The program of the prefix.

    Inputs `image_tokens` (B, I, W), `tokens` (B, L) int64 and `lengths` (B,) int32, the real tokens of each row, which
    come first; outputs `keys`, `values` (depth, B, I + L, kv_heads, d).
    """

    state_last: ClassVar[bool] = False
    """Whether a row's last token is its state, which no other token sees."""

    def __init__(
        self, weights: PrefixWeights, batch: int, image_tokens: int, length: int, attention: str = "own"
    ) -> None:
        self.weights, self.tokens, block = weights, image_tokens + length, weights.stack.block
        self.device = weights.stack.products[0].weight.device
        rows = Rows(batch, self.tokens, padded=True, state_last=self.state_last)
        self.stack = StackPlan(weights.stack, rows, attention, rope_tables(self.tokens, block.head_dim, self.device))
        self.attention, self.chain = self.stack.attention, self.stack.chain
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"
        if weights.table.device != self.device:
            self.detail += ", embeddings on the host"
        self.ahead: Ahead | None = None
        """Where the program records which layers are enqueued."""

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        if self.ahead is not None:
            self.ahead.begin()
        with self.chain:
            self.embed(inputs)
            self.stack.run(inputs["lengths"], partial(self.cache, outputs), self._reached)
        if self.ahead is None:
            self.finish(outputs)

    def embed(self, inputs: Mapping[str, Tensor], **state: Tensor) -> None:
        """Enqueue the rows of the stack and their norm."""
        stack = self.stack
        embed_norm(
            inputs["image_tokens"], inputs["tokens"], self.weights.table, stack.x, stack.h,
            eps=stack.weights.block.eps, inverse_scale=None, **state,
        )  # fmt: skip

    def cache(self, outputs: Mapping[str, Tensor], index: int) -> tuple[Tensor, Tensor]:
        """Return where the keys and values of a layer are written, (B, S, kv_heads, d) each."""
        return outputs["keys"][index], outputs["values"][index]

    def finish(self, outputs: Mapping[str, Tensor]) -> None:
        """Enqueue the work after the last layer."""

    def complete(self, outputs: Mapping[str, Tensor], index: int) -> None:
        """Enqueue the remaining work of one layer after its keys and values."""

    def go_ahead(self, outputs: Mapping[str, Tensor]) -> Ahead:
        """From now on, record an event for each layer once its keys and values are enqueued. The consumer completes
        each layer that it waits for.
        """
        depth = len(self.weights.stack.blocks) + 1
        self.ahead = Ahead(self.device, depth, partial(self.complete, outputs))
        return self.ahead

    def _reached(self, index: int) -> None:
        if self.ahead is not None:
            self.ahead.reached(index)


class PaliGemmaStore(FlowStore[N]):
    """Prepared weights of a model on PaliGemma."""

    paired: ClassVar[bool] = True
    """As of `PrefixWeights`."""

    def kv_cache(self, batch: int, image_tokens: int, length: int, spec: EngineSpec) -> Program:
        """Return the prefix program for `image_tokens` image tokens and `length` prompt tokens in each row."""
        weights = self.prefix_weights(spec, partial(PrefixWeights.of, paired=self.paired))
        return NativePrefix(weights, batch, image_tokens, length, spec.attention)
