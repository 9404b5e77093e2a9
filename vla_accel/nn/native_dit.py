"""The diffusion transformer of GR00T and VLA-JEPA in fused ops, all steps in one program: five kernels in a block.

Exact savings: everything that depends on the step only is a constant (embeddings of time, modulations of the norms, the
products of their shifts and sums with the weights), the two linear maps from actions to the second action product are
one, and keys and values of blocks with cross-attention are read where the prefix wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.ops import attention
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.loop.tables import LayerTables
from vla_accel.kernels.rows.flow import ActionInput, EulerStep, Guidance, flow_step
from vla_accel.nn.dit import DitLayer, DitNetwork, Source
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import Inputs, LayerLoop, LayerProduct
from vla_accel.nn.weights import BlockWeights, compute_dtype, plain_input, weights_in


@dataclass(frozen=True)
class TransformerWeights:
    """Prepared weights.

    Args:
        layers: products without the biases of `qkv` and `up`, which are in `biases` (float32), one pair a layer.
        sources: what each layer attends to.
        ends: the output product of the transformer, if it has one, and the two that decode it, each with its bias in
            float32.
        w_in, b_mix: (A, W) and (W,) float32, from actions to the second action product.
        state: the two products of the state; empty without one.
        positions: (H, W).
        future: (F, W) float32, the learned rows between state and actions, without the bias of `action_out`, which
            its product adds to them.
        precision: of the weights of the layers.
    """

    layers: tuple[BlockWeights, ...]
    biases: tuple[tuple[Tensor, Tensor], ...]
    sources: tuple[Source, ...]
    ends: tuple[tuple[Linear, Tensor], ...]
    w_in: Tensor
    b_mix: Tensor
    action_out: Linear
    state: tuple[tuple[Tensor, Tensor], ...]
    positions: Tensor
    future: Tensor
    precision: str

    @classmethod
    def of(cls, model: DitNetwork, precision: str) -> TransformerWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or for the layers fp8 or int8."""
        dtype, head = compute_dtype(precision), model.head
        layers, biases, sources = [], [], []
        for index, layer in enumerate(head.layers):
            assert isinstance(layer, DitLayer)
            names = ("qkv_proj" if layer.source == "self" else "q_proj", "out_proj", "fc1", "fc2")
            with model.present(*(f"head.layers.{index}.{n}" for n in names)):
                first, out, fc1, fc2 = (getattr(layer, n) for n in names)
                products = (
                    plain_input(precision, first.weight), plain_input(precision, out.weight, out.bias),
                    plain_input(precision, fc1.weight), plain_input(precision, fc2.weight, fc2.bias),
                )  # fmt: skip
                biases.append((first.bias.float().clone(), fc1.bias.float().clone()))
            layers.append(BlockWeights(*products))
            sources.append(layer.source)
        small = [f"head.{n}" for n in ("decode_in", "decode_out", "action_in", "action_mix", "action_out",
                                       "action_positions")]  # fmt: skip
        small += ["head.out_proj"] if model.config.head.final else []
        small += ["head.state_in", "head.state_out"] if model.config.head.state else []
        small += ["head.future"] if head.future is not None else []
        with model.present(*small):
            ends = tuple(
                (make_linear(p.weight, None, dtype), p.bias.float().clone())
                for p in (*((head.out_proj,) if model.config.head.final else ()), head.decode_in, head.decode_out)
            )
            learned = head.action_positions[:0] if head.future is None else head.future
            projections = (head.state_in, head.state_out) if model.config.head.state else ()
            future = learned.float() - head.action_out.bias.float()
            if not model.config.head.state:
                future[:1] = learned[:1].float()  # The product adds nothing to a sequence's first row.
            mix = head.action_mix.weight[:, : model.config.head.width].double()
            return cls(
                tuple(layers), tuple(biases), tuple(sources), ends,
                (mix @ head.action_in.weight.double()).T.float().contiguous(),
                (mix @ head.action_in.bias.double()).float(),
                make_linear(head.action_out.weight, head.action_out.bias, dtype),
                tuple((p.weight.float().clone(), p.bias.float().clone()) for p in projections),
                head.action_positions[: model.config.action_horizon].float().clone(),
                future, precision,
            )  # fmt: skip


