"""Triton kernels behind `vla_accel.ops`. Needs triton; imported only when a GPU op is first called.

Every kernel computes in float32 what it reads in fewer bits, and takes any shape that its wrapper documents.
"""
