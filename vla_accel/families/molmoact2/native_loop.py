"""MolmoAct2's expert in fused ops, all steps in one program: eight kernels in a block.

Exact savings: everything that depends on the step only is a constant (modulations, products of their shifts with the
weights), norms are inside the products after them, and keys and values of the prompt are read where they were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vla_accel.families.molmoact2.network import EPS, MolmoAct2, MolmoAct2Config
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import SuffixShape
from vla_accel.kernels.attention.few import MOST_ROWS, few_attention
from vla_accel.kernels.attention.ops import attention
from vla_accel.kernels.attention.suffix import prefix_attention
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.loop.tables import LayerTables
from vla_accel.kernels.rows.flow import ActionInput, ActionOutput, EulerStep, Guidance
from vla_accel.kernels.rows.flow import step as flow_step
from vla_accel.kernels.rows.rows import HeadNorms, rope_tables, rotate
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import Inputs, LayerLoop, LayerProduct, prefix_of
from vla_accel.nn.rtc import step_gains
from vla_accel.nn.weights import BlockWeights, compute_dtype, plain_input, weights_in


@dataclass(frozen=True)
class MolmoBlockWeights(BlockWeights):
    """A block's products. Those after a norm, `qkv`, `cross_q` and `up`, have no biases: these are in the tables."""

    cross_q: Linear = field(kw_only=True)
    cross_out: Linear = field(kw_only=True)


@dataclass(frozen=True)
class LoopWeights:
    """Prepared weights of the expert. `w_in`, `b_in`: (A, W) and (W,) float32, from actions to rows; `w_out`, `b_out`:
    (A, W) and (A,) float32, from rows to velocities; columns of padding are zero."""

    layers: tuple[MolmoBlockWeights, ...]
    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    b_out: Tensor
    precision: str

    @classmethod
    def of(cls, model: MolmoAct2, precision: str) -> LoopWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or fp8 or int8 for the weights of the layers."""

        def product(name: str, *, biased: bool) -> Linear:
            bias = model.weight(f"{name}.bias") if biased else None
            return plain_input(precision, model.weight(f"{name}.weight"), bias)

        layers = []
        for index in range(model.config.expert.depth):
            start = f"expert.layers.{index}."
            qkv, cross_q, up = (product(start + n, biased=False) for n in ("qkv_proj", "cross_q", "gate_up_proj"))
            out, cross_out, down = (product(start + n, biased=True) for n in ("o_proj", "cross_out", "down_proj"))
            layers.append(MolmoBlockWeights(qkv, out, up, down, cross_q=cross_q, cross_out=cross_out))
        count, ends = model.config.real_actions, []
        for name, sign in (("action_in_proj", 1.0), ("action_out_proj", -1.0)):
            ends += [sign * model.weight(f"{name}.{part}").float() for part in ("weight", "bias")]
        w_in, b_in, w_out, b_out = ends
        w_in[:, count:], w_out[count:], b_out[count:] = 0.0, 0.0, 0.0
        return cls(tuple(layers), w_in.T.contiguous(), b_in, w_out.contiguous(), b_out, precision)


class BlockRows(NamedTuple):
    """The constants of a block in one step, float32. `tables`: scale, shift and gate of attention, the scale of the
    norm before attention to the prompt (`mlp_scale`), and the gate of the MLP; then what `LayerTables` lacks."""

    tables: LayerTables
    cross_shift: Tensor
    cross_gate: Tensor
    up_scale: Tensor
    up_shift: Tensor


@dataclass(frozen=True)
class StepTables:
    """The constants of the steps: of each block, and shift and scale of the last norm; times, sizes of the Euler steps
    (negative), and the guidance's w(t)."""

    blocks: tuple[tuple[BlockRows, ...], ...]
    final: tuple[tuple[Tensor, Tensor], ...]
    times: tuple[float, ...]
    dts: tuple[float, ...]
    gains: tuple[float, ...]


