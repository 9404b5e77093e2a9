"""The native engine's programs, beside the networks that they run."""
