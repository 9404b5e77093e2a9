"""GR00T N1.7's weights under the names of Isaac-GR00T, or of lerobot, which adds the prefix `_groot_model.`.

Sizes come from the shapes and are checked against config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lora import Lora, fold
from vla_accel.checkpoints.qwen import (
    TRANSFORMER,
    language_config,
    language_pieces,
    layer_of,
    transformer_pieces,
    vision_config,
    vision_pieces,
)
from vla_accel.checkpoints.stacks import shapes_by_name
from vla_accel.checkpoints.weights import Piece, Weights, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.groot.head import HeadConfig
from vla_accel.families.groot.network import Groot, GrootConfig
from vla_accel.families.groot.settings import check_config
from vla_accel.nn.qwen_language import QwenConfig

_MODEL_TYPES = ("gr00tn1d7", "gr00t_n1d7", "gr00t_n1_7")
LEROBOT = "_groot_model."
_VISION, _LANGUAGE = "backbone.model.model.visual.", "backbone.model.model.language_model."
_HEAD, _DIT = "action_head.", "action_head.model."
SIGN = _DIT + "proj_out_1.weight"
"""A tensor that only GR00T's checkpoints have."""
# One table under two names; files have one or both.
_EMBEDDINGS = (_LANGUAGE + "embed_tokens.weight", "backbone.model.lm_head.weight")
# The head reads the input of the last norm. The mask token and the dropout are for training.
_DEAD = (_LANGUAGE + "norm.weight", _HEAD + "mask_token", _HEAD + "dropout_prob_by_embodiment", *_EMBEDDINGS)
# Widths of heads, which no shape shows: vision-language attention, diffusion transformer.
_VL_HEAD, _DIT_HEAD = 64, 48
_BY_EMBODIMENT = {
    "state_in": "state_encoder.layer1", "state_out": "state_encoder.layer2", "action_in": "action_encoder.W1",
    "action_mix": "action_encoder.W2", "action_out": "action_encoder.W3", "decode_in": "action_decoder.layer1",
    "decode_out": "action_decoder.layer2",
}  # fmt: skip


def prefix_of(shapes: Mapping[str, object]) -> str | None:
    """Return the prefix of GR00T's tensor names; None if these are not GR00T's tensors."""
    return next((prefix for prefix in ("", LEROBOT) if prefix + SIGN in shapes), None)


OTHERS = "another network, which is not supported; lerobot up to 0.5.1 runs N1.5, Isaac-GR00T has a branch for each"