@torch.inference_mode()
def step_tables(
    model: MolmoAct2, weights: LoopWeights, schedule: Schedule, max_weight: float | None = None
) -> StepTables:
    """Compute the constants of the steps, with the weights of the products as stored. `max_weight`: as in
    `RtcConfig`."""
    times = model.times(schedule)
    _, rows = model.conditioning(times.to(model.device))
    assert rows is not None
    rows = rows.float()
    found: list[list[BlockRows]] = [[] for _ in schedule.dts]
    for index, layer in enumerate(weights.layers):
        shifts = {}
        for part, (name, product) in enumerate(
            (("qkv_proj", layer.qkv), ("cross_q", layer.cross_q), ("gate_up_proj", layer.up))
        ):
            weight = product.true_weight(torch.float32)
            bias = model.weight(f"expert.layers.{index}.{name}.bias").float()
            shifts[name] = rows[:, 9 * index + 3 * part] @ weight.T + bias
            del weight
        for step, its in enumerate(found):
            of = [row.contiguous() for row in rows[step, 9 * index : 9 * index + 9]]
            qkv, cross, up = (table[step].contiguous() for table in shifts.values())
            tables = LayerTables(of[1], qkv, of[2], mlp_scale=of[4], mlp_gate=of[8])
            its.append(BlockRows(tables, cross, of[5], of[7], up))
    final = tuple((row[-1].contiguous(), row[-2].contiguous()) for row in rows)
    sizes, values = schedule.dts, tuple(times.tolist())
    return StepTables(tuple(map(tuple, found)), final, values, sizes, step_gains(values, sizes, max_weight))


