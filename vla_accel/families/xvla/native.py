"""The native programs of X-VLA: its text encoder and its denoising loop in fused operations, and the store of all.

Exact savings besides those of the network: missing views, positions and soft prompts are constants; of an action's
product, the state's part is computed once a call and the time's part once; norms are folded into products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.xvla.native_vision import NativeVision, VisionWeights
from vla_accel.families.xvla.network import EPS, Xvla, XvlaConfig
from vla_accel.fp8 import Products
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.rows.mix import Head, Mix, MixedInput, mix_step
from vla_accel.nn.bart import BartConfig
from vla_accel.nn.davit import Size
from vla_accel.nn.flow import Schedule
from vla_accel.nn.native_bart import BartWeights, NativeBart
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import Precision, StackWeights, compute_dtype, fold, stack_weights

QUANTISED = {"denoise": {"native": Products(("qkv_proj", "out_proj", "fc1", "fc2"))}}
"""By component, then engine. All other products are computed in the policy's precision."""


# -- once an observation ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextWeights:
    """The text encoder and the projections of what it reads.

    Attributes:
        embed: Token table (vocabulary, W).
        text, view: Projections of the encoder's output and of other views, without bias.
        base: What the rows of the context have without image or text (C, W): positions and biases of the projections,
            also for missing views, and soft prompts.
    """

    bart: BartWeights
    embed: Tensor
    text: Linear
    view: Linear
    base: Tensor

    @classmethod
    def of(cls, model: Xvla, precision: str, rows: int, context: int) -> ContextWeights:
        """Prepare the weights of a model for `rows` of the encoder, and of a context with soft prompts."""
        dtype, config = compute_dtype(precision), model.config
        with model.present("encoder.positions", "text_proj", "view_proj", "position_embedding", "soft_prompts"):
            text, view = (make_linear(part.weight, None, dtype) for part in (model.text_proj, model.view_proj))
            start, count = config.action_horizon, context - config.soft_prompts
            base = model.position_embedding[start : start + count].float().clone()
            base[:rows] += model.text_proj.bias.float()
            base[rows:] += model.view_proj.bias.float()
            base = torch.cat((base, model.soft_prompts.view(-1, config.width).float()))
            positions = model.encoder.table(rows).to(dtype).clone()
        bart = BartWeights.of(model, "encoder", config.encoder, positions)
        return cls(bart, model.weight("embed.weight").to(dtype), text, view, base.to(dtype))


class NativeContext:
    """The program. Inputs `image_tokens` (B, V, rows, W) and `tokens` (B, T) int64; output `context` (B, C, W)."""

    def __init__(self, weights: ContextWeights, config: BartConfig, views: int, batch: int, attention: str) -> None:
        self.weights, self.views, self.batch = weights, views, batch
        self.bart = NativeBart(weights.bart, config, batch, attention)
        self.attention, self.detail = self.bart.attention, self.bart.detail

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        w, seen, tokens = self.weights, inputs["image_tokens"], inputs["tokens"]
        batch, rows = self.batch, len(w.bart.positions)
        x = self.bart.x.view(batch, rows, -1)
        x[:, : seen.shape[2]] = seen[:, 0]
        x[:, seen.shape[2] :] = F.embedding(tokens, w.embed)
        self.bart.run()
        context, others = outputs["context"], (self.views - 1) * seen.shape[2]
        made = x.new_empty(batch * rows, context.shape[2])
        gemm(self.bart.x, w.text, made)
        context.copy_(w.base.expand_as(context))
        context[:, :rows] += made.view(batch, rows, -1)
        if others:
            made = made.new_empty(batch * others, context.shape[2])
            gemm(seen[:, 1:].reshape(batch * others, -1), w.view, made)
            context[:, rows : rows + others] += made.view(batch, others, -1)


# -- once a step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopWeights:
    """The transformer with the products before and after it, float32 except `stack`.

    Attributes:
        noisy: Product of noisy actions (A, W), zero for grippers.
        state: That of the state (S, W), zero for grippers.
        positions: Positions of the rows of actions and the bias of their product (H, W).
        head: Of rows without the last norm's weights.
    """

    stack: StackWeights
    noisy: Tensor
    state: Tensor
    positions: Tensor
    head: Head

    @classmethod
    def of(cls, model: Xvla, precision: Precision) -> LoopWeights:
        """Prepare the weights of a model."""
        config = model.config
        stack = stack_weights(model, "layers", config.block, config.depth, precision)
        with model.present("action_in", "action_out", "norm", "position_embedding"):
            noisy, state = (rows.clone() for rows in _parts(model)[:2])
            for rows in (noisy, state):
                for gripper in config.grippers:
                    rows[gripper] = 0.0
            positions = model.position_embedding[: config.action_horizon].float() + model.action_in.bias.float()
            head, bias = fold(
                model.action_out.weight, model.action_out.bias, model.norm.weight.double(), model.norm.bias
            )
        assert bias is not None
        return cls(stack, noisy, state, positions, Head(head, bias, EPS))


