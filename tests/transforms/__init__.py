"""Tests of transforms between observations and arrays: tokens, images, presets, normalization."""
