"""The native programs of Evo-1: the components written in fused ops over static buffers, for a CUDA graph.

Exact savings: keys and values of all blocks are one product; the times' share of an MLP, and the positions of actions,
are constants; the weights of every norm are folded into the product after it; the two products that follow the actions'
projection and the one that pools all rows read each weight once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.evo1.network import Evo1, Evo1Config
from vla_accel.fp8 import Products
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import SuffixShape
from vla_accel.kernels.attention.suffix import Prefix, prefix_attention
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.flow import ActionInput, EulerStep, Guidance, flow_step
from vla_accel.kernels.rows.rows import add_norm
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import Inputs, LayerLoop, LayerProduct
from vla_accel.nn.native_qwen_language import LanguageWeights, NativeLanguage
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.qwen_store import TowerStore
from vla_accel.nn.rtc import step_gains
from vla_accel.nn.weights import BlockWeights, Precision, StackWeights, compute_dtype, fold, stack_weights, weights_in

QUANTISED = {"denoise": {"native": Products(("q_proj", "out_proj", "fc1", "fc2", "pool"), activations=False)}}
"""By component, then engine: the products of the head's blocks, and the one that reads all rows."""
_AFTER_ACTIONS = ("action_mix", "action_out")


# -- prompt -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReaderWeights:
    """The language model, the two products of the state, float32, and one product of all blocks' keys and values."""

    language: LanguageWeights
    state: tuple[tuple[Tensor, Tensor], ...]
    keys_values: Linear

    @classmethod
    def of(cls, model: Evo1, precision: str) -> ReaderWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        stored, blocks = Precision(precision), range(model.config.head.depth)
        weight, bias = (
            torch.cat([model.weight(f"head.layers.{i}.kv_proj.{part}") for i in blocks]) for part in ("weight", "bias")
        )
        state = tuple(
            (model.weight(f"head.{name}.weight").float().clone(), model.weight(f"head.{name}.bias").float().clone())
            for name in ("state_in", "state_out")
        )
        return cls(LanguageWeights.of(model, stored), state, make_linear(weight, bias, stored.dtype))


class NativeReader:
    """The program of the prompt. Inputs `image_tokens`, `tokens` and `state`; outputs `keys` and `values`, (depth, B,
    1 + S, heads, d) each."""

    attention = None

    def __init__(self, weights: ReaderWeights, config: Evo1Config, batch: int, layout: Layout, attention: str) -> None:
        self.weights, self.batch, self.config = weights, batch, config
        self.language = NativeLanguage(weights.language, batch, layout, attention)
        stack = self.language.stack
        self.detail = f"fused ops, {stack.kind}, {stack.detail}"
        self.context = stack.x.new_empty(batch, 1 + layout.tokens, config.language.width)
        self.joined = stack.x.new_empty(batch * (1 + layout.tokens), len(weights.keys_values.weight))

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        with self.language.chain:
            hidden = self.language.run(inputs)
        (w_1, b_1), (w_2, b_2) = self.weights.state
        token = torch.addmm(b_2, torch.relu(torch.addmm(b_1, inputs["state"], w_1.T)), w_2.T)
        self.context[:, 0] = token.to(self.context.dtype)
        self.context[:, 1:] = hidden.view(self.batch, -1, self.config.language.width)
        gemm(self.context.flatten(0, 1), self.weights.keys_values, self.joined)
        heads = self.config.head.heads, self.config.head_dim
        keys, values = self.joined.view(*self.context.shape[:2], -1, 2, *heads).permute(3, 2, 0, 1, 4, 5)
        outputs["keys"].copy_(keys)
        outputs["values"].copy_(values)


