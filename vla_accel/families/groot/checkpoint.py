"""GR00T's weights under the names of Isaac-GR00T, or of lerobot, which adds the prefix `_groot_model.`.

Sizes come from the shapes and are checked against config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.eagle import eagle_config, eagle_pieces
from vla_accel.checkpoints.lora import Lora, fold
from vla_accel.checkpoints.qwen import (
    TRANSFORMER,
    language_config,
    language_pieces,
    transformer_pieces,
    vision_config,
    vision_pieces,
)
from vla_accel.checkpoints.stacks import depth_of, layer_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, Weights, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.groot.head import HeadConfig
from vla_accel.families.groot.network import Groot, GrootConfig, groot_n15, groot_n16, groot_n17
from vla_accel.families.groot.releases import N15, N16, N17, Release, prefix_of, release_of
from vla_accel.families.groot.settings import check_config
from vla_accel.nn.eagle_vision import EagleVisionConfig
from vla_accel.nn.qwen_language import Arrangement, QwenConfig
from vla_accel.nn.qwen_vision import QwenVisionConfig

_HEAD, _DIT = "action_head.", "action_head.model."
_PUBLISHED = {N17: groot_n17(), N16: groot_n16(), N15: groot_n15()}
_BY_EMBODIMENT = {
    "state_in": "state_encoder.layer1", "state_out": "state_encoder.layer2", "action_in": "action_encoder.W1",
    "action_mix": "action_encoder.W2", "action_out": "action_encoder.W3", "decode_in": "action_decoder.layer1",
    "decode_out": "action_decoder.layer2",
}  # fmt: skip


def load_groot(weights: Weights, config: GrootConfig, embodiment: int, where: str, lora: Lora | None = None) -> Groot:
    """Return the network of one embodiment, with an adapter folded in.

    Language layers after the last one in use and the weights of other embodiments are not loaded.

    Raises:
        CheckpointError: Tensors are missing, left over or misshaped.
    """
    network, release = Groot.empty(config), _release(config)
    prefix = prefix_of(weights.shapes) or ""
    recipe: dict[str, tuple[Piece, ...]] = {
        name: tuple(Piece(prefix + p.name, p.rows, p.entry) for p in pieces(name, config, embodiment))
        for name in network.state_dict()
    }
    recipe["embed.weight"] = (Piece(prefix + _table(release, weights.shapes, prefix)),)
    dead = [name for name in weights.shapes if _is_dead(name.removeprefix(prefix), release, config)]
    model = fitted(network, weights, recipe, where, release.title, dead)
    unread = [name.removeprefix(prefix) for name in dead]
    unread += [name for name in (lora.changes if lora else ()) if _is_dead(name, release, config)]
    return fold(model, lora, lambda name: pieces(name, config, embodiment), unread)


def _tables(release: Release) -> tuple[str, str]:
    """The token table under two names; files have one or both."""
    return release.language + "embed_tokens.weight", release.head


def _table(release: Release, shapes: Mapping[str, object], prefix: str) -> str:
    tables = _tables(release)
    return next((table for table in tables if prefix + table in shapes), tables[0])


def _is_dead(name: str, release: Release, config: GrootConfig) -> bool:
    """Whether no action depends on a stored tensor: the mask token and the dropout are for training, and SigLIP's head
    pools for other purposes."""
    if name in (_HEAD + "mask_token", _HEAD + "dropout_prob_by_embodiment", *_tables(release)):
        return True
    if name == release.language + "norm.weight":
        return not config.language.final_norm
    layer = layer_of(name, release.language + "layers.")
    return name.startswith(release.vision + "head.") or layer >= config.language.depth


def _release(config: GrootConfig) -> Release:
    """The release of a network, by its tower."""
    if not isinstance(config.vision, EagleVisionConfig):
        return N17
    return N16 if config.vision.joined else N15


def pieces(name: str, config: GrootConfig, embodiment: int) -> tuple[Piece, ...]:
    """Return Isaac-GR00T's tensors that make up one canonical tensor, in order along its first axis."""
    part, _, rest = name.partition(".")
    release = _release(config)
    if part == "embed":
        return (Piece(_tables(release)[0]),)
    if part == "vision":
        if release is N17:
            return vision_pieces(rest, release.vision)
        return eagle_pieces(rest, release.vision, release.connector, config.vision)  # type: ignore[arg-type]
    if rest == "norm.weight":
        return (Piece(release.language + rest),)
    if part == "language":
        return language_pieces(rest, release.language, config.language)
    if rest.startswith("vl_layers."):
        return transformer_pieces(rest, _HEAD + "vl_self_attention.", config.head.vl_width)
    if rest.startswith("layers."):
        return transformer_pieces(rest, _DIT, config.head.width)
    if rest == "future":
        return (Piece(_HEAD + "future_tokens.weight"),)
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
        return depth_of(self.shapes, self.prefix + start)

    def value(self, key: str) -> Any:
        """Return a setting, None if config.json has none. Dots separate nested keys."""
        found: Any = self.stated
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def size(self, key: str, published: int) -> int:
        name = key.rpartition(".")[2]
        return size_of({name: self.value(key)}, name, Path(self.where) / "config.json", published)


