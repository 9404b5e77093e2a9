"""π0-FAST's weights under lerobot's names: which stored tensors make up each canonical one, and the sizes they show.

lerobot keeps the token table twice, as embedding and as head, and trains them apart: where they differ, the model has
both. Knows nothing of robots, statistics or tokenizers: see `vla_accel.families.pi0_fast.folder`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted, shapes_of
from vla_accel.checkpoints.dialects import DEAD, EMBEDDINGS, NAMES, said_of_variant, stack_sizes, tower_sizes
from vla_accel.checkpoints.lerobot import member
from vla_accel.checkpoints.lerobot_statistics import buffers
from vla_accel.checkpoints.stacks import Shapes, shapes_by_name
from vla_accel.checkpoints.weights import Piece, Weights, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig

PREFIX = "model."
_TABLE, _HEAD = (PREFIX + name for name in EMBEDDINGS)
_OTHERS = {"norm.weight": PREFIX + DEAD[1], "head.weight": _HEAD}
"""What π0 has no use for: the final norm, and the head."""


def load_weights(
    weights: Weights, config: Pi0FastConfig, where: str, *, device: str | torch.device, dtype: torch.dtype | None
) -> Pi0Fast:  # fmt: skip
    """The model with a checkpoint's weights, in eval mode, each read when it is asked for; `dtype` of the large
    products, None keeps what is stored. Raises CheckpointError that lists keys missing, left over or misshaped."""
    empty = Pi0Fast.empty(config)
    recipe = {name: pieces(name, config) for name in shapes_of(empty)}
    stored = [name for name in (_TABLE, _HEAD) if name in weights.shapes]
    for name in ("embed.weight", "head.weight"):
        # One table under either name, unless there are two.
        if name in recipe and (config.tied or len(stored) == 1):
            recipe[name] = (Piece((stored or [_TABLE])[0]),)
    dead = (_TABLE, _HEAD) if config.tied else ()
    dead = (*dead, *buffers(weights.shapes))
    return fitted(empty, weights, recipe, where, "pi0_fast", dead).bound_for(torch.device(device), dtype)


def pieces(name: str, config: Pi0FastConfig) -> tuple[Piece, ...]:
    """The tensors in lerobot's names that make up one canonical tensor, in order along its first axis."""
    if name in _OTHERS:
        return (Piece(_OTHERS[name]),)
    return tuple(Piece(PREFIX + piece.name, piece.rows) for piece in NAMES.pieces(name, config))


def reads_head(changes: Collection[str]) -> bool:
    """Whether an adapter changes the head, which then is another table than the embedding."""
    return EMBEDDINGS[1] in changes


def read_sizes(weights: Weights, content: Mapping[str, Any], max_token_len: int, where: Path) -> Pi0FastConfig:
    """The architecture of weights in lerobot's names, from their shapes, checked against its config.json `content`.

    `max_token_len`: the longest prompt, without the <bos> that comes behind it. A stop token is the tokenizer's to say.
    Raises CheckpointError that names what is missing or contradicts.
    """
    folder = str(where.parent)
    shapes: Shapes = weights.shapes
    shape = shapes_by_name(shapes, PREFIX, folder)
    table = next((name for name in EMBEDDINGS if PREFIX + name in shapes), EMBEDDINGS[0])
    resolution = member(content, "image_resolution", list, where)
    (action_dim,) = content["output_features"]["action"]["shape"]
    both = _TABLE in shapes and _HEAD in shapes
    try:
        config = Pi0FastConfig(
            vision=tower_sizes(shapes, PREFIX, shape),
            prefix=stack_sizes("prefix", shapes, PREFIX, shape),
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
        ("image_resolution", resolution, [side, side]),
        said_of_variant("prefix", content.get("paligemma_variant"), config.prefix, folder),
    ]
    compare_sizes(pairs, folder)
    return config
