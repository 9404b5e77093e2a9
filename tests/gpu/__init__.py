"""Tests that need a CUDA GPU (`python -m pytest -m gpu`), and scripts that time or sanitize kernels."""
