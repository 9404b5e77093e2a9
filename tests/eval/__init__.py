"""Tests of the evaluation: harness, LIBERO, training of the demo, statistics and reports."""
