"""GEMM of many rows with fused epilogues, in CUDA C++ for Hopper."""

from vla_accel.kernels.gemm.hopper.config import TABLES, HopperTile, planned, searched, why_not_on, why_not_searched
from vla_accel.kernels.gemm.hopper.launch import gemm, why_not

__all__ = ["TABLES", "HopperTile", "gemm", "planned", "searched", "why_not", "why_not_on", "why_not_searched"]
