"""What the denoise programs of all families with a prefix share: where their loop begins, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import BESIDE, FollowingProgram, Program
from vla_accel.native.ahead import Ahead
from vla_accel.native.prefix import NativePrefix
from vla_accel.ops.cuda.denoise import StepTables, StreamedLoop

Wait = Callable[[int], None]
"""Called before a layer that reads the prefix's keys and values of that layer."""


class LayerLoop(ABC):
    """A loop of fused ops, layer by layer: as `StreamedLoop`, begun and gone on with."""

    reads_by_layer = True

    @abstractmethod
    def begin(
        self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor, wait: Wait | None = None
    ) -> None:
        """Enqueue the first step; `actions` hold the noise, and are integrated in place. `wait`: with it no layer
        starts before it is its turn."""

    @abstractmethod
    def go_on(
        self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor, *, joined: bool = False
    ) -> None:
        """Enqueue the other steps, and the end. `joined`: something else came between."""

    def run(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue all of it."""
        self.begin(inputs, state_token, actions)
        self.go_on(inputs, state_token, actions)


class LoopProgram(FollowingProgram):
    """A `Program` around a loop, a `StreamedLoop` or a `LayerLoop`, that integrates the output `actions` in place.

    Its first step runs beside the prefix where both are native: a layer of it waits for that layer's keys and values
    alone.
    """

    loop: StreamedLoop | LayerLoop
    tables: StepTables
    ahead: Ahead | None = None

    def follow(self, earlier: Program, outputs: Mapping[str, Tensor]) -> str:
        if not (isinstance(earlier, NativePrefix) and self.loop.reads_by_layer):
            return ""
        self.ahead = earlier.go_ahead(outputs)
        return BESIDE

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        actions = outputs["actions"]
        if self.ahead is None:
            self.loop.run(inputs, self.prepare(inputs, actions), actions)
            return
        with self.ahead.beside():
            state = self.prepare(inputs, actions)
            self.loop.begin(inputs, state, actions, self.ahead.wait)
        self.loop.go_on(inputs, state, actions, joined=True)

    def prepare(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor | None:
        """Where the loop begins: at the noise, but for actions that a trained model has pinned. Returns the state's
        token (B, W), None where the suffix has none."""
        actions.copy_(inputs["noise"])
        if self.tables.trained:
            torch.where(inputs["weights"].unsqueeze(-1) > 0, inputs["target"], actions, out=actions)
        return None


def described(loop: Any, what: str, why_not_streamed: str | None) -> str:
    """The ledger's line of a loop: a `StreamedLoop`, or one of fused ops, with `detail`. `what`: of its weights;
    `why_not_streamed`: of one that might have been."""
    if isinstance(loop, StreamedLoop):
        apart = loop.schedule.apart
        return f"streamed CUDA kernels, {what}" + (f" (q/k/v and attention apart: {apart})" if apart else "")
    reason = f" (no streamed kernels: {why_not_streamed})" if why_not_streamed else ""
    return f"fused ops, {what}{reason}{loop.detail}"
