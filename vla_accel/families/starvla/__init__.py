"""starVLA."""
