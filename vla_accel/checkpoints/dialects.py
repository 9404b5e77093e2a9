"""Names under which other projects keep the same weights, and the sizes that can be read off the shapes.

openpi's PyTorch model and lerobot's, which wraps it under `model.`; canonical names are this package's own modules.
Knows nothing of files or of robots.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from vla_accel.checkpoints.checkpoint import compare_sizes
from vla_accel.checkpoints.stacks import Names, ShapeOf, Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, some
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.pi0.network import Kind, Pi0Config
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig

Dialect = Literal["vla_accel", "openpi", "lerobot"]

_ROOT = "paligemma_with_expert."
_TOWER = _ROOT + "paligemma.model.vision_tower.vision_model."
_PROJECTOR = _ROOT + "paligemma.model.multi_modal_projector.linear."
_STACKS = {"prefix": _ROOT + "paligemma.model.language_model.", "expert": _ROOT + "gemma_expert.model."}
# One table under two names; savers keep either or both. The first is what is read.
EMBEDDINGS = (_STACKS["prefix"] + "embed_tokens.weight", _ROOT + "paligemma.lm_head.weight")
NAMES = Names(_TOWER, _PROJECTOR, _STACKS, EMBEDDINGS[0])
# Never read by the model: the expert's head, and the prefix's final norm (only K and V leave the prefix). The last
# prefix layer's MLP and output projection are dead, too, but kept in the model, so not listed here.
DEAD = (_ROOT + "gemma_expert.lm_head.weight", _STACKS["prefix"] + "norm.weight")
UNREAD = (*DEAD, EMBEDDINGS[1])
"""Stored tensors of π0 and π0.5 that no action depends on, next to a token table under its first name."""
_SIGLIP_HEAD_DIM = 72  # of every SigLIP So400m; the number of heads cannot be read off a weight

# Sizes behind the names in openpi's and lerobot's configs: width, depth, mlp_dim, heads, kv_heads, head_dim.
VARIANTS: dict[str, GemmaConfig] = {
    "gemma_2b": GemmaConfig(2048, 18, 16_384, 8, 1, 256),
    "gemma_300m": GemmaConfig(1024, 18, 4096, 8, 1, 256),
    "dummy": GemmaConfig(64, 4, 128, 8, 1, 16),
}


def dialect_of(names: Collection[str]) -> tuple[Dialect, str]:
    """Whose names these are, and what stands before each of them."""
    if any(n.startswith(_ROOT) for n in names):
        return "openpi", ""
    if any(n.startswith("model." + _ROOT) for n in names):
        return "lerobot", "model."
    return "vla_accel", ""


def pieces(name: str, config: Pi0Config, prefix: str = "") -> tuple[Piece, ...]:
    """The tensors in openpi's dialect that make up one canonical tensor, in order along its first axis; `embed.weight`
    is given as the first of `EMBEDDINGS`. `prefix`: what stands before each name."""
    return tuple(Piece(prefix + piece.name, piece.rows) for piece in NAMES.pieces(name, config))


# -- sizes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stated:
    """What a checkpoint's config or the user says of a model; None: nothing. `variants`: of prefix and expert."""

    kind: Kind | None = None
    action_dim: int | None = None
    action_horizon: int | None = None
    max_token_len: int | None = None
    discrete_state_input: bool | None = None
    image_size: int | None = None
    variants: tuple[str | None, str | None] = (None, None)


def infer_config(shapes: Shapes, prefix: str, stated: Stated, where: str) -> Pi0Config:
    """The architecture of weights in openpi's dialect, from their shapes, checked against what is stated.

    Only the action horizon and the longest prompt leave no trace in the weights: the horizon must be stated, the
    prompt has openpi's default (48 tokens for π0, 200 for π0.5). Raises CheckpointError that names what is missing
    or contradicts.
    """
    kind = _kind(shapes, prefix, where)

    shape = shapes_by_name(shapes, prefix, where)
    if stated.action_horizon is None:
        raise CheckpointError(
            f"checkpoint {where}: expected config.json with action_horizon, which no weight shows; or set "
            "checkpoint.action_horizon in the configuration"
        )
    table = next((e for e in EMBEDDINGS if prefix + e in shapes), EMBEDDINGS[0])
    vocabulary, _ = shape(table, 2)
    try:
        config = Pi0Config(
            kind=kind,
            vision=tower_sizes(shapes, prefix, shape),
            prefix=stack_sizes("prefix", shapes, prefix, shape),
            expert=stack_sizes("expert", shapes, prefix, shape),
            vocab_size=vocabulary,
            action_dim=shape("action_in_proj.weight", 2)[1],
            action_horizon=stated.action_horizon,
            max_token_len=stated.max_token_len or (200 if kind == "pi05" else 48),
            discrete_state_input=(
                kind == "pi05" if stated.discrete_state_input is None else stated.discrete_state_input
            ),
        )
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error
    _cross_check(config, stated, where)
    return config


