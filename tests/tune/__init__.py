"""Tests of `vla-accel tune`: candidates, the sequential test, the search, the command."""
