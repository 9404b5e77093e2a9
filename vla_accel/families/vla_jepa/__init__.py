"""VLA-JEPA."""
