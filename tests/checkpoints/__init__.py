"""Tests of checkpoints of every project: names, sizes, statistics, adapters, and invalid folders."""
