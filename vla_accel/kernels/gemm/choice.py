"""The choice between the own GEMM and cuBLAS, measured when a program is built, and remembered.

Candidates are cuBLAS and the tiling of the table, or, without one, a few that are searched for. Nothing is measured
during graph capture or inside a deterministic runtime; then, and for products that no program has measured, the table
decides. It also decides for a product that norms its input or adds to the residual: cuBLAS cannot do this, and the
tilings of the table were timed in such chains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import remembered
from vla_accel.kernels.gemm import hopper as gemm
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import current

Trial = Callable[[Gpu], Callable[[gemm.Tiling | None], object]]
"""Makes operands for a GPU, and a call of the product with them: by a tiling, by the library for None."""

LIBRARY = "library"
CALLS = 10
"""Calls in a row that are measured together."""
_KNOWN: dict[tuple[torch.device, Gpu | None, torch.dtype, Activation, int, int, int], gemm.Tiling | None] = {}


def known(
    device: torch.device, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int, *, inside: bool = False
) -> gemm.Tiling | None:
    """Return the tiling that is faster than cuBLAS, as measured or else by the table; None if none is known.

    Arguments as `gemm.planned`. `inside`: the product norms its input or adds to the residual, so the table comes
    first.
    """
    runtime = current(device)
    gpu = runtime.gpu
    table = gemm.planned(gpu, kind, activation, rows, n, k)
    if gpu is None or runtime.deterministic or (inside and table is not None):
        return table
    return _KNOWN.get((device, gpu, kind, activation, rows, n, k), table)


def why_library(device: torch.device, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int) -> str:
    """Explain for the ledger why `measured` found no tiling."""
    runtime = current(device)
    gpu = runtime.gpu
    if gpu is None:
        return "there is no GPU"
    if not runtime.deterministic and (device, gpu, kind, activation, rows, n, k) in _KNOWN:
        return "it was measured to be slower"
    return gemm.why_not_searched(gpu, rows, n, k) or "no tiling of it is known for this size"


def measured(
    device: torch.device, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int, trial: Trial, *,
    inside: bool = False,
) -> gemm.Tiling | None:  # fmt: skip
    """`known`, after measuring if that is necessary and possible. Call it while a program is built."""
    runtime, sizes = current(device), (kind, activation, rows, n, k)
    gpu = runtime.gpu
    table = gemm.planned(gpu, *sizes)
    key = (device, gpu, *sizes)
    asked = key in _KNOWN or runtime.deterministic or (inside and table is not None)
    if gpu is not None and not asked and not torch.cuda.is_current_stream_capturing():
        found = gemm.searched(gpu, *sizes) if table is None else [table]
        tilings = {str(tiling): tiling for tiling in found}
        if tilings:
            call = trial(gpu)
            ways = {text: functools.partial(call, tilings.get(text)) for text in (LIBRARY, *tilings)}
            found = remembered(f"GEMM {kind} {activation} {rows}x{n}x{k}", ways, runtime, CALLS)
            _KNOWN[key] = tilings.get(found.candidate)
    return known(device, *sizes, inside=inside)
