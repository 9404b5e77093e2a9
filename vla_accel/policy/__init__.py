"""A policy ready to act, its pipelines of engines, and engines built ahead of time."""

from vla_accel.policy.optimized import OptimizedPolicy

__all__ = ["OptimizedPolicy"]
