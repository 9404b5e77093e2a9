"""Random weights of a small X-VLA that any interpreter draws alike, by the names that they are stored under."""

from __future__ import annotations

import numpy as np
from groot_weights import draw
from groot_weights import weight as usual

_DRAWN = {
    "transformer.pos_emb": 0.5, "soft_prompt_hub.weight": 0.5, "action_encoder.fc.weight": 0.1,
    "action_decoder.fc.weight": 0.15, "_proj.fc.weight": 0.15, "bias.weight": 0.1,
}  # fmt: skip
"""Deviations by the end of a name: tables of domains are rows without the shape of a matrix."""


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """lerobot's tensor of a name, float32: no bias zero, no norm one, positions and domains that matter."""
    if name.endswith(("shared.weight", "embed_tokens.weight")):  # one table, of which files keep either name
        name = "shared.weight"
    for end, deviation in _DRAWN.items():
        if name.endswith(end):
            return deviation * draw(name, *shape)
    # Branches of half the size: rounding grows less from step to step.
    return (0.5 if name.endswith(("mlp.fc2.weight", "attn.proj.weight")) else 1.0) * usual(name, shape)
