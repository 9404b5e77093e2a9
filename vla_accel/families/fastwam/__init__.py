"""FastWAM."""
