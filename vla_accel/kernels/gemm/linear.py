"""Products of linear layers: the project's own kernels where they are the fastest, cuBLAS elsewhere.

Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_accel.fp8 import INT8
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.dispatch import path
from vla_accel.kernels.gemm import int8
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import geglu, gelu
from vla_accel.runtime import current


def launched_own_gemm(
    x: Tensor, layer: Linear, out: Tensor, activation: Activation, inverse_scale: float | None, **norms: Any
) -> bool:
    """Launch the project's own Hopper GEMM if it is the fastest kernel for this product.

    Args:
        norms: arguments of `gemm` for a norm of x or a residual, which cuBLAS does not offer.

    Returns:
        Whether a kernel was launched.
    """
    from vla_accel.kernels.gemm import hopper as gemm
    from vla_accel.kernels.gemm.choice import known

    gpu = current(x).gpu
    if gpu is None or gemm.why_not(gpu, x, layer.weight, out, activation) is not None:
        return False
    tiling = known(x.device, x.dtype, activation, len(x), *layer.weight.shape, inside=bool(norms))
    if tiling is None or (activation.gated and layer.bias is not None):
        return False
    scale = layer.input_scale_value * layer.weight_scale_value
    gemm.gemm(
        x, layer.weight, layer.bias, out, gpu=gpu, tiling=tiling, activation=activation, scale=scale,
        inverse_scale=inverse_scale, **norms,
    )  # fmt: skip
    return True


def has_own_gemm(rows: int, layer: Linear, activation: Activation, *, inside: bool = False) -> bool:
    """Return whether `launched_own_gemm` takes this product. Arguments as `why_no_own_gemm`."""
    return why_no_own_gemm(rows, layer, activation, inside=inside) is None


def why_no_own_gemm(rows: int, layer: Linear, activation: Activation, *, inside: bool = False) -> str | None:
    """Explain why `launched_own_gemm` does not take this product; None if it does.

    Call it while a program is built: if no measurement exists yet, it measures the GEMM and cuBLAS.

    Args:
        rows: rows of x.
        activation: NONE, GELU, GEGLU or SWIGLU.
        inside: whether the product norms its input or adds to the residual.
    """
    if path(layer.weight) != "cuda":
        return "it runs on a GPU"
    if layer.weight.dtype == INT8.dtype:
        return "INT8 has a kernel of its own"
    from vla_accel.kernels.gemm import hopper as gemm
    from vla_accel.kernels.gemm.choice import measured, why_library

    gpu = current(layer.weight).gpu
    if gpu is not None and (reason := gemm.why_not_on(gpu)):
        return reason
    if activation.gated and layer.bias is not None:
        return "its gated products have no bias"
    if activation.gated and not layer.paired:
        return "the rows of gate and up do not alternate by eights"
    (n, k), trial = layer.weight.shape, functools.partial(_trial, layer, activation, rows)
    sizes = (layer.weight.device, layer.weight.dtype, activation, rows, n, k)
    tiling = measured(*sizes, trial, inside=inside)
    if tiling is None:
        return why_library(*sizes)
    return tiling.why_not(activation, normed=True) if inside and activation.gated else None


def _trial(layer: Linear, activation: Activation, rows: int, gpu: Gpu) -> Callable[[Any], Tensor]:
    """Return a call of the product on random rows: with a tiling, or with cuBLAS for None."""
    from vla_accel.kernels.gemm import hopper as gemm

    (n, k), device, kind = layer.weight.shape, layer.weight.device, layer.weight.dtype
    fp8 = layer.weight_scale is not None
    x = torch.randn(rows, k, generator=torch.Generator(device).manual_seed(0), device=device).to(kind)
    product = out = torch.empty(rows, n, dtype=torch.bfloat16 if fp8 else kind, device=device)
    if activation is not Activation.NONE:
        out = torch.empty(rows, n // 2 if activation.gated else n, dtype=kind, device=device)
    inverse = 1.0 if fp8 and activation is not Activation.NONE else None
    scale = layer.input_scale_value * layer.weight_scale_value

    chain = Chain(gpu)

    def call(tiling: gemm.Tiling | None) -> Tensor:
        if tiling is not None:
            with chain.resumed():
                gemm.gemm(
                    x, layer.weight, layer.bias, out, gpu=gpu, tiling=tiling, activation=activation, scale=scale,
                    inverse_scale=inverse,
                )  # fmt: skip
        elif activation is Activation.GELU and not fp8:
            library_product(x, layer, out, activation)
        else:
            library_product(x, layer, product)
            if activation.gated:
                geglu(product, out, inverse_scale=inverse, paired=layer.paired, activation=activation)
            elif activation is Activation.GELU:
                gelu(product, out, inverse_scale=inverse)
        return out

    return call


def products_by(
    rows: int, products: Mapping[str, tuple[Linear, Activation]], inside: Collection[str] = ()
) -> tuple[str, bool]:
    """Describe which kernels run a program's products.

    Args:
        rows: rows of every product.
        products: each product by name, with its activation.
        inside: names of the products that norm their input or add to the residual (`norms.can_be_inside`).

    Returns:
        The text for the program's ledger entry, with the reasons for cuBLAS, empty without a GPU; and whether dependent
        launches pay off. They do not if cuBLAS runs every product, because its kernels wait for all their predecessors.
    """
    ways: dict[str, list[str]] = {}
    for name, (layer, activation) in products.items():
        if path(layer.weight) == "reference":
            return "", False
        ways.setdefault(_way(rows, layer, activation, name in inside), []).append(name)
    return ", products " + "; ".join(f"{way}: {', '.join(names)}" for way, names in ways.items()), _OWN in ways


_OWN = "in CUDA C++"


def _way(rows: int, layer: Linear, activation: Activation, inside: bool) -> str:
    """Describe for the ledger which kernel runs a product."""
    if layer.weight.dtype == INT8.dtype:
        int8.measure(layer, activation, rows)
        return f"in INT8 by Triton ({int8.tile(layer, activation, rows)})"
    reason = why_no_own_gemm(rows, layer, activation, inside=inside)
    return _OWN if reason is None else f"by cuBLAS (CUDA C++ out: {reason})"


def library_product(x: Tensor, layer: Linear, out: Tensor, activation: Activation = Activation.NONE) -> None:
    """`linear` by cuBLAS, on a GPU. `activation`: NONE, or GELU for a layer with a bias."""
    if layer.weight_scale is not None and layer.input_scale is not None:
        torch._scaled_mm(
            x, layer.weight.t(), scale_a=layer.input_scale, scale_b=layer.weight_scale, bias=layer.bias,
            out_dtype=out.dtype, use_fast_accum=True, out=out,
        )  # fmt: skip
    elif activation is Activation.GELU:
        # cuBLASLt's GELU epilogue is the tanh form.
        torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True, out=out)  # type: ignore[call-overload]
    elif layer.bias is not None:
        torch.addmm(layer.bias, x, layer.weight.t(), out=out)
    else:
        torch.mm(x, layer.weight.t(), out=out)


def linear(x: Tensor, layer: Linear, out: Tensor, activation: Activation = Activation.NONE) -> None:
    """out = activation(x Wᵀ + b), NONE or GELU (not in FP8). x (R, K), out (R, N). INT8 sums are exact."""
    way = path(x)
    if layer.weight.dtype == INT8.dtype:
        return int8.product(x, layer, out, activation=activation)
    if x.is_cuda and way != "reference":
        if way == "cuda" and activation is Activation.NONE and launched_own_gemm(x, layer, out, activation, None):
            return
        library_product(x, layer, out, activation)
        return
    wide = torch.promote_types(torch.float32, out.dtype)
    y = (x.to(wide) * layer.input_scale_value) @ layer.true_weight(wide).T
    if layer.bias is not None:
        y = y + layer.bias.to(wide)
    out.copy_(reference.activate(y, activation))


def linear_gelu(x: Tensor, layer: Linear, scratch: Tensor, out: Tensor, *, inverse_scale: float | None) -> None:
    """out = gelu_tanh(x Wᵀ + b). x (R, K), out (R, N); `scratch` (R, N) may be `out`."""
    if layer.weight.dtype == INT8.dtype:
        return int8.product(x, layer, out, activation=Activation.GELU, inverse_scale=inverse_scale)
    if path(x) == "cuda" and launched_own_gemm(x, layer, out, Activation.GELU, inverse_scale):
        return
    if layer.weight_scale is None and inverse_scale is None:
        return linear(x, layer, out, Activation.GELU)
    linear(x, layer, scratch)
    gelu(scratch, out, inverse_scale=inverse_scale)


def gate_up(
    x: Tensor, layer: Linear, scratch: Tensor, out: Tensor, *, inverse_scale: float | None,
    activation: Activation = Activation.GEGLU,
) -> None:  # fmt: skip
    """out = activation(x Wᵀ + b), GEGLU or SWIGLU. x (R, K), out (R, H); `scratch` (R, 2 H)."""
    if layer.weight.dtype == INT8.dtype:
        return int8.product(x, layer, out, activation=activation, inverse_scale=inverse_scale)
    if path(x) == "cuda" and layer.paired and launched_own_gemm(x, layer, out, activation, inverse_scale):
        return
    linear(x, layer, scratch)
    geglu(scratch, out, inverse_scale=inverse_scale, paired=layer.paired, activation=activation)


def patch_product(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (R, N) float32 = rows (R, K) BF16 times weight (N, K) BF16, transposed."""
    if rows.is_cuda and path(rows) != "reference":
        torch.mm(rows, weight.t(), out_dtype=torch.float32, out=out)  # type: ignore[call-overload]
    else:
        out.copy_(rows.to(out.dtype) @ weight.to(out.dtype).T)
