"""Tests of configuration, files, latency, FP8, and the rules of the code base, such as its layers."""
