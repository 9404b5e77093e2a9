"""The denoise loop of few rows as one persistent kernel in CUDA C++, for every GPU from Ampere on."""

from vla_accel.kernels.persistent.launch import NotResident, PersistentLoop, why_not
from vla_accel.kernels.persistent.plan import Plan

__all__ = ["NotResident", "PersistentLoop", "Plan", "why_not"]
