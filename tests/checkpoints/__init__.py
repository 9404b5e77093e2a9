"""Checkpoints of every project: names, sizes, statistics, adapters, and every way in which a folder can be wrong."""
