"""SmolVLA's denoise loop, all steps in one program: CUDA C++ for few rows on Hopper, fused ops otherwise.

The layers are so small that launches dominate: a layer is four kernels (five with fused ops if it attends to the
actions as well), and two kernels run between steps. Exact savings: everything that depends only on the step is a
constant, the two linear maps from actions to the time MLP are one, norm weights are folded, and keys and values of the
prefix are read where the prefix wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.families.pi0.native_loop import ExpertLayer
from vla_accel.families.pi0.step_tables import paired
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import SuffixShape
from vla_accel.kernels.attention.suffix import cross_attention, crossing, suffix_attention
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import Packed, Sizes, StepTables, StreamedLoop, why_not
from vla_accel.kernels.loop.tables import WHOLE
from vla_accel.kernels.rows.flow import ActionInput, ActionOutput
from vla_accel.kernels.rows.flow import step as flow_step
from vla_accel.nn.fold import fold_norm, plain
from vla_accel.nn.loop import LayerLoop, LoopProgram, described
from vla_accel.nn.rtc import step_gains
from vla_accel.nn.weights import compute_dtype, plain_input, weights_in
from vla_accel.numeric import round_up
from vla_accel.runtime import current


@dataclass(frozen=True)
class SmolVlaExpertWeights:
    """The weights of the expert. Its layers are stored once: as `layers`, or as `packed` for the streamed kernels.

    `qkv` of a crossing layer has only queries; `mix` (W, W): the second layer of the time MLP; `w_out` (A, W) float32;
    `precision`: of the layers' weights. Packed weights have the width `sizes_of(config).width`, and zeros for the keys
    and values of a crossing layer, which no kernel reads.
    """

    layers: tuple[ExpertLayer, ...]
    packed: Packed | None
    mix: Linear
    w_out: Tensor
    b_out: Tensor
    dtype: torch.dtype
    precision: str

    @classmethod
    def of(cls, model: SmolVla, precision: str, *, streamed: bool = False) -> SmolVlaExpertWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or fp8 or int8 (`store.plain_input`)."""
        dtype, expert = compute_dtype(precision), model.config.expert
        beyond = sizes_of(model.config).width - expert.width if streamed else 0

        def made(index: int) -> ExpertLayer:
            layer, crosses = model.expert.layers[index], model.config.crosses(index)
            first = "q_proj" if crosses else "qkv_proj"
            missing = 2 * expert.kv_heads * expert.head_dim if crosses and streamed else 0
            parts = (first, "o_proj", "gate_up_proj", "down_proj", "input_layernorm", "post_attention_layernorm")
            with model.present(*(f"expert.layers.{index}.{name}" for name in parts)):
                product: dict[str, torch.nn.Linear] = {n: layer.get_submodule(n) for n in parts[:4]}  # type: ignore[misc]
                before, after = (plain(layer.get_submodule(n)) for n in parts[4:])
                return ExpertLayer(
                    plain_input(precision, *fold_norm(product[first], before), beyond, missing),
                    plain_input(precision, product["o_proj"].weight, pad_n=beyond),
                    plain_input(precision, *fold_norm(product["gate_up_proj"], after), beyond),
                    plain_input(precision, product["down_proj"].weight, pad_n=beyond),
                )

        with model.present("action_time_mlp_out", "action_out_proj"):
            last = model.action_time_mlp_out
            mix = make_linear(last.weight, last.bias, dtype, pad_k=beyond, pad_n=beyond)
            w_out = F.pad(model.action_out_proj.weight.float(), (0, beyond)).contiguous()
            b_out = model.action_out_proj.bias.float()
        every = (made(index) for index in range(expert.depth))
        if not streamed:
            return cls(tuple(every), None, mix, w_out, b_out, dtype, precision)
        products = ((w.qkv, w.o, w.gate_up, w.down) for w in every)
        packed = Packed.of(products, mix.weight, expert.head_dim, expert.depth)
        return cls((), packed, mix, w_out, b_out, dtype, precision)


