"""GEMM of many rows with fused epilogues, in CUDA C++ for Hopper."""

from vla_accel.ops.cuda.gemm.launch import Norm, gemm, plan, why_not
from vla_accel.ops.cuda.gemm.table import TABLES, planned
from vla_accel.ops.cuda.gemm.tiling import Tiling

__all__ = ["TABLES", "Norm", "Tiling", "gemm", "plan", "planned", "why_not"]
