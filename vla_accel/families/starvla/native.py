"""The native programs of starVLA's frameworks that VLA-JEPA does not have: QwenOFT's language model and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.starvla.network import OftConfig, QwenOft
from vla_accel.families.vla_jepa.network import condition_rows
from vla_accel.nn.mlp_head import NativeMlpHead
from vla_accel.nn.native_qwen_language import LanguageWeights, NativeLanguage
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.qwen_store import TowerStore
from vla_accel.nn.weights import Precision


@dataclass(frozen=True)
class DecoderWeights:
    """The weights of language model and head."""

    language: LanguageWeights
    head: NativeMlpHead
    config: OftConfig

    @classmethod
    def of(cls, model: QwenOft, precision: str) -> DecoderWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        stored = Precision(precision)
        return cls(LanguageWeights.of(model, stored), NativeMlpHead.of(model, stored.dtype), model.config)


class NativeDecoder:
    """The program of language model and head. Inputs `image_tokens`, `deepstack`, `tokens` and their `lengths` (B,)
    int32; output `actions` (B, H, A) float32. The head's few rows are products of the library."""

    attention = None

    def __init__(self, weights: DecoderWeights, batch: int, layout: Layout, attention: str) -> None:
        self.weights, self.batch = weights, batch
        self.language = NativeLanguage(weights.language, batch, layout, attention)
        stack = self.language.stack
        self.detail = f"fused ops, {stack.kind}, {stack.detail}"
        self.first = torch.arange(batch, device=stack.x.device)[:, None] * layout.tokens

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        config, language = self.weights.config, self.language
        with language.chain:
            hidden = language.run(inputs)
        rows = condition_rows(config.condition, language.places, self.batch, inputs["lengths"]) + self.first
        actions = self.weights.head(hidden[rows.flatten()])
        outputs["actions"].copy_(actions.view(outputs["actions"].shape))


class OftStore(TowerStore[QwenOft]):
    """Prepared weights of one QwenOFT."""

    def decode(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The program of language model and head."""
        precision = self.precision("decode", spec)
        weights = self.weights(("decode", precision), lambda: DecoderWeights.of(self.model, precision))
        return NativeDecoder(weights, batch, layout, spec.attention)
