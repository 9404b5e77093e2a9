"""LIBERO: run `python -m eval.libero`. Importing this package does not import the simulator."""
