"""Ops and their kernels beside references in plain PyTorch: in Triton's interpreter, through compilers, by choice."""