def sizes_of(config: SmolVlaConfig) -> Sizes:
    """Return the sizes of a model for the streamed kernels."""
    e = config.expert
    return Sizes(
        round_up(e.width, WHOLE), e.mlp_dim, e.heads, e.kv_heads, e.head_dim, e.depth, config.action_horizon,
        config.action_horizon, config.action_dim, False, e.eps, e.width, causal=True, activation=Activation.SWIGLU,
        self_every=config.self_every,
    )  # fmt: skip


def why_not_streamed(model: SmolVla, precision: str, batch: int) -> str | None:
    """Explain why the streamed kernels do not run a model on its device; None if they do."""
    return why_not(current(model.device).gpu, sizes_of(model.config), batch, precision)


@torch.inference_mode()
def steps_of(
    model: SmolVla, num_steps: int, max_weight: float | None = None, trained: bool = False, *, streamed: bool = False
) -> StepTables:
    """Return the constants of the steps of a model; they are the same for all weights and shapes.

    `max_weight`, `trained`: as in `RtcConfig`; `streamed`: for the streamed kernels.
    """
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
    if streamed:
        beyond = sizes_of(model.config).width - model.config.expert.width
        b_in, w_in, final = (F.pad(x, (0, beyond)).contiguous() for x in (b_in, w_in, final))
    b_in = paired(b_in) if trained else b_in
    return StepTables(None, None, None, None, None, None, final, None, b_in, w_in, times, gains, trained)


class SmolVlaDenoise(LoopProgram):
    """The denoise program.

    Inputs `noise` (B, H, A) float32, `keys`, `values` (depth, B, S, kv_heads, d) as the expert reads them, `lengths`
    (B,) int32; `target` (B, H, A) and `weights` (B, H) float32 of the guidance (zero for none), or, with trained
    tables, of the pinned actions. Output `actions` (B, H, A) float32.
    """

    def __init__(
        self, weights: SmolVlaExpertWeights, config: SmolVlaConfig, tables: StepTables, batch: int, prefix_tokens: int,
        why_not_streamed: str | None = None,
    ) -> None:  # fmt: skip
        """`why_not_streamed`: for the ledger, if the weights are not packed."""
        self.weights, self.tables = weights, tables
        device = weights.w_out.device
        gpu = current(device).gpu
        if gpu is not None and weights.packed is not None:
            self.loop = streamed_loop(gpu, weights, config, tables, batch, prefix_tokens)
        else:
            self.loop = SmolVlaLayerLoop(weights, config, tables, batch, prefix_tokens)
        what = f"{weights_in(weights.precision)}, {self.loop.kernels_a_step} kernels a step"
        self.detail = described(self.loop, what, why_not_streamed if device.type == "cuda" else None)


def streamed_loop(
    gpu: Gpu, weights: SmolVlaExpertWeights, config: SmolVlaConfig, tables: StepTables, batch: int, prefix_tokens: int
) -> StreamedLoop:
    """Return the loop of streamed kernels over packed weights and streamed tables."""
    assert weights.packed is not None and weights.mix.bias is not None
    return StreamedLoop(
        gpu, sizes_of(config), weights.packed, tables, weights.w_out, weights.b_out,
        weights.mix.bias.float().contiguous(), batch, prefix_tokens,
    )  # fmt: skip


