"""SmolVLA's denoise loop in fused ops, all of the steps in one program.

The layers are so small that launches are the cost: a layer that crosses is four kernels (queries and attention are
one), one that attends to the actions, too, is five, and there are two between steps. Exact savings: everything that
depends on the step only is a constant, the two linear maps from actions to the time MLP are one, norms' weights are
folded, and the prefix's keys and values are read where the prefix wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.models.rtc import step_gains
from vla_accel.models.smolvla import SmolVla, SmolVlaConfig
from vla_accel.native.constants import paired
from vla_accel.native.cuts import Cuts
from vla_accel.native.expert import ExpertLayer, begin
from vla_accel.native.fold import fold_norm, plain
from vla_accel.native.store import compute_dtype, plain_input, weights_in
from vla_accel.ops import suffix
from vla_accel.ops.cuda.denoise import StepTables
from vla_accel.ops.dispatch import dependent_launches
from vla_accel.ops.linear import Linear, make_linear
from vla_accel.ops.moments import Moments, measure
from vla_accel.ops.rows import rope_tables
from vla_accel.ops.suffix_tilings import SuffixAttention


@dataclass(frozen=True)
class ExpertWeights:
    """The expert's weights. Of a layer that crosses, `qkv` is its queries' alone; `mix` (W, W): the second layer of the
    time MLP; `w_out` (A, W) float32; `precision`: of the layers' weights."""

    layers: tuple[ExpertLayer, ...]
    mix: Linear
    w_out: Tensor
    b_out: Tensor
    dtype: torch.dtype
    precision: str

    @classmethod
    def of(cls, model: SmolVla, precision: str) -> ExpertWeights:
        """Prepare from a model; `precision`: fp32, bf16, or fp8 or int8 (`store.plain_input`)."""
        dtype = compute_dtype(precision)
        layers = []
        for index, layer in enumerate(model.expert.layers):
            first = "q_proj" if model.config.crosses(index) else "qkv_proj"
            parts = (first, "o_proj", "gate_up_proj", "down_proj", "input_layernorm", "post_attention_layernorm")
            with model.present(*(f"expert.layers.{index}.{name}" for name in parts)):
                product: dict[str, torch.nn.Linear] = {n: layer.get_submodule(n) for n in parts[:4]}  # type: ignore[misc]
                before, after = (plain(layer.get_submodule(n)) for n in parts[4:])
                layers.append(
                    ExpertLayer(
                        plain_input(precision, *fold_norm(product[first], before)),
                        plain_input(precision, product["o_proj"].weight),
                        plain_input(precision, *fold_norm(product["gate_up_proj"], after)),
                        plain_input(precision, product["down_proj"].weight),
                    )
                )
        with model.present("action_time_mlp_out", "action_out_proj"):
            mix = make_linear(model.action_time_mlp_out.weight, model.action_time_mlp_out.bias, dtype)
            w_out, b_out = model.action_out_proj.weight.float().contiguous(), model.action_out_proj.bias.float()
        return cls(tuple(layers), mix, w_out, b_out, dtype, precision)


@torch.inference_mode()
def steps_of(model: SmolVla, num_steps: int, max_weight: float | None = None, trained: bool = False) -> StepTables:
    """What the steps add to any weights of a model; the same for all shapes. `max_weight`, `trained`: as in
    `RtcConfig`."""
    euler = model.times(num_steps)
    times = tuple(euler.tolist())
    euler = torch.cat((euler, euler.new_zeros(int(trained))))
    rows, _ = model.conditioning(euler.to(model.device))
    with model.present("action_in_proj", "action_time_mlp_in", "expert.norm"):
        # Two linear maps in a row are one: actions → width → hidden layer.
        from_actions = model.action_time_mlp_in.weight[:, : model.config.expert.width].double()
        b_in = (from_actions @ model.action_in_proj.bias.double() + rows.double()).float().contiguous()
        w_in = (from_actions @ model.action_in_proj.weight.double()).T.float().contiguous()
        final = (model.expert.norm.factor - 1.0).float().contiguous()
    gains = step_gains(times, max_weight)
    b_in = paired(b_in) if trained else b_in
    return StepTables(None, None, None, None, None, None, final, None, b_in, w_in, times, gains, trained)


