"""Canonical weights to openpi's names and back, written from openpi's module tree: the inverse of what is tested."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from vla_accel.families.pi0.network import Pi0Config

ROOT = "paligemma_with_expert."
LANGUAGE = ROOT + "paligemma.model.language_model."
EXPERT = ROOT + "gemma_expert.model."
TOWER = ROOT + "paligemma.model.vision_tower.vision_model."
EMBED_TOKENS, LM_HEAD = LANGUAGE + "embed_tokens.weight", ROOT + "paligemma.lm_head.weight"


def openpi_names(name: str) -> list[str]:
    """The names under which openpi keeps a canonical weight: several where ours is fused."""
    if match := re.fullmatch(r"(prefix|expert)\.layers\.(\d+)\.(\w+)\.(.+)", name):
        stack, index, module, leaf = match.groups()
        start = f"{LANGUAGE if stack == 'prefix' else EXPERT}layers.{index}."
        parts = {
            "qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "o_proj": ["self_attn.o_proj"],
            "gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            "down_proj": ["mlp.down_proj"],
        }.get(module, [module])
        return [f"{start}{part}.{leaf}" for part in parts]
    if match := re.fullmatch(r"vision\.layers\.(\d+)\.(\w+)\.(.+)", name):
        index, module, leaf = match.groups()
        parts = {
            "qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "out_proj": ["self_attn.out_proj"],
            "fc1": ["mlp.fc1"],
            "fc2": ["mlp.fc2"],
        }.get(module, [module])
        return [f"{TOWER}encoder.layers.{index}.{part}.{leaf}" for part in parts]
    if name.startswith("vision.patch_embedding."):
        return [f"{TOWER}embeddings.{name.removeprefix('vision.')}"]
    if name == "vision.position_embedding":
        return [f"{TOWER}embeddings.position_embedding.weight"]
    if name.startswith("vision.post_layernorm."):
        return [f"{TOWER}{name.removeprefix('vision.')}"]
    if name.startswith("projector."):
        return [f"{ROOT}paligemma.model.multi_modal_projector.linear.{name.removeprefix('projector.')}"]
    if name == "embed.weight":
        return [LM_HEAD]
    if name.startswith("expert.norm."):
        return [f"{EXPERT}{name.removeprefix('expert.')}"]
    return [name]


def to_openpi(state: dict[str, Tensor], config: Pi0Config) -> dict[str, Tensor]:
    """What openpi's `save_model` writes for these weights: tied embedding stored as the head, dead weights present."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        names = openpi_names(name)
        if len(names) == 3 and name.startswith("vision."):
            pieces = value.chunk(3)
        elif len(names) == 3:
            c = config.prefix
            pieces = value.split((c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim))
        else:
            pieces = value.chunk(len(names))
        result |= {n: piece.clone() for n, piece in zip(names, pieces, strict=True)}
    result[ROOT + "gemma_expert.lm_head.weight"] = torch.randn(config.vocab_size, config.expert.width)
    result[LANGUAGE + "norm.weight"] = torch.randn(config.prefix.width)
    return result
