"""The product of rows with a weight, with what surrounds it in one kernel: `gemm`.

Conventions as in `vla_accel.kernels.rows.rows`. Rows and weights of the same dtype go to the tensor cores as they are:
BF16, FP16, FP8 with scales, or INT8 with exact sums. FP8 and INT8 weights of wider rows are widened in registers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.fp8 import INT8
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.gemm import int8
from vla_accel.kernels.gemm.config import (
    GemmConfig,
    GemmSizes,
    Library,
    OneRow,
    Skinny,
    default,
    gemm_sizes,
    known,
)
from vla_accel.kernels.gemm.epilogue import PLAIN, Epilogue, Heads, Norm, Workspace
from vla_accel.kernels.gemm.hopper.config import HopperTile
from vla_accel.kernels.gemm.moments import write as write_moments
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import geglu, gelu, store
from vla_accel.runtime import current


def gemm(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue = PLAIN, norm: Norm | None = None,
    config: GemmConfig | None = None, workspace: Workspace | None = None,
) -> None:  # fmt: skip
    """out = epilogue(norm(x) Wᵀ).

    Args:
        x: (R, K).
        weights: (N, K).
        out: (R, N), (R, N / 2) for a gated activation, or heads with N columns for a rotation.
        config: the tile config, from `config.candidates`, `variants` or `without_triton`. None: the measured or
            default one. `Library` and `HopperTile` need the moments of the rows for a norm, and support no pinned rows.
        workspace: made by `gemm_workspace` for the same config. Without a config: a buffer (R, N) in which cuBLAS
            leaves the product before the activation; may be `out`.

    Raises:
        EngineError: no kernel runs this product. Plan a norm or a residual with `choice.is_inside`.
    """
    if path(x) == "reference":
        return _reference(x, weights, out, epilogue, norm, workspace)
    if x.dtype == INT8.dtype:
        assert isinstance(out, Tensor)
        return int8.launch(x, weights, out, epilogue, int8.tile(weights, epilogue.activation, len(x)))
    if config is None and not (_widens(x, out) or _needs_triton(epilogue, norm)):
        assert isinstance(out, Tensor)
        return _hopper_or_library(x, weights, out, epilogue, norm, workspace)
    gpu = current(x).gpu
    if config is None:
        heads = out if isinstance(out, Heads) else None
        gated = epilogue.activation.gated
        layer_norm = norm is not None and not gated and heads is None
        config = default(gpu, gemm_sizes(x, weights, heads, gated=gated, layer_norm=layer_norm))
    if isinstance(config, HopperTile):
        from vla_accel.kernels.gemm import hopper

        assert gpu is not None
        hopper.gemm(x, weights, out, epilogue, norm, config, gpu)
    elif isinstance(config, Library):
        assert workspace is not None and epilogue.pinned is None
        library_product(x if norm is None else norm.rows(x), weights, workspace[0])
        kernels("gemm.triton_library").finish(workspace[0], weights, out, epilogue, norm)
    elif isinstance(config, OneRow):
        kernels("gemm.triton_row").product(x, weights, out, epilogue, norm, config)
    elif isinstance(config, Skinny):
        kernels("gemm.triton_skinny").product(x, weights, out, epilogue, norm, config)
    else:
        kernels("gemm.triton_pipelined").product(x, weights, out, epilogue, norm, config, workspace)


def gemm_workspace(sizes: GemmSizes, device: torch.device, config: GemmConfig) -> Workspace | None:
    """Allocate what a product keeps between programs that share K, or between cuBLAS and the kernel after it.

    None if it needs nothing. The counters start as zero, and each call resets them.
    """
    if isinstance(config, (Skinny, OneRow, HopperTile)) or path(device) == "reference":
        return None
    if isinstance(config, Library):
        dtype = torch.bfloat16 if sizes.row_bytes == 2 else torch.float32
        return (torch.empty(sizes.rows, sizes.n, dtype=dtype, device=device),)
    if config.split == 1:
        return None
    parts, counters = config.workspace(sizes)
    return torch.empty(parts, device=device), torch.zeros(counters, dtype=torch.int32, device=device)


def patch_product(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (R, N) float32 = rows (R, K) BF16 times weight (N, K) BF16, transposed."""
    if path(rows) != "reference":
        torch.mm(rows, weight.t(), out_dtype=torch.float32, out=out)  # type: ignore[call-overload]
    else:
        out.copy_(rows.to(out.dtype) @ weight.to(out.dtype).T)


