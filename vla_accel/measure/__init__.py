"""Measurements: speed compared with the floor, agreement with FP32, the cost of a precision."""
