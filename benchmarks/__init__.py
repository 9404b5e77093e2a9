"""Benchmarks of vla_accel: what is timed, the stored results, and the tables and pictures made from them."""
