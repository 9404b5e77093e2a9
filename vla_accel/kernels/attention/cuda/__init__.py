"""Attention of many queries in CUDA C++ for Hopper: a vision tower's, and a prefix's."""

from vla_accel.kernels.attention.cuda.launch import attention, kernel_for, why_not

__all__ = ["attention", "kernel_for", "why_not"]
