"""Tests of ops and kernels against plain PyTorch: in Triton's interpreter, by compilers, and the choice of kernels."""
