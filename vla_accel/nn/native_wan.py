"""The stacks of `nn.wan` in fused ops: the video's rows once, and the actions' in every step. Eight kernels in a block.

Exact savings: the video's modulation is in the weights, that of actions in tables, one a step; keys and values of text
are one product of all blocks of a stack; actions read keys and values of the video where it wrote them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import NormedShape, normed_tiles
from vla_accel.kernels.attention.normed import HeadsNorm, Keys, normed_attention
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments, measure
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.loop.tables import LayerTables
from vla_accel.kernels.rows.flow import ActionInput, EulerStep, Guidance, flow_step
from vla_accel.kernels.rows.rows import NormedHeads, norm_heads
from vla_accel.nn.kernel_choices import KernelChoices
from vla_accel.nn.loop import Inputs, LayerLoop, LayerProduct
from vla_accel.nn.network import Network
from vla_accel.nn.overlap import Overlap
from vla_accel.nn.wan import WanConfig
from vla_accel.nn.weights import BlockWeights, compute_dtype, fold, plain_input, weights_in
from vla_accel.runtime import current


@dataclass(frozen=True)
class WanBlockWeights(BlockWeights):
    """A block's products, `qkv` and `up` without the norm before them. `q_norm`, `k_norm` (heads * d,) are of all heads
    together, as `text_q_norm`, of the queries to text."""

    text_q: Linear = field(kw_only=True)
    text_out: Linear = field(kw_only=True)
    text_q_norm: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class WanWeights:
    """Prepared weights of a stack. `last`: keys and values of one more block, whose output is not needed, with the norm
    of its keys.

    With constant `modulations` these are folded into the weights; otherwise a step's are in its tables.
    """

    layers: tuple[WanBlockWeights, ...]
    precision: str
    last: tuple[Linear, Tensor] | None = None

    @classmethod
    def of(
        cls, model: Network, stack: str, config: WanConfig, precision: str, modulations: Tensor | None = None
    ) -> WanWeights:
        """Prepare `stack`.layers. `modulations` (depth, 6, W): constant ones, of a stack that ends at keys and
        values."""
        full = config.depth if modulations is None else config.depth - 1
        layers = [_block(model, f"{stack}.layers.{i}.", precision, None if modulations is None else modulations[i])
                  for i in range(full)]  # fmt: skip
        last = None
        if modulations is not None:
            start, shift, scale = f"{stack}.layers.{full}.", *modulations[full, :2]
            weight, bias = _modulated(_stored(model, start + "qkv_proj"), scale, shift)
            rows = slice(config.attended, None)
            linear = _with_sums(plain_input(precision, weight[rows], bias[rows]))
            last = linear, _norm(model, start + "k_norm")
        return cls(tuple(layers), precision, last)


@dataclass(frozen=True)
class TextWeights:
    """From rows of text to keys and values of a stack's first `depth` blocks: two products, and one of all blocks, with
    the norms of keys (depth, heads * d)."""

    into: Linear
    mix: Linear
    keys_values: Linear
    k_norms: Tensor

    @classmethod
    def of(cls, model: Network, stack: str, depth: int, precision: str) -> TextWeights:
        """Prepare the weights of `stack`."""
        dtype = compute_dtype(precision)
        both = [_stored(model, f"{stack}.layers.{i}.text_kv") for i in range(depth)]
        weight, bias = (torch.cat([pair[part].to(dtype) for pair in both]) for part in range(2))
        del both
        into, mix = (make_linear(*_stored(model, f"{stack}.{name}"), dtype) for name in ("text_in", "text_mix"))
        norms = torch.stack([_norm(model, f"{stack}.layers.{i}.text_k_norm") for i in range(depth)])
        return cls(into, mix, plain_input(precision, weight, bias), norms)


def _block(model: Network, start: str, precision: str, modulation: Tensor | None) -> WanBlockWeights:
    """Prepare a block. `modulation` (6, W): constant."""

    def product(name: str) -> tuple[Tensor, Tensor]:
        return _stored(model, start + name)

    qkv, out, up, down = (product(name) for name in ("qkv_proj", "out_proj", "fc1", "fc2"))
    if modulation is not None:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        qkv, up = _modulated(qkv, scale, shift), _modulated(up, mlp_scale, mlp_shift)
        out, down = ((w.float() * g[:, None], b.float() * g) for (w, b), g in ((out, gate), (down, mlp_gate)))
    factor, shift = (model.weight(f"{start}text_norm.{part}") for part in ("weight", "bias"))
    text_q = _modulated(product("text_q"), factor.double() - 1.0, shift)
    return WanBlockWeights(
        _with_sums(plain_input(precision, *qkv)), plain_input(precision, *out),
        _with_sums(plain_input(precision, *up)), plain_input(precision, *down),
        _norm(model, start + "q_norm"), _norm(model, start + "k_norm"),
        text_q=_with_sums(plain_input(precision, *text_q)), text_out=plain_input(precision, *product("text_out")),
        text_q_norm=_norm(model, start + "text_q_norm"),
    )  # fmt: skip


def _modulated(product: tuple[Tensor, Tensor], scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of a product of x (1 + scale) + shift."""
    weight, bias = fold(*product, 1.0 + scale.double(), shift)
    assert bias is not None
    return weight, bias


