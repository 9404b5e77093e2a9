"""What the families on PaliGemma must do before actions: their first two components' work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_accel.config import EngineSpec
from vla_accel.models.family import Work, products_of
from vla_accel.transforms.processing import Inputs


def prefix_work(config: Any, inputs: Inputs, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
    """Of vision and kv_cache on one prepared observation: the last prefix layer stops after its keys and values.
    `config`: of a `models.paligemma.PaliGemma`."""
    v, p = config.vision, config.prefix
    image_tokens = len(inputs.images) * v.tokens
    per_token = 4 * v.width * v.width + 2 * v.width * v.mlp_dim
    vision = v.depth * (2 * image_tokens * per_token + 4 * image_tokens * v.tokens * v.width)
    vision += 2 * image_tokens * (3 * v.patch_size**2 * v.width + v.width * p.width)
    tokens = image_tokens + len(inputs.tokens)
    attended = p.heads * p.head_dim
    layer = p.width * (p.qkv_dim + attended + 3 * p.mlp_dim)
    last = p.width * 2 * p.kv_heads * p.head_dim
    prefix = 2 * tokens * ((p.depth - 1) * layer + last) + (p.depth - 1) * 4 * tokens * tokens * attended
    return {
        "vision": Work(float(vision), precision=products_of(specs["vision"])),
        "kv_cache": Work(float(prefix), precision=products_of(specs["kv_cache"])),
    }
