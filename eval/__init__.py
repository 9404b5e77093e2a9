"""Evaluations of policies built with vla_accel."""
