"""The fused ops of the native engine: each writes into buffers that it is given and allocates nothing on a GPU.

On CUDA tensors they run Triton kernels (`vla_accel.ops.kernels`) or cuBLAS; elsewhere the torch reference beside each
of them, which defines what it computes. Knows nothing about models. Conventions: rows are flattened tokens; a weight is
(N, K); `inverse_scale` asks for float8_e4m3fn output, x * inverse_scale saturated at ±448; None for the buffer's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.fp8 import E4M3
from vla_accel.ops import reference
from vla_accel.ops.gpu import Gpu

FP8 = E4M3.dtype


def dependent_launches(device: torch.device) -> bool:
    """Whether kernels of this device can be launched while their predecessors still run."""
    gpu = Gpu.of(device)
    return gpu is not None and gpu.dependent_launch


def _kernels(module: str) -> Any:
    import importlib

    return importlib.import_module(f"vla_accel.ops.kernels.{module}")


def _store(out: Tensor, value: Tensor, inverse_scale: float | None) -> None:
    if inverse_scale is not None:
        value = E4M3.saturated(value.float() * inverse_scale)
    out.copy_(value.reshape(out.shape).to(out.dtype))


@dataclass(frozen=True)
class Linear:
    """A weight ready for the tensor cores.

    `weight` (N, K) in BF16/FP16/FP32, or float8_e4m3fn with `weight_scale` (true weight = stored x scale) and
    `input_scale` (true input = stored x scale), both of which are 0-dimensional float32 on the weight's device;
    `bias` (N,) or None. The `*_value` fields are the same scales on the host. `paired`: the rows of gate and up of a
    GeGLU by turns, eight of each, so that one block of the tensor cores has both. `sums` (N,) float32: of the stored
    weight's rows, for a LayerNorm after the product.
    """

    weight: Tensor
    bias: Tensor | None = None
    weight_scale: Tensor | None = None
    input_scale: Tensor | None = None
    weight_scale_value: float = 1.0
    input_scale_value: float = 1.0
    paired: bool = False
    sums: Tensor | None = None

    @property
    def inverse_scale(self) -> float | None:
        """What the producer of this product's input must multiply by; None when it takes the plain dtype."""
        return None if self.input_scale is None else 1.0 / self.input_scale_value

    @property
    def bytes(self) -> int:
        """Bytes that one product reads of it."""
        return self.weight.numel() * self.weight.element_size()


def make_linear(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, input_amax: float | None = None, pad_k: int = 0,
    pad_n: int = 0,
) -> Linear:  # fmt: skip
    """A `Linear` from (N, K) in any dtype: padded with zeros, in `dtype`, or FP8 where `input_amax` is given.

    FP8 scales are per tensor, of the weight and of the calibrated input (`fp8.Format.scale`).
    """
    if pad_k or pad_n:
        weight = F.pad(weight, (0, pad_k, 0, pad_n))
        bias = F.pad(bias, (0, pad_n)) if bias is not None else None
    bias = bias.to(dtype).contiguous() if bias is not None else None
    if input_amax is None:
        return Linear(weight.to(dtype).contiguous(), bias)
    amax = float(weight.abs().amax())
    weight_scale, input_scale = E4M3.scale(amax), E4M3.scale(input_amax)
    stored = E4M3.saturated(weight.float() / weight_scale).contiguous()
    device = weight.device
    return Linear(
        stored, bias, torch.tensor(weight_scale, device=device), torch.tensor(input_scale, device=device),
        weight_scale, input_scale,
    )  # fmt: skip


def pair(layer: Linear) -> Linear:
    """A product whose first half of rows are a GeGLU's gate and the others its up, with its rows `paired`.

    The same product where those halves are no whole eights.
    """
    if layer.weight.shape[0] % 16:
        return layer

    def mixed(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2).contiguous()

    return replace(layer, weight=mixed(layer.weight), bias=mixed(layer.bias), paired=True)


def own_product(
    x: Tensor, layer: Linear, out: Tensor, activation: str, inverse_scale: float | None, pdl: bool, **norms: Any
) -> bool:
    """Whether the project's own Hopper kernel has taken this product: where it is the fastest."""
    from vla_accel.ops.cuda import product

    gpu, tiling = Gpu.of(x.device), product.plan(x, layer.weight, out, activation)
    if gpu is None or tiling is None or (activation == "geglu" and layer.bias is not None):
        return False
    scale = layer.input_scale_value * layer.weight_scale_value
    product.product(
        x, layer.weight, layer.bias, out, gpu=gpu, tiling=tiling, activation=activation, scale=scale,
        inverse_scale=inverse_scale, dependent=pdl, **norms,
    )  # fmt: skip
    return True


