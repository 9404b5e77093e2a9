"""Which kernel runs a product of many rows: the Hopper GEMM or cuBLAS, measured while a program is built.

Candidates are cuBLAS and the config of the table, or, without one, those of the search. Each call reads other weights,
as a program's layers do, and the Hopper GEMM prefetches those of the next call. Nothing is measured during graph
capture or in a deterministic runtime; then, and for products that no program has measured, the table decides.

cuBLAS cannot norm its input or add to the residual. Whether a norm runs inside the products around it is decided by
both together, because it saves a kernel between them. The table's configs were timed in such chains.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.config import measure, measured
from vla_accel.kernels.gemm import hopper, int8
from vla_accel.kernels.gemm.config import Library, known, measurement
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.gemm.hopper.config import HopperSizes, Use
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import by_library, gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.reference import MOMENTS_OF
from vla_accel.kernels.rows.rows import add_norm
from vla_accel.runtime import current

Product = tuple[Linear, Activation]
CALLS = 24
"""Calls in a row that are measured together."""
_CACHED = 128 << 20
"""Bytes of weights that no cache holds."""
_EPS = 1e-6
HOPPER = "in CUDA C++"
"""The ledger's name of the Hopper GEMM."""


def tune(weights: Linear, activation: Activation, rows: int, *, inside: bool = False) -> None:
    """Measure the Hopper GEMM and cuBLAS on a product, if that is necessary and possible. Arguments as `known`."""
    (n, k), kind, device = weights.weight.shape, weights.weight.dtype, weights.weight.device
    runtime = current(device)
    gpu, name = runtime.gpu, measurement(kind, activation, rows, n, k, inside=inside)
    table = hopper.planned(gpu, kind, activation, rows, n, k)
    decided = (
        measured(name, weights.weight.device) is not None or runtime.deterministic or (inside and table is not None)
    )
    if gpu is None or decided or torch.cuda.is_current_stream_capturing():
        return
    tiles = hopper.searched(gpu, kind, activation, rows, n, k) if table is None else [table]
    if inside and activation.gated:
        sizes = HopperSizes(rows, n, k, kind.itemsize, (Use(gated=True, normed=True),))
        tiles = [tile for tile in tiles if tile.why_not(gpu, sizes) is None]
    if tiles:
        configs = tiles if inside else [Library(), *tiles]
        measure(name, configs, trial(weights, activation, rows, gpu), device, CALLS)


