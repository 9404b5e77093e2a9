"""Kernels and the ops that launch them, a folder for each group of ops.

Every op has a torch reference that defines its result. Networks call the plain references (`reference.py`), native
programs call the fused ops. `dispatch.path` decides whether an op runs the reference, a Triton kernel or CUDA C++.
"""