def has_own_product(rows: int, layer: Linear, activation: str) -> bool:
    """Whether `own_product` will take `rows` rows by this weight, on its device. `activation`: none, gelu or geglu."""
    from vla_accel.ops.cuda import product

    weight = layer.weight
    return product.planned(weight.device, weight.dtype, activation, rows, *weight.shape) is not None


def products_by(rows: int, products: Mapping[str, tuple[Linear, str]]) -> tuple[str, bool]:
    """What to add to a program's line in the ledger, and whether its kernels should start before others end.

    `products`: by name, each with its activation (none, gelu, geglu). The line says whose kernels take them, and is
    empty where all are the library's: those wait for all before them, and to start early beside them costs more than it
    saves.
    """
    own, library = [], []
    for name, (layer, activation) in products.items():
        (own if has_own_product(rows, layer, activation) else library).append(name)
    if not own:
        return "", False
    detail = f", products in CUDA C++: {', '.join(own)}" + (f"; cuBLAS: {', '.join(library)}" if library else "")
    return detail, all(dependent_launches(layer.weight.device) for layer, _ in products.values())


def gate_up(
    x: Tensor, layer: Linear, scratch: Tensor, out: Tensor, *, inverse_scale: float | None, pdl: bool = False
) -> None:
    """out = gelu_tanh(gate) * up, of gate and up = x Wᵀ + b. x (R, K), out (R, H), scratch (R, 2 H) may be used."""
    if x.is_cuda and layer.paired and own_product(x, layer, out, "geglu", inverse_scale, pdl):
        return
    linear(x, layer, scratch, pdl=pdl)
    geglu(scratch, out, inverse_scale=inverse_scale, paired=layer.paired, pdl=pdl)


def linear_gelu(
    x: Tensor, layer: Linear, scratch: Tensor, out: Tensor, *, inverse_scale: float | None, pdl: bool = False
) -> None:
    """out = gelu_tanh(x Wᵀ + b). x (R, K), out (R, N), scratch (R, N), which may be used and may be `out`."""
    if x.is_cuda and own_product(x, layer, out, "gelu", inverse_scale, pdl):
        return
    if layer.weight_scale is None and inverse_scale is None:
        return linear(x, layer, out, gelu=True)
    linear(x, layer, scratch, pdl=pdl)
    gelu(scratch, out, inverse_scale=inverse_scale, pdl=pdl)


def linear(x: Tensor, layer: Linear, out: Tensor, *, gelu: bool = False, pdl: bool = False) -> None:
    """out = x Wᵀ + b, then tanh GELU if `gelu` (BF16/FP16 only). x (R, K), out (R, N).

    `pdl`: where the kernel can, it starts before its predecessor has finished, and waits for it itself.
    """
    if x.is_cuda:
        if not gelu and own_product(x, layer, out, "none", None, pdl):
            return
        if layer.weight_scale is not None and layer.input_scale is not None:
            torch._scaled_mm(
                x, layer.weight.t(), scale_a=layer.input_scale, scale_b=layer.weight_scale, bias=layer.bias,
                out_dtype=out.dtype, use_fast_accum=True, out=out,
            )  # fmt: skip
        elif gelu:
            # cuBLASLt's GELU epilogue is the tanh form.
            torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True, out=out)  # type: ignore[call-overload]
        elif layer.bias is not None:
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)
        else:
            torch.mm(x, layer.weight.t(), out=out)
        return
    wide = torch.promote_types(torch.float32, out.dtype)
    y = (x.to(wide) * layer.input_scale_value) @ (layer.weight.to(wide) * layer.weight_scale_value).T
    if layer.bias is not None:
        y = y + layer.bias.to(wide)
    out.copy_(F.gelu(y, approximate="tanh") if gelu else y)


