"""Attention of many queries in CUDA C++ for Hopper: a vision tower's, and a prefix's."""

from vla_accel.kernels.attention.cuda.launch import kernel_for, shared_keys, whole, why_not

__all__ = ["kernel_for", "shared_keys", "whole", "why_not"]