class SmolVlaLayerLoop(LayerLoop):
    """Four or five kernels in a layer and two between steps."""

    def __init__(
        self, weights: SmolVlaExpertWeights, config: SmolVlaConfig, tables: StepTables, batch: int, prefix_tokens: int
    ) -> None:
        super().__init__(
            config.expert, tables, batch, config.action_horizon, prefix_tokens, weights.dtype, weights.w_out.device
        )
        self.weights, self.config = weights, config
        self._cut(self.attention)
        crossing = sum(map(config.crosses, range(self.depth)))
        self.kernels_a_step = 5 * self.depth - crossing + 3

    def _cut(self, sizes: SuffixShape) -> None:
        """Choose the tile configs of the products and of attention."""
        device, layers = self.x.device, self.weights.layers
        lengths = torch.zeros(sizes.batch, dtype=torch.int32, device=device)
        crosses = [i for i in range(len(layers)) if self.config.crosses(i)]
        whole = [i for i in range(len(layers)) if i not in crosses]
        o, gate_up, down = layers[0].o, layers[0].gate_up, layers[0].down
        cache = torch.zeros(sizes.batch, sizes.prefix_tokens, *self.k.shape[2:], dtype=self.k.dtype, device=device)
        full = lengths + sizes.prefix_tokens

        def every(op: Callable[[ExpertLayer], None]) -> None:
            for layer in layers:
                op(layer)

        # What writes moments comes before what reads them.
        self.cuts.products("o", gemm_sizes(self.context, o), lambda: every(self._o), of=self.x, beside=True)
        self.cuts.products("down", gemm_sizes(self.active, down), lambda: every(self._down), of=self.x, beside=True)
        product = gemm_sizes(self.x, gate_up, gated=True)
        self.cuts.products("gate_up", product, lambda: every(self._gate_up), beside=True)
        if whole:
            product = gemm_sizes(self.x, layers[whole[0]].qkv, self.heads)
            self.cuts.products("qkv", product, lambda: [self._qkv(i, lengths) for i in whole], beside=True)
            self.cuts.attention("attention", sizes, lambda: self._attend(cache, cache, full))
        if crosses:
            sizes_of = crossing(self.x, layers[crosses[0]].qkv, cache)
            self.cuts.crossing("cross", sizes_of, lambda: [self._cross(i, cache, cache, full) for i in crosses])
        mix = gemm_sizes(self.hidden, self.weights.mix)
        self.cuts.products("mix", mix, self._mix)

    def _between(self, inputs: Mapping[str, Tensor], actions: Tensor, state_token: Tensor | None, step: int) -> None:
        del state_token  # The state is in the prefix.
        w, tables = self.weights, self.tables
        at, output = self.at(step), ActionOutput(tables.final_scale, None, w.w_out, w.b_out, self.eps)
        into = ActionInput(tables.w_in, tables.b_in[min(step, tables.steps - 1)], Activation.SILU)
        flow_step(self.x, output, actions, self.guidance(inputs), into, self.hidden, at, tokens=self.tokens)
        if not at.last:
            self._mix()

    def _layer(self, step: int, index: int, inputs: Mapping[str, Tensor]) -> None:
        del step  # No norm depends on it.
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
        epilogue, weights = Epilogue(rope=self.rotation(lengths)), self.weights.layers[index].qkv
        gemm(self.x, weights, self.heads, epilogue, self.norm_before(index), **self.cuts.options("qkv"))

    def _attend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        suffix_attention(
            self.q, keys, values, self.k, self.v, lengths, self.context, state_first=False, causal=True,
            **self.cuts.options("attention"),
        )  # fmt: skip

    def _cross(self, index: int, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        cross_attention(
            self.x, self.weights.layers[index].qkv, self.cos, self.sin, keys, values, lengths, self.context,
            norm=self.norm_before(index), config=self.cuts.alone("cross"),
        )  # fmt: skip

    def _o(self, layer: ExpertLayer) -> None:
        epilogue = Epilogue(residual=True, moments=self.cuts.moments("o"))
        gemm(self.context, layer.o, self.x, epilogue, **self.cuts.options("o"))

    def _gate_up(self, layer: ExpertLayer) -> None:
        epilogue, norm = Epilogue(activation=Activation.SWIGLU), Norm(self.eps, self.cuts.moments("o"))
        gemm(self.x, layer.gate_up, self.active, epilogue, norm, **self.cuts.options("gate_up"))

    def _down(self, layer: ExpertLayer) -> None:
        epilogue = Epilogue(residual=True, moments=self.cuts.moments("down"))
        gemm(self.active, layer.down, self.x, epilogue, **self.cuts.options("down"))

    def _mix(self) -> None:
        gemm(self.hidden, self.weights.mix, self.x, **self.cuts.options("mix"))
