"""The native programs of VLA-JEPA: the components written in fused ops over static buffers, for a CUDA graph.

Exact saving besides those of the parts: the keys and values of all blocks are one product, of the rows that are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.vla_jepa.network import VlaJepa, VlaJepaConfig, condition_rows
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.nn.native_qwen_language import LanguageWeights, NativeLanguage
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.qwen_store import TransformerStore
from vla_accel.nn.weights import Precision


@dataclass(frozen=True)
class ReaderWeights:
    """The weights of the prefix. `keys_values`: one product of all blocks, or one of each if they read other layers."""

    language: LanguageWeights
    keys_values: tuple[Linear, ...]
    config: VlaJepaConfig

    @classmethod
    def of(cls, model: VlaJepa, precision: str) -> ReaderWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        stored, config = Precision(precision), model.config

        def joined(blocks: Sequence[int], part: str) -> Tensor:
            return torch.cat([model.weight(f"head.layers.{i}.kv_proj.{part}").to(stored.dtype) for i in blocks])

        every = config.head.blocks("all")
        groups = [[block] for block in every] if config.layerwise else [every]
        products = tuple(Linear(joined(blocks, "weight"), joined(blocks, "bias")) for blocks in groups)
        return cls(LanguageWeights.of(model, stored), products, config)


class NativeReader:
    """The program of the prefix. Inputs `image_tokens`, `deepstack`, `tokens` and their `lengths` (B,) int32; outputs
    `all_keys`, `all_values` (n, B, condition, heads, d)."""

    attention = None

    def __init__(self, weights: ReaderWeights, batch: int, layout: Layout, attention: str) -> None:
        self.weights, self.batch = weights, batch
        self.language = NativeLanguage(weights.language, batch, layout, attention)
        stack, config = self.language.stack, weights.config
        self.detail = f"fused ops, {stack.kind}, {stack.detail}"
        self.first = torch.arange(batch, device=stack.x.device)[:, None] * layout.tokens
        self.count = config.condition or layout.tokens
        self.joined = stack.x.new_empty(batch * self.count, len(weights.keys_values[0].weight))

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        config, language = self.weights.config, self.language
        blocks = config.head.blocks("all")

        def each(index: int) -> None:
            if config.layerwise and index in blocks:
                block = blocks.index(index)
                self._keys_values(language.stack.x, block, outputs, slice(block, block + 1))

        with language.chain:
            hidden = language.run(inputs, each=each)
        if config.condition:
            rows = condition_rows(config.condition, language.places, self.batch, inputs["lengths"]) + self.first
            hidden = hidden[rows.flatten()]
        if not config.layerwise:
            self._keys_values(hidden, 0, outputs, slice(None))

    def _keys_values(self, rows: Tensor, product: int, outputs: Mapping[str, Tensor], blocks: slice) -> None:
        head = self.weights.config.head
        gemm(rows, self.weights.keys_values[product], self.joined)
        split = self.joined.view(self.batch, self.count, -1, 2, head.heads, head.head_dim)
        keys, values = split.permute(3, 2, 0, 1, 4, 5)
        outputs["all_keys"][blocks].copy_(keys)
        outputs["all_values"][blocks].copy_(values)


class VlaJepaStore(TransformerStore[VlaJepa]):
    """Prepared weights of one VLA-JEPA."""

    def kv_cache(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The program of the language model."""
        precision = self.precision("kv_cache", spec)
        weights = self.weights(("kv_cache", precision), lambda: ReaderWeights.of(self.model, precision))
        return NativeReader(weights, batch, layout, spec.attention)
