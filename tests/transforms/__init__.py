"""Observations to arrays and back: tokens, images, presets, normalisation."""
