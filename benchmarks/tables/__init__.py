"""The tables of README and docs/, made from the stored results."""
