"""GR00T's diffusion transformer in fused ops, all steps in one program: five kernels in a block.

Exact savings: everything that depends only on the step is a constant (embeddings of time, modulations of the norms, the
products of their shifts and sums with the weights), the two linear maps from actions to the second action product are
one, and keys and values of blocks with cross-attention are read where the prefix wrote them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vla_accel.families.groot.head import DitLayer, Source, StepConstants
from vla_accel.families.groot.network import Groot, GrootConfig
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.ops import attention
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments, measure
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.flow import Guidance, flow_step
from vla_accel.nn.kernel_choices import Cuts
from vla_accel.nn.weights import compute_dtype, plain_input, weights_in
from vla_accel.runtime import current


@dataclass(frozen=True)
class BlockWeights:
    """The four products of a block; `first` is q, or q, k and v. The biases of `first` and `fc1` are in the tables."""

    first: Linear
    first_bias: Tensor
    out: Linear
    fc1: Linear
    fc1_bias: Tensor
    fc2: Linear
    source: Source


@dataclass(frozen=True)
class TransformerWeights:
    """`ends`: the output product of the transformer and the two that decode it, each with its bias in float32; `w_in`
    (A, W) float32: from actions to the second action product; `state`: two products; `positions` (H, W); `precision`:
    of the weights of the blocks.
    """

    blocks: tuple[BlockWeights, ...]
    ends: tuple[tuple[Linear, Tensor], ...]
    w_in: Tensor
    b_mix: Tensor
    action_out: Linear
    state: tuple[tuple[Tensor, Tensor], ...]
    positions: Tensor
    dtype: torch.dtype
    precision: str

    @classmethod
    def of(cls, model: Groot, precision: str) -> TransformerWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or for blocks fp8 or int8 (`store.plain_input`)."""
        dtype, head, blocks = compute_dtype(precision), model.head, []
        for index, layer in enumerate(head.layers):
            assert isinstance(layer, DitLayer)
            first = "qkv_proj" if layer.source == "self" else "q_proj"
            names = (first, "out_proj", "fc1", "fc2")
            with model.present(*(f"head.layers.{index}.{n}" for n in names)):
                one, out, fc1, fc2 = (getattr(layer, n) for n in names)
                block = BlockWeights(
                    plain_input(precision, one.weight), one.bias.float().clone(),
                    plain_input(precision, out.weight, out.bias), plain_input(precision, fc1.weight),
                    fc1.bias.float().clone(), plain_input(precision, fc2.weight, fc2.bias), layer.source,
                )  # fmt: skip
            blocks.append(block)
        small = [f"head.{n}" for n in ("out_proj", "decode_in", "decode_out", "action_in", "action_mix", "action_out",
                                       "action_positions", "state_in", "state_out")]  # fmt: skip
        with model.present(*small):
            ends = tuple(
                (make_linear(p.weight, None, dtype), p.bias.float().clone())
                for p in (head.out_proj, head.decode_in, head.decode_out)
            )
            mix = head.action_mix.weight[:, : model.config.head.width].double()
            return cls(
                tuple(blocks), ends, (mix @ head.action_in.weight.double()).T.float().contiguous(),
                (mix @ head.action_in.bias.double()).float(),
                make_linear(head.action_out.weight, head.action_out.bias, dtype),
                tuple((p.weight.float().clone(), p.bias.float().clone()) for p in (head.state_in, head.state_out)),
                head.action_positions[: model.config.action_horizon].float().clone(), dtype, precision,
            )  # fmt: skip


@dataclass(frozen=True)
class StepRow:
    """The constants of one step. `norms`: for each block, the norm before attention and the shift of its product;
    `final`: those of the last norm; `b_in`: the bias of the first product.
    """

    norms: tuple[tuple[Norm, Tensor], ...]
    final: tuple[Norm, Tensor]
    b_in: Tensor


@dataclass(frozen=True)
class TransformerTables:
    """The constants of each step, and for each block the plain norm before its MLP."""

    rows: tuple[StepRow, ...]
    plain: tuple[Norm, ...]


