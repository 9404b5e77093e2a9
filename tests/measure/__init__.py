"""Tests of measurements: bench, parity, memory, recorded observations."""
