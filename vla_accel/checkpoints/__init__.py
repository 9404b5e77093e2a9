"""Checkpoints: where they lie, whose dialect they speak, every key accounted for; reading, writing, converting."""