def _stored(model: Network, name: str) -> tuple[Tensor, Tensor]:
    return model.weight(f"{name}.weight"), model.weight(f"{name}.bias")


def _norm(model: Network, name: str) -> Tensor:
    return model.weight(f"{name}.weight").float().clone()


def _with_sums(layer: Linear) -> Linear:
    """The sums of the weight's rows as they are multiplied, for the LayerNorm before the product."""
    return replace(layer, sums=layer.weight.float().sum(1) * layer.sums_scale)


class TextProgram:
    """Keys and values of text for all blocks of a stack."""

    def __init__(self, weights: TextWeights, config: WanConfig, depth: int, rows: int, chain: Chain) -> None:
        """`chain`: that is open when it is called."""
        self.weights, self.config, self.depth = weights, config, depth
        x = weights.into.weight.new_empty(rows, len(weights.into.weight))
        self.hidden, self.embedded = x, torch.empty_like(x)
        self.both = x.new_empty(rows, len(weights.keys_values.weight))
        self.options: dict[str, Any] = {}
        if weights.keys_values.weight_scale is not None:
            choices = KernelChoices(x.device, chain)
            sizes = gemm_sizes(self.embedded, weights.keys_values)
            choices.product("text", sizes, lambda: self._project(**choices["text"].options), every_backend=True)
            self.options = choices["text"].options

    def __call__(self, context: Tensor, keys: Tensor, values: Tensor) -> None:
        """context (R, text_dim) to keys and values (depth, B, S, heads, d)."""
        weights = self.weights
        gemm(context, weights.into, self.hidden, Epilogue(activation=Activation.GELU), workspace=(self.hidden,))
        gemm(self.hidden, weights.mix, self.embedded)
        self._project(**self.options)
        rows = self.both.view(len(self.both) * self.depth, -1)
        into = NormedHeads(keys, values, weights.k_norms)
        norm_heads(rows, into, None, heads=self.config.heads, eps=self.config.eps, layers=self.depth)

    def _project(self, **options: Any) -> None:
        gemm(self.embedded, self.weights.keys_values, self.both, **options)


