"""GEMM of many rows with fused epilogues, in CUDA C++ for Hopper."""

from vla_accel.ops.cuda.gemm.launch import Norm, gemm, why_not, why_not_on
from vla_accel.ops.cuda.gemm.search import searched, why_not_searched
from vla_accel.ops.cuda.gemm.table import TABLES, planned
from vla_accel.ops.cuda.gemm.tiling import Tiling

__all__ = [
    "TABLES", "Norm", "Tiling", "gemm", "planned", "searched", "why_not", "why_not_on", "why_not_searched",
]  # fmt: skip