def other_generation(content: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the generation of another GR00T, by its tensor names or by the base in lerobot's config.json; None for
    N1.7."""
    for part, generation in ((".eagle_model.", "N1.5"), ("backbone.model.vision_model.", "N1.6")):
        if any(part in name for name in names):
            return generation
    for key in ("base_model_path", "model_name"):
        if match := re.search(r"gr00t.n1[._d]?([0-6])(?!\d)", str(content.get(key)).lower()):
            return f"N1.{match[1]}"
    return None


def is_groot(content: Mapping[str, Any], shapes: Mapping[str, object]) -> bool:
    """Return whether Isaac-GR00T's config.json, or without one the tensors, belong to an N1.7."""
    kind = model_type(content)
    return kind in _MODEL_TYPES or (prefix_of(shapes) is not None and not kind)


def model_type(content: Mapping[str, Any]) -> str:
    """Return the `model_type` of a config.json in lower case, empty if it has none."""
    value = content.get("model_type")
    return value.lower() if isinstance(value, str) else ""


def load_groot(weights: Weights, config: GrootConfig, embodiment: int, where: str, lora: Lora | None = None) -> Groot:
    """Return the network of one embodiment, with an adapter folded in.

    Language layers after the last one in use and the weights of other embodiments are not loaded.

    Raises:
        CheckpointError: Tensors are missing, left over or misshaped.
    """
    network = Groot.empty(config)
    prefix = prefix_of(weights.shapes) or ""
    recipe: dict[str, tuple[Piece, ...]] = {
        name: tuple(Piece(prefix + p.name, p.rows, p.entry) for p in pieces(name, config, embodiment))
        for name in network.state_dict()
    }
    table = next((prefix + e for e in _EMBEDDINGS if prefix + e in weights.shapes), prefix + _EMBEDDINGS[0])
    recipe["embed.weight"] = (Piece(table),)
    deeper = (n for n in weights.shapes if layer_of(n.removeprefix(prefix), _LANGUAGE) >= config.language.depth)
    dead = [*(prefix + d for d in _DEAD), *deeper]
    model = fitted(network, weights, recipe, where, "GR00T N1.7", dead)
    unread = [name.removeprefix(prefix) for name in dead]
    unread += [name for name in (lora.changes if lora else ()) if layer_of(name, _LANGUAGE) >= config.language.depth]
    return fold(model, lora, lambda name: pieces(name, config, embodiment), unread)


def pieces(name: str, config: GrootConfig, embodiment: int) -> tuple[Piece, ...]:
    """Return Isaac-GR00T's tensors that make up one canonical tensor, in order along its first axis."""
    part, _, rest = name.partition(".")
    if part == "embed":
        return (Piece(_EMBEDDINGS[0]),)
    if part == "vision":
        return vision_pieces(rest, _VISION)
    if part == "language":
        return language_pieces(rest, _LANGUAGE, config.language)
    if rest.startswith("vl_layers."):
        return transformer_pieces(rest, _HEAD + "vl_self_attention.", config.head.vl_width)
    if rest.startswith("layers."):
        return transformer_pieces(rest, _DIT, config.head.width)
    if rest == "action_positions":
        return (Piece(_HEAD + "position_embedding.weight"),)
    module, _, leaf = rest.partition(".")
    if module in _BY_EMBODIMENT:
        return (Piece(f"{_HEAD}{_BY_EMBODIMENT[module]}.{'W' if leaf == 'weight' else 'b'}", entry=embodiment),)
    return (Piece(f"{_HEAD}vlln.{leaf}" if module == "vl_norm" else f"{_DIT}{TRANSFORMER[module]}.{leaf}"),)


# -- sizes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """Shapes by Isaac-GR00T's names, and its config.json."""

    shapes: Mapping[str, tuple[int, ...]]
    prefix: str
    stated: Mapping[str, Any]
    where: str

    def __call__(self, name: str, axes: int) -> tuple[int, ...]:
        return shapes_by_name(self.shapes, self.prefix, self.where)(name, axes)

    def depth(self, start: str) -> int:
        return 1 + max((layer_of(n.removeprefix(self.prefix), start) for n in self.shapes), default=-1)

    def value(self, key: str) -> Any:
        """Return a setting, None if config.json has none. Dots separate nested keys."""
        found: Any = self.stated
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def size(self, key: str, published: int) -> int:
        name = key.rpartition(".")[2]
        return size_of({name: self.value(key)}, name, Path(self.where) / "config.json", published)


def infer_config(shapes: Mapping[str, tuple[int, ...]], stated: Mapping[str, Any], where: str) -> GrootConfig:
    """Return the architecture of stored weights, checked against Isaac-GR00T's config.json (`stated`, may be empty).

    Sizes that no shape shows are as stated, or as published: widths of heads, language layers in use, denoising steps.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    stored = _Stored(shapes, prefix_of(shapes) or "", stated, where)
    check_config(stated, f"checkpoint {where}")
    try:
        config = GrootConfig(
            vision=vision_config(stored, stored.depth, _VISION),
            language=_language(stored),
            head=_head(stored),
            action_dim=stored(_HEAD + "action_encoder.W1.W", 3)[1],
            state_dim=stored(_HEAD + "state_encoder.layer1.W", 3)[1],
            action_horizon=stored.size("action_horizon", 40),
            num_steps=stored.size("num_inference_timesteps", 4),
            ramp=float(stated.get("rtc_ramp_rate") or 6.0),
        )
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error
    head, dit, vl = config.head, "diffusion_model_cfg", "vl_self_attention_cfg"
    found = {
        "max_state_dim": config.state_dim,
        "max_action_dim": config.action_dim,
        "hidden_size": head.hidden,
        "input_embedding_dim": head.width,
        "backbone_embedding_dim": head.vl_width,
        "max_seq_len": head.longest_chunk,
        "max_num_embodiments": stored(_HEAD + "action_encoder.W1.W", 3)[0],
        f"{dit}.num_layers": head.depth,
        f"{dit}.num_attention_heads": head.heads,
        f"{dit}.output_dim": head.hidden,
        "use_vl_self_attention": head.vl_depth > 0,
        f"{vl}.num_layers": head.vl_depth,
        f"{vl}.num_attention_heads": head.vl_heads,
    }
    compare_sizes([(name, stored.value(name), size) for name, size in found.items()], where)
    return config


def _language(shape: _Stored) -> QwenConfig:
    table = next((e for e in _EMBEDDINGS if shape.prefix + e in shape.shapes), _EMBEDDINGS[0])
    depth = shape.size("select_layer", min(16, shape.depth(_LANGUAGE + "layers.")))
    return language_config(shape, _LANGUAGE, table, depth=depth)


def _head(shape: _Stored) -> HeadConfig:
    (vl_width,) = shape(_HEAD + "vlln.weight", 1)
    vl, dit = _HEAD + "vl_self_attention.transformer_blocks.", _DIT + "transformer_blocks."
    width, vl_depth = shape(_DIT + "proj_out_1.weight", 2)[1], shape.depth(vl)
    vl_head = shape.size("vl_self_attention_cfg.attention_head_dim", _VL_HEAD)
    head_dim = shape.size("diffusion_model_cfg.attention_head_dim", _DIT_HEAD)
    if vl_width % vl_head or width % head_dim:
        raise ConfigError(f"head: expected multiples of {vl_head} and {head_dim} as widths, got {vl_width}, {width}")
    return HeadConfig(
        vl_width=vl_width, vl_depth=vl_depth, vl_heads=vl_width // vl_head,
        vl_mlp_dim=shape(vl + "0.ff.net.0.proj.weight", 2)[0] if vl_depth else 4 * vl_width, width=width,
        depth=shape.depth(dit), heads=width // head_dim, head_dim=head_dim,
        mlp_dim=shape(dit + "0.ff.net.0.proj.weight", 2)[0], hidden=shape(_DIT + "proj_out_2.weight", 2)[0],
        text_every=shape.size("attend_text_every_n_blocks", 2),
        longest_chunk=shape(_HEAD + "position_embedding.weight", 2)[0],
        buckets=shape.size("num_timestep_buckets", 1000),
    )  # fmt: skip