def trial(weights: Linear, activation: Activation, rows: int, gpu: Gpu) -> Callable[[Library | HopperTile], Tensor]:
    """Return a call of the product on random rows by a config, which returns its output."""
    (n, k), device, kind = weights.weight.shape, weights.weight.device, weights.weight.dtype
    plain, fp8 = activation is Activation.NONE, weights.weight_scale is not None
    x = torch.randn(rows, k, generator=torch.Generator(device).manual_seed(0), device=device).to(kind)
    sums = out = torch.empty(rows, n, dtype=torch.bfloat16 if fp8 else kind, device=device)
    if not plain:
        out = torch.empty(rows, n // 2 if activation.gated else n, dtype=kind, device=device)
    epilogue = Epilogue(activation=activation, quantize=1.0 if fp8 and not plain else None)
    chain, layers = Chain(gpu), itertools.pairwise(in_turns(weights))

    def call(config: Library | HopperTile) -> Tensor:
        layer, following = next(layers)
        if isinstance(config, Library):
            by_library(x, layer, out, epilogue, (sums,))
        else:
            with chain.resumed():
                hopper.gemm(x, layer, out, replace(epilogue, prefetch=following.prefetchable), None, config, gpu)
        return out

    return call


def in_turns(weights: Linear) -> Iterator[Linear]:
    """Return copies of a product in turns, as many as a cache does not hold: a program runs one layer after another, so
    its weights come from memory. If memory is short, there are fewer copies."""
    copies = [weights]
    with contextlib.suppress(torch.OutOfMemoryError):
        for _ in range(1, min(CALLS, -(-_CACHED // max(weights.bytes, 1)))):
            copies.append(replace(weights, weight=weights.weight.clone()))
    return itertools.cycle(copies)


def has_hopper_gemm(rows: int, weights: Linear, activation: Activation, *, inside: bool = False) -> bool:
    """Return whether the Hopper GEMM runs a product. Arguments as `why_no_hopper_gemm`."""
    return why_no_hopper_gemm(rows, weights, activation, inside=inside) is None


def why_no_hopper_gemm(rows: int, weights: Linear, activation: Activation, *, inside: bool = False) -> str | None:
    """Explain why the Hopper GEMM does not run a product; None if it does.

    Call it while a program is built: if no measurement exists yet, it measures the GEMM and cuBLAS.

    Args:
        rows: rows of x.
        activation: one that the Hopper GEMM has.
        inside: whether the product norms its input or adds to the residual.
    """
    runtime = current(weights.weight)
    if runtime.backend != "cuda":
        return runtime.why_not_cuda
    if weights.integers:
        return "INT8 has a kernel of its own"
    device, kind, (n, k) = weights.weight.device, weights.weight.dtype, weights.weight.shape
    gpu = runtime.gpu
    if gpu is not None and (reason := hopper.why_not_on(gpu)):
        return reason
    if activation.gated and weights.bias is not None:
        return "its gated products have no bias"
    if activation.gated and not weights.paired:
        return "the rows of gate and up do not alternate by eights"
    tune(weights, activation, rows, inside=inside)
    tile = known(device, kind, activation, rows, n, k, inside=inside)
    if tile is not None:
        use = Use(gated=activation.gated, normed=inside and activation.gated)
        return tile.why_not(gpu, HopperSizes(rows, n, k, kind.itemsize, (use,)))
    if gpu is None:
        return "there is no GPU"
    if measured(measurement(kind, activation, rows, n, k), device) is not None:
        return "it was measured to be slower"
    return hopper.why_not_searched(gpu, rows, n, k) or "no tile config is known for this size"


def is_inside(rows: int, before: Product, after: Product) -> bool:
    """Return whether a norm runs inside the products before and after it: both have a kernel that can, and together
    these are the fastest. The product before the norm adds to the residual.
    """
    width = len(before[0].weight)
    # The rows of a quantised product are quantised after their norm.
    if after[0].weight_scale is not None or width % MOMENTS_OF:
        return False
    products = (before, after)
    if not all(has_hopper_gemm(rows, weights, kind, inside=True) for weights, kind in products):
        return False
    gpu = current(before[0].weight).gpu
    if all(hopper.planned(gpu, w.weight.dtype, kind, rows, *w.weight.shape) for w, kind in products):
        return True
    for weights, kind in products:
        tune(weights, kind, rows)
    names = " and ".join(f"{'x'.join(map(str, w.weight.shape))} {w.weight.dtype} {kind}" for w, kind in products)
    what = f"{'RMSNorm' if after[0].sums is None else 'LayerNorm'} of {rows} rows between {names}"
    ways = ("inside", "apart")
    return measure(what, ways, norm_trial(rows, before, after), before[0].weight.device, CALLS).config == ways[0]


def norm_trial(rows: int, before: Product, after: Product) -> Callable[[str], Tensor]:
    """Return a call of two products of random rows with the norm between them "inside" or "apart", which returns the
    output."""
    (first, _), (second, activation) = before, after
    (width, k), n, device = first.weight.shape, len(second.weight), first.weight.device
    draw = torch.Generator(device).manual_seed(0)
    kind = torch.bfloat16 if second.weight_scale is not None else second.weight.dtype
    x = torch.randn(rows, k, generator=draw, device=device).to(first.weight.dtype)
    stream = torch.randn(rows, width, generator=draw, device=device).to(kind)
    y, normed, sums = torch.empty_like(stream), torch.empty_like(stream), stream.new_empty(rows, n)
    normed = normed.to(second.weight.dtype)
    out, moments = (stream.new_empty(rows, n // 2) if activation.gated else sums), Moments.like(stream)
    epilogue, layer = Epilogue(activation=activation), second.sums is not None
    chain = Chain(current(device).gpu)
    layers = itertools.pairwise(zip(in_turns(first), in_turns(second), strict=False))

    def call(way: str) -> Tensor:
        (one, other), (following, _) = next(layers)
        last = replace(epilogue, prefetch=following.prefetchable)
        with chain.resumed():
            if way == "inside":
                gemm(x, one, stream, Epilogue(residual=True, moments=moments))
                gemm(stream, other, out, last, Norm(_EPS, moments, sums=second.sums))
            else:
                gemm(x, one, y)
                add_norm(stream, y, stream, normed, layer=layer, eps=_EPS, inverse_scale=second.inverse_scale)
                gemm(normed, other, out, last, workspace=(sums,))
        return out

    return call


def products_by(
    rows: int, products: Mapping[str, tuple[Linear, Activation]], inside: Collection[str] = ()
) -> tuple[str, bool]:
    """Describe which kernels run a program's products.

    Args:
        rows: rows of every product.
        products: each product by name, with its activation.
        inside: names of the products that norm their input or add to the residual (`is_inside`).

    Returns:
        The text for the program's ledger entry, with the reasons for cuBLAS, empty without a GPU; and whether dependent
        launches pay off. They do not if cuBLAS runs every product, because its kernels wait for all their predecessors.
    """
    backends: dict[str, list[str]] = {}
    for name, (weights, activation) in products.items():
        if current(weights.weight).backend == "reference":
            return "", False
        backends.setdefault(_backend(rows, weights, activation, name in inside), []).append(name)
    return ", products " + "; ".join(f"{by}: {', '.join(names)}" for by, names in backends.items()), HOPPER in backends


def _backend(rows: int, weights: Linear, activation: Activation, inside: bool) -> str:
    """Describe for the ledger which kernel runs a product."""
    if weights.integers:
        int8.tune(weights, activation, rows)
        return f"in INT8 by Triton ({int8.tile(weights, activation, rows)})"
    reason = why_no_hopper_gemm(rows, weights, activation, inside=inside)
    return HOPPER if reason is None else f"by cuBLAS (CUDA C++ out: {reason})"
