"""What needs a CUDA GPU: `python -m pytest -m gpu`. Scripts that time or sanitize kernels stand beside the tests."""
