"""The native programs of SmolVLA: its prefix, and the store of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.smolvla.native_loop import expert_spec, expert_weights, steps_of, why_not_streamed
from vla_accel.families.smolvla.network import SmolVla
from vla_accel.fp8 import Scales
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import LoopProgram
from vla_accel.nn.native_prefix import NativePrefix, PrefixStore, PrefixWeights


@dataclass(frozen=True)
class SmolVlaPrefixWeights:
    """The stack's weights; the state's projection, float32; and what the expert's crossing layers, whose numbers are
    `crossing`, make of the prefix's keys and values: (len(crossing), C, C) each, C = kv_heads * d. `every`: as
    `SmolVlaConfig.self_every`."""

    stack: PrefixWeights
    state: Linear
    crossing: tuple[int, ...]
    every: int
    keys: Tensor
    values: Tensor

    @classmethod
    def of(
        cls, model: SmolVla, precision: str, scales: Scales | None, embeddings: Literal["gpu", "host"],
        keep: Sequence[str] = (),
    ) -> SmolVlaPrefixWeights:  # fmt: skip
        """Prepare from a model, as `PrefixWeights` is."""
        stack = PrefixWeights.of(model, precision, scales, embeddings, keep)
        crossing = tuple(i for i in range(model.config.expert.depth) if model.config.crosses(i))
        dtype, block = stack.stack.dtype, stack.stack.block
        width = block.kv_heads * block.head_dim
        made: dict[str, Tensor] = {}
        for name in ("key_proj", "value_proj"):
            made[name] = torch.empty(len(crossing), width, width, dtype=dtype, device=model.device)
            for place, index in zip(made[name], crossing, strict=True):
                place.copy_(model.weight(f"expert.layers.{index}.{name}.weight"))
        state = Linear(model.weight("state_proj.weight").float(), model.weight("state_proj.bias").float())
        return cls(stack, state, crossing, model.config.self_every, made["key_proj"], made["value_proj"])

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        """The crossing layers as slices of all layers, and as slices of `crossing`: those of one slice are equally far
        from each other, so that a product can write to all of them."""
        if self.every < 1:
            return [(slice(None), slice(None))]
        last = min(self.every, len(self.stack.stack.blocks) + 1)
        return [(slice(i, None, self.every), slice(i - 1, None, self.every - 1)) for i in range(1, last)]


class SmolVlaPrefix(NativePrefix):
    """The program. Inputs `image_tokens` (B, I, W), `tokens` (B, L) int64, `state` (B, state_dim) float32, `lengths`
    (B,) int32, the real tokens of a row, which come first, the state last of them; outputs `keys`, `values` (depth, B,
    I + L + 1, kv_heads, d) as the expert reads them."""

    state_last = True

    def __init__(
        self, weights: SmolVlaPrefixWeights, batch: int, image_tokens: int, length: int, attention: str = "own"
    ) -> None:
        super().__init__(weights.stack, batch, image_tokens, length + 1, attention)
        self.own, stack, device = weights, weights.stack.stack, weights.keys.device
        self.state_token = torch.zeros(batch, stack.block.width, device=device)
        # The stack's own keys and values of the layers of which the expert reads others.
        shape = (2, len(weights.crossing), batch, self.tokens, stack.block.kv_heads, stack.block.head_dim)
        self.kept = torch.empty(shape, dtype=stack.dtype, device=device)

    def embed(self, inputs: Mapping[str, Tensor], **_: Tensor) -> None:
        assert self.own.state.bias is not None
        self.state_token.copy_(torch.addmm(self.own.state.bias, inputs["state"], self.own.state.weight.t()))
        super().embed(inputs, state=self.state_token, lengths=inputs["lengths"])

    def cache(self, outputs: Mapping[str, Tensor], index: int) -> tuple[Tensor, Tensor]:
        if index not in self.own.crossing:
            return super().cache(outputs, index)
        place = self.own.crossing.index(index)
        return self.kept[0, place], self.kept[1, place]

    def finish(self, outputs: Mapping[str, Tensor]) -> None:
        """All crossing layers in batched products, straight to where the expert reads."""
        for layers, places in self.own.runs:
            for kept, made, weight in (
                (self.kept[0], outputs["keys"], self.own.keys),
                (self.kept[1], outputs["values"], self.own.values),
            ):
                rows, cache = (x.view(len(x), -1, weight.shape[1]) for x in (kept[places], made[layers]))
                torch.bmm(rows, weight[places].transpose(1, 2), out=cache)

    def complete(self, outputs: Mapping[str, Tensor], index: int) -> None:
        if index in self.own.crossing:
            place = self.own.crossing.index(index)
            for which, (name, weight) in enumerate((("keys", self.own.keys), ("values", self.own.values))):
                rows, cache = (x.view(-1, weight.shape[1]) for x in (self.kept[which, place], outputs[name][index]))
                torch.mm(rows, weight[place].t(), out=cache)


class SmolVlaStore(PrefixStore[SmolVla]):
    """Prepared weights of one SmolVLA."""

    prefix_weights = SmolVlaPrefixWeights.of
    prefix_program = SmolVlaPrefix  # type: ignore[assignment]

    def denoise(
        self, batch: int, prefix_tokens: int, schedule: Schedule, spec: EngineSpec, max_weight: float | None = None,
        trained: bool = False,
    ) -> Program:  # fmt: skip
        """The whole Euler loop. `max_weight`, `trained`: as in `RtcConfig`."""
        key, weights, why_not = self.loop_weights(spec, batch, trained, why_not_streamed, expert_weights)
        steps, streamed = (*key, schedule, max_weight, trained), why_not is None
        tables = self.weights(steps, lambda: steps_of(self.model, schedule, max_weight, trained, streamed=streamed))
        return LoopProgram(weights, expert_spec(self.model.config), tables, batch, prefix_tokens, why_not)
