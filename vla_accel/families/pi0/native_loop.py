"""The denoise loop of π0 and π0.5, all steps in one program: CUDA C++ for few rows on Hopper, fused ops otherwise.

Exact savings: everything that depends only on the step is a constant (time embedding, adaptive norms, the product of a
norm's shift with its weight), π0's two linear maps from actions to the time MLP are one, and keys and values of the
prefix are read where the prefix wrote them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.families.pi0.network import Pi0, Pi0Config
from vla_accel.families.pi0.step_tables import step_tables
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.suffix import suffix_attention
from vla_accel.kernels.gemm.config import GemmSizes, gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import Packed, Sizes, StepTables, StreamedLoop, why_not
from vla_accel.kernels.rows.flow import ActionInput, ActionOutput
from vla_accel.kernels.rows.flow import step as flow_step
from vla_accel.nn.fold import fold_norm, plain
from vla_accel.nn.loop import LayerLoop, LoopProgram, Wait, described
from vla_accel.nn.reference import TransformerBlock
from vla_accel.nn.weights import compute_dtype, plain_input, weights_in
from vla_accel.runtime import current


@dataclass(frozen=True)
class ExpertLayer:
    """The four products of a block."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the expert. Its layers are stored once: as `layers`, or as `packed` for the streamed kernels.

    `state` (W, A) and `mix` (W, W): π0's state projection and the second layer of its time MLP, else None; `w_out` (A,
    W) float32; `precision`: of the layers' weights.
    """

    layers: tuple[ExpertLayer, ...]
    packed: Packed | None
    w_out: Tensor
    b_out: Tensor
    state: Linear | None
    mix: Linear | None
    dtype: torch.dtype
    precision: str
    head_dim: int

    def normed_products(self) -> Iterator[tuple[Linear, Linear]]:
        """Yield q/k/v and gate/up of each layer, the products after a norm. Packed weights yield copies."""
        if self.packed is None:
            yield from ((layer.qkv, layer.gate_up) for layer in self.layers)
        else:
            yield from self.packed.normed_products()

    @property
    def mix_bias(self) -> Tensor:
        """The bias of `mix` in float32."""
        assert self.mix is not None and self.mix.bias is not None
        return self.mix.bias.float().contiguous()

    @classmethod
    def of(cls, model: Pi0, precision: str, *, streamed: bool = False) -> ExpertWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or fp8 or int8 (`store.plain_input`)."""
        dtype, adaptive = compute_dtype(precision), model.config.kind == "pi05"
        names = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
        # Adaptive norms have a dense layer of the time instead of weights to fold (`native.constants`).
        names += [] if adaptive else ["input_layernorm", "post_attention_layernorm"]

        def made(index: int) -> ExpertLayer:
            layer = model.expert.layers[index]
            assert isinstance(layer, TransformerBlock)
            with model.present(*(f"expert.layers.{index}.{name}" for name in names)):
                first, second = layer.input_layernorm, layer.post_attention_layernorm
                qkv = (layer.qkv_proj.weight, None) if adaptive else fold_norm(layer.qkv_proj, plain(first))
                gate_up = (
                    (layer.gate_up_proj.weight, None) if adaptive else fold_norm(layer.gate_up_proj, plain(second))
                )
                return ExpertLayer(
                    plain_input(precision, *qkv),
                    plain_input(precision, layer.o_proj.weight),
                    plain_input(precision, *gate_up),
                    plain_input(precision, layer.down_proj.weight),
                )

        state = mix = None
        if not adaptive:
            with model.present("state_proj", "action_time_mlp_out"):
                state = Linear(model.state_proj.weight.float(), model.state_proj.bias.float())
                mix = make_linear(model.action_time_mlp_out.weight, model.action_time_mlp_out.bias, dtype)
        with model.present("action_out_proj"):
            w_out, b_out = model.action_out_proj.weight.float().contiguous(), model.action_out_proj.bias.float()
        depth, head_dim = model.config.expert.depth, model.config.expert.head_dim
        every = (made(index) for index in range(depth))
        packed, layers = None, ()
        if streamed:
            products = ((w.qkv, w.o, w.gate_up, w.down) for w in every)
            packed = Packed.of(products, None if mix is None else mix.weight, head_dim, depth)
        else:
            layers = tuple(every)
        return cls(layers, packed, w_out, b_out, state, mix, dtype, precision, head_dim)


