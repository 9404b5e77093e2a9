"""The denoise loop in fused ops: five kernels a layer and one between steps, all of the steps in one program.

Exact savings: everything that depends on the step only is a constant (time embedding, adaptive norms, the product of a
norm's shift with its weight), π0's two linear maps from actions to the time MLP are one, and the prefix's keys and
values are read where the prefix wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.models.gemma import GemmaLayer, RmsNorm
from vla_accel.models.pi0 import Pi0, euler_times
from vla_accel.native.fold import compute_dtype, fold_norm
from vla_accel.ops import fused
from vla_accel.ops.fused import Linear, make_linear


@dataclass(frozen=True)
class ExpertLayer:
    """One block's four products."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class ExpertWeights:
    """The expert's weights. `state` (W, A) and `state_bias`, `mix` (W, W): π0's state projection and the second layer
    of its time MLP, else None. `w_out` (A, W) float32."""

    layers: tuple[ExpertLayer, ...]
    w_out: Tensor
    b_out: Tensor
    final_scale: Tensor | None
    state: Linear | None
    mix: Linear | None
    dtype: torch.dtype
    narrow: bool

    @classmethod
    def of(cls, model: Pi0, precision: str) -> ExpertWeights:
        """Prepare from a model; `precision` fp32, bf16 or fp8: weights of one byte, widened in registers."""
        dtype, adaptive = compute_dtype(precision), model.config.kind == "pi05"
        # Weight-only: the activations are never quantised, so no calibration is needed and the input scale is unused.
        amax = 448.0 if precision == "fp8" else None
        layers = []
        for layer in model.expert.layers:
            assert isinstance(layer, GemmaLayer)
            first, second = layer.input_layernorm, layer.post_attention_layernorm
            qkv = (layer.qkv_proj.weight, None) if adaptive else fold_norm(layer.qkv_proj, _plain(first))
            gate_up = (layer.gate_up_proj.weight, None) if adaptive else fold_norm(layer.gate_up_proj, _plain(second))
            layers.append(
                ExpertLayer(
                    make_linear(*qkv, dtype, amax),
                    make_linear(layer.o_proj.weight, None, dtype, amax),
                    make_linear(*gate_up, dtype, amax),
                    make_linear(layer.down_proj.weight, None, dtype, amax),
                )
            )
        state = mix = final_scale = None
        if not adaptive:
            assert isinstance(model.expert.norm, RmsNorm)
            final_scale = model.expert.norm.weight.float().contiguous()
            state = Linear(model.state_proj.weight.float(), model.state_proj.bias.float())
            mix = make_linear(model.action_time_mlp_out.weight, model.action_time_mlp_out.bias, dtype)
        w_out, b_out = model.action_out_proj.weight.float(), model.action_out_proj.bias.float()
        return cls(tuple(layers), w_out.contiguous(), b_out, final_scale, state, mix, dtype, amax is not None)

    @property
    def bytes(self) -> int:
        """Bytes of the layers' weights: what one step must read."""
        return sum(p.bytes for layer in self.layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down))


def _plain(norm: object) -> RmsNorm:
    assert isinstance(norm, RmsNorm)
    return norm


@dataclass(frozen=True)
class _StepConstants:
    """What one step adds: per layer the modulations, and the input projection's bias (π0: with the time in it)."""

    input_scale: Tensor | None  # (depth, W)
    input_gate: Tensor | None
    input_shift: Tensor | None  # (depth, qkv) already multiplied with the weight
    post_scale: Tensor | None
    post_gate: Tensor | None
    post_shift: Tensor | None  # (depth, 2 H)
    final_scale: Tensor | None  # (W,)
    final_shift: Tensor | None
    b_in: Tensor  # (W,)