def library_product(x: Tensor, weights: Linear, out: Tensor, activation: Activation = Activation.NONE) -> None:
    """The product by cuBLAS, on a GPU. `activation`: NONE, or GELU or RELU for weights with a bias."""
    if weights.weight_scale is not None and weights.input_scale is not None:
        torch._scaled_mm(
            x, weights.weight.t(), scale_a=weights.input_scale, scale_b=weights.weight_scale, bias=weights.bias,
            out_dtype=out.dtype, use_fast_accum=True, out=out,
        )  # fmt: skip
    elif activation is not Activation.NONE:
        # cuBLASLt's GELU epilogue is the tanh form.
        gelu = activation is Activation.GELU
        torch._addmm_activation(weights.bias, x, weights.weight.t(), use_gelu=gelu, out=out)  # type: ignore[call-overload]
    elif weights.bias is not None:
        torch.addmm(weights.bias, x, weights.weight.t(), out=out)
    else:
        torch.mm(x, weights.weight.t(), out=out)


def by_library(
    x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue, workspace: Workspace | None,
    product: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """`gemm` by a plain `product`, by default of cuBLAS, and a kernel for an activation that it does not have."""
    # cuBLAS is on a GPU only; a test may run kernels on a CPU.
    product = product or (library_product if x.is_cuda else _reference_product)
    activation, plain = epilogue.activation, weights.weight_scale is None and epilogue.quantize is None
    if activation is Activation.NONE or (activation in (Activation.GELU, Activation.RELU) and plain):
        return product(x, weights, out, activation)
    assert workspace is not None
    product(x, weights, workspace[0])
    if activation.gated:
        geglu(workspace[0], out, inverse_scale=epilogue.quantize, paired=weights.paired, activation=activation)
    else:
        assert activation in (Activation.GELU, Activation.GELU_ERF, Activation.QUICK_GELU)
        gelu(workspace[0], out, inverse_scale=epilogue.quantize, form=activation)


def _widens(x: Tensor, out: Tensor | Heads) -> bool:
    """Return whether the output is wider than a product of such rows, which cuBLAS refuses where it adds a bias."""
    return isinstance(out, Tensor) and out.dtype == torch.float32 != x.dtype


def _needs_triton(epilogue: Epilogue, norm: Norm | None) -> bool:
    """Return whether neither the Hopper GEMM with a default config nor cuBLAS runs a product."""
    e = epilogue
    alone = e.residual and e.moments is None
    normed = norm is not None and (norm.moments is None or norm.scale is not None)
    return alone or normed or any(p is not None for p in (e.shift, e.rope, e.gate, e.pinned)) or e.skip_every > 0


def _is_fused(epilogue: Epilogue, norm: Norm | None) -> bool:
    """Return whether a product norms its input, adds to the residual or writes moments, which cuBLAS cannot."""
    return norm is not None or epilogue.residual or epilogue.moments is not None


def _hopper_or_library(
    x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue, norm: Norm | None, workspace: Workspace | None
) -> None:
    """Launch the faster of the Hopper GEMM and cuBLAS; with a norm, a residual or moments the Hopper GEMM."""
    from vla_accel.kernels.gemm import hopper

    gpu, activation, fused = current(x).gpu, epilogue.activation, _is_fused(epilogue, norm)
    if path(x) == "cuda" and gpu is not None and (weights.paired or not activation.gated):
        tile = known(x.device, x.dtype, activation, len(x), *weights.weight.shape, inside=fused)
        if tile is not None and hopper.why_not(gpu, x, weights, out, epilogue) is None:
            return hopper.gemm(x, weights, out, epilogue, norm, tile, gpu)
    if fused:
        raise EngineError(
            f"gemm: no kernel adds {len(x)} rows by a weight {tuple(weights.weight.shape)} to a residual, norms them "
            "or writes their moments"
        )
    by_library(x, weights, out, epilogue, workspace)


def _reference(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, workspace: Workspace | None
) -> None:
    e = epilogue
    if x.dtype == INT8.dtype:
        assert isinstance(out, Tensor)
        return _reference_int8(x, weights, out, epilogue)
    if isinstance(out, Tensor) and not (_is_fused(e, norm) or _needs_triton(e, norm)):
        return by_library(x, weights, out, epilogue, workspace, _reference_product)
    wide = torch.promote_types(torch.float32, x.dtype)
    y = x.to(wide) @ weights.true_weight(wide).T if norm is None else _normed_product(x, weights, e, norm)
    shift = weights.bias if e.shift is None else _own(e.shift, e.pinned)
    y = y if shift is None else y + shift.to(wide)
    if weights.paired:
        y = y.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1)
    y = reference.activate(y, e.activation)
    if isinstance(out, Heads):
        assert e.rope is not None
        batch, tokens, heads, head_dim = out.q.shape
        at = e.rope.starts[:, None] + torch.arange(tokens, device=x.device)
        c, s = (table[at][:, :, None].to(y.dtype) for table in (e.rope.cos, e.rope.sin))
        q, k, v = y.view(batch, tokens, -1, head_dim).split((heads, out.k.shape[2], out.k.shape[2]), 2)
        out.q.copy_(reference.apply_rope(q, c, s))
        out.k.copy_(reference.apply_rope(k, c, s))
        out.v.copy_(v)
        return
    y = y if e.gate is None else y * _own(e.gate, e.pinned)
    y = y + out.to(wide) if e.residual else y
    if e.skip_every:
        y = torch.where((torch.arange(len(out), device=x.device) % e.skip_every > 0)[:, None], y, out.to(wide))
    store(out, y, e.quantize)
    if e.moments is not None:
        write_moments(out, e.next_scale, e.moments)