class WanLoop(LayerLoop):
    """The launches of a stack: attention, attention to text, and the MLP of each layer.

    More buffers: `qkv` (R, 3 heads * d) and `text_q` (R, heads * d), before their norms.
    """

    weights: WanWeights

    def __init__(
        self, weights: WanWeights, config: WanConfig, steps: int, x: Tensor, batch: int, rope: tuple[Tensor, Tensor],
        *, scaled: bool,
    ) -> None:  # fmt: skip
        """`rope`: tables of a sequence's rows; `scaled`: whether modulations are in tables."""
        super().__init__(weights, steps, x, config.attended, config.mlp_dim, scaled=scaled, mlp_scaled=False)
        self.next_scaled["text_out"] = scaled
        self.config, self.batch = config, batch
        cos, sin = rope
        self.rope = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self.qkv, self.text_q = (x.new_zeros(len(x), parts * config.attended) for parts in (3, 1))
        self.attended = self.context.view(batch, -1, config.heads, config.head_dim)
        # Where a product writes no moments, its parts are measured as rows of their own.
        self.apart = {
            name: Moments.like(rows.view(-1, config.attended), config.attended)
            for name, rows in (("qkv", self.qkv), ("text_q", self.text_q))
        }

    # -- what the loops of video and actions define ---------------------------------------------------------------

    def norm_before(self, step: int, index: int, name: str) -> tuple[Norm, Tensor | None]:
        """The norm before the product `name`, "qkv" or "up", without its moments, and the product's shift."""
        del step
        return Norm(self.config.eps, sums=getattr(self.weights.layers[index], name).sums), None

    @abstractmethod
    def around(self, index: int, inputs: Inputs) -> tuple[Keys | None, Keys | None]:
        """Return the keys of the prefix (or None) and the cache that receives this layer's keys and values (or None),
        (B, T, heads, d)."""

    # -- a layer --------------------------------------------------------------------------------------------------

    def products(self) -> dict[str, LayerProduct]:
        layer, every, found = self.weights.layers[0], range(self.depth), super().products()
        text_out = LayerProduct(gemm_sizes(self.context, layer.text_out), self._text_out, every)
        normed = {"qkv": self._qkv, "text_q": self._text_q, "up": self._mlp_up}
        return {"out": found["out"], "text_out": text_out, "down": found["down"]} | {
            name: LayerProduct(gemm_sizes(self.x, getattr(layer, name), layer_norm=True), run, every)
            for name, run in normed.items()
        }

    def moments_of(self, name: str) -> Callable[[int], Moments | None] | None:
        rows, attended = {"qkv": self.qkv, "text_q": self.text_q}.get(name), self.config.attended
        if rows is None:
            return super().moments_of(name)
        return lambda columns: None if attended % columns else Moments.like(rows, columns)

    def choose_attention(self, inputs: Inputs) -> None:
        """Choose the configs of both attentions, with `inputs` of all layers."""
        tokens, config, size = self.attended.shape[1], self.config, self.x.element_size()
        prefix, _ = self.around(0, inputs)
        for name, run, own, keys in (
            ("attention", self._look, True, 0 if prefix is None else prefix.keys.shape[1]),
            ("text", self._look_at_text, False, inputs["text_keys"].shape[2]),
        ):
            shape = NormedShape(self.batch, tokens, keys, config.heads, config.head_dim, size, own)
            tiles = normed_tiles(current(self.x).gpu, shape)
            self.choices.config(name, shape, tiles, lambda run=run: [run(i, inputs) for i in range(self.depth)])

    def _attend(self, step: int, index: int, inputs: Inputs) -> None:
        self._qkv(step, index, inputs)
        self._look(index, inputs)

    def _up(self, step: int, index: int, inputs: Inputs) -> None:
        """Attention to text, then the first product of the MLP."""
        self._text_q(step, index, inputs)
        self._look_at_text(index, inputs)
        self._text_out(step, index, inputs)
        self._mlp_up(step, index, inputs)

    def _look(self, index: int, inputs: Inputs) -> None:
        """Attention of the rows `qkv`: to `context`."""
        layer, (prefix, cache) = self.weights.layers[index], self.around(index, inputs)
        assert layer.q_norm is not None
        norm = HeadsNorm(self.config.eps, layer.q_norm, layer.k_norm, self.rope)
        self._normed_attention("qkv", norm, prefix, cache, "attention")

    def _look_at_text(self, index: int, inputs: Inputs) -> None:
        """Attention of the rows `text_q`: to `context`."""
        norm = HeadsNorm(self.config.eps, self.weights.layers[index].text_q_norm)
        text = Keys(inputs["text_keys"][index], inputs["text_values"][index], inputs["text_bias"])
        self._normed_attention("text_q", norm, text, None, "text")

    def _normed_attention(self, name: str, norm: HeadsNorm, prefix: Keys | None, cache: Keys | None, kind: str) -> None:
        rows, moments = getattr(self, name), self.choices[name].moments
        if moments is None:
            moments = self.apart[name]
            measure(rows.view(-1, self.config.attended), None, moments)
        normed_attention(rows, moments, norm, self.attended, prefix, cache, self.choices[kind].config)

    def _qkv(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        self._normed("qkv", self.moments_before(index), self.qkv, step, index)

    def _mlp_up(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        self._normed("up", self.choices["text_out"].moments, self.active, step, index, Activation.GELU)

    def _text_q(self, step: int, index: int, inputs: Inputs) -> None:
        del step, inputs
        layer, choice = self.weights.layers[index], self.choices["text_q"]
        norm = Norm(self.config.eps, self.choices["out"].moments, sums=layer.text_q.sums)
        gemm(self.x, layer.text_q, self.text_q, Epilogue(moments=choice.moments), norm, **choice.options)

    def _text_out(self, step: int, index: int, inputs: Inputs) -> None:
        del inputs
        choice, scale = self.choices["text_out"], self.norm_before(step, index, "up")[0].scale
        epilogue = Epilogue(residual=True, moments=choice.moments, next_scale=scale)
        gemm(self.context, self.weights.layers[index].text_out, self.x, epilogue, **choice.options)

    def _normed(
        self, name: str, moments: Moments | None, out: Tensor, step: int, index: int,
        activation: Activation = Activation.NONE,
    ) -> None:  # fmt: skip
        (norm, shift), choice = self.norm_before(step, index, name), self.choices[name]
        epilogue = Epilogue(shift, activation, moments=choice.moments)
        layer = getattr(self.weights.layers[index], name)
        gemm(self.x, layer, out, epilogue, replace(norm, moments=moments), **choice.options)


def _empty(x: Tensor, config: WanConfig, rows: Mapping[str, tuple[int, int]]) -> Inputs:
    """Zeros for the inputs of a loop in the dtype of x, of sequences and rows by prefix of their names."""
    shape, found = (config.heads, config.head_dim), {}
    for start, (batch, count) in rows.items():
        zeros = x.new_zeros(1, batch, count, *shape).expand(config.depth, *[-1] * 4)
        found |= {f"{start}keys": zeros, f"{start}values": zeros, f"{start}bias": x.new_zeros(batch, count).float()}
    return found


class VideoLoop(WanLoop):
    """The video's rows through all blocks, once. Inputs `keys`, `values` (depth, B, T, heads, d), which it writes, and
    `text_keys`, `text_values` (depth - 1, B, S, heads, d), `text_bias` (B, S) float32."""

    final_norm_reads_moments = True

    def __init__(
        self, weights: WanWeights, config: WanConfig, batch: int, tokens: int, text_rows: int,
        rope: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        x = torch.zeros(batch * tokens, config.width, dtype=compute_dtype(weights.precision), device=rope[0].device)
        super().__init__(weights, config, 1, x, batch, rope, scaled=False)
        assert weights.last is not None
        (self.last_kv, self.last_norm), self.kv = weights.last, x.new_empty(len(x), 2 * config.attended)
        self.overlap: Overlap | None = None
        self.choose_products({})
        self.choose_attention(_empty(x, config, {"": (batch, tokens), "text_": (batch, text_rows)}))

    def overlapped(self) -> Overlap:
        """From now on, record an event for each layer once its keys and values are enqueued."""
        self.overlap = Overlap(self.x.device, self.depth + 1, lambda layer: None)
        return self.overlap

    def products(self) -> dict[str, LayerProduct]:
        sizes = gemm_sizes(self.x, self.last_kv, layer_norm=True)
        return {**super().products(), "last": LayerProduct(sizes, self._last, (self.depth,))}

    def __call__(self, rows: Tensor, inputs: Inputs) -> None:
        """rows (B, T, W)."""
        if self.overlap is not None:
            self.overlap.begun.record()
        with self.chain:
            self.x.copy_(rows.reshape(self.x.shape))
            self._evaluate(inputs, 0)
            self._last(0, self.depth, inputs)
            into = NormedHeads(inputs["keys"][self.depth], inputs["values"][self.depth], self.last_norm)
            norm_heads(self.kv, into, self.rope, heads=self.config.heads, eps=self.config.eps)
            self._cached(self.depth)

    def _last(self, step: int, index: int, inputs: Inputs) -> None:
        """Keys and values of the last block."""
        del step, inputs
        norm = Norm(self.config.eps, self.moments_before(index), sums=self.last_kv.sums)
        gemm(self.x, self.last_kv, self.kv, norm=norm, **self.choices["last"].options)

    def around(self, index: int, inputs: Inputs) -> tuple[Keys | None, Keys | None]:
        return None, Keys(inputs["keys"][index], inputs["values"][index])

    def _look(self, index: int, inputs: Inputs) -> None:
        super()._look(index, inputs)
        self._cached(index)

    def _cached(self, index: int) -> None:
        if self.overlap is not None:
            self.overlap.layers[index].record()

    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        """There are no steps."""


@dataclass(frozen=True)
class StepTables:
    """The constants of the steps, float32: for each step and layer the gates of attention and MLP, and the norm with
    the shift of "qkv" and "up"; the sizes of the Euler steps (negative); rotary tables."""

    gates: tuple[tuple[LayerTables, ...], ...]
    norms: Mapping[str, tuple[tuple[tuple[Norm, Tensor], ...], ...]]
    dts: tuple[float, ...]
    rope: tuple[Tensor, Tensor]


@torch.inference_mode()
def step_tables(
    weights: WanWeights, biases: Mapping[str, list[Tensor]], config: WanConfig, modulations: Tensor,
    dts: tuple[float, ...], rope: tuple[Tensor, Tensor],
) -> StepTables:  # fmt: skip
    """Compute the constants of the steps, with the weights of the products as stored. `modulations` (n, depth, 6, W);
    `biases` of "qkv" and "up" by layer."""
    found: dict[str, list[list[tuple[Norm, Tensor]]]] = {}
    wide = modulations.float()
    for name, (shift, scale) in {"qkv": (0, 1), "up": (3, 4)}.items():
        found[name] = [[] for _ in dts]
        for index, layer in enumerate(weights.layers):
            weight, bias = getattr(layer, name).true_weight(torch.float32), biases[name][index].float()
            sums = (1.0 + wide[:, index, scale]) @ weight.T
            shifts = wide[:, index, shift] @ weight.T + bias
            for step, row in enumerate(found[name]):
                norm = Norm(config.eps, None, wide[step, index, scale].contiguous(), sums[step].contiguous())
                row.append((norm, shifts[step].contiguous()))
            del weight
    gates = tuple(
        tuple(
            LayerTables(scale=found["qkv"][step][i][0].scale, gate=wide[step, i, 2].contiguous(),
                        mlp_gate=wide[step, i, 5].contiguous())
            for i in range(config.depth)
        )
        for step in range(len(dts))
    )  # fmt: skip
    return StepTables(gates, {n: tuple(map(tuple, rows)) for n, rows in found.items()}, dts, rope)


class ActionLoop(WanLoop):
    """The denoise program. Inputs `noise` (B, H, A) float32, `keys`, `values`, `text_keys`, `text_values` (depth, B, S,
    heads, d), `text_bias` (B, S) float32; output `actions` (B, H, A) float32.

    With the `overlap` of a video, each layer of the first step waits only for its own keys and values.
    """

    overlap: Overlap | None = None

    def __init__(
        self, weights: WanWeights, tables: StepTables, ends: tuple[tuple[Tensor, Tensor], Linear], config: WanConfig,
        noise: tuple[int, int, int], sources: tuple[int, int],
    ) -> None:  # fmt: skip
        """`ends`: weight (A, W) and bias float32 of what actions become, and the product that becomes velocities;
        `noise`: its shape; `sources`: rows of the video and of the context."""
        batch, horizon, actions = noise
        self.tables, self.ends, self.tokens = tables, ends, horizon
        device = ends[0][0].device
        x = torch.zeros(batch * horizon, config.width, dtype=compute_dtype(weights.precision), device=device)
        super().__init__(weights, config, len(tables.dts), x, batch, tables.rope, scaled=True)
        self.velocity = torch.zeros(batch * horizon, actions, device=device)
        self.unguided = torch.zeros(batch, horizon, device=device)
        self.flow = [torch.zeros(noise, device=device) for _ in range(2)]
        self.choose_products({})
        self.choose_attention(_empty(x, config, {"": (batch, sources[0]), "text_": (batch, sources[1])}))
        kind = weights_in(weights.precision)
        self.detail = f"fused ops, {kind}, {3 + 8 * self.depth} launches a step{self.choices.detail}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        overlap, actions = self.overlap, outputs["actions"]
        if overlap is None:
            self.run(inputs, None, actions)
            return
        with overlap.consumer(), self.chain:
            self.first_step(inputs, None, actions, overlap.wait)
        with self.chain:
            self.other_steps(inputs, None, actions)

    def norm_before(self, step: int, index: int, name: str) -> tuple[Norm, Tensor | None]:
        return self.tables.norms[name][step][index]

    def tables_of(self, step: int, index: int) -> LayerTables:
        return self.tables.gates[step][index] if index < self.depth else LayerTables()

    def around(self, index: int, inputs: Inputs) -> tuple[Keys | None, Keys | None]:
        return Keys(inputs["keys"][index], inputs["values"][index]), None

    def _between(self, inputs: Inputs, actions: Tensor, state_token: Tensor | None, step: int) -> None:
        del state_token
        first, last = step == 0, step == self.steps
        (w_in, b_in), out = self.ends
        if not first:
            gemm(self.x, out, self.velocity)
        before, after = (
            inputs["noise"] if first else self.flow[(step - 1) % 2],
            actions if last else self.flow[step % 2],
        )
        guidance = Guidance(self.flow[0], self.unguided, pinned=True)
        at = EulerStep(self.tables.dts[max(step - 1, 0)], first=first, last=last)
        into = ActionInput(w_in, b_in, Activation.NONE)
        flow_step(self.velocity, before, guidance, into, after, self.x, at, tokens=self.tokens)
