"""Tests of agreement with openpi's and lerobot's code, in separate environments: `python -m pytest -m parity`."""