@torch.inference_mode()
def step_tables(model: Groot, weights: TransformerWeights, steps: int) -> TransformerTables:
    """Compute the constants of `steps` steps, with the weights of the products as stored."""
    constants, head = model.constants(steps), model.config.head
    scales, shifts = constants.scales.float(), constants.shifts.float()
    by_block = []
    for index, block in enumerate(weights.blocks):
        stored = block.first.true_weight(torch.float32)
        sums = (1.0 + scales[:, index]) @ stored.T
        moved = shifts[:, index] @ stored.T + block.first_bias
        by_block.append(
            [(Norm(head.eps, None, scales[s, index].contiguous(), sums[s]), moved[s]) for s in range(steps)]
        )
    plain = tuple(Norm(head.eps, sums=b.fc1.weight.float().sum(1) * b.fc1.sums_scale) for b in weights.blocks)
    return TransformerTables(tuple(_row(constants, weights, by_block, s, head.final_eps) for s in range(steps)), plain)


def _row(
    constants: StepConstants, weights: TransformerWeights, by_block: list[list[tuple[Norm, Tensor]]], step: int,
    eps: float,
) -> StepRow:  # fmt: skip
    last, bias = weights.ends[0]
    stored, scale = last.weight.float(), constants.final_scale[step].float().contiguous()
    final = Norm(eps, None, scale, stored @ (1.0 + scale))
    shift = stored @ constants.final_shift[step].float() + bias
    b_in = (constants.time[step].float() + weights.b_mix).contiguous()
    return StepRow(tuple(block[step] for block in by_block), (final, shift), b_in)