@dataclass(frozen=True)
class StepRow:
    """The constants of one step. `norms`: for each layer the norm before attention, and last the norm of the output;
    `shifts`: of the products after these norms; `b_in`: the bias of the first product.
    """

    norms: tuple[Norm, ...]
    shifts: tuple[Tensor, ...]
    b_in: Tensor


@dataclass(frozen=True)
class TransformerTables:
    """The constants of each step, the sizes of the Euler steps (negative), and for each layer the norm before its
    MLP."""

    rows: tuple[StepRow, ...]
    dts: tuple[float, ...]
    mlp_norms: tuple[Norm, ...]


@torch.inference_mode()
def step_tables(model: DitNetwork, weights: TransformerWeights, schedule: Schedule) -> TransformerTables:
    """Compute the constants of the steps, with the weights of the products as stored."""
    constants, head, steps = model.constants(schedule), model.config.head, schedule.steps
    layers = list(zip(weights.layers, weights.biases, strict=True))
    normed = [
        (layer.qkv.true_weight(torch.float32), bias, constants.scales[:, i], constants.shifts[:, i], head.eps)
        for i, (layer, (bias, _)) in enumerate(layers)
    ]
    if constants.final_scale is not None and constants.final_shift is not None:
        last, bias = weights.ends[0]
        normed.append((last.weight.float(), bias, constants.final_scale, constants.final_shift, head.final_eps))
    norms: list[list[Norm]] = [[] for _ in range(steps)]
    moved: list[list[Tensor]] = [[] for _ in range(steps)]
    for weight, bias, scales, shifts, eps in normed:
        sums, products = (1.0 + scales.float()) @ weight.T, shifts.float() @ weight.T + bias
        for step in range(steps):
            norms[step].append(Norm(eps, None, scales[step].float().contiguous(), sums[step]))
            moved[step].append(products[step])
    rows = tuple(
        StepRow(tuple(norms[s]), tuple(moved[s]), (constants.time[s].float() + weights.b_mix).contiguous())
        for s in range(steps)
    )
    mlp_norms = (Norm(head.eps, sums=w.up.weight.float().sum(1) * w.up.sums_scale) for w in weights.layers)
    return TransformerTables(rows, schedule.dts, tuple(mlp_norms))


