"""GPUs that are not there, with the figures of their data sheets: handed to kernels in place of the machine's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vla_accel.kernels.gpu import Gpu

KB, GB = 1 << 10, 1 << 30

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * KB, 228 * KB, 80 * GB)
H200 = Gpu("NVIDIA H200", (9, 0), 132, 227 * KB, 228 * KB, 141 * GB)
H20 = Gpu("NVIDIA H20", (9, 0), 78, 227 * KB, 228 * KB, 96 * GB)
MIG_SLICE = Gpu("NVIDIA H200 MIG 1g.18gb", (9, 0), 16, 227 * KB, 228 * KB, 18 * GB)
MIG_TWO = Gpu("NVIDIA H200 MIG 2g.35gb", (9, 0), 32, 227 * KB, 228 * KB, 35 * GB)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KB, 164 * KB, 80 * GB)
ORIN = Gpu("Orin", (8, 7), 16, 163 * KB, 164 * KB, 64 * GB)
RTX_3090 = Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 * KB, 100 * KB, 24 * GB)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * KB, 100 * KB, 24 * GB)
L40S = Gpu("NVIDIA L40S", (8, 9), 142, 99 * KB, 100 * KB, 48 * GB)
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * KB, 100 * KB, 32 * GB)
B200 = Gpu("NVIDIA B200", (10, 0), 148, 227 * KB, 228 * KB, 180 * GB)
THOR = Gpu("NVIDIA Thor", (11, 0), 20, 227 * KB, 228 * KB, 128 * GB)

GPUS = {
    "H100": H100, "H200": H200, "H20": H20, "MIG slice": MIG_SLICE, "MIG of two": MIG_TWO, "A100": A100, "Orin": ORIN,
    "RTX 3090": RTX_3090, "RTX 4090": RTX_4090, "RTX 5090": RTX_5090, "B200": B200, "Thor": THOR,
}  # fmt: skip

ARCHITECTURES = {gpu.version: gpu for gpu in (A100, RTX_3090, ORIN, RTX_4090, H200, B200, THOR, RTX_5090)}
"""One GPU of every compute capability that the kernels are compiled for."""

GENERATIONS = (("8.0", "8.6", "8.7", "8.9"), ("9.0",), ("10.0", "11.0"), ("12.0",))
"""Capabilities for which Triton makes the same code of the same launch. Launches differ, and the memory of a block."""


@contextmanager
def assumed(gpu: Gpu | None) -> Iterator[None]:
    """Make every CUDA device count as `gpu`, without opening a runtime; None changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if gpu is not None:
            patch.setattr(Gpu, "of", lambda device: gpu if torch.device(device).type == "cuda" else None)
        yield
