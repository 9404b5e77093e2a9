"""Checkpoint folders of SmolVLA, lerobot's and this package's own: the network's sizes, its weights, and the robot's
transforms."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted, is_own, read_config
from vla_accel.checkpoints.lerobot import (
    Processors,
    buffers,
    denoising_steps,
    read_processors,
    read_settings,
    required,
)
from vla_accel.checkpoints.lora import fold
from vla_accel.checkpoints.stacks import Names, Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.overrides import adapter_of, processor_of, resized, robot_of
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, expert_mlp_dim
from vla_accel.nn.gemma import SmolLmConfig
from vla_accel.nn.siglip import SiglipConfig
from vla_accel.transforms.normalisation import load_scales
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import load_preset
from vla_accel.transforms.tokenizer import load_line_tokenizer

TOKENIZER_HUB = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
_log = logging.getLogger("vla_accel.checkpoints")
_ROOT = "model.vlm_with_expert."
_TOWER = _ROOT + "vlm.model.vision_model."
_STACKS = {"prefix": _ROOT + "vlm.model.text_model.", "expert": _ROOT + "lm_expert."}
_PROJECTOR = _ROOT + "vlm.model.connector.modality_projection.proj."
_NAMES = Names(_TOWER, _PROJECTOR, _STACKS, _STACKS["prefix"] + "embed_tokens.weight", "model.")
SIGNS = (_PROJECTOR + "weight", _STACKS["expert"] + "norm.weight")
"""Two tensors that no other model has."""
DEAD = (_ROOT + "vlm.lm_head.weight", _STACKS["prefix"] + "norm.weight")
"""Tensors that the model never reads: the language model's head, and the prefix's final norm (only K and V leave the
prefix). The MLP and output projection of the last prefix layer are unused, too, but they are part of the network."""
# No weight shows the number of heads.
_HEAD_DIM = 64  # of every SmolLM2
_TEXT_WIDTHS = (256, 576, 960, 2048)  # of the bundled demo, and of SmolLM2's three sizes
_VISION_HEADS = {256: 4, 768: 12, 1152: 16}  # by width: the bundled demo, SigLIP B and SO400M (arXiv 2504.05299)


def load_folder(folder: Path, settings: PolicyConfig, weights: Weights | None = None) -> tuple[SmolVla, Processor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    lora, described = adapter_of(folder, settings)
    path, weights = described / "config.json", weights or SafetensorsWeights(folder)
    hub: str | None = None
    if own := is_own(read_json(path)):
        config = resized(read_config(folder, SmolVlaConfig), settings)
        preset = dataclasses.replace(load_preset(settings.preset or "libero"), resize="corner")
        saved = Processors(preset, *load_scales(folder / "norm_stats.json", "mean_std"))
    else:
        content = read_settings(path, ("smolvla",))
        saved = read_processors(described, content, "corner", weights)
        config = resized(read_sizes(weights.shapes, content, saved.max_token_len, path), settings)
        saved = dataclasses.replace(saved, preset=robot_of(saved.preset, settings))
        hub = saved.tokenizer or content.get("vlm_model_name")
    for name in ("state", "action"):
        needed, available = getattr(saved.preset, f"{name}_dim"), getattr(config, f"{name}_dim")
        if needed > available:
            raise ConfigError(f"preset: expected at most {available} {name} dimensions, got {needed}")
    tokenizer = load_line_tokenizer(described, settings.checkpoint.tokenizer, hub or TOKENIZER_HUB)
    fields = {"discrete_state": False, "padded_state": config.state_dim, "prompt_form": "line"}
    processor = processor_of(Processor, config, saved, tokenizer, settings, **fields)
    model = SmolVla.empty(config)
    recipe = {name: (Piece(name),) if own else pieces(name, config) for name in model.state_dict()}
    fitted(model, weights, recipe, str(folder), "smolvla", () if own else (*DEAD, *buffers(weights.shapes)))
    return fold(model, lora, lambda name: pieces(name, config), DEAD), processor


def pieces(name: str, config: SmolVlaConfig) -> tuple[Piece, ...]:
    """Return lerobot's tensors that make up one canonical tensor, in order along its first axis."""
    return _NAMES.pieces(name, config)


# -- sizes --------------------------------------------------------------------------------------------------------


