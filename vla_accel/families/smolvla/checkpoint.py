"""SmolVLA's weights under lerobot's names: which stored tensors make up each canonical one, and the sizes they show.

Knows nothing of robots, statistics or tokenizers: see `vla_accel.families.smolvla.folder`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted, shapes_of
from vla_accel.checkpoints.lerobot import member, steps_of
from vla_accel.checkpoints.lerobot_statistics import buffers
from vla_accel.checkpoints.stacks import Names, Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, Weights, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, expert_mlp_dim
from vla_accel.nn.gemma import SmolLmConfig
from vla_accel.nn.siglip import SiglipConfig

_log = logging.getLogger("vla_accel.checkpoints")
_ROOT = "model.vlm_with_expert."
_TOWER = _ROOT + "vlm.model.vision_model."
_STACKS = {"prefix": _ROOT + "vlm.model.text_model.", "expert": _ROOT + "lm_expert."}
_PROJECTOR = _ROOT + "vlm.model.connector.modality_projection.proj."
_NAMES = Names(_TOWER, _PROJECTOR, _STACKS, _STACKS["prefix"] + "embed_tokens.weight", "model.")
SIGNS = (_PROJECTOR + "weight", _STACKS["expert"] + "norm.weight")
"""Two tensors that no other model has."""
# Never read by the model: the language model's head, and the prefix's final norm (only K and V leave the prefix). The
# last prefix layer's MLP and output projection are dead, too, but kept in the model, so not listed here.
DEAD = (_ROOT + "vlm.lm_head.weight", _STACKS["prefix"] + "norm.weight")
# The number of heads cannot be read off a weight.
_HEAD_DIM = 64  # of every SmolLM2
_TEXT_WIDTHS = (256, 576, 960, 2048)  # of the bundled demo, and of SmolLM2's three sizes
_VISION_HEADS = {256: 4, 768: 12, 1152: 16}  # by width: of the bundled demo, SigLIP B and SO400M (arXiv 2504.05299)


def load_weights(
    weights: Weights, config: SmolVlaConfig, where: str, *, device: str | torch.device, dtype: torch.dtype | None
) -> SmolVla:  # fmt: skip
    """The model with a checkpoint's weights, in eval mode, each read when it is asked for; `dtype` of the large
    products, None keeps what is stored. Raises CheckpointError that lists keys missing, left over or misshaped."""
    empty = SmolVla.empty(config)
    recipe = {name: pieces(name, config) for name in shapes_of(empty)}
    return fitted(empty, weights, recipe, where, "smolvla", (*DEAD, *buffers(weights.shapes))).bound_for(
        torch.device(device), dtype
    )


def pieces(name: str, config: SmolVlaConfig) -> tuple[Piece, ...]:
    """The tensors in lerobot's names that make up one canonical tensor, in order along its first axis."""
    return _NAMES.pieces(name, config)


# -- sizes --------------------------------------------------------------------------------------------------------


def read_sizes(shapes: Shapes, content: Mapping[str, Any], max_token_len: int, where: Path) -> SmolVlaConfig:
    """The architecture of weights in lerobot's names, from their shapes, checked against its config.json `content`.

    Only the action horizon, the longest prompt and which layers cross leave no sure trace in the weights. Raises
    CheckpointError that names what is missing or contradicts.
    """
    shape = shapes_by_name(shapes, "", str(where.parent))

    def stack(name: str) -> SmolLmConfig:
        start = _STACKS[name]
        queries, width = shape(f"{start}layers.0.self_attn.q_proj.weight", 2)
        keys, _ = shape(f"{start}layers.0.self_attn.k_proj.weight", 2)
        mlp_dim, _ = shape(f"{start}layers.0.mlp.gate_proj.weight", 2)
        if queries % _HEAD_DIM or keys % _HEAD_DIM:
            told = f"expected heads {_HEAD_DIM} wide, as every SmolLM2 has, got {queries} and {keys} rows of q and k"
            raise CheckpointError(f"checkpoint {where.parent}: {name}: {told}")
        return SmolLmConfig(width, depth_of(shapes, start), mlp_dim, queries // _HEAD_DIM, keys // _HEAD_DIM, _HEAD_DIM)

    width, _, _, patch = shape(_TOWER + "embeddings.patch_embedding.weight", 4)
    patches, _ = shape(_TOWER + "embeddings.position_embedding.weight", 2)
    hidden, _ = shape(_TOWER + "encoder.layers.0.mlp.fc1.weight", 2)
    heads = _VISION_HEADS.get(width, width // _HEAD_DIM)
    prefix = stack("prefix")
    if width not in _VISION_HEADS or prefix.width not in _TEXT_WIDTHS:
        _log.warning("%s: of no SmolVLM2's widths: its heads are taken to be %d wide", where.parent, _HEAD_DIM)
    crossed = "cross" in member(content, "attention_mode", str, where)
    every = member(content, "self_attn_every_n_layers", int, where)
    side = patch * math.isqrt(patches)
    try:
        config = SmolVlaConfig(
            vision=SiglipConfig(width, depth_of(shapes, _TOWER + "encoder."), hidden, heads, side, patch),
            prefix=prefix,
            expert=stack("expert"),
            vocab_size=shape(_STACKS["prefix"] + "embed_tokens.weight", 2)[0],
            shuffle=math.isqrt(shape(SIGNS[0], 2)[1] // width),
            self_every=max(every, 0) if crossed else 1,
            state_dim=shape("model.state_proj.weight", 2)[1],
            action_dim=shape("model.action_in_proj.weight", 2)[1],
            action_horizon=size_of(content, "chunk_size", where),
            max_token_len=max_token_len,
            num_steps=steps_of(content, "num_steps", where),
        )
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where.parent}: {error}") from error
    _cross_check(config, content, where)
    return config


def _resized(content: Mapping[str, Any], where: Path) -> list[int]:
    """The width and height that lerobot brings images to."""
    value = content.get("resize_imgs_with_padding")
    if value is None:
        what = "null, with which lerobot leaves images in the size that they come in"
    elif not isinstance(value, list) or len(value) != 2 or any(type(side) is not int for side in value):
        what = f"{value!r:.60}"
    elif value[0] != value[1]:
        what = f"{value}, images that are not square"
    else:
        return value
    raise CheckpointError(f"{where}: resize_imgs_with_padding: expected two equal sizes, got {what}: not supported")


def _cross_check(config: SmolVlaConfig, content: Mapping[str, Any], where: Path) -> None:
    """What config.json says must be what the weights show; layers of 0 or less mean all, which says nothing."""
    width = int(config.prefix.width * member(content, "expert_width_multiplier", float, where))
    pairs = [
        ("resize_imgs_with_padding", _resized(content, where), [config.vision.image_size] * 2),
        ("max_state_dim", member(content, "max_state_dim", int, where), config.state_dim),
        ("max_action_dim", member(content, "max_action_dim", int, where), config.action_dim),
        ("expert_width_multiplier", (width, expert_mlp_dim(width)), (config.expert.width, config.expert.mlp_dim)),
    ]
    for name, found in (("num_vlm_layers", config.prefix.depth), ("num_expert_layers", config.expert.depth)):
        said = member(content, name, int, where)
        pairs.append((name, said if said > 0 else None, found))
    compare_sizes(pairs, str(where.parent))