class NativeDenoise:
    """The program. Inputs `noise` (B, H, A) float32, `keys`, `values` (depth, B, S, kv_heads, d), `lengths` (B,) int32
    and, for π0, `state` (B, A) float32; output `actions` (B, H, A) float32."""

    def __init__(self, weights: ExpertWeights, model: Pi0, batch: int, prefix_tokens: int, num_steps: int) -> None:
        self.weights, self.num_steps = weights, num_steps
        config = model.config
        expert = config.expert
        self.eps, self.tokens, self.kind = expert.eps, config.suffix_tokens, config.kind
        device, dtype = weights.w_out.device, weights.dtype
        self.pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.detail = f"fused ops, {'FP8 weights' if weights.narrow else dtype}" + (
            ", dependent launch" if self.pdl else ""
        )
        rows = batch * self.tokens

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x, self.hidden = buffer(rows, expert.width), buffer(rows, expert.width)
        self.q = buffer(batch, self.tokens, expert.heads, expert.head_dim)
        self.k = buffer(batch, self.tokens, expert.kv_heads, expert.head_dim)
        self.v = torch.zeros_like(self.k)
        self.context = buffer(rows, expert.heads * expert.head_dim)
        self.active = buffer(rows, expert.mlp_dim)
        self.state_token = torch.zeros(batch, expert.width, device=device)
        self.workspace = fused.suffix_workspace(
            batch, self.tokens, prefix_tokens, expert.heads, expert.kv_heads, expert.head_dim, device
        )
        self.cos, self.sin = fused.rope_tables(prefix_tokens + self.tokens, expert.head_dim, device)
        with torch.inference_mode():
            self.w_in, self.steps = _constants(model, weights, num_steps)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        w, actions = self.weights, outputs["actions"]
        actions.copy_(inputs["noise"])
        if w.state is not None:
            assert w.state.bias is not None
            self.state_token.copy_(torch.addmm(w.state.bias, inputs["state"], w.state.weight.t()))
        dt = -1.0 / self.num_steps
        self._between(actions, self.steps[0], self.steps[0], dt, first=True)
        for index, constants in enumerate(self.steps):
            for layer in range(len(w.layers)):
                self._layer(layer, constants, inputs)
            last = index + 1 == self.num_steps
            self._between(actions, constants, self.steps[index if last else index + 1], dt, last=last)

    def _between(
        self, actions: Tensor, done: _StepConstants, coming: _StepConstants, dt: float, *, first: bool = False,
        last: bool = False,
    ) -> None:  # fmt: skip
        w = self.weights
        following = self.x if w.mix is None else self.hidden
        # The first kernel of the chain, and the one after a plain copy, must not start early.
        fused.step(
            self.x, done.final_scale, done.final_shift, w.w_out, w.b_out, actions, self.w_in, coming.b_in, following,
            dt=dt, eps=self.eps, tokens=self.tokens, first=first, last=last, silu=w.mix is not None,
            pdl=self.pdl and not first,
        )  # fmt: skip
        if w.mix is not None and not last:
            self.x.view(len(self.state_token), self.tokens, -1)[:, 0] = self.state_token.to(self.x.dtype)
            fused.project(
                self.hidden, w.mix, None, self.x, residual=False, tokens=self.tokens, skip_first=True, pdl=False
            )

    def _layer(self, index: int, constants: _StepConstants, inputs: Mapping[str, Tensor]) -> None:
        layer, lengths, pdl, c = self.weights.layers[index], inputs["lengths"], self.pdl, constants

        def at(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[index]

        fused.qkv_rope(
            self.x, layer.qkv, at(c.input_scale), at(c.input_shift), self.cos, self.sin, lengths, self.q, self.k,
            self.v, eps=self.eps, pdl=pdl,
        )  # fmt: skip
        fused.suffix_attention(
            self.q, inputs["keys"][index], inputs["values"][index], self.k, self.v, lengths, self.context,
            self.workspace, state_first=self.kind == "pi0", pdl=pdl,
        )  # fmt: skip
        fused.project(self.context, layer.o, at(c.input_gate), self.x, pdl=pdl)
        fused.gate_up_geglu(
            self.x, layer.gate_up, at(c.post_scale), at(c.post_shift), self.active, eps=self.eps, pdl=pdl
        )
        fused.project(self.active, layer.down, at(c.post_gate), self.x, pdl=pdl)


def _constants(model: Pi0, weights: ExpertWeights, num_steps: int) -> tuple[Tensor, list[_StepConstants]]:
    """The input projection (A, W) float32 and every step's constants."""
    times = euler_times(num_steps).to(weights.w_out.device)
    embeddings, modulations = model.conditioning(times)
    action_in, bias_in = model.action_in_proj.weight.double(), model.action_in_proj.bias.double()
    if modulations is None:
        width = model.config.expert.width
        mlp, bias = model.action_time_mlp_in.weight.double(), model.action_time_mlp_in.bias.double()
        from_actions, from_time = mlp[:, :width], mlp[:, width:]
        rows = (from_actions @ bias_in + bias + embeddings.double() @ from_time.T).float().contiguous()
        w_in = (from_actions @ action_in).T.float().contiguous()
        none = [None] * 6
        return w_in, [_StepConstants(*none, weights.final_scale, None, row) for row in rows]  # type: ignore[arg-type]
    b_in = bias_in.float()
    steps = []
    for table in modulations.float():
        scale, shift, gate = (part.contiguous() for part in table.chunk(3, dim=-1))
        products = [[], []]
        for index, layer in enumerate(weights.layers):
            for kind, product in enumerate((layer.qkv, layer.gate_up)):
                true = product.weight.float() * product.weight_scale_value
                products[kind].append(true @ shift[2 * index + kind])
        steps.append(
            _StepConstants(
                scale[0:-1:2].contiguous(), gate[0:-1:2].contiguous(), torch.stack(products[0]),
                scale[1:-1:2].contiguous(), gate[1:-1:2].contiguous(), torch.stack(products[1]),
                scale[-1].contiguous(), shift[-1].contiguous(), b_in,
            )
        )  # fmt: skip
    return action_in.T.float().contiguous(), steps
