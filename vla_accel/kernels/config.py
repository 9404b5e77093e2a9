"""The common form of tile configs, and the choice of the fastest one.

A tile config defines how one kernel divides its work among programs. It is a frozen dataclass with a short `__str__`
for the ledger, the methods of `TileConfig`, and a module-level function `candidates(gpu, sizes)`: the configs worth
measuring, all of which the GPU can run, the best estimate first. The first one is used where nothing is measured.

This module is plain arithmetic but for `measure`, and imports no triton.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from vla_accel.kernels.autotune import remembered
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import current

MOST_MEASURED = 6
"""Configs that are measured for one problem: each one is a kernel to compile at the first start."""
NO_LIMIT = 1 << 30
"""Shared memory of a block where no GPU is known."""


class TileConfig(Protocol):
    """A tile config. `sizes`: the problem, a frozen dataclass of the kernel."""

    def why_not(self, gpu: Gpu | None, sizes: Any) -> str | None:
        """Explain why the kernel cannot run with this config; None if it can. Every config that can run is correct."""
        ...

    def cost(self, gpu: Gpu | None, sizes: Any) -> tuple[float, ...]:
        """Estimate the time, in units of this kernel alone. The lowest is the most promising."""
        ...


C = TypeVar("C", bound=TileConfig)
T = TypeVar("T")


def shared_limit(gpu: Gpu | None) -> int:
    """Return the bytes of shared memory that a block can have."""
    return NO_LIMIT if gpu is None else gpu.shared_per_block


def too_large(config: object, shared: int, gpu: Gpu | None) -> str | None:
    """Explain that a block of `config` needs more than the GPU's shared memory; None if its `shared` bytes fit."""
    return f"{config} needs {shared} bytes of shared memory a block" if shared > shared_limit(gpu) else None


def imbalance(gpu: Gpu | None, blocks: int) -> float:
    """Return how far `blocks` are from one on each multiprocessor, in powers of two."""
    return abs(math.log2(blocks / (128 if gpu is None else gpu.multiprocessors)))


def deepest(config: C, stages: Iterable[int], gpu: Gpu | None, sizes: Any) -> C | None:
    """Return the config with the first of `stages` that the GPU can run; None if there is none."""
    for count in stages:
        deeper = dataclasses.replace(config, stages=count)  # type: ignore[type-var]
        if deeper.why_not(gpu, sizes) is None:
            return deeper
    return None


def cheapest(configs: Iterable[C], gpu: Gpu | None, sizes: Any, most: int | None = None) -> list[C]:
    """Return the `most` configs of the lowest cost, without duplicates, in the order of their costs."""
    return sorted(dict.fromkeys(configs), key=lambda config: config.cost(gpu, sizes))[:most]


@dataclass(frozen=True)
class Choice:
    """A chosen config or backend. `times`: milliseconds of each candidate by name, empty if nothing was measured."""

    config: Any
    times: Mapping[str, float]


_MEASURED: dict[tuple[str, torch.device, Gpu | None], Any] = {}


def measure(what: str, configs: Sequence[T], run: Callable[[T], object], device: torch.device, calls: int) -> Choice:
    """Choose the fastest of some configs, and remember it for `measured` and for later starts of the process.

    On a CPU and in a deterministic runtime the first one is chosen, and in the latter nothing is remembered.

    Args:
        what: names the kernel and the problem.
        configs: in order of preference. Their texts must differ.
        run: runs the kernel with a config.
        device: where to measure.
        calls: calls in a row that are measured together.
    """
    by_name, runtime = {str(config): config for config in configs}, current(device)
    found = remembered(what, {name: functools.partial(run, c) for name, c in by_name.items()}, runtime, calls)
    choice = Choice(by_name[found.candidate], found.times)
    if not runtime.deterministic:
        _MEASURED[what, device, runtime.gpu] = choice.config
    return choice


def measured(what: str, device: torch.device) -> Any:
    """Return what `measure` chose under this name in this process; None if nothing, and in a
    deterministic runtime."""
    runtime = current(device)
    return None if runtime.deterministic else _MEASURED.get((what, device, runtime.gpu))
