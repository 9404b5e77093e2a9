"""`Runtime`: what decides which kernels run on a device, made once for a policy.

The policy opens its runtime while it builds and runs engines. A native engine with other kernels than the fastest opens
its own one inside. Ops and planning code call `current(device)`; where no runtime is open, as in an image pipeline,
they get the default of the device. The open runtime is the state of one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vla_accel.kernels.gpu import Gpu

Backend = Literal["reference", "triton", "cuda"]
"""How ops run: "reference" by torch, "cuda" by the fastest kernels, "triton" without this package's CUDA C++."""


@dataclass(frozen=True)
class Runtime:
    """A device and how kernels run on it.

    Attributes:
        gpu: the GPU that kernels are chosen for, None if there is none.
        backend: "triton" on a CPU needs Triton's interpreter (set TRITON_INTERPRET=1 before importing triton).
        deterministic: no kernel is chosen by measurement, and no earlier measurement counts.
        submit: compiles a CUDA C++ source for an architecture in another thread. If set, kernels that are not loaded
            yet are submitted and not launched.
    """

    device: torch.device
    gpu: Gpu | None
    backend: Backend
    deterministic: bool = False
    submit: Callable[[str, str], object] | None = None

    @classmethod
    def of(cls, device: torch.device, *, deterministic: bool = False) -> Runtime:
        """Return the runtime of a device: the fastest kernels on a GPU, torch references elsewhere."""
        return cls(device, Gpu.of(device), "cuda" if device.type == "cuda" else "reference", deterministic)

    @property
    def portable(self) -> Runtime:
        """The same runtime without kernels that need more than an Ada GPU has."""
        return replace(self, gpu=self.gpu and self.gpu.portable)

    @property
    def triton(self) -> Runtime:
        """The portable runtime without this package's CUDA C++."""
        return replace(self.portable, backend="triton")

    @property
    def why_not_cuda(self) -> str | None:
        """Why this package's CUDA C++ does not run; None if it does."""
        if self.gpu is None:
            return "there is no GPU"
        return None if self.backend == "cuda" else "Triton's kernels only"

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make this the current runtime of this thread, for tensors on this type of device."""
        outer, OPEN.runtime = OPEN.runtime, self
        try:
            yield
        finally:
            OPEN.runtime = outer


class _Open(threading.local):
    """What a thread has open: its runtime, its `kernels.chain.Chain`, and its record of `kernels.phases`."""

    runtime: Runtime | None = None
    chain: Any = None
    record: Any = None


OPEN = _Open()


def current(where: Tensor | torch.device) -> Runtime:
    """Return the open runtime, or the default of the device if none is open or the open one has another device type."""
    device = where.device if isinstance(where, Tensor) else where
    runtime = OPEN.runtime
    return runtime if runtime is not None and runtime.device.type == device.type else Runtime.of(device)