class NativeDenoise:
    """The program. Inputs `noise` (B, H, A) float32, `keys`, `values` (depth, B, S, kv_heads, d) as the expert reads
    them, `lengths` (B,) int32, `target` (B, H, A) and `weights` (B, H) float32 of the guidance (zero: a plain call),
    or, with trained tables, of the actions that are pinned; output `actions` (B, H, A) float32."""

    def __init__(
        self, weights: ExpertWeights, config: SmolVlaConfig, tables: StepTables, batch: int, prefix_tokens: int
    ) -> None:
        self.weights, self.config, self.tables = weights, config, tables
        expert, self.horizon = config.expert, config.action_horizon
        device, dtype = weights.w_out.device, weights.dtype
        self.pdl = dependent_launches(device)
        rows = batch * self.horizon

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x, self.hidden = buffer(rows, expert.width), buffer(rows, expert.width)
        self.q = buffer(batch, self.horizon, expert.heads, expert.head_dim)
        self.k = buffer(batch, self.horizon, expert.kv_heads, expert.head_dim)
        self.v = torch.zeros_like(self.k)
        self.context = buffer(rows, expert.heads * expert.head_dim)
        self.active = buffer(rows, expert.mlp_dim)
        sizes = SuffixAttention(
            batch, self.horizon, prefix_tokens, expert.heads, expert.kv_heads, expert.head_dim, dtype.itemsize
        )
        self.cos, self.sin = rope_tables(prefix_tokens + self.horizon, expert.head_dim, device)
        self.cuts = Cuts(device)
        self.first = Moments.like(self.x, expert.width, False)
        self._cut(sizes)
        crossing = sum(map(config.crosses, range(expert.depth)))
        kind = weights_in(weights.precision)
        self.detail = f"fused ops, {kind}, {5 * expert.depth - crossing + 3} kernels a step{self.cuts.detail}"

    def _cut(self, sizes: SuffixAttention) -> None:
        """Choose how products and attention are cut."""
        device, layers = self.x.device, self.weights.layers
        lengths = torch.zeros(sizes.batch, dtype=torch.int32, device=device)
        crossing = [i for i in range(len(layers)) if self.config.crosses(i)]
        whole = [i for i in range(len(layers)) if i not in crossing]
        o, gate_up, down = layers[0].o, layers[0].gate_up, layers[0].down
        cache = torch.zeros(sizes.batch, sizes.prefix_tokens, *self.k.shape[2:], dtype=self.k.dtype, device=device)
        full = lengths + sizes.prefix_tokens

        def every(op: Callable[[ExpertLayer], None]) -> None:
            for layer in layers:
                op(layer)

        # What writes moments comes before what reads them.
        self.cuts.products("o", suffix.project_product(self.context, o), lambda: every(self._o), of=self.x)
        self.cuts.products("down", suffix.project_product(self.active, down), lambda: every(self._down), of=self.x)
        self.cuts.products("gate_up", suffix.gate_up_product(self.x, gate_up), lambda: every(self._gate_up))
        if whole:
            product = suffix.qkv_product(self.x, layers[whole[0]].qkv, self.q, self.k)
            self.cuts.products("qkv", product, lambda: [self._qkv(i, lengths) for i in whole])
            self.cuts.attention("attention", sizes, lambda: self._attend(cache, cache, full))
        if crossing:
            sizes_of = suffix.crossing(self.x, layers[crossing[0]].qkv, cache)
            self.cuts.crossing("cross", sizes_of, lambda: [self._cross(i, cache, cache, full) for i in crossing])
        mix = suffix.project_product(self.hidden, self.weights.mix)
        self.cuts.products("mix", mix, self._mix)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        actions = outputs["actions"]
        begin(self.tables, inputs, actions)
        self._between(inputs, actions, 0)
        for step in range(self.tables.steps):
            if self.cuts.moments("down") is not None:
                measure(self.x, None, self.first, pdl=self.pdl)
            for index in range(len(self.weights.layers)):
                self._layer(index, inputs)
            self._between(inputs, actions, step + 1)

    def _between(self, inputs: Mapping[str, Tensor], actions: Tensor, step: int) -> None:
        """Finish evaluation step - 1 and prepare evaluation `step`."""
        w, tables = self.weights, self.tables
        first, last = step == 0, step == tables.steps
        done = max(step - 1, 0)
        # The first kernel of the chain must not start early.
        suffix.step(
            self.x, tables.final_scale, None, w.w_out, w.b_out, actions, inputs["target"], inputs["weights"],
            tables.w_in, tables.b_in[min(step, tables.steps - 1)], self.hidden, dt=-1.0 / tables.steps,
            time=tables.times[done], gain=tables.gains[done], eps=self.config.expert.eps, tokens=self.horizon,
            first=first, last=last, silu=True, pinned=tables.trained, pdl=self.pdl and not first,
        )  # fmt: skip
        if not last:
            self._mix()

    def _layer(self, index: int, inputs: Mapping[str, Tensor]) -> None:
        layer, lengths = self.weights.layers[index], inputs["lengths"]
        keys, values = inputs["keys"][index], inputs["values"][index]
        if self.config.crosses(index):
            self._cross(index, keys, values, lengths)
        else:
            self._qkv(index, lengths)
            self._attend(keys, values, lengths)
        self._o(layer)
        self._gate_up(layer)
        self._down(layer)

    def _qkv(self, index: int, lengths: Tensor) -> None:
        suffix.qkv_rope(
            self.x, self.weights.layers[index].qkv, None, None, self.cos, self.sin, lengths, self.q, self.k, self.v,
            eps=self.config.expert.eps, pdl=self.pdl, cut=self.cuts.alone("qkv"),
            moments=self.cuts.read_by(index, self.first),
        )  # fmt: skip

    def _attend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        suffix.suffix_attention(
            self.q, keys, values, self.k, self.v, lengths, self.context, state_first=False, causal=True, pdl=self.pdl,
            **self.cuts.options("attention"),
        )  # fmt: skip

    def _cross(self, index: int, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        suffix.cross_attention(
            self.x, self.weights.layers[index].qkv, self.cos, self.sin, keys, values, lengths, self.context,
            eps=self.config.expert.eps, pdl=self.pdl, cut=self.cuts.alone("cross"),
            moments=self.cuts.read_by(index, self.first),
        )  # fmt: skip

    def _o(self, layer: ExpertLayer) -> None:
        suffix.project(
            self.context, layer.o, None, self.x, pdl=self.pdl, **self.cuts.options("o"), moments=self.cuts.moments("o")
        )

    def _gate_up(self, layer: ExpertLayer) -> None:
        suffix.gate_up_geglu(
            self.x, layer.gate_up, None, None, self.active, eps=self.config.expert.eps, silu=True, pdl=self.pdl,
            cut=self.cuts.alone("gate_up"), moments=self.cuts.moments("o"),
        )  # fmt: skip

    def _down(self, layer: ExpertLayer) -> None:
        suffix.project(
            self.active,
            layer.down,
            None,
            self.x,
            pdl=self.pdl,
            **self.cuts.options("down"),
            moments=self.cuts.moments("down"),
        )

    def _mix(self) -> None:
        suffix.project(
            self.hidden, self.weights.mix, None, self.x, residual=False, pdl=self.pdl, **self.cuts.options("mix")
        )  # fmt: skip
