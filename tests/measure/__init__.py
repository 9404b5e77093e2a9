"""Measuring: bench, parity, memory, recorded observations."""
