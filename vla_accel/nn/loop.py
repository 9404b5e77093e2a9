"""The denoise loop: layer by layer in fused ops, in the streamed kernels of Hopper, or in one persistent kernel; and
the program around it.

Exact savings: everything that depends on the step only is a constant (time embedding, adaptive norms, the product of a
norm's shift with its weight), norm weights are folded, two linear maps from actions to a time MLP are one, and keys and
values of the prefix are read where the prefix wrote them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from vla_accel.component import OVERLAP, Program
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import SuffixShape
from vla_accel.kernels.attention.suffix import Prefix, cross_attention, crossing, suffix_attention
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.config import GemmSizes, gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation
from vla_accel.kernels.gemm.moments import Moments, measure
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import ExpertSpec, StepTables, StreamedLoop
from vla_accel.kernels.loop.tables import LayerTables
from vla_accel.kernels.persistent import NotResident, PersistentLoop, Plan
from vla_accel.kernels.persistent import why_not as why_not_persistent
from vla_accel.kernels.rows.flow import ActionInput, ActionOutput, EulerStep, Guidance
from vla_accel.kernels.rows.flow import step as flow_step
from vla_accel.kernels.rows.rows import rope_tables
from vla_accel.nn.expert import ExpertWeights
from vla_accel.nn.kernel_choices import KernelChoices
from vla_accel.nn.native_prefix import NativePrefix
from vla_accel.nn.overlap import Overlap
from vla_accel.nn.weights import BlockWeights, weights_in
from vla_accel.runtime import current

Inputs = Mapping[str, Tensor]
Wait = Callable[[int], None]
"""Called with each layer before it reads the prefix's keys and values of that layer."""
LayerOp = Callable[[int, int, Inputs], object]
"""An op of a layer, called with step, layer and the inputs of the loop."""


class Layers(Protocol):
    """Weights with layers."""

    @property
    def layers(self) -> Sequence[BlockWeights]: ...


@dataclass(frozen=True)
class LayerProduct:
    """A product of some layers, and the op that runs it."""

    sizes: GemmSizes
    op: LayerOp
    layers: Sequence[int]

    def run(self, inputs: Inputs) -> None:
        """Run the product in all its layers."""
        for index in self.layers:
            self.op(0, index, inputs)