def sizes_of(config: Pi0Config) -> Sizes:
    """Return the sizes of a model for the streamed kernels."""
    e = config.expert
    return Sizes(
        e.width, e.mlp_dim, e.heads, e.kv_heads, e.head_dim, e.depth, config.suffix_tokens, config.action_horizon,
        config.action_dim, config.kind == "pi05", e.eps, e.width,
    )  # fmt: skip


def why_not_streamed(model: Pi0, precision: str, batch: int) -> str | None:
    """Explain why the streamed kernels do not run a model on its device; None if they do."""
    return why_not(current(model.device).gpu, sizes_of(model.config), batch, precision)


def steps_of(
    model: Pi0, weights: ExpertWeights, num_steps: int, max_weight: float | None = None, trained: bool = False
) -> StepTables:
    """Return the constants of the steps for these weights; they are the same for all shapes."""
    return step_tables(model, weights.normed_products(), num_steps, max_weight, trained)


def streamed_loop(
    gpu: Gpu, weights: ExpertWeights, config: Pi0Config, tables: StepTables, batch: int, prefix_tokens: int
) -> StreamedLoop:
    """Return the loop of streamed kernels over packed weights."""
    assert weights.packed is not None
    return StreamedLoop(
        gpu, sizes_of(config), weights.packed, tables, weights.w_out, weights.b_out,
        None if weights.mix is None else weights.mix_bias, batch, prefix_tokens,
    )  # fmt: skip