def _normed_product(x: Tensor, weights: Linear, epilogue: Epilogue, norm: Norm) -> Tensor:
    wide, m = torch.promote_types(torch.float32, x.dtype), norm.moments
    rows = x.to(wide)
    mean = rows.mean(1) if m is None else m.sums.to(wide).sum(0) / x.shape[1]
    square = rows.square().mean(1) if m is None else m.squares.to(wide).sum(0) / x.shape[1]
    variance = square if norm.sums is None else (square - mean.square()).clamp(min=0)
    if norm.scale is not None:
        rows = (rows * (1.0 + _own(norm.scale, epilogue.pinned))).to(x.dtype).to(wide)
    y = rows @ weights.true_weight(wide).T
    y = y if norm.sums is None else y - mean[:, None] * norm.sums.to(wide)
    return y * torch.rsqrt(variance + norm.eps)[:, None]


def _own(table: Tensor, pinned: Tensor | None) -> Tensor:
    return table if pinned is None else table[pinned.long()]


def _reference_product(x: Tensor, weights: Linear, out: Tensor, activation: Activation = Activation.NONE) -> None:
    wide = torch.promote_types(torch.float32, out.dtype)
    y = (x.to(wide) * weights.input_scale_value) @ weights.true_weight(wide).T
    y = y if weights.bias is None else y + weights.bias.to(wide)
    out.copy_(reference.activate(y, activation))


def _reference_int8(x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue) -> None:
    assert weights.weight_scale is not None
    # Float64 holds every sum of 127 x 127 exactly; then in float32, in the kernel's order.
    y = (x.double() @ weights.weight.double().T).float() * (weights.weight_scale * weights.input_scale_value)
    y = y if weights.bias is None else y + weights.bias.float()
    if epilogue.activation.gated:
        geglu(y, out, inverse_scale=epilogue.quantize, paired=weights.paired, activation=epilogue.activation)
    else:
        store(out, reference.activate(y, epilogue.activation), epilogue.quantize)