class NativeTransformer(LayerLoop):
    """The denoise program. Inputs as `nn.dit_components.Denoise`; output `actions` (B, H, A) float32."""

    weights: TransformerWeights

    def __init__(self, weights: TransformerWeights, tables: TransformerTables, config: Any, batch: int) -> None:
        head, horizon = config.head, config.action_horizon
        self.tables, self.config, self.batch = tables, config, batch
        self.final_norm_reads_moments = head.final
        self.tokens = int(head.state) + head.future + horizon
        rows, dtype = batch * self.tokens, compute_dtype(weights.precision)
        x = torch.zeros(rows, head.width, dtype=dtype, device=weights.w_in.device)
        super().__init__(weights, len(tables.rows), x, head.width, head.mlp_dim, scaled=True, mlp_scaled=False)
        self.start, self.hidden = torch.zeros_like(x), torch.zeros_like(x)
        self.qkv, self.q = x.new_zeros(rows, 3 * head.width), x.new_zeros(rows, head.width)
        self.out, self.decoded = x.new_zeros(rows, head.hidden), x.new_zeros(rows, head.hidden)
        self.velocity = torch.zeros(rows, config.action_dim, device=x.device)
        self.unguided = torch.zeros(batch, horizon, device=x.device)
        self.flow = [torch.zeros(batch, horizon, config.action_dim, device=x.device) for _ in range(2)]
        self.choose_products({})
        kind, launches = weights_in(weights.precision), 4 + 5 * head.depth + 3
        self.detail = f"fused ops, {kind}, {launches} launches a step{self.choices.detail}"

    def products(self) -> dict[str, LayerProduct]:
        layers, sources = self.weights.layers, self.weights.sources
        found = super().products()
        for name, own in (("qkv", True), ("q", False)):
            chosen = [index for index, source in enumerate(sources) if (source == "self") == own]
            if chosen:
                sizes = gemm_sizes(self.x, layers[chosen[0]].qkv, layer_norm=True)
                found[name] = LayerProduct(sizes, self._first, chosen)
        sizes = gemm_sizes(self.x, layers[0].up, layer_norm=True)
        found["up"] = LayerProduct(sizes, self._up, range(self.depth))
        return found

    def tables_of(self, step: int, index: int) -> LayerTables:
        return LayerTables(self.tables.rows[step].norms[index].scale)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        learned = torch.cat((self.weights.future, self.weights.positions))
        start = self.start.view(self.batch, self.tokens, -1)
        start[:, -len(learned) :] = learned.to(start.dtype)
        if self.weights.state:
            (w_1, b_1), (w_2, b_2) = self.weights.state
            token = torch.addmm(b_2, torch.relu(torch.addmm(b_1, inputs["state"], w_1.T)), w_2.T)
            start[:, 0] = token.to(start.dtype)
        self.run(inputs, None, outputs["actions"])

    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        del state_token  # It is in `start`.
        first, last = step == 0, step == self.steps
        if not first:
            self._decode(step - 1)
        before = inputs["noise"] if first else self.flow[(step - 1) % 2]
        after = actions if last else self.flow[step % 2]
        b_in = self.tables.rows[min(step, self.steps - 1)].b_in
        target, weights = inputs.get("target", self.flow[0]), inputs.get("weights", self.unguided)
        guidance, into = Guidance(target, weights, pinned=True), ActionInput(self.weights.w_in, b_in)
        at = EulerStep(-self.tables.dts[max(step - 1, 0)], first=first, last=last)
        flow_step(self.velocity, before, guidance, into, after, self.hidden, at, tokens=self.tokens)
        if not last:
            self.x.copy_(self.start)
            self.chain.restart()
            gemm(self.hidden, self.weights.action_out, self.x, Epilogue(residual=True, skip_every=self.tokens))

    def _decode(self, step: int) -> None:
        """The output of the transformer: `x` to `velocity`."""
        *last, (decode_in, b_in), (decode_out, b_out) = self.weights.ends
        row, x = self.tables.rows[step], self.x
        for product, _ in last:
            norm = replace(row.norms[-1], moments=self.choices["down"].moments)
            gemm(x, product, self.out, Epilogue(row.shifts[-1]), norm)
            x = self.out
        gemm(x, decode_in, self.decoded, Epilogue(b_in, Activation.RELU))
        gemm(self.decoded, decode_out, self.velocity, Epilogue(b_out))

    def _attend(self, step: int, index: int, inputs: Inputs) -> None:
        head, source = self.config.head, self.weights.sources[index]
        heads = self._first(step, index, inputs).view(self.batch, self.tokens, -1, head.heads, head.head_dim)
        if source == "self":
            q, k, v = heads.unbind(2)
            attention(q, k, v, self.context, None)
            return
        place = self.weights.sources[:index].count(source)
        keys, values = inputs[f"{source}_keys"][place], inputs[f"{source}_values"][place]
        lengths = inputs.get("lengths") if source == head.sources[0] else None
        attention(heads[:, :, 0], keys, values, self.context, lengths)

    def _first(self, step: int, index: int, inputs: Inputs) -> Tensor:
        """Norm, then q, or q, k and v of a layer. Returns their buffer."""
        del inputs
        row, own = self.tables.rows[step], self.weights.sources[index] == "self"
        name, out = ("qkv", self.qkv) if own else ("q", self.q)
        norm, epilogue = replace(row.norms[index], moments=self.moments_before(index)), Epilogue(row.shifts[index])
        gemm(self.x, self.weights.layers[index].qkv, out, epilogue, norm, **self.choices[name].options)
        return out

    def _up(self, step: int, index: int, inputs: Inputs) -> None:
        del step, inputs
        norm = replace(self.tables.mlp_norms[index], moments=self.choices["out"].moments)
        epilogue = Epilogue(self.weights.biases[index][1], Activation.GELU)
        gemm(self.x, self.weights.layers[index].up, self.active, epilogue, norm, **self.choices["up"].options)