class NativeDenoise(LoopProgram):
    """The denoise program.

    Inputs `noise` (B, H, A) float32, `keys`, `values` (depth, B, S, kv_heads, d), `lengths` (B,) int32, and for π0
    `state` (B, A) float32; `target` (B, H, A) and `weights` (B, H) float32 of the guidance (zero for none), or, with
    trained tables, of the pinned actions. Output `actions` (B, H, A) float32.
    """

    def __init__(
        self, weights: ExpertWeights, config: Pi0Config, tables: StepTables, batch: int, prefix_tokens: int,
        why_not_streamed: str | None = None,
    ) -> None:  # fmt: skip
        """`why_not_streamed`: for the ledger, if the weights are not packed."""
        self.weights, self.config, self.tables = weights, config, tables
        device = weights.w_out.device
        self.state_token = None
        if weights.state is not None:
            self.state_token = torch.zeros(batch, config.expert.width, device=device)
        gpu = current(device).gpu
        kind = weights_in(weights.precision)
        if gpu is not None and weights.packed is not None:
            self.loop = streamed_loop(gpu, weights, config, self.tables, batch, prefix_tokens)
        else:
            self.loop = Pi0LayerLoop(weights, config, self.tables, batch, prefix_tokens)
        self.detail = described(self.loop, kind, why_not_streamed if device.type == "cuda" else None)

    def prepare(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor | None:
        state = self.weights.state
        super().prepare(inputs, actions)
        if state is not None:
            assert state.bias is not None and self.state_token is not None
            self.state_token.copy_(torch.addmm(state.bias, inputs["state"], state.weight.t()))
        return self.state_token


class Pi0LayerLoop(LayerLoop):
    """Five kernels in a layer and one between steps."""

    def __init__(
        self, weights: ExpertWeights, config: Pi0Config, tables: StepTables, batch: int, prefix_tokens: int
    ) -> None:
        device = weights.w_out.device
        super().__init__(config.expert, tables, batch, config.suffix_tokens, prefix_tokens, weights.dtype, device)
        self.weights, self.horizon = weights, config.action_horizon
        # Which rows are of pinned actions; a state's never is.
        pins = tables.trained and tables.adaptive
        self.pinned = torch.zeros(len(self.x), dtype=torch.int32, device=device) if pins else None
        self._cut()

    @property
    def products(self) -> dict[str, GemmSizes]:
        """The four products of a layer."""
        first = self.weights.layers[0]
        return {
            "qkv": gemm_sizes(self.x, first.qkv, self.heads),
            "o": gemm_sizes(self.context, first.o),
            "gate_up": gemm_sizes(self.x, first.gate_up, gated=True),
            "down": gemm_sizes(self.active, first.down),
        }

    def _cut(self) -> None:
        """Choose the tile configs of the four products and of attention."""
        sizes, device = self.attention, self.x.device
        lengths = torch.zeros(len(self.q), dtype=torch.int32, device=device)
        # What writes moments comes before what reads them.
        for name in ("o", "down", "qkv", "gate_up"):
            of = self.x if name in ("o", "down") and self.pinned is None else None
            run = functools.partial(self.every, name, lengths)
            self.cuts.products(
                name, self.products[name], run, of=of, scaled=self.tables.adaptive, beside=self.pinned is None
            )
        cache = torch.zeros(1, sizes.batch, sizes.prefix_tokens, *self.k.shape[2:], dtype=self.k.dtype, device=device)
        inputs = {"keys": cache, "values": cache, "lengths": lengths + sizes.prefix_tokens}
        self.cuts.attention("attention", sizes, functools.partial(self._attend, 0, inputs))

    def every(self, name: str, lengths: Tensor) -> None:
        """Run one of the products in every layer, as the loop does."""
        for index in range(len(self.weights.layers)):
            {"qkv": self._qkv, "o": self._o, "gate_up": self._gate_up, "down": self._down}[name](0, index, lengths)

    def begin(
        self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor, wait: Wait | None = None
    ) -> None:
        if self.pinned is not None:
            self.pinned.view(-1, self.tokens)[:, self.tokens - self.horizon :].copy_(inputs["weights"] > 0)
        super().begin(inputs, state_token, actions, wait)

    def _between(self, inputs: Mapping[str, Tensor], actions: Tensor, state_token: Tensor | None, step: int) -> None:
        w, tables = self.weights, self.tables
        done, at = max(step - 1, 0), self.at(step)
        final_scale = tables.final_scale[done] if tables.adaptive else tables.final_scale
        b_in = tables.b_in if tables.adaptive else tables.b_in[min(step, tables.steps - 1)]
        output = ActionOutput(final_scale, tables.of(tables.final_shift, done), w.w_out, w.b_out, self.eps)
        into = ActionInput(tables.w_in, b_in, Activation.NONE if w.mix is None else Activation.SILU)
        following = self.x if w.mix is None else self.hidden
        flow_step(self.x, output, actions, self.guidance(inputs), into, following, at, tokens=self.tokens)
        if w.mix is not None and not at.last:
            assert state_token is not None
            self.x.view(len(state_token), self.tokens, -1)[:, 0] = state_token.to(self.x.dtype)
            self.chain.restart()
            gemm(self.hidden, w.mix, self.x, Epilogue(skip_every=self.tokens))

    def _layer(self, step: int, index: int, inputs: Mapping[str, Tensor]) -> None:
        lengths = inputs["lengths"]
        self._qkv(step, index, lengths)
        self._attend(index, inputs)
        self._o(step, index, lengths)
        self._gate_up(step, index, lengths)
        self._down(step, index, lengths)

    def _qkv(self, step: int, index: int, lengths: Tensor) -> None:
        t, layer = self.tables, self.weights.layers[index]
        epilogue = Epilogue(t.of(t.input_shift, step, index), rope=self.rotation(lengths), pinned=self.pinned)
        norm = self.norm_before(index, t.of(t.input_scale, step, index))
        gemm(self.x, layer.qkv, self.heads, epilogue, norm, **self.cuts.options("qkv"))

    def _attend(self, index: int, inputs: Mapping[str, Tensor]) -> None:
        suffix_attention(
            self.q, inputs["keys"][index], inputs["values"][index], self.k, self.v, inputs["lengths"], self.context,
            state_first=self.weights.mix is not None, **self.cuts.options("attention"),
        )  # fmt: skip

    def _o(self, step: int, index: int, _: Tensor) -> None:
        t, layer = self.tables, self.weights.layers[index]
        epilogue = Epilogue(
            gate=t.of(t.input_gate, step, index), residual=True, moments=self.cuts.moments("o"),
            next_scale=t.of(t.post_scale, step, index), pinned=self.pinned,
        )  # fmt: skip
        gemm(self.context, layer.o, self.x, epilogue, **self.cuts.options("o"))

    def _gate_up(self, step: int, index: int, _: Tensor) -> None:
        t, layer = self.tables, self.weights.layers[index]
        epilogue = Epilogue(t.of(t.post_shift, step, index), Activation.GEGLU, pinned=self.pinned)
        norm = Norm(self.eps, self.cuts.moments("o"), t.of(t.post_scale, step, index))
        gemm(self.x, layer.gate_up, self.active, epilogue, norm, **self.cuts.options("gate_up"))

    def _down(self, step: int, index: int, _: Tensor) -> None:
        t, layer = self.tables, self.weights.layers[index]
        last = index + 1 == len(self.weights.layers)
        epilogue = Epilogue(
            gate=t.of(t.post_gate, step, index), residual=True, pinned=self.pinned,
            moments=None if last else self.cuts.moments("down"),
            next_scale=None if last else t.of(t.input_scale, step, index + 1),
        )  # fmt: skip
        gemm(self.active, layer.down, self.x, epilogue, **self.cuts.options("down"))