# -- actions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadWeights:
    """The head's weights.

    Attributes:
        stack: The blocks, `qkv` of which has the queries alone.
        shifts: (depth, mlp_dim) float32, the first products of the MLPs of the shifts of the norms before them.
        w_in: (A, W) float32, of the actions' projection; `b_in` (W,).
        mix: The product after it; `out`: the next one.
        pool: The product of all rows of a chunk.
        decode: The two products after it; the last one gives the velocity of falling times, zero where the robot has no
            number.
        precision: Of the blocks and of `pool`.
    """

    stack: StackWeights
    shifts: Tensor
    w_in: Tensor
    b_in: Tensor
    mix: Linear
    out: Linear
    pool: Linear
    decode: tuple[Linear, Linear]
    precision: str

    @property
    def layers(self) -> tuple[BlockWeights, ...]:
        """The blocks."""
        return self.stack.blocks

    @classmethod
    def of(cls, model: Evo1, precision: str) -> HeadWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or for the blocks and `pool` fp8 or int8."""
        config, blocks = model.config, [f"layers.{i}" for i in range(model.config.head.depth)]
        stored = Precision(precision, QUANTISED["denoise"]["native"])

        def read(name: str) -> tuple[Tensor, Tensor]:
            return model.weight(f"head.{name}.weight"), model.weight(f"head.{name}.bias")

        shifts = [read(f"{b}.fc1")[0].float() @ read(f"{b}.layer_norm2")[1].float() for b in blocks]
        factor, shift = (x.double().repeat(config.action_horizon) for x in read("norm"))
        (w_in, b_in), (mix, out) = read("action_in"), (make_linear(*read(n), stored.dtype) for n in _AFTER_ACTIONS)
        weight, bias = (-x.float().unflatten(0, (config.action_horizon, -1)) for x in read("decode_out"))
        weight[:, config.robot_action_dim :], bias[:, config.robot_action_dim :] = 0, 0
        decode = read("decode_in"), (weight.flatten(0, 1), bias.flatten())
        return cls(
            stack_weights(model, "head.layers", config.block, config.head.depth, stored),
            torch.stack(shifts),
            w_in.float().T.contiguous(),
            b_in.float().clone(),
            mix,
            out,
            stored.linear("head.pool", *fold(*read("pool"), factor, shift)),
            (make_linear(*decode[0], stored.dtype), make_linear(*decode[1], stored.dtype)),
            precision,
        )


@dataclass(frozen=True)
class HeadTables:
    """The constants of a schedule: `up` (n, depth, mlp_dim) float32, the biases of the MLPs' first products in each
    step; `positions` (H, W) float32; sizes (negative), times and gains of the steps; for each block the norms before
    its queries and before its MLP."""

    up: Tensor
    positions: Tensor
    dts: tuple[float, ...]
    times: tuple[float, ...]
    gains: tuple[float, ...]
    norms: tuple[tuple[Norm, Norm], ...]

    @classmethod
    def of(cls, model: Evo1, weights: HeadWeights, schedule: Schedule, max_weight: float | None) -> HeadTables:
        """Compute the constants. `max_weight`: as in `RtcConfig`."""
        constants, eps, times = model.constants(schedule), model.config.head.eps, tuple(model.times(schedule))

        def norm(product: Linear) -> Norm:
            return Norm(eps, sums=product.weight.float().sum(1) * product.sums_scale)

        return cls(
            constants.time + weights.shifts, constants.positions, schedule.dts, times,
            step_gains(times, schedule.dts, max_weight),
            tuple((norm(layer.qkv), norm(layer.up)) for layer in weights.layers),
        )  # fmt: skip


class NativeHead(LayerLoop):
    """The denoise program. Inputs `noise` (B, H, A) float32, `keys`, `values` (depth, B, S, heads, d), `lengths` (B,)
    int32, `target` (B, H, A) and `weights` (B, H) float32; output `actions` (B, H, A) float32."""

    weights: HeadWeights

    def __init__(self, weights: HeadWeights, tables: HeadTables, config: Evo1Config, batch: int, keys: int) -> None:
        self.tables, self.config, self.batch = tables, config, batch
        width, chunk, device = config.language.width, config.action_horizon, weights.w_in.device
        dtype = compute_dtype(weights.precision)
        x = torch.zeros(batch * chunk, width, dtype=dtype, device=device)
        super().__init__(weights, len(tables.dts), x, width, config.block.mlp_dim, scaled=False, mlp_scaled=False)
        self.hidden, self.mixed, self.query, self.normed = (torch.zeros_like(x) for _ in range(4))
        self.pooled, self.decoded = x.new_zeros(batch, width), x.new_zeros(batch, config.head.hidden)
        self.velocity = torch.zeros(batch, chunk * config.action_dim, device=device)
        self.flow = [torch.zeros(batch, chunk, config.action_dim, device=device) for _ in range(3)]
        self.is_robot = (torch.arange(config.action_dim, device=device) < config.robot_action_dim).float()
        self.shape = SuffixShape(
            batch, chunk, keys, config.head.heads, config.head.heads, config.head_dim, x.element_size(), own=False
        )
        cache = x.new_zeros(1, batch, keys, config.head.heads, config.head_dim).expand(self.depth, -1, -1, -1, -1)
        full = torch.full((batch,), keys, dtype=torch.int32, device=device)
        inputs = {"keys": cache, "values": cache, "lengths": full}
        self.choose_products(inputs)
        w = self.weights
        for name, rows, product, op in (
            ("mix", self.hidden, w.mix, self._mix), ("enter", self.mixed, w.out, self._enter),
            ("pool", self.normed.view(batch, -1), w.pool, self._pool),
            ("decode_in", self.pooled, w.decode[0], self._decode_in),
            ("decode_out", self.decoded, w.decode[1], self._decode_out),
        ):  # fmt: skip
            self.choices.product(name, gemm_sizes(rows, product), op)
        self.choices.attention("attention", self.shape, lambda: self._attention(0, inputs))
        kind, launches = weights_in(weights.precision), 3 + 5 * self.depth + 4
        self.detail = f"fused ops, {kind}, {launches} launches a step{self.choices.detail}"

    def products(self) -> dict[str, LayerProduct]:
        first, every, found = self.weights.layers[0], range(self.depth), super().products()
        found["query"] = LayerProduct(gemm_sizes(self.x, first.qkv, layer_norm=True), self._query, every)
        found["up"] = LayerProduct(gemm_sizes(self.x, first.up, layer_norm=True), self._up, every)
        return found

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        torch.mul(inputs["noise"], self.is_robot, out=self.flow[2])
        self.run(inputs, None, outputs["actions"])

    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        del state_token  # It is among the keys.
        first, last, tables = step == 0, step == self.steps, self.tables
        if not first:
            add_norm(self.x, None, self.x, self.normed, layer=True, eps=self.config.head.eps, inverse_scale=None)
            self._pool()
            self._decode_in()
            self._decode_out()
        before = self.flow[2] if first else self.flow[(step - 1) % 2]
        after = actions if last else self.flow[step % 2]
        guidance = Guidance(inputs["target"], inputs["weights"])
        into = ActionInput(self.weights.w_in, self.weights.b_in, Activation.RELU, tables.positions)
        move = (values[max(step - 1, 0)] for values in (tables.dts, tables.times, tables.gains))
        at, velocity = EulerStep(*move, first=first, last=last), self.velocity.view(len(self.x), -1)
        flow_step(velocity, before, guidance, into, after, self.hidden, at, tokens=self.config.action_horizon)
        if not last:
            self._mix()
            self._enter()

    def _mix(self) -> None:
        relu = Epilogue(activation=Activation.RELU)
        gemm(self.hidden, self.weights.mix, self.mixed, relu, **self.choices["mix"].options)

    def _enter(self) -> None:
        gemm(self.mixed, self.weights.out, self.x, **self.choices["enter"].options)

    def _pool(self) -> None:
        gemm(self.normed.view(self.batch, -1), self.weights.pool, self.pooled, **self.choices["pool"].options)

    def _decode_in(self) -> None:
        relu = Epilogue(activation=Activation.RELU)
        gemm(self.pooled, self.weights.decode[0], self.decoded, relu, **self.choices["decode_in"].options)

    def _decode_out(self) -> None:
        gemm(self.decoded, self.weights.decode[1], self.velocity, **self.choices["decode_out"].options)

    def _attend(self, step: int, index: int, inputs: Inputs) -> None:
        self._query(step, index, inputs)
        self._attention(index, inputs)

    def _query(self, step: int, index: int, inputs: Inputs) -> None:
        del step, inputs
        norm = replace(self.tables.norms[index][0], moments=self.moments_before(index))
        gemm(self.x, self.weights.layers[index].qkv, self.query, norm=norm, **self.choices["query"].options)

    def _attention(self, index: int, inputs: Inputs) -> None:
        prefix = Prefix(inputs["keys"][index], inputs["values"][index], inputs["lengths"])
        q = self.query.view(self.batch, -1, self.config.head.heads, self.config.head_dim)
        prefix_attention(q, prefix, self.context, **self.choices["attention"].options)

    def _up(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        norm = replace(self.tables.norms[index][1], moments=self.choices["out"].moments)
        epilogue = Epilogue(self.tables.up[step, index], Activation.GELU_ERF)
        gemm(self.x, self.weights.layers[index].up, self.active, epilogue, norm, **self.choices["up"].options)


class Evo1Store(TowerStore[Evo1]):
    """Prepared weights of one Evo-1."""

    def kv_cache(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The program of the prompt."""
        precision = self.precision("kv_cache", spec)
        weights = self.weights(("kv_cache", precision), lambda: ReaderWeights.of(self.model, precision))
        return NativeReader(weights, self.model.config, batch, layout, spec.attention)

    def denoise(
        self, batch: int, keys: int, schedule: Schedule, max_weight: float | None, spec: EngineSpec
    ) -> Program:  # fmt: skip
        """The whole Euler loop over so many keys. Its FP8 and INT8 are of weights alone and need no scales."""
        precision = self.precision("denoise", spec, QUANTISED["denoise"]["native"])
        form = ("denoise", precision)
        weights = self.weights(form, lambda: HeadWeights.of(self.model, precision))
        tables = self.weights(
            (*form, schedule, max_weight), lambda: HeadTables.of(self.model, weights, schedule, max_weight)
        )
        return NativeHead(weights, tables, self.model.config, batch, keys)
