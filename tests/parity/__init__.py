"""Agreement with openpi's and lerobot's own code, in environments of their own: `python -m pytest -m parity`."""
