"""What the denoise programs of all families with a prefix share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import BESIDE, FollowingProgram, Program
from vla_accel.kernels.attention.config import SuffixShape
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.epilogue import Heads, Norm, Rotation
from vla_accel.kernels.gemm.moments import Moments, measure
from vla_accel.kernels.loop import StepTables, StreamedLoop
from vla_accel.kernels.rows.flow import EulerStep, Guidance
from vla_accel.kernels.rows.rows import rope_tables
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.kernel_choices import Cuts
from vla_accel.nn.native_prefix import NativePrefix
from vla_accel.nn.overlap import Ahead
from vla_accel.runtime import current

Stack = GemmaConfig
Wait = Callable[[int], None]
"""Called before a layer that reads the prefix's keys and values of that layer."""


class LayerLoop(ABC):
    """A denoise loop of fused ops, layer by layer, with the interface of `StreamedLoop`. Any number of rows, any GPU.

    The tile config of each op is measured over all layers when the loop is built, and remembered; `detail` reports it.

    Buffers of the suffix: `x` (B T, W), `hidden` (B T, W) after the first layer of the action MLP, `q`, `k`, `v`
    (B, T, heads, d), `context` of the attention and the gated `active`. `attention`: its sizes.
    """

    reads_by_layer = True

    def __init__(
        self, expert: Stack, tables: StepTables, batch: int, tokens: int, prefix_tokens: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`tokens`: suffix tokens of a sequence; `dtype`: of activations."""
        self.tables, self.tokens, self.eps, self.depth = tables, tokens, expert.eps, expert.depth
        self.chain = Chain(current(device).gpu)
        rows = batch * tokens

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x, self.hidden = buffer(rows, expert.width), buffer(rows, expert.width)
        self.q = buffer(batch, tokens, expert.heads, expert.head_dim)
        self.k = buffer(batch, tokens, expert.kv_heads, expert.head_dim)
        self.v = torch.zeros_like(self.k)
        self.context = buffer(rows, expert.heads * expert.head_dim)
        self.active = buffer(rows, expert.mlp_dim)
        self.cos, self.sin = rope_tables(prefix_tokens + tokens, expert.head_dim, device)
        self.heads = Heads(self.q, self.k, self.v)
        self.attention = SuffixShape(
            batch, tokens, prefix_tokens, expert.heads, expert.kv_heads, expert.head_dim, dtype.itemsize
        )
        self.cuts = Cuts(device, self.chain)
        self.first = Moments.like(self.x, expert.width, tables.adaptive)

    def rotation(self, lengths: Tensor) -> Rotation:
        """Rotary embeddings of sequences after prefixes of these lengths (B,) int32."""
        return Rotation(self.cos, self.sin, lengths)

    def at(self, step: int) -> EulerStep:
        """The Euler step after evaluation `step` - 1, and before evaluation `step`."""
        tables, done = self.tables, max(step - 1, 0)
        return EulerStep(
            -1.0 / tables.steps, tables.times[done], tables.gains[done], first=step == 0, last=step == tables.steps
        )

    def guidance(self, inputs: Mapping[str, Tensor]) -> Guidance:
        """The inputs `target` and `weights`."""
        return Guidance(inputs["target"], inputs["weights"], self.tables.trained)

    def norm_before(self, index: int, scale: Tensor | None = None) -> Norm:
        """The norm of the rows that layer `index` reads."""
        return Norm(self.eps, self.cuts.read_by(index, self.first), scale)

    @property
    def detail(self) -> str:
        """The measured tile configs, for the ledger."""
        return self.cuts.detail

    def begin(
        self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor, wait: Wait | None = None
    ) -> None:
        """Enqueue the first step. Call `begin` and `go_on` with `chain` open.

        Args:
            actions: (B, H, A) float32; they hold the noise and are integrated in place.
            wait: called with each layer before it is enqueued, until its keys and values are ordered before it.
        """
        self._between(inputs, actions, state_token, 0)
        self._step(inputs, 0, wait)

    def go_on(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the other steps and the end."""
        for step in range(1, self.tables.steps):
            self._between(inputs, actions, state_token, step)
            self._step(inputs, step)
        self._between(inputs, actions, state_token, self.tables.steps)

    def run(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the whole loop."""
        with self.chain:
            self.begin(inputs, state_token, actions)
            self.go_on(inputs, state_token, actions)

    def _step(self, inputs: Mapping[str, Tensor], step: int, wait: Wait | None = None) -> None:
        if self.cuts.moments("down") is not None:
            # Of the rows that the first layer reads, which no product has written.
            measure(self.x, self.tables.of(self.tables.input_scale, step, 0), self.first)
        for layer in range(self.depth):
            if wait is not None:
                wait(layer)
                self.chain.restart()
            self._layer(step, layer, inputs)

    @abstractmethod
    def _between(self, inputs: Mapping[str, Tensor], actions: Tensor, state_token: Tensor | None, step: int) -> None:
        """Finish evaluation step - 1 and prepare evaluation `step`."""

    @abstractmethod
    def _layer(self, step: int, index: int, inputs: Mapping[str, Tensor]) -> None:
        """Enqueue a layer of evaluation `step`."""


class LoopProgram(FollowingProgram):
    """A `Program` around a `StreamedLoop` or a `LayerLoop` that integrates the output `actions` in place.

    If the prefix is native as well, the first step overlaps it: each layer waits only for its own keys and values.
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
            with self.loop.chain:
                self.loop.begin(inputs, state, actions, self.ahead.wait)
        with self.loop.chain:
            self.loop.go_on(inputs, state, actions)

    def prepare(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor | None:
        """Write the initial actions: the noise, except for actions that a trained model pins.

        Returns:
            The token of the state (B, W), or None if the suffix has none.
        """
        actions.copy_(inputs["noise"])
        if self.tables.trained:
            torch.where(inputs["weights"].unsqueeze(-1) > 0, inputs["target"], actions, out=actions)
        return None


def described(loop: Any, what: str, why_not_streamed: str | None) -> str:
    """Return a loop's text for the ledger.

    Args:
        loop: a `StreamedLoop`, or a loop of fused ops with `detail`.
        what: describes the weights.
        why_not_streamed: why the streamed kernels do not run this loop, if they were considered.
    """
    if isinstance(loop, StreamedLoop):
        apart = loop.schedule.apart
        return f"streamed CUDA kernels, {what}" + (f" (q/k/v and attention apart: {apart})" if apart else "")
    reason = f" (no streamed kernels: {why_not_streamed})" if why_not_streamed else ""
    return f"fused ops, {what}{reason}{loop.detail}"
