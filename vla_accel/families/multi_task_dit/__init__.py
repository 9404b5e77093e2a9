"""Multi-task DiT."""
