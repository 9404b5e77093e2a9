"""Benchmarks: the tables and pictures of the stored runs, and the jobs that make them."""
