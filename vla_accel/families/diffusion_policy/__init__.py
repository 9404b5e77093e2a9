"""Diffusion Policy."""
