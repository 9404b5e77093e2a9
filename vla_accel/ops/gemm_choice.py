"""Own GEMM or the library's: measured when a program is built, and remembered. The candidates are the table's tiling,
or where it has none a few that are searched for, and the library.

Nothing is measured while a graph is captured, and inside `autotune.pinned`; there, and where no program asked, the
table is believed. It also is of a product that takes a norm in or adds to the residual: the library cannot, so that it
is no candidate, and the table's tilings were timed within their chains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vla_accel.ops.activation import Activation
from vla_accel.ops.autotune import is_pinned, remembered
from vla_accel.ops.cuda import gemm
from vla_accel.ops.gpu import Gpu

Trial = Callable[[Gpu], Callable[[gemm.Tiling | None], object]]
"""Makes operands for a GPU, and a call of the product with them: by a tiling, by the library for None."""

LIBRARY = "library"
CALLS = 10
"""Calls in a row that are measured together."""
_KNOWN: dict[tuple[torch.device, Gpu | None, torch.dtype, Activation, int, int, int], gemm.Tiling | None] = {}


def known(
    device: torch.device, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int, *, inside: bool = False
) -> gemm.Tiling | None:
    """The tiling that is faster than the library: as it was measured, else by the table; None where none is known.

    Arguments as `gemm.planned` takes them; `inside`: of a product that takes a norm in or adds to the residual, for
    which the table comes first.
    """
    gpu = Gpu.of(device)
    table = gemm.planned(gpu, kind, activation, rows, n, k)
    if gpu is None or is_pinned() or (inside and table is not None):
        return table
    return _KNOWN.get((device, gpu, kind, activation, rows, n, k), table)


def why_library(device: torch.device, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int) -> str:
    """Why `measured` found no tiling, in a clause for the ledger."""
    gpu = Gpu.of(device)
    if gpu is None:
        return "there is no GPU"
    if not is_pinned() and (device, gpu, kind, activation, rows, n, k) in _KNOWN:
        return "it was measured to be slower"
    return gemm.why_not_searched(gpu, rows, n, k) or "no tiling of it is known for this size"


def measured(
    device: torch.device, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int, trial: Trial, *,
    inside: bool = False,
) -> gemm.Tiling | None:  # fmt: skip
    """`known`, and measured first where that is needed and can be done; a program asks while it is built."""
    gpu, sizes = Gpu.of(device), (kind, activation, rows, n, k)
    table = gemm.planned(gpu, *sizes)
    key = (device, gpu, *sizes)
    asked = key in _KNOWN or is_pinned() or (inside and table is not None)
    if gpu is not None and not asked and not torch.cuda.is_current_stream_capturing():
        found = gemm.searched(gpu, *sizes) if table is None else [table]
        tilings = {str(tiling): tiling for tiling in found}
        if tilings:
            call = trial(gpu)
            ways = {text: functools.partial(call, tilings.get(text)) for text in (LIBRARY, *tilings)}
            _KNOWN[key] = tilings.get(remembered(f"GEMM {kind} {activation} {rows}x{n}x{k}", ways, device, CALLS).way)
    return known(device, *sizes, inside=inside)