def infer_config(
    shapes: Mapping[str, tuple[int, ...]], stated: Mapping[str, Any], where: str, arrangement: Arrangement | None = None
) -> GrootConfig:
    """Return the architecture of stored weights, checked against Isaac-GR00T's config.json (`stated`, may be empty).

    Sizes that no shape shows are as stated, or as published: widths of heads, language layers in use, denoising steps.

    Args:
        shapes: Of the stored tensors.
        stated: The settings, in one level.
        where: The folder, for errors.
        arrangement: Where images are in a prompt; None for that of the published tokenizer.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    stored, release = _Stored(shapes, prefix_of(shapes) or "", stated, where), release_of(shapes) or N17
    check_config(stated, f"checkpoint {where}", release)
    published = _PUBLISHED[release]
    try:
        config = GrootConfig(
            vision=_vision(stored, release),
            language=_language(stored, published.language, release),
            head=_head(stored, published.head),
            arrangement=arrangement or published.arrangement,
            action_dim=stored(_HEAD + "action_encoder.W1.W", 3)[1],
            state_dim=stored(_HEAD + "state_encoder.layer1.W", 3)[1],
            action_horizon=stored.size("action_horizon", published.action_horizon),
            num_steps=stored.size("num_inference_timesteps", published.num_steps),
            ramp=float(stated.get("rtc_ramp_rate") or published.ramp),
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
        "num_target_vision_tokens": head.future,
        "use_vl_self_attention": head.vl_depth > 0,
        f"{vl}.num_layers": head.vl_depth,
        f"{vl}.num_attention_heads": head.vl_heads,
    }
    compare_sizes([(name, stored.value(name), size) for name, size in found.items()], where)
    return config


def _vision(shape: _Stored, release: Release) -> QwenVisionConfig:
    if release is N17:
        return vision_config(shape, shape.depth, release.vision)
    return eagle_config(shape, shape.depth, release.vision, release.connector, release is N16)


def _language(shape: _Stored, published: QwenConfig, release: Release) -> QwenConfig:
    table = _table(release, shape.shapes, shape.prefix)
    depth = shape.size("select_layer", min(published.depth, shape.depth(release.language + "layers.")))
    config = language_config(shape, release.language, table, depth=depth)
    if release is N17:
        return config
    sections = (config.head_dim // 2, 0, 0)
    return replace(config, theta=published.theta, sections=sections, final_norm=published.final_norm)


def _head(shape: _Stored, published: HeadConfig) -> HeadConfig:
    (vl_width,) = shape(_HEAD + "vlln.weight", 1)
    vl, dit = _HEAD + "vl_self_attention.transformer_blocks.", _DIT + "transformer_blocks."
    width, vl_depth = shape(_DIT + "proj_out_1.weight", 2)[1], shape.depth(vl)
    vl_head = shape.size("vl_self_attention_cfg.attention_head_dim", published.vl_width // published.vl_heads)
    head_dim = shape.size("diffusion_model_cfg.attention_head_dim", published.head_dim)
    if vl_width % vl_head or width % head_dim:
        raise ConfigError(f"head: expected multiples of {vl_head} and {head_dim} as widths, got {vl_width}, {width}")
    return HeadConfig(
        vl_width=vl_width, vl_depth=vl_depth, vl_heads=vl_width // vl_head,
        vl_mlp_dim=shape(vl + "0.ff.net.0.proj.weight", 2)[0] if vl_depth else 4 * vl_width, width=width,
        depth=shape.depth(dit), heads=width // head_dim, head_dim=head_dim,
        mlp_dim=shape(dit + "0.ff.net.0.proj.weight", 2)[0], hidden=shape(_DIT + "proj_out_2.weight", 2)[0],
        text_every=_text_every(shape, published), future=_future(shape),
        longest_chunk=shape(_HEAD + "position_embedding.weight", 2)[0],
        buckets=shape.size("num_timestep_buckets", 1000),
    )  # fmt: skip


def _text_every(shape: _Stored, published: HeadConfig) -> int:
    if shape.value("use_alternate_vl_dit") is False:
        return 0
    return shape.size("attend_text_every_n_blocks", published.text_every) if published.text_every else 0


def _future(shape: _Stored) -> int:
    name = _HEAD + "future_tokens.weight"
    return shape(name, 2)[0] if shape.prefix + name in shape.shapes else 0
