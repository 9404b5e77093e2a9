"""MolmoAct2 (Allen Institute for AI): Molmo 2's vision and language, and an expert that denoises actions."""
