"""The persistent kernel in torch: the same phases with the same roundings, to find a phase that is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.persistent.launch import Layer, PersistentLoop


def rounded(x: Tensor) -> Tensor:
    """Round to BF16, in float32."""
    return x.bfloat16().float()


def columns_of(operand: Tensor, width: int) -> Tensor:
    """Return an input of a product, in the kernel's order, as rows (R, `width`) in float32."""
    return operand.transpose(0, 1).flatten(1)[:, :width].float()


class Reference:
    """The loop of a `PersistentLoop`.

    Attributes:
        found: what each phase of the last layer of the last step leaves in the loop's buffers, by their names, as rows.
    """

    def __init__(self, loop: PersistentLoop, layers: list[Layer], mix: Tensor | None) -> None:
        self.plan, self.constants, self.layers, self.mix = loop.plan, loop.constants, layers, mix
        self.found: dict[str, Tensor] = {}

    def run(self, inputs: Mapping[str, Tensor], state: Tensor | None, actions: Tensor) -> None:
        """Integrate `actions` (B, H, A) float32 in place. Inputs as of `PersistentLoop.run`."""
        spec = self.plan.spec
        pinned = torch.zeros(self.plan.batch, spec.tokens, dtype=torch.bool, device=actions.device)
        pinned[:, spec.tokens - spec.horizon :] = inputs["weights"] > 0
        self.pinned = pinned.flatten() if self.plan.trained else torch.zeros_like(pinned).flatten()
        for step in range(self.plan.steps):
            x = self.input(step, state, actions)
            for layer in range(spec.depth):
                x = self.layer(step, layer, x, inputs)
            self.move(step, x, inputs, actions)

    def row_constants(self, name: str, step: int, layer: int) -> Tensor | float:
        """A table's rows for all rows of the suffix, or 0 if it has none."""
        table = self.constants[name]
        if table is None:
            return 0.0
        row = table[step, layer]
        return row[self.pinned.long()] if row.ndim == 2 else row

    def normed(self, x: Tensor, scale: Tensor | float, name: str) -> tuple[Tensor, Tensor]:
        """Return x ∘ (1 + scale) in BF16, and 1 / rms(x)."""
        self.found[name] = rounded(x * (1.0 + scale))
        return self.found[name], torch.rsqrt(x.square().mean(-1, keepdim=True) + self.plan.spec.eps)

    def input(self, step: int, state: Tensor | None, actions: Tensor) -> Tensor:
        """Return the rows (R, W) of an evaluation."""
        spec, (weight, bias, mix_bias) = self.plan.spec, (self.constants[n] for n in ("w_in", "b_in", "mix_bias"))
        assert weight is not None and bias is not None
        bias = bias if spec.adaptive else bias[step]
        bias = bias[self.pinned.view(-1, spec.tokens)[:, -spec.horizon :].long()] if bias.ndim == 2 else bias
        rows = actions @ weight + bias
        if self.mix is None:
            return rows.flatten(0, 1)
        assert mix_bias is not None
        rows = rounded(F.silu(rows)) @ self.mix.float().T + mix_bias
        return (rows if state is None or not spec.has_state else torch.cat((state[:, None], rows), 1)).flatten(0, 1)

    def layer(self, step: int, index: int, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the rows behind a layer."""
        spec, (qkv, out, up, down) = self.plan.spec, (p.weight.float() for p in self.layers[index])

        def gate(name: str) -> Tensor | float:
            return self.row_constants(name, step, index) if spec.adaptive else 1.0

        scaled, factor = self.normed(x, self.row_constants("in_scale", step, index), "x")
        heads = factor * (scaled @ qkv.T) + self.row_constants("in_shift", step, index)
        self.found["context"] = self.attention(heads, index, inputs)
        x = x + gate("in_gate") * (self.found["context"] @ out.T)
        scaled, factor = self.normed(x, self.row_constants("post_scale", step, index), "x")
        gate_up = factor * (scaled @ up.T) + self.row_constants("post_shift", step, index)
        self.found["active"] = rounded(reference.activate(gate_up, Activation.GEGLU))
        return x + gate("post_gate") * (self.found["active"] @ down.T)

    def attention(self, heads: Tensor, index: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the context (R, heads * d) of products of q/k/v."""
        spec, batch, c = self.plan.spec, self.plan.batch, self.constants
        assert c["cos"] is not None and c["sin"] is not None
        heads = heads.view(batch, spec.tokens, -1, spec.head_dim)
        lengths = inputs["lengths"].long()
        positions = lengths[:, None] + torch.arange(spec.tokens, device=heads.device)
        rotated = reference.apply_rope(
            heads[:, :, : spec.heads + spec.kv_heads], c["cos"][positions, None], c["sin"][positions, None]
        )
        q, k = rounded(rotated).split((spec.heads, spec.kv_heads), 2)
        v = rounded(heads[:, :, spec.heads + spec.kv_heads :])
        self.found |= {name: t.flatten(0, 1) for name, t in (("q", q), ("k", k), ("v", v))}
        prefix = torch.arange(inputs["keys"].shape[2], device=heads.device) < lengths[:, None]
        inner = torch.ones(spec.tokens, spec.tokens, dtype=torch.bool, device=heads.device)
        inner[0, 1:] = not spec.has_state
        mask = torch.cat((prefix[:, None].expand(-1, spec.tokens, -1), inner.expand(batch, -1, -1)), 2)
        keys, values = (inputs[name][index].float() for name in ("keys", "values"))
        values = values.masked_fill(~prefix[:, :, None, None], 0)
        keys = keys.masked_fill(~prefix[:, :, None, None], 0)
        found = reference.attention(q, torch.cat((keys, k), 1), torch.cat((values, v), 1), mask)
        return rounded(found.reshape(self.plan.rows, -1))

    def move(self, step: int, x: Tensor, inputs: Mapping[str, Tensor], actions: Tensor) -> None:
        """Last norm, output projection and Euler step."""
        spec, c = self.plan.spec, self.constants
        scale, shift, weight, schedule = (c[n] for n in ("final_scale", "out_shift", "w_out", "schedule"))
        assert scale is not None and shift is not None and weight is not None and schedule is not None
        scaled, factor = self.normed(x, scale[step] if spec.adaptive else scale, "x")
        velocity = (factor * (scaled @ weight.T) + shift[step]).view(self.plan.batch, spec.tokens, -1)
        velocity = velocity[:, -spec.horizon :]
        dt, time, gain = schedule[:, step]
        error = inputs["target"] - (actions - time * velocity)
        velocity = velocity - gain * (inputs["weights"][..., None] * error)
        if self.plan.trained:
            velocity = velocity.masked_fill(inputs["weights"][..., None] > 0, 0)
        actions += dt * velocity