class MolmoLoop(LayerLoop):
    """The denoise program. Inputs `noise` (B, H, A) float32, `keys`, `values` (depth, B, S, heads, d), `target`
    (B, H, A) and `weights` (B, H) float32 of the guidance, `lengths` (B,) int32; output `actions` (B, H, A) float32.

    More buffers: `qkv` (R, 3 W) and `q` (R, W).
    """

    weights: LoopWeights

    def __init__(
        self, weights: LoopWeights, tables: StepTables, config: MolmoAct2Config, batch: int, prefix_tokens: int
    ) -> None:
        expert, device = config.expert, weights.w_in.device
        self.tables, self.expert, self.batch, self.tokens = tables, expert, batch, config.action_horizon
        x = torch.zeros(batch * self.tokens, expert.width, dtype=compute_dtype(weights.precision), device=device)
        super().__init__(weights, len(tables.dts), x, expert.width, expert.mlp_dim, scaled=True, mlp_scaled=True)
        self.next_scaled["cross_out"] = True
        self.qkv, self.q = x.new_zeros(len(x), 3 * expert.width), torch.zeros_like(x)
        self.rope = rope_tables(self.tokens, expert.head_dim, device)
        one = torch.ones(expert.head_dim, device=device)
        self.norms = HeadNorms(one, one, EPS)
        self.short = self.tokens <= MOST_ROWS
        sizes = SuffixShape(
            batch, self.tokens, prefix_tokens, expert.heads, expert.heads, expert.head_dim, x.element_size(), own=False
        )
        cache = x.new_zeros(1, batch, prefix_tokens, expert.heads, expert.head_dim).expand(self.depth, *[-1] * 4)
        full = torch.full((batch,), prefix_tokens, dtype=torch.int32, device=device)
        inputs = {"keys": cache, "values": cache, "lengths": full}
        self.choose_products(inputs)
        self.choices.attention("attention", sizes, lambda: self._cross(0, inputs))
        launches = (8 if self.short else 9) * self.depth + 1 + (self.choices["down"].moments is not None)
        self.detail = f"fused ops, {weights_in(weights.precision)}, {launches} launches a step{self.choices.detail}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        outputs["actions"].copy_(inputs["noise"])
        self.run(inputs, None, outputs["actions"])

    def tables_of(self, step: int, index: int) -> LayerTables:
        return self.tables.blocks[step][index].tables if index < self.depth else LayerTables()

    def products(self) -> dict[str, LayerProduct]:
        layer, every, found = self.weights.layers[0], range(self.depth), super().products()
        cross_out = LayerProduct(gemm_sizes(self.context, layer.cross_out), self._cross_out, every)
        return {"out": found["out"], "cross_out": cross_out, "down": found["down"]} | {
            "qkv": LayerProduct(gemm_sizes(self.x, layer.qkv, layer_norm=True), self._qkv, every),
            "cross_q": LayerProduct(gemm_sizes(self.x, layer.cross_q, layer_norm=True), self._cross_q, every),
            "up": LayerProduct(gemm_sizes(self.x, layer.up, gated=True), self._mlp_up, every),
        }

    # -- a block --------------------------------------------------------------------------------------------------

    def _attend(self, step: int, index: int, inputs: Inputs) -> None:
        self._qkv(step, index, inputs)
        if self.short:
            return few_attention(self.qkv, self.rope, self.context, heads=self.expert.heads, eps=EPS)
        rotate(self.qkv, *self.rope, self.expert.heads, self.norms)
        q, k, v = self._heads(self.qkv).unbind(2)
        attention(q, k, v, self.context.view(self.batch, self.tokens, -1), None)

    def _up(self, step: int, index: int, inputs: Inputs) -> None:
        """Attention to the prompt, then the first product of the MLP."""
        self._cross_q(step, index, inputs)
        self._cross(index, inputs)
        self._cross_out(step, index, inputs)
        self._mlp_up(step, index, inputs)

    def _cross(self, index: int, inputs: Inputs) -> None:
        q, prefix = self._heads(self.q)[:, :, 0], prefix_of(inputs, index)
        prefix_attention(q, prefix, self.context, **self.choices["attention"].options, eps=EPS)

    def _heads(self, rows: Tensor) -> Tensor:
        """(R, n W) as (B, T, n, heads, d)."""
        return rows.view(self.batch, self.tokens, -1, self.expert.heads, self.expert.head_dim)

    def _qkv(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        tables = self.tables_of(step, index)
        norm = Norm(EPS, self.moments_before(index), tables.scale)
        options = self.choices["qkv"].options
        gemm(self.x, self.weights.layers[index].qkv, self.qkv, Epilogue(tables.shift), norm, **options)

    def _cross_q(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        rows = self.tables.blocks[step][index]
        norm = Norm(EPS, self.choices["out"].moments, rows.tables.mlp_scale)
        options = self.choices["cross_q"].options
        gemm(self.x, self.weights.layers[index].cross_q, self.q, Epilogue(rows.cross_shift), norm, **options)

    def _cross_out(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        rows, choice = self.tables.blocks[step][index], self.choices["cross_out"]
        epilogue = Epilogue(gate=rows.cross_gate, residual=True, moments=choice.moments, next_scale=rows.up_scale)
        gemm(self.context, self.weights.layers[index].cross_out, self.x, epilogue, **choice.options)

    def _mlp_up(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        rows = self.tables.blocks[step][index]
        norm = Norm(EPS, self.choices["cross_out"].moments, rows.up_scale)
        epilogue = Epilogue(rows.up_shift, Activation.SWIGLU)
        gemm(self.x, self.weights.layers[index].up, self.active, epilogue, norm, **self.choices["up"].options)

    # -- between steps --------------------------------------------------------------------------------------------

    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        del state_token
        w, tables, before = self.weights, self.tables, max(step - 1, 0)
        move = tables.dts[before], tables.times[before], tables.gains[before]
        at = EulerStep(*move, first=step == 0, last=step == self.steps)
        scale, shift = tables.final[before]
        output, into = ActionOutput(scale, shift, w.w_out, w.b_out, EPS), ActionInput(w.w_in, w.b_in, Activation.NONE)
        guidance = Guidance(inputs["target"], inputs["weights"])
        flow_step(self.x, output, actions, guidance, into, self.x, at, tokens=self.tokens)