class NativeTransformer:
    """The denoise program. Inputs as `components.groot.Denoise`; output `actions` (B, H, A) float32."""

    def __init__(self, weights: TransformerWeights, tables: TransformerTables, config: GrootConfig, batch: int) -> None:
        self.weights, self.tables, self.config, self.batch = weights, tables, config, batch
        head, device, dtype = config.head, weights.w_in.device, weights.dtype
        self.tokens, horizon = config.action_horizon + 1, config.action_horizon
        self.chain = Chain(current(device).gpu)
        rows = batch * self.tokens
        kind = weights_in(weights.precision)
        launches = 4 + 5 * head.depth + 3

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.start, self.x, self.context, self.hidden = (buffer(rows, head.width) for _ in range(4))
        self.first = {"self": buffer(rows, 3 * head.width), "other": buffer(rows, head.width)}
        self.active, self.out, self.decoded = (
            buffer(rows, head.mlp_dim),
            buffer(rows, head.hidden),
            buffer(rows, head.hidden),
        )
        self.velocity = buffer(rows, config.action_dim, kind=torch.float32)
        self.flow = [buffer(batch, horizon, config.action_dim, kind=torch.float32) for _ in range(2)]
        self.cuts = Cuts(device, self.chain)
        self.begun = Moments.like(self.x, head.width, True)
        self._cut()
        self.detail = f"fused ops, {kind}, {launches} launches a step{self.cuts.detail}"

    def _cut(self) -> None:
        """Choose the tile configs of the products. `product` at the ends and attention take the first one."""
        blocks = list(enumerate(self.weights.blocks))
        block = self.weights.blocks[0]
        # What writes moments comes before what reads them.
        for name, given, op in (("out", self.context, self._out), ("fc2", self.active, self._fc2)):
            sizes = gemm_sizes(given, getattr(block, name))
            run = functools.partial(self._every, op, blocks)
            self.cuts.products(name, sizes, run, of=self.x, scaled=name == "fc2")
        kinds = {
            "qkv": [(i, b) for i, b in blocks if b.source == "self"],
            "q": [(i, b) for i, b in blocks if b.source != "self"],
        }
        for name, chosen in kinds.items():
            if chosen:
                sizes = gemm_sizes(self.x, chosen[0][1].first, layer_norm=True)
                self.cuts.products(name, sizes, functools.partial(self._every, self._first, chosen))
        sizes = gemm_sizes(self.x, block.fc1, layer_norm=True)
        self.cuts.products("fc1", sizes, functools.partial(self._every, self._fc1, blocks))

    @staticmethod
    def _every(op: Callable[[int, int, BlockWeights], object], blocks: Sequence[tuple[int, BlockWeights]]) -> None:
        for index, block in blocks:
            op(0, index, block)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self._begin(inputs["state"])
        steps = len(self.tables.rows)
        with self.chain:
            for step in range(steps):
                self._step(inputs, outputs["actions"], step)
            self._flow(inputs, outputs["actions"], steps)

    def _step(self, inputs: Mapping[str, Tensor], actions: Tensor, step: int) -> None:
        self._flow(inputs, actions, step)
        self.x.copy_(self.start)
        self.chain.restart()
        gemm(self.hidden, self.weights.action_out, self.x, Epilogue(residual=True, skip_every=self.tokens))
        measure(self.x, self.tables.rows[step].norms[0][0].scale, self.begun)
        seen = {"text": 0, "image": 0}
        for index, block in enumerate(self.weights.blocks):
            self._block(step, index, block, inputs, seen)
        self._velocity(step)

    def _begin(self, state: Tensor) -> None:
        """Write the token of the state and the positions of the actions, which are the same in every step."""
        (w_1, b_1), (w_2, b_2) = self.weights.state
        token = torch.addmm(b_2, torch.relu(torch.addmm(b_1, state, w_1.T)), w_2.T)
        start = self.start.view(self.batch, self.tokens, -1)
        start[:, 0] = token.to(start.dtype)
        start[:, 1:] = self.weights.positions.to(start.dtype)

    def _flow(self, inputs: Mapping[str, Tensor], actions: Tensor, step: int) -> None:
        """Finish evaluation step - 1 and prepare evaluation `step`."""
        steps = len(self.tables.rows)
        first, last = step == 0, step == steps
        before = inputs["noise"] if first else self.flow[(step - 1) % 2]
        b_in = self.tables.rows[min(step, steps - 1)].b_in
        flow_step(
            self.velocity, before, Guidance(inputs["target"], inputs["weights"]), self.weights.w_in, b_in,
            actions if last else self.flow[step % 2], self.hidden, dt=1.0 / steps, tokens=self.tokens, first=first,
            last=last,
        )  # fmt: skip

    def _block(
        self, step: int, index: int, block: BlockWeights, inputs: Mapping[str, Tensor], seen: dict[str, int]
    ) -> None:
        head, source = self.config.head, block.source
        heads = self._first(step, index, block).view(self.batch, self.tokens, -1, head.heads, head.head_dim)
        if source == "self":
            q, k, v = heads.unbind(2)
            lengths = None
        else:
            place = seen[source]
            q, k, v = heads[:, :, 0], inputs[f"{source}_keys"][place], inputs[f"{source}_values"][place]
            lengths = inputs["lengths"] if source == "text" else None
            seen[source] += 1
        attention(q, k, v, self.context, lengths)
        self._out(step, index, block)
        self._fc1(step, index, block)
        self._fc2(step, index, block)

    def _first(self, step: int, index: int, block: BlockWeights) -> Tensor:
        """Enqueue q, or q, k and v. Returns their buffer."""
        norm, shift = self.tables.rows[step].norms[index]
        out, kind = (self.first["self"], "qkv") if block.source == "self" else (self.first["other"], "q")
        norm = replace(norm, moments=self.cuts.moments("fc2") if index else self.begun)
        gemm(self.x, block.first, out, Epilogue(shift), norm, self.cuts.alone(kind))
        return out

    def _out(self, step: int, index: int, block: BlockWeights) -> None:
        epilogue = Epilogue(residual=True, moments=self.cuts.moments("out"))
        gemm(self.context, block.out, self.x, epilogue, **self.cuts.options("out"))

    def _fc1(self, step: int, index: int, block: BlockWeights) -> None:
        norm = replace(self.tables.plain[index], moments=self.cuts.moments("out"))
        epilogue = Epilogue(block.fc1_bias, Activation.GELU)
        gemm(self.x, block.fc1, self.active, epilogue, norm, self.cuts.alone("fc1"))

    def _fc2(self, step: int, index: int, block: BlockWeights) -> None:
        row = self.tables.rows[step]
        norm, _ = row.final if index + 1 == len(self.weights.blocks) else row.norms[index + 1]
        epilogue = Epilogue(residual=True, moments=self.cuts.moments("fc2"), next_scale=norm.scale)
        gemm(self.active, block.fc2, self.x, epilogue, **self.cuts.options("fc2"))

    def _velocity(self, step: int) -> None:
        (last, _), (decode_in, b_in), (decode_out, b_out) = self.weights.ends
        norm, shift = self.tables.rows[step].final
        gemm(self.x, last, self.out, Epilogue(shift), replace(norm, moments=self.cuts.moments("fc2")))
        gemm(self.out, decode_in, self.decoded, Epilogue(b_in, Activation.RELU))
        gemm(self.decoded, decode_out, self.velocity, Epilogue(b_out))