_SIGNS: dict[Kind, tuple[str, ...]] = {
    "pi0": ("state_proj.weight", "action_time_mlp_in.weight"),
    "pi05": ("time_mlp_in.weight", _STACKS["expert"] + "norm.dense.weight"),
}


def kind_of(shapes: Shapes) -> Kind | None:
    """Which model tensors of any dialect are; None for neither and for both."""
    _, prefix = dialect_of(shapes)
    found: list[Kind] = [kind for kind, names in _SIGNS.items() if any(prefix + n in shapes for n in names)]
    return found[0] if len(found) == 1 else None


def _kind(shapes: Shapes, prefix: str, where: str) -> Kind:
    found = {kind: [n for n in names if prefix + n in shapes] for kind, names in _SIGNS.items()}
    if found["pi0"] and not found["pi05"]:
        return "pi0"
    if found["pi05"] and not found["pi0"]:
        return "pi05"
    raise CheckpointError(
        f"checkpoint {where}: expected weights of π0 ({', '.join(_SIGNS['pi0'])}) or of π0.5 "
        f"({', '.join(_SIGNS['pi05'])}), found {some(found['pi0'] + found['pi05']) or 'none of them'}"
    )


def tower_sizes(shapes: Shapes, prefix: str, shape: ShapeOf) -> SiglipConfig:
    """Of PaliGemma's vision tower. Raises ConfigError for another tower."""
    width, _, _, patch = shape(_TOWER + "embeddings.patch_embedding.weight", 4)
    if width % _SIGLIP_HEAD_DIM:
        raise ConfigError(f"vision.width {width}: not a So400m tower, whose heads are {_SIGLIP_HEAD_DIM} wide")
    tokens, _ = shape(_TOWER + "embeddings.position_embedding.weight", 2)
    return SiglipConfig(
        width=width,
        depth=depth_of(shapes, prefix + _TOWER + "encoder."),
        mlp_dim=shape(_TOWER + "encoder.layers.0.mlp.fc1.weight", 2)[0],
        heads=max(1, width // _SIGLIP_HEAD_DIM),
        image_size=patch * math.isqrt(tokens),
        patch_size=patch,
    )


def stack_sizes(stack: str, shapes: Shapes, prefix: str, shape: ShapeOf) -> GemmaConfig:
    """Of the Gemma that is the `stack`, "prefix" or "expert"."""
    start = _STACKS[stack]
    queries, width = shape(start + "layers.0.self_attn.q_proj.weight", 2)
    # All of PaliGemma's variants have one key/value head.
    head_dim, _ = shape(start + "layers.0.self_attn.k_proj.weight", 2)
    return GemmaConfig(
        width=width,
        depth=depth_of(shapes, prefix + start),
        mlp_dim=shape(start + "layers.0.mlp.gate_proj.weight", 2)[0],
        heads=max(1, queries // head_dim),
        kv_heads=1,
        head_dim=head_dim,
    )


def _cross_check(config: Pi0Config, stated: Stated, where: str) -> None:
    """What is stated must be what the weights show."""
    pairs: list[tuple[str, object, object]] = [
        ("kind", stated.kind, config.kind),
        ("action_dim", stated.action_dim, config.action_dim),
        ("image_size", stated.image_size, config.vision.image_size),
    ]
    stacks = zip(("prefix", "expert"), stated.variants, (config.prefix, config.expert), strict=True)
    pairs += [said_of_variant(*stack, where) for stack in stacks]
    compare_sizes(pairs, where)
    if config.kind == "pi0" and config.discrete_state_input:
        raise CheckpointError(
            f"checkpoint {where}: π0 has its state outside of the prompt, discrete_state_input says in it"
        )


def said_of_variant(name: str, variant: str | None, found: GemmaConfig, where: str) -> tuple[str, object, object]:
    """What the name of a stack's variant says of its sizes, for `compare_sizes`. Raises CheckpointError for an unknown
    one."""
    if variant is None:
        return name, None, found
    known = VARIANTS.get(str(variant).removesuffix("_lora"))
    if known is None:
        raise CheckpointError(f"checkpoint {where}: expected {name} one of {', '.join(VARIANTS)}, got {variant!r}")
    return f"{name} {variant}", known, found
