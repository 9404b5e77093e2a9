"""Observations to arrays and arrays to actions: robots' conventions, images, statistics, tokens. Needs no torch."""
