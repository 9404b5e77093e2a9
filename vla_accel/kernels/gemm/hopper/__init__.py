"""GEMM of many rows with fused epilogues, in CUDA C++ for Hopper."""

from vla_accel.kernels.gemm.hopper.launch import Norm, gemm, why_not, why_not_on
from vla_accel.kernels.gemm.hopper.search import searched, why_not_searched
from vla_accel.kernels.gemm.hopper.table import TABLES, planned
from vla_accel.kernels.gemm.hopper.tiling import Tiling

__all__ = [
    "TABLES", "Norm", "Tiling", "gemm", "planned", "searched", "why_not", "why_not_on", "why_not_searched",
]  # fmt: skip