class LayerLoop(ABC):
    """A denoise loop of fused ops, layer by layer, for any number of rows and any GPU. Used like `StreamedLoop`.

    A layer is attention, the product into the residual stream, the MLP, and the product into the residual stream. Both
    of these products write the moments of the new rows for the next norm, if their kernel can.

    Buffers: the residual stream `x` (R, W), `context` (R, heads * d) of attention, and `active` (R, M) of the MLP.
    """

    reads_by_layer = True
    final_norm_reads_moments = False
    pinned: Tensor | None = None
    """(R,) int32: whether a row is a pinned action. Then scales, shifts and gates are pairs."""

    def __init__(
        self, weights: Layers, steps: int, x: Tensor, attended: int, mlp_dim: int, *, scaled: bool, mlp_scaled: bool
    ) -> None:
        """`scaled`, `mlp_scaled`: whether the norm before attention, and that before the MLP, has a scale."""
        self.weights, self.steps, self.depth, self.x = weights, steps, len(weights.layers), x
        self.next_scaled = {"out": mlp_scaled, "down": scaled}
        self.context, self.active = x.new_zeros(len(x), attended), x.new_zeros(len(x), mlp_dim)
        self.chain = Chain(current(x.device).gpu)
        self.choices = KernelChoices(x.device, self.chain)
        self.first = Moments.like(x, x.shape[1], scaled)

    # -- what a loop defines --------------------------------------------------------------------------------------

    def tables_of(self, step: int, index: int) -> LayerTables:
        """The constants of a layer in a step; with index `depth`, the scale of the last norm."""
        del step, index
        return LayerTables()

    @abstractmethod
    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        """Finish evaluation `step` - 1 and write the rows of evaluation `step` to `x`."""

    @abstractmethod
    def _attend(self, step: int, index: int, inputs: Inputs) -> None:
        """Norm, q/k/v and attention of a layer: `x` to `context`."""

    @abstractmethod
    def _up(self, step: int, index: int, inputs: Inputs) -> None:
        """Norm, first product and activation of the MLP of a layer: `x` to `active`."""

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self, inputs: Inputs, state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the whole loop. `actions`: (B, H, A) float32, the noise, integrated in place."""
        with self.chain:
            self.first_step(inputs, state_token, actions)
            self.other_steps(inputs, state_token, actions)

    def first_step(self, inputs: Inputs, state_token: Tensor | None, actions: Tensor, wait: Wait | None = None) -> None:
        """Enqueue the first evaluation. Open `chain` around this method and `other_steps`.

        Args:
            wait: called with each layer, so that its keys and values are ordered before its launches.
        """
        self._between(inputs, actions, state_token, 0)
        self._evaluate(inputs, 0, wait)

    def other_steps(self, inputs: Inputs, state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the other evaluations and the last Euler step."""
        for step in range(1, self.steps):
            self._between(inputs, actions, state_token, step)
            self._evaluate(inputs, step)
        self._between(inputs, actions, state_token, self.steps)

    def _evaluate(self, inputs: Inputs, step: int, wait: Wait | None = None) -> None:
        if self.choices["down"].moments is not None:
            measure(self.x, self.tables_of(step, 0).scale, self.first)  # no product has written these rows
        for index in range(self.depth):
            if wait is not None:
                wait(index)
                self.chain.restart()
            self._attend(step, index, inputs)
            self._out(step, index, inputs)
            self._up(step, index, inputs)
            self._down(step, index, inputs)

    def _out(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        tables, choice = self.tables_of(step, index), self.choices["out"]
        epilogue = Epilogue(
            gate=tables.gate, residual=True, moments=choice.moments, next_scale=tables.mlp_scale, pinned=self.pinned
        )
        gemm(self.context, self.weights.layers[index].out, self.x, epilogue, **choice.options)

    def _down(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        choice, gate = self.choices["down"], self.tables_of(step, index).mlp_gate
        epilogue = Epilogue(gate=gate, residual=True, pinned=self.pinned)
        if index + 1 < self.depth or self.final_norm_reads_moments:
            scale = self.tables_of(step, index + 1).scale
            epilogue = replace(epilogue, moments=choice.moments, next_scale=scale)
        gemm(self.active, self.weights.layers[index].down, self.x, epilogue, **choice.options)

    def moments_before(self, index: int) -> Moments | None:
        """The moments of the rows that a layer reads; None if no product writes them."""
        written = self.choices["down"].moments
        return self.first if index == 0 and written is not None else written

    # -- kernels --------------------------------------------------------------------------------------------------

    def products(self) -> dict[str, LayerProduct]:
        """The products of a layer. Those that write moments come first."""
        layer, every = self.weights.layers[0], range(self.depth)
        return {
            "out": LayerProduct(gemm_sizes(self.context, layer.out), self._out, every),
            "down": LayerProduct(gemm_sizes(self.active, layer.down), self._down, every),
        }

    def choose_products(self, inputs: Inputs) -> None:
        """Choose the kernels of the products. Only Triton's support pinned rows."""
        products, normed = self.products(), {}
        for name, product in products.items():
            run, moments = partial(product.run, inputs), self.moments_of(name)
            self.choices.product(name, product.sizes, run, moments=moments, every_backend=self.pinned is None)
            if moments is not None:
                normed[name] = product.sizes, moments
        self.choices.few_rows_moments(normed, lambda: [product.run(inputs) for product in products.values()])

    def moments_of(self, name: str) -> Callable[[int], Moments | None] | None:
        """What allocates the moments that a product writes (`KernelChoices.product`); None if it writes none."""
        scaled = None if self.pinned is not None else self.next_scaled.get(name)
        return None if scaled is None else partial(Moments.like, self.x, scaled=scaled)


class CachedLoop(LayerLoop):
    """The loop of layers that attend to cached keys and values, and to new ones. A layer is four or five kernels.

    More buffers: `q` (B, T, heads, d), `k`, `v` (kept, B, T, kv_heads, d). `heads` are those of each layer.
    """

    def __init__(
        self, weights: Layers, spec: ExpertSpec, steps: int, x: Tensor, prefix_tokens: int, *, kept: int = 1
    ) -> None:
        """`kept`: the new keys and values of how many layers are in memory, 1 or all."""
        attended = spec.heads * spec.head_dim
        super().__init__(weights, steps, x, attended, spec.mlp_dim, scaled=spec.adaptive, mlp_scaled=spec.adaptive)
        self.spec, batch = spec, len(x) // spec.tokens
        self.q = x.new_zeros(batch, spec.tokens, spec.heads, spec.head_dim)
        self.k = x.new_zeros(kept, batch, spec.tokens, spec.kv_heads, spec.head_dim)
        self.v = torch.zeros_like(self.k)
        self.heads = [Heads(self.q, self.k[index % kept], self.v[index % kept]) for index in range(self.depth)]
        self.cos, self.sin = rope_tables(prefix_tokens + spec.tokens, spec.head_dim, x.device)
        self.attention = SuffixShape(
            batch, spec.tokens, prefix_tokens, spec.heads, spec.kv_heads, spec.head_dim, x.element_size()
        )

    def products(self) -> dict[str, LayerProduct]:
        layers, whole = self.weights.layers, self.layers_of(crosses=False)
        found = super().products()
        found["up"] = LayerProduct(gemm_sizes(self.x, layers[0].up, gated=True), self._up, range(self.depth))
        if whole:
            sizes = gemm_sizes(self.x, layers[whole[0]].qkv, self.heads[0])
            found["qkv"] = LayerProduct(sizes, self._qkv, whole)
        return found

    def layers_of(self, *, crosses: bool) -> list[int]:
        """The layers that attend to the prefix only, or those that attend to the suffix as well."""
        return [index for index in range(self.depth) if self.spec.crosses(index) == crosses]

    def choose_kernels(self) -> None:
        """Choose the tile configs of the products and of attention."""
        sizes, whole, crosses = self.attention, self.layers_of(crosses=False), self.layers_of(crosses=True)
        cache = self.k.new_zeros(1, sizes.batch, sizes.prefix_tokens, *self.k.shape[3:]).expand(self.depth, *[-1] * 4)
        lengths = torch.zeros(sizes.batch, dtype=torch.int32, device=self.x.device)
        empty = {"keys": cache, "values": cache, "lengths": lengths}
        full = {**empty, "lengths": lengths + sizes.prefix_tokens}
        self.choose_products(empty)
        if whole:
            self.choices.attention("attention", sizes, lambda: self._attention(0, whole[0], full))
        if crosses:
            shape = crossing(self.x, self.weights.layers[crosses[0]].qkv, cache[0])
            self.choices.crossing("cross", shape, lambda: [self._cross(0, index, full) for index in crosses])

    def _attend(self, step: int, index: int, inputs: Inputs) -> None:
        if self.spec.crosses(index):
            self._cross(step, index, inputs)
        else:
            self._qkv(step, index, inputs)
            self._attention(step, index, inputs)

    def _qkv(self, step: int, index: int, inputs: Inputs) -> None:
        tables, rope = self.tables_of(step, index), Rotation(self.cos, self.sin, inputs["lengths"])
        norm = Norm(self.spec.eps, self.moments_before(index), tables.scale)
        epilogue, weights = Epilogue(tables.shift, rope=rope, pinned=self.pinned), self.weights.layers[index].qkv
        gemm(self.x, weights, self.heads[index], epilogue, norm, **self.choices["qkv"].options)

    def _attention(self, step: int, index: int, inputs: Inputs) -> None:
        del step
        suffix_attention(
            self.heads[index], prefix_of(inputs, index), self.context, state_first=self.spec.has_state,
            causal=self.spec.causal, **self.choices["attention"].options,
        )  # fmt: skip

    def _cross(self, step: int, index: int, inputs: Inputs) -> None:
        del step
        norm, weights = Norm(self.spec.eps, self.moments_before(index)), self.weights.layers[index].qkv
        cross_attention(
            self.x, weights, (self.cos, self.sin), prefix_of(inputs, index), self.context, norm=norm,
            config=self.choices["cross"].config,
        )  # fmt: skip

    def _up(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        tables = self.tables_of(step, index)
        norm = Norm(self.spec.eps, self.choices["out"].moments, tables.mlp_scale)
        epilogue = Epilogue(tables.mlp_shift, self.spec.activation, pinned=self.pinned)
        gemm(self.x, self.weights.layers[index].up, self.active, epilogue, norm, **self.choices["up"].options)


class SuffixLoop(CachedLoop):
    """The loop of an expert that reads a prefix (π0, π0.5, SmolVLA).

    More buffers: `hidden` (R, W), the first layer of the action MLP.
    """

    weights: ExpertWeights

    def __init__(
        self, weights: ExpertWeights, spec: ExpertSpec, tables: StepTables, batch: int, prefix_tokens: int
    ) -> None:
        rows, device = batch * spec.tokens, weights.w_out.device
        x = torch.zeros(rows, spec.model_width, dtype=weights.dtype, device=device)
        super().__init__(weights, spec, tables.steps, x, prefix_tokens)
        self.tables, self.hidden = tables, torch.zeros_like(x)
        if tables.trained and tables.adaptive:
            self.pinned = torch.zeros(rows, dtype=torch.int32, device=device)
        self.choose_kernels()
        if weights.mix is not None:
            self.choices.product("mix", gemm_sizes(self.hidden, weights.mix), self._mix)

    @property
    def kernels_a_step(self) -> int:
        """Launches of one evaluation and of the Euler step before it."""
        between = 1 + (self.weights.mix is not None) + (self.choices["down"].moments is not None)
        return 5 * self.depth - len(self.layers_of(crosses=True)) + between

    def tables_of(self, step: int, index: int) -> LayerTables:
        return self.tables.layer(step, index)

    def first_step(self, inputs: Inputs, state_token: Tensor | None, actions: Tensor, wait: Wait | None = None) -> None:
        if self.pinned is not None:
            of_actions = self.pinned.view(-1, self.spec.tokens)[:, self.spec.tokens - self.spec.horizon :]
            of_actions.copy_(inputs["weights"] > 0)
        super().first_step(inputs, state_token, actions, wait)

    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        w, tables, before = self.weights, self.tables, max(step - 1, 0)
        move = tables.dts[before], tables.times[before], tables.gains[before]
        at = EulerStep(*move, first=step == 0, last=step == self.steps)
        output = ActionOutput(*tables.final(before), w.w_out, w.b_out, self.spec.eps)
        activation = Activation.NONE if w.mix is None else Activation.SILU
        into = ActionInput(tables.w_in, tables.input_bias(min(step, self.steps - 1)), activation)
        guidance = Guidance(inputs["target"], inputs["weights"], tables.trained)
        following = self.x if w.mix is None else self.hidden
        flow_step(self.x, output, actions, guidance, into, following, at, tokens=self.spec.tokens)
        if w.mix is None or at.last:
            return
        if state_token is not None:
            self.x.view(len(state_token), self.spec.tokens, -1)[:, 0] = state_token.to(self.x.dtype)
            self.chain.restart()
        self._mix()

    def _mix(self) -> None:
        assert self.weights.mix is not None
        skip = self.spec.tokens if self.spec.has_state else 0
        gemm(self.hidden, self.weights.mix, self.x, Epilogue(skip_every=skip), **self.choices["mix"].options)


def prefix_of(inputs: Inputs, layer: int) -> Prefix:
    """Return the keys and values that a layer reads."""
    return Prefix(inputs["keys"][layer], inputs["values"][layer], inputs["lengths"])


def streamed_loop(
    gpu: Gpu, weights: ExpertWeights, spec: ExpertSpec, tables: StepTables, batch: int, prefix_tokens: int
) -> StreamedLoop:
    """Return the loop of streamed kernels over packed weights."""
    assert weights.packed is not None
    return StreamedLoop(
        gpu, spec, weights.packed, tables, weights.w_out, weights.b_out, weights.mix_bias, batch, prefix_tokens
    )


def persistent_loop(
    weights: ExpertWeights, spec: ExpertSpec, tables: StepTables, batch: int, prefix_tokens: int
) -> PersistentLoop | str:
    """Return the loop as one persistent kernel, or why there is none."""
    runtime = current(weights.w_out)
    reason = runtime.why_not_cuda or why_not_persistent(runtime.gpu, spec, batch, weights.precision)
    if reason is not None:
        return reason
    assert runtime.gpu is not None
    plan = Plan(spec, batch, tables.steps, tables.trained, runtime.gpu)
    output = (weights.w_out, weights.b_out.contiguous())
    try:
        return PersistentLoop(plan, list(weights.layers), tables, output, weights.mix, prefix_tokens)
    except NotResident as error:
        return str(error)


class LoopProgram:
    """The denoise program of an expert that reads a prefix.

    Inputs `noise` (B, H, A) float32, `keys`, `values` (depth, B, S, kv_heads, d) as the expert reads them, `lengths`
    (B,) int32, with a state `state` (B, A) float32; `target` (B, H, A) and `weights` (B, H) float32 of the guidance
    (zero for none), or, with trained tables, of the pinned actions. Output `actions` (B, H, A) float32.

    If the prefix is native as well, the first step overlaps it: each layer waits only for its own keys and values.
    """

    def __init__(
        self, weights: ExpertWeights, spec: ExpertSpec, tables: StepTables, batch: int, prefix_tokens: int,
        why_not_streamed: str | None = None,
    ) -> None:  # fmt: skip
        """`why_not_streamed`: for the ledger, if the weights are not packed."""
        self.weights, self.tables = weights, tables
        self.overlap: Overlap | None = None
        device = weights.w_out.device
        self.state_token = None
        if weights.state is not None:
            self.state_token = torch.zeros(batch, spec.model_width, device=device)
        gpu = current(device).gpu
        self.loop: StreamedLoop | PersistentLoop | SuffixLoop
        why_not = {"streamed kernels": why_not_streamed}
        if gpu is not None and weights.packed is not None:
            self.loop = streamed_loop(gpu, weights, spec, tables, batch, prefix_tokens)
        else:
            found = persistent_loop(weights, spec, tables, batch, prefix_tokens)
            if isinstance(found, str):
                why_not["persistent kernel"] = found
                found = SuffixLoop(weights, spec, tables, batch, prefix_tokens)
            self.loop = found
        self.detail = described(self.loop, weights_in(weights.precision), why_not if device.type == "cuda" else {})

    def follow(self, earlier: Program, outputs: Mapping[str, Tensor]) -> str:
        if not (self.loop.reads_by_layer and isinstance(earlier, NativePrefix)):
            return ""
        self.overlap = earlier.overlapped(outputs)
        return OVERLAP

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        actions, overlap = outputs["actions"], self.overlap
        if overlap is None:
            self.loop.run(inputs, self.prepare(inputs, actions), actions)
            return
        assert not isinstance(self.loop, PersistentLoop)
        with overlap.consumer():
            state = self.prepare(inputs, actions)
            with self.loop.chain:
                self.loop.first_step(inputs, state, actions, overlap.wait)
        with self.loop.chain:
            self.loop.other_steps(inputs, state, actions)

    def prepare(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor | None:
        """Write the initial actions: the noise, except for actions that a trained model pins.

        Returns:
            The token of the state (B, W), or None if the suffix has none.
        """
        actions.copy_(inputs["noise"])
        if self.tables.trained:
            torch.where(inputs["weights"].unsqueeze(-1) > 0, inputs["target"], actions, out=actions)
        state = self.weights.state
        if state is not None:
            assert state.bias is not None and self.state_token is not None
            self.state_token.copy_(torch.addmm(state.bias, inputs["state"], state.weight.t()))
        return self.state_token


def described(loop: StreamedLoop | PersistentLoop | SuffixLoop, weights: str, why_not: Mapping[str, str | None]) -> str:
    """Return a loop's text for the ledger.

    Args:
        weights: their dtype.
        why_not: why faster kernels do not run this loop, by their names, if they were considered.
    """
    reasons = "".join(f" (no {kernels}: {reason})" for kernels, reason in why_not.items() if reason)
    if isinstance(loop, PersistentLoop):
        return f"one persistent CUDA kernel, {weights}{reasons}"
    what = f"{weights}, {loop.kernels_a_step} kernels a step"
    if isinstance(loop, StreamedLoop):
        apart = loop.schedule.apart
        return f"streamed CUDA kernels, {what}" + (f" (q/k/v and attention apart: {apart})" if apart else "")
    return f"fused ops, {what}{reasons}{loop.choices.detail}"
