"""lerobot's checkpoint folders of π0-FAST: the network's sizes, its weights, and the robot's transforms.

openpi has this model only in JAX, which is not read here. lerobot decodes `n_action_steps` actions of a chunk of
`chunk_size`. The tokens cover the whole chunk, and so do the actions here: both agree if the two settings are equal.
lerobot stores the token table twice, as embedding and as head, and trains them apart: if they differ, so do ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import buffers, read_processors, read_settings, required
from vla_accel.checkpoints.lora import fold
from vla_accel.checkpoints.paligemma import DEAD, EMBEDDINGS, NAMES, compared_variant, stack_sizes, tower_sizes
from vla_accel.checkpoints.stacks import Shapes, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.overrides import adapter_of, processor_of, resized, robot_of
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig
from vla_accel.families.pi0_fast.transforms import Detokeniser, FastProcessor, load_fast
from vla_accel.transforms.tokenizer import PALIGEMMA_HUB, load_tokenizer

_PREFIX = "model."
_TABLE, _HEAD = (_PREFIX + name for name in EMBEDDINGS)
_OTHERS = {"norm.weight": _PREFIX + DEAD[1], "head.weight": _HEAD}
"""Tensors that π0 does not read: the final norm, and the head."""


def load_folder(folder: Path, settings: PolicyConfig, weights: Weights | None = None) -> tuple[Pi0Fast, FastProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    lora, described = adapter_of(folder, settings)
    path, overrides = described / "config.json", settings.checkpoint
    content, weights = read_settings(path, ("pi0_fast",)), weights or SafetensorsWeights(folder)
    saved = read_processors(described, content, "bilinear", weights)
    config = resized(read_sizes(weights, content, saved.max_token_len, path), settings)
    if lora is not None and EMBEDDINGS[1] in lora.changes:
        # The adapter changes the head, which then differs from the embedding.
        config = dataclasses.replace(config, tied=False)
    hub = saved.tokenizer or content.get("text_tokenizer_name") or PALIGEMMA_HUB
    tokenizer = load_tokenizer(described, overrides.tokenizer, elsewhere=True, hub=hub)
    fast = required(content, "action_tokenizer_name", str, path)
    detokeniser = Detokeniser.of(
        load_fast((described / "fast", saved.action_tokenizer), overrides.action_tokenizer, fast),
        tokenizer,
        required(content, "fast_skip_tokens", int, path),
        config.action_horizon,
        config.action_dim,
        opened=bool(content.get("validate_action_token_prefix", True)),
        relaxed=overrides.relaxed_actions,
    )
    config = dataclasses.replace(config, stop_token=detokeniser.stop)
    saved = dataclasses.replace(saved, preset=robot_of(saved.preset, settings))
    fields = {"discrete_state": True, "prompt_form": "fast", "detokeniser": detokeniser}
    processor = processor_of(FastProcessor, config, saved, tokenizer, settings, **fields)
    recipe = {name: pieces(name, config) for name in Pi0Fast.empty(config).state_dict()}
    stored = [name for name in (_TABLE, _HEAD) if name in weights.shapes]
    for name in ("embed.weight", "head.weight"):
        # One table under either name, unless there are two.
        if name in recipe and (config.tied or len(stored) == 1):
            recipe[name] = (Piece((stored or [_TABLE])[0]),)
    dead = (*((_TABLE, _HEAD) if config.tied else ()), *buffers(weights.shapes))
    model = fitted(Pi0Fast.empty(config), weights, recipe, str(folder), "pi0_fast", dead)
    return fold(model, lora, lambda name: pieces(name, config)), processor


def pieces(name: str, config: Pi0FastConfig) -> tuple[Piece, ...]:
    """Return lerobot's tensors that make up one canonical tensor, in order along its first axis."""
    if name in _OTHERS:
        return (Piece(_OTHERS[name]),)
    return tuple(Piece(_PREFIX + piece.name, piece.rows) for piece in NAMES.pieces(name, config))


def read_sizes(weights: Weights, content: Mapping[str, Any], max_token_len: int, where: Path) -> Pi0FastConfig:
    """Return the architecture that the shapes show, checked against config.json.

    Args:
        weights: Tensors under lerobot's names.
        content: config.json. The stop token is known to the tokenizer only.
        max_token_len: The longest prompt, without the <bos> after it.
        where: Path of config.json.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    folder = str(where.parent)
    shapes: Shapes = weights.shapes
    shape = shapes_by_name(shapes, _PREFIX, folder)
    table = next((name for name in EMBEDDINGS if _PREFIX + name in shapes), EMBEDDINGS[0])
    (action_dim,) = content["output_features"]["action"]["shape"]
    both = _TABLE in shapes and _HEAD in shapes
    try:
        config = Pi0FastConfig(
            vision=tower_sizes(shapes, _PREFIX, shape),
            prefix=stack_sizes("prefix", shapes, _PREFIX, shape),
            vocab_size=shape(table, 2)[0],
            action_dim=action_dim,
            action_horizon=size_of(content, "chunk_size", where),
            max_token_len=max_token_len + 1,
            max_steps=size_of(content, "max_decoding_steps", where),
            tied=not both or torch.equal(weights.read(_TABLE), weights.read(_HEAD)),
        )
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    side = config.vision.image_size
    pairs = [
        ("image_resolution", required(content, "image_resolution", list, where), [side, side]),
        compared_variant("prefix", content.get("paligemma_variant"), config.prefix, folder),
    ]
    compare_sizes(pairs, folder)
    return config