def _parts(model: Xvla) -> Sequence[Tensor]:
    """The product of an action's row, in the parts of its actions, the state and the time, float32."""
    config = model.config
    return model.action_in.weight.T.float().split((config.action_dim, config.state_dim, config.time_dim))


class NativeLoop:
    """The program of all steps. Inputs `noise` (B, H, A) and `state` (B, S) float32 and `context` (B, C, W); output
    `actions` (B, H, A) float32."""

    def __init__(
        self, weights: LoopWeights, times: Sequence[float], steps: Tensor, config: XvlaConfig, rows: Rows,
        attention: str,
    ) -> None:  # fmt: skip
        """`steps` (n, W): what each time adds to the rows of actions."""
        self.weights, self.times, self.steps, self.config = weights, times, steps, config
        self.stack = StackPlan(weights.stack, rows, attention)
        self.attention, self.chain = self.stack.attention, self.stack.chain
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        w, stack, actions = self.weights, self.stack, outputs["actions"]
        base = torch.mm(inputs["state"], w.state)[:, None] + w.positions
        inverse, count = stack.weights.products[0].inverse_scale, len(self.times)
        with self.chain:
            for index in range(count + 1):
                step = min(index, count - 1)
                into = MixedInput(w.noisy, base, self.steps[step], inputs["context"])
                at = Mix(self.times[step], first=index == 0, last=index == count)
                mix_step(stack.x, stack.h, w.head, inputs["noise"], into, actions, at, inverse_scale=inverse)
                if not at.last:
                    stack.run()
        for gripper in self.config.grippers:
            actions[..., gripper].sigmoid_()


# -- the store ----------------------------------------------------------------------------------------------------


class XvlaStore(NativeStore[Xvla]):
    """Prepared weights of one X-VLA."""

    def vision(self, sizes: Sequence[Size], batch: int, spec: EngineSpec) -> Program:
        """The program of images."""
        model, config = self.model, self.model.config
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: VisionWeights.of(model, precision))
        last = config.vision.sizes(config.fitted(sizes[0]))[-1]
        positions = self.weights(("vision", precision, last), lambda: self._positions(last, compute_dtype(precision)))
        return NativeVision(weights, positions, config, sizes, batch, spec.attention)

    def _positions(self, size: Size, dtype: torch.dtype) -> Tensor:
        with self.model.present("rows", "columns", "frame"):
            return self.model.view_positions(size).to(dtype)

    def kv_cache(self, views: int, size: Size, batch: int, spec: EngineSpec) -> Program:
        """The program of the text encoder. `size`: of the network's images."""
        model, config = self.model, self.model.config
        precision = self.precision("kv_cache", spec)
        rows, context = config.view_tokens(size) + config.max_token_len, config.context_tokens(size)
        key = ("kv_cache", precision, rows, context)
        weights = self.weights(key, lambda: ContextWeights.of(model, precision, rows, context))
        return NativeContext(weights, config.encoder, views, batch, spec.attention)

    def denoise(self, schedule: Schedule, size: Size, batch: int, spec: EngineSpec) -> Program:
        """The program of all steps."""
        model, config, products = self.model, self.model.config, QUANTISED["denoise"]["native"]
        name = self.precision("denoise", spec, products)
        precision = Precision(name, products.without(spec.keep), self.scales)
        weights = self.weights(("denoise", name, tuple(spec.keep)), lambda: LoopWeights.of(model, precision))
        steps = self.weights(("denoise", schedule), lambda: self._steps(schedule))
        rows = Rows(batch, config.action_horizon + config.context_tokens(size))
        return NativeLoop(weights, model.times(schedule).tolist(), steps, config, rows, spec.attention)

    def _steps(self, schedule: Schedule) -> Tensor:
        with self.model.present("action_in"):
            times = self.model.time_embedding(self.model.times(schedule)).to(self.model.device)
            return times @ _parts(self.model)[2]