def patchify(images: Tensor, out: Tensor, patch: int) -> None:
    """Patches of uint8 images (N, S, S, 3) as rows (N * patches, 2 * stride): twice the row of a convolution's weight
    (channel, row, column), padded with zeros. Bytes are exact in BF16, so weights in two halves lose nothing."""
    if images.is_cuda:
        return _kernels("rows").patchify(images, out, patch)
    n, size = images.shape[:2]
    side, stride = size // patch, out.shape[1] // 2
    rows = images.permute(0, 3, 1, 2).reshape(n, 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
    rows = F.pad(rows.reshape(n * side * side, -1).to(out.dtype), (0, stride - 3 * patch * patch))
    out.copy_(torch.cat((rows, rows), 1))


def patch_product(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (R, N) float32 = rows (R, K) BF16 times weight (N, K) BF16, transposed."""
    if rows.is_cuda:
        torch.mm(rows, weight.t(), out_dtype=torch.float32, out=out)  # type: ignore[call-overload]
    else:
        out.copy_(rows.to(out.dtype) @ weight.to(out.dtype).T)


def _normed(x: Tensor, layer: bool, eps: float) -> Tensor:
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if layer:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def add_norm(
    x: Tensor, y: Tensor | None, x_out: Tensor, h: Tensor, *, layer: bool, eps: float, inverse_scale: float | None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """x_out = x + y, h = norm(x_out), without weights: those are folded into the product that follows.

    x, x_out (R, W); y (R', W), R a multiple of R' (repeated), or None: x_out is not written. `layer`: LayerNorm,
    otherwise RMSNorm.
    """
    if x.is_cuda:
        return _kernels("rows").add_norm(x, y, x_out, h, layer=layer, eps=eps, inverse_scale=inverse_scale, pdl=pdl)
    if y is not None:
        x_out.copy_(x + y.repeat(x.shape[0] // y.shape[0], 1).to(x.dtype))
        x = x_out
    _store(h, _normed(x, layer, eps), inverse_scale)


def embed_norm(
    image_tokens: Tensor, tokens: Tensor, table: Tensor, x: Tensor, h: Tensor, *, eps: float,
    inverse_scale: float | None,
) -> None:  # fmt: skip
    """x = image tokens (B, I, W) and then embedded tokens (B, L), times √W, as rows; h = rmsnorm(x)."""
    if x.is_cuda:
        return _kernels("rows").embed_norm(image_tokens, tokens, table, x, h, eps=eps, inverse_scale=inverse_scale)
    embedded = table[tokens] * float(x.shape[1]) ** 0.5
    x.copy_(torch.cat((image_tokens, embedded.to(x.dtype)), 1).reshape(x.shape))
    _store(h, _normed(x, False, eps), inverse_scale)


def geglu(
    gate_up: Tensor, out: Tensor, *, inverse_scale: float | None, paired: bool = False, pdl: bool = False
) -> None:
    """out (R, H) = gelu_tanh(gate) * up of (R, 2 H): gate first, or, `paired`, by turns eight of gate, eight of up."""
    if gate_up.is_cuda:
        return _kernels("rows").geglu(gate_up, out, inverse_scale=inverse_scale, paired=paired, pdl=pdl)
    if paired:
        gate_up = gate_up.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1)
    _store(out, reference.geglu(gate_up), inverse_scale)


def gelu(x: Tensor, out: Tensor, *, inverse_scale: float | None, pdl: bool = False) -> None:
    """out = gelu_tanh(x)."""
    if x.is_cuda:
        return _kernels("rows").gelu(x, out, inverse_scale=inverse_scale, pdl=pdl)
    _store(out, F.gelu(x, approximate="tanh"), inverse_scale)


def rope_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 … length - 1, each (length, head_dim / 2) float32."""
    cos, sin = reference.rope_tables(torch.arange(length, device=device), head_dim, torch.float32)
    return cos[:, 0].contiguous(), sin[:, 0].contiguous()


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, heads: int, *, pdl: bool = False
) -> None:
    """Rotate q inside `qkv` (B * S, (heads + 2 kv_heads) * d) in place; rotated k and v go to the cache.

    keys, values (B, S, kv_heads, d), contiguous. The position of a row is its place in the sequence.
    """
    if qkv.is_cuda:
        return _kernels("rows").rope_cache(qkv, cos, sin, keys, values, heads, pdl=pdl)
    batch, tokens, kv_heads, head_dim = keys.shape
    parts = qkv.view(batch, tokens, heads + 2 * kv_heads, head_dim)
    c, s = cos[:tokens, None].to(qkv.dtype), sin[:tokens, None].to(qkv.dtype)
    keys.copy_(reference.apply_rope(parts[:, :, heads : heads + kv_heads], c, s))
    values.copy_(parts[:, :, heads + kv_heads :])
    parts[:, :, :heads] = reference.apply_rope(parts[:, :, :heads], c, s)


def attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, *, inverse_scale: float | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Every query sees the first `lengths[b]` keys (all of them for None).

    q (B, T, heads, d), k, v (B, S, kv_heads, d), k and v of equal strides, any strides but the last; out (B, T,
    heads * d) contiguous; lengths (B,) int32. On a Hopper the shapes of the full-size models run CUDA C++
    (`vla_accel.ops.cuda.attention`).
    """
    if q.is_cuda:
        from vla_accel.ops.cuda import attention as hopper

        kernel, gpu = hopper.kernel_of(q, k, v, out, lengths), Gpu.of(q.device)
        if kernel and gpu is not None:
            return hopper.attention(kernel, q, k, v, out, lengths, gpu=gpu, inverse_scale=inverse_scale, pdl=pdl)
        return _kernels("attention").attention(q, k, v, out, lengths, inverse_scale=inverse_scale, pdl=pdl)
    mask = None
    if lengths is not None:
        mask = (torch.arange(k.shape[1], device=q.device) < lengths[:, None])[:, None].expand(-1, q.shape[1], -1)
    _store(out, reference.attention(q, k, v, mask).flatten(2), inverse_scale)


def suffix_workspace(
    batch: int, tokens: int, prefix_tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """What `suffix_attention` keeps between its programs. The counters must be zero at the start, and stay so."""
    if device.type != "cuda":
        return (torch.empty(0), torch.empty(0), torch.empty(0))
    sizes = _kernels("attention").suffix_workspace(batch, tokens, prefix_tokens, heads, kv_heads, head_dim)
    return (
        torch.empty(sizes[0], device=device),
        torch.empty(sizes[1], device=device),
        torch.zeros(sizes[2], dtype=torch.int32, device=device),
    )


def suffix_attention(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor,
    workspace: tuple[Tensor, Tensor, Tensor], *, state_first: bool, pdl: bool = False,
) -> None:  # fmt: skip
    """The suffix attends to the first `lengths[b]` keys of the prefix and to itself.

    q (B, T, heads, d); prefix_k, prefix_v (B, S, kv_heads, d); k, v (B, T, kv_heads, d); out (B * T, heads * d); all
    contiguous. `state_first`: the first token sees itself and the prefix only (π0).
    """
    if q.is_cuda:
        return _kernels("attention").suffix_attention(
            q, prefix_k, prefix_v, k, v, lengths, out, workspace, state_first=state_first, pdl=pdl
        )
    batch, tokens = q.shape[:2]
    inner = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    if state_first:
        inner[0, 1:] = False
    outer = torch.arange(prefix_k.shape[1], device=q.device) < lengths[:, None]
    mask = torch.cat((outer[:, None].expand(-1, tokens, -1), inner.expand(batch, -1, -1)), 2)
    keys, values = torch.cat((prefix_k, k), 1), torch.cat((prefix_v, v), 1)
    values = values.masked_fill(~torch.cat((outer, outer.new_ones(batch, tokens)), 1)[:, :, None, None], 0)
    out.copy_(reference.attention(q, keys, values, mask).reshape(out.shape))


def _modulated_product(x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
    wide = torch.promote_types(torch.float32, x.dtype)
    rstd = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    scaled = x.to(wide) if scale is None else (x.to(wide) * (1.0 + scale)).to(x.dtype).to(wide)
    y = scaled @ (layer.weight.to(wide) * layer.weight_scale_value).T * rstd
    return y if shift is None else y + shift


def qkv_rope(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, cos: Tensor, sin: Tensor, lengths: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *, eps: float, pdl: bool = False,
) -> None:  # fmt: skip
    """Norm, q/k/v projection and rotation of the suffix. FP8 weights are widened, the activations are not quantised.

    x (B * T, W); `scale` (W,) float32 of the norm (1 + scale) or None; `shift` (N,) float32: the norm's shift times
    the weight; positions start at lengths[b]; q (B, T, heads, d), k, v (B, T, kv_heads, d), contiguous.
    """
    if x.is_cuda:
        return _kernels("skinny").qkv_rope(
            x, layer.weight, layer.weight_scale_value, scale, shift, cos, sin, lengths, q, k, v, eps=eps, pdl=pdl
        )
    batch, tokens, heads, head_dim = q.shape
    y = _modulated_product(x, layer, scale, shift, eps).view(batch, tokens, -1, head_dim)
    place = lengths[:, None] + torch.arange(tokens, device=x.device)
    c, s = cos[place][:, :, None].to(y.dtype), sin[place][:, :, None].to(y.dtype)
    kv_heads = k.shape[2]
    q.copy_(reference.apply_rope(y[:, :, :heads], c, s))
    k.copy_(reference.apply_rope(y[:, :, heads : heads + kv_heads], c, s))
    v.copy_(y[:, :, heads + kv_heads :])


def gate_up_geglu(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, out: Tensor, *, eps: float,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Norm, gate and up projections and GeGLU of the suffix: x (R, W) to out (R, H). As `qkv_rope` otherwise."""
    if x.is_cuda:
        return _kernels("skinny").gate_up_geglu(
            x, layer.weight, layer.weight_scale_value, scale, shift, out, eps=eps, pdl=pdl
        )
    out.copy_(reference.geglu(_modulated_product(x, layer, scale, shift, eps)))


def project(
    a: Tensor, layer: Linear, gate: Tensor | None, x: Tensor, *, residual: bool = True, tokens: int = 1,
    skip_first: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """x (R, N) += gate ∘ (a Wᵀ + b), or = without `residual`. a (R, K); gate (N,) float32 or None.

    `skip_first`: the first of every `tokens` rows of x is left alone.
    """
    if a.is_cuda:
        return _kernels("skinny").project(
            a, layer.weight, layer.weight_scale_value, layer.bias, gate, x, residual=residual, tokens=tokens,
            skip_first=skip_first, pdl=pdl,
        )  # fmt: skip
    wide = torch.promote_types(torch.float32, x.dtype)
    y = a.to(wide) @ (layer.weight.to(wide) * layer.weight_scale_value).T
    if layer.bias is not None:
        y = y + layer.bias.to(wide)
    if gate is not None:
        y = y * gate
    if residual:
        y = y + x.to(wide)
    if skip_first:
        y = torch.where((torch.arange(len(x), device=x.device) % tokens > 0)[:, None], y, x.to(wide))
    x.copy_(y)


def step(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, w_out: Tensor, b_out: Tensor, actions: Tensor,
    target: Tensor, weights: Tensor, w_in: Tensor, b_in: Tensor, following: Tensor, *, dt: float, time: float,
    gain: float, eps: float, tokens: int, first: bool, last: bool, silu: bool, pdl: bool = False,
) -> None:  # fmt: skip
    """Between two evaluations: final norm, output projection, Euler step, and the next evaluation's input.

    actions (B, H, A) float32 += dt * velocity, unless `first`; following (B * T, W) gets actions · w_in + b_in (SiLU of
    it if `silu`) in its last H tokens of every T, unless `last`. w_out, w_in (A, W) float32, b_out (A,), b_in (W,);
    scale (W,): the norm multiplies by 1 + scale; shift (W,) or None. The velocity is guided towards `target` (B, H, A):
    gain * weights ∘ (target - (actions - time * velocity)) less, weights (B, H) float32; zero changes no bit.
    """
    if x.is_cuda:
        return _kernels("skinny").step(
            x, scale, shift, w_out, b_out, actions, target, weights, w_in, b_in, following, dt=dt, time=time,
            gain=gain, eps=eps, tokens=tokens, first=first, last=last, silu=silu, pdl=pdl,
        )  # fmt: skip
    batch, horizon, _ = actions.shape
    if not first:
        assert scale is not None
        tail = x.view(batch, tokens, -1)[:, tokens - horizon :]
        normed = _normed(tail, False, eps) * (1.0 + scale)
        normed = normed if shift is None else normed + shift
        velocity = (normed @ w_out.T + b_out).to(actions.dtype)
        velocity = velocity - gain * (weights[..., None] * (target - (actions - time * velocity)))
        actions += dt * velocity
    if not last:
        embedded = actions.to(w_in.dtype) @ w_in + b_in
        embedded = F.silu(embedded) if silu else embedded
        following.view(batch, tokens, -1)[:, tokens - horizon :] = embedded.to(following.dtype)
