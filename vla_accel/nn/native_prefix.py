"""The prefix in fused ops: image tokens and prompt to keys and values.

Exact savings: norm weights are folded into q/k/v and gate/up, prefix attention and the expert read the same copy of
keys and values, and nothing runs after the last layer's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.fp8 import Scales
from vla_accel.kernels.rows.rows import embed_norm, rope_tables
from vla_accel.nn.native_vision import NativeVision, VisionWeights
from vla_accel.nn.overlap import Ahead
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import Precision, StackWeights, stack_weights

N = TypeVar("N", bound=PrefixNetwork)
W = TypeVar("W")


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
        if embeddings == "gpu":
            return cls(model.weight("embed.weight"), stack)
        table = model.weight("embed.weight", torch.device("cpu"))
        # A GPU can read page-locked memory.
        return cls(table.pin_memory() if model.device.type == "cuda" else table, stack)


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


class PrefixStore(NativeStore[N]):
    """Prepared weights of one network with a prefix."""

    prefix_weights: ClassVar[Callable[..., Any]] = PrefixWeights.of
    prefix_program: ClassVar[type[NativePrefix]] = NativePrefix

    def vision(self, batch: int, views: int, spec: EngineSpec) -> Program:
        """Return the vision program for `batch` observations of `views` images."""
        precision = self.precision("vision", spec, QUANTISED["vision"]["native"], "fp16", any_policy=True)
        weights = self.weights(
            ("vision", precision, spec.keep), lambda: VisionWeights.of(self.model, precision, self.scales, spec.keep)
        )
        return NativeVision(weights, batch, views, spec.attention)

    def kv_cache(self, batch: int, image_tokens: int, length: int, spec: EngineSpec) -> Program:
        """Return the prefix program for `image_tokens` image tokens and `length` prompt tokens in each row."""
        precision = self.precision("kv_cache", spec, QUANTISED["kv_cache"]["native"])
        where = spec.native.embeddings
        weights = self.weights(
            ("kv_cache", precision, where, spec.keep),
            lambda: self.prefix_weights(self.model, precision, self.scales, where, spec.keep),
        )
        return self.prefix_program(weights, batch, image_tokens, length, spec.attention)

    def loop_weights(
        self, spec: EngineSpec, batch: int, trained: bool, why_not_streamed: Callable[..., str | None],
        of: Callable[..., W],
    ) -> tuple[tuple[str, ...], W, str | None]:  # fmt: skip
        """Return the key of a denoise loop's weights, the weights, and why the streamed kernels do not run them.

        Args:
            trained: as in `RtcConfig`.
            why_not_streamed: called with model, precision and batch.
            of: prepares the weights, called with model, precision and `streamed`.
        """
        precision = self.precision("denoise", spec, QUANTISED["denoise"]["native"])
        why_not = "they have one flow time for all actions" if trained else None
        why_not = why_not or why_not_streamed(self.model, precision, batch)
        key = ("denoise", precision, "layers" if why_not else "streamed")
        return key, self.weights(key, lambda: of(self.model, precision, streamed=why_not is None)), why_not
