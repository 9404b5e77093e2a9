"""X-VLA."""