def read_sizes(shapes: Shapes, content: Mapping[str, Any], max_token_len: int, where: Path) -> SmolVlaConfig:
    """Return the architecture that the shapes show, checked against config.json at `where`.

    Only the action horizon, the longest prompt and the crossing layers leave no certain trace in the weights.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    folder = str(where.parent)
    shape = shapes_by_name(shapes, "", folder)
    width, _, _, patch = shape(_TOWER + "embeddings.patch_embedding.weight", 4)
    patches, _ = shape(_TOWER + "embeddings.position_embedding.weight", 2)
    hidden, _ = shape(_TOWER + "encoder.layers.0.mlp.fc1.weight", 2)
    heads = _VISION_HEADS.get(width, width // _HEAD_DIM)
    prefix, expert = (_stack(name, shapes, folder) for name in ("prefix", "expert"))
    if width not in _VISION_HEADS or prefix.width not in _TEXT_WIDTHS:
        _log.warning("%s: the widths are not those of a known SmolVLM2; assuming heads of width %d", folder, _HEAD_DIM)
    crossed = "cross" in required(content, "attention_mode", str, where)
    every = required(content, "self_attn_every_n_layers", int, where)
    side = patch * math.isqrt(patches)
    try:
        config = SmolVlaConfig(
            vision=SiglipConfig(width, depth_of(shapes, _TOWER + "encoder.layers."), hidden, heads, side, patch),
            prefix=prefix,
            expert=expert,
            vocab_size=shape(_STACKS["prefix"] + "embed_tokens.weight", 2)[0],
            shuffle=math.isqrt(shape(SIGNS[0], 2)[1] // width),
            self_every=max(every, 0) if crossed else 1,
            state_dim=shape("model.state_proj.weight", 2)[1],
            action_dim=shape("model.action_in_proj.weight", 2)[1],
            action_horizon=size_of(content, "chunk_size", where),
            max_token_len=max_token_len,
            num_steps=denoising_steps(content, "num_steps", where),
        )
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    width = int(config.prefix.width * required(content, "expert_width_multiplier", float, where))
    pairs = [
        ("resize_imgs_with_padding", _image_size(content, where), [config.vision.image_size] * 2),
        ("max_state_dim", required(content, "max_state_dim", int, where), config.state_dim),
        ("max_action_dim", required(content, "max_action_dim", int, where), config.action_dim),
        ("expert_width_multiplier", (width, expert_mlp_dim(width)), (config.expert.width, config.expert.mlp_dim)),
    ]
    for name, found in (("num_vlm_layers", config.prefix.depth), ("num_expert_layers", config.expert.depth)):
        stated = required(content, name, int, where)
        # 0 or less means all layers, which states no number.
        pairs.append((name, stated if stated > 0 else None, found))
    compare_sizes(pairs, folder)
    return config


def _stack(name: str, shapes: Shapes, folder: str) -> SmolLmConfig:
    start, shape = _STACKS[name], shapes_by_name(shapes, "", folder)
    queries, width = shape(f"{start}layers.0.self_attn.q_proj.weight", 2)
    keys, _ = shape(f"{start}layers.0.self_attn.k_proj.weight", 2)
    mlp_dim, _ = shape(f"{start}layers.0.mlp.gate_proj.weight", 2)
    if queries % _HEAD_DIM or keys % _HEAD_DIM:
        raise CheckpointError(
            f"checkpoint {folder}: {name}: expected heads {_HEAD_DIM} wide, as every SmolLM2 has, got {queries} and "
            f"{keys} rows of q and k"
        )
    depth = depth_of(shapes, start + "layers.")
    return SmolLmConfig(width, depth, mlp_dim, queries // _HEAD_DIM, keys // _HEAD_DIM, _HEAD_DIM)


def _image_size(content: Mapping[str, Any], where: Path) -> list[int]:
    """Return the width and height to which lerobot resizes images."""
    value = content.get("resize_imgs_with_padding")
    if value is None:
        got = "null, with which lerobot keeps the size of the images"
    elif not isinstance(value, list) or len(value) != 2 or any(type(side) is not int for side in value):
        got = f"{value!r:.60}"
    elif value[0] != value[1]:
        got = f"{value}, images that are not square"
    else:
        return value
    raise CheckpointError(f"{where}: resize_imgs_with_padding: expected two equal sizes, got {got}: not supported")
