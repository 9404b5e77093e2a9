"""Runtimes that tests open: another backend, or a deterministic one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from vla_accel.runtime import Backend, Runtime

CPU = torch.device("cpu")


def steered(backend: Backend, device: torch.device = CPU) -> AbstractContextManager[None]:
    """Open a runtime in which ops on tensors on this type of device run by `backend`."""
    return replace(Runtime.of(device), backend=backend).open()


def pinned(device: torch.device = CPU) -> AbstractContextManager[None]:
    """Open the deterministic runtime of a device."""
    return Runtime.of(device, deterministic=True).open()
