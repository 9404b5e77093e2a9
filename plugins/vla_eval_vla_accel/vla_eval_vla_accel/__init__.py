"""A model server for vla-eval's harness that runs policies on vla_accel's engines."""

from vla_eval_vla_accel.model_server import VlaAccelModelServer

__all__ = ["VlaAccelModelServer"]
