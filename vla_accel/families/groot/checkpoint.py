"""GR00T's weights under the names of Isaac-GR00T, or of lerobot, which adds the prefix `_groot_model.`.

Sizes come from the shapes and are checked against config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lora import Lora, fold
from vla_accel.checkpoints.stacks import shapes_by_name
from vla_accel.checkpoints.weights import Piece, Weights, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.groot.head import HeadConfig
from vla_accel.families.groot.language import Arrangement, QwenConfig
from vla_accel.families.groot.network import Groot, GrootConfig, groot_n15, groot_n16, groot_n17
from vla_accel.families.groot.releases import BY_TOWER, N15, N16, N17, Release, prefix_of
from vla_accel.families.groot.settings import check_config
from vla_accel.families.groot.vision import VisionConfig

_HEAD, _DIT = "action_head.", "action_head.model."
_PUBLISHED = {N17: groot_n17(), N16: groot_n16(), N15: groot_n15()}

_MERGER = {"fc1": "linear_fc1", "fc2": "linear_fc2"}
_PRE_NORM = {
    "layer_norm1": ("norm1",), "qkv_proj": ("attn.qkv",), "out_proj": ("attn.proj",), "layer_norm2": ("norm2",),
    "fc1": ("mlp.linear_fc1",), "fc2": ("mlp.linear_fc2",),
}  # fmt: skip
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_SIGLIP = {"qkv_proj": _QKV, "out_proj": ("self_attn.out_proj",), "fc1": ("mlp.fc1",), "fc2": ("mlp.fc2",)}
_QWEN = {
    "qkv_proj": _QKV, "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",), "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "down_proj": ("mlp.down_proj",),
}  # fmt: skip
_DIFFUSERS = {
    "layer_norm1": ("norm1",), "layer_norm2": ("norm3",), "modulation": ("norm1.linear",), "q_proj": ("attn1.to_q",),
    "kv_proj": ("attn1.to_k", "attn1.to_v"), "qkv_proj": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "out_proj": ("attn1.to_out.0",), "fc1": ("ff.net.0.proj",), "fc2": ("ff.net.2",),
}  # fmt: skip
_BY_EMBODIMENT = {
    "state_in": "state_encoder.layer1", "state_out": "state_encoder.layer2", "action_in": "action_encoder.W1",
    "action_mix": "action_encoder.W2", "action_out": "action_encoder.W3", "decode_in": "action_decoder.layer1",
    "decode_out": "action_decoder.layer2",
}  # fmt: skip
_SHARED = {
    "vl_norm": "vlln", "time_in": "model.timestep_encoder.timestep_embedder.linear_1",
    "time_out": "model.timestep_encoder.timestep_embedder.linear_2", "final_modulation": "model.proj_out_1",
    "out_proj": "model.proj_out_2",
}  # fmt: skip
_CONNECTORS = {N16: {"norm": "0", "fc1": "1", "fc2": "3"}, N15: {"fc1": "0"}}
"""Between tower and language model, by release: the places in a torch sequence."""


def load_groot(weights: Weights, config: GrootConfig, embodiment: int, where: str, lora: Lora | None = None) -> Groot:
    """Return the network of one embodiment, with an adapter folded in.

    Language layers after the last one in use and the weights of other embodiments are not loaded.

    Raises:
        CheckpointError: Tensors are missing, left over or misshaped.
    """
    network, release = Groot.empty(config), BY_TOWER[config.vision.kind]
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
    return name.startswith(release.vision + "head.") or _layer(name, release.language) >= config.language.depth


def pieces(name: str, config: GrootConfig, embodiment: int) -> tuple[Piece, ...]:
    """Return Isaac-GR00T's tensors that make up one canonical tensor, in order along its first axis."""
    part, _, rest = name.partition(".")
    release = BY_TOWER[config.vision.kind]
    if part == "embed":
        return (Piece(_tables(release)[0]),)
    if match := re.fullmatch(r"(vl_layers|layers)\.(\d+)\.(\w+)\.(.+)", rest):
        stack, index, module, leaf = match.groups()
        start, names = {
            ("vision", "layers"): _blocks(release),
            ("language", "layers"): (release.language + "layers.", _QWEN),
            ("head", "vl_layers"): (_HEAD + "vl_self_attention.transformer_blocks.", _DIFFUSERS),
            ("head", "layers"): (_DIT + "transformer_blocks.", _DIFFUSERS),
        }[part, stack]
        stored = names.get(module, (module,))
        rows = _rows(config, part, stack, module) if len(stored) > 1 else (None,)
        return tuple(Piece(f"{start}{index}.{s}.{leaf}", r) for s, r in zip(stored, rows, strict=True))
    if part == "vision":
        return (Piece(_vision_name(rest, release)),)
    if part == "language":
        return (Piece(release.language + rest),)
    if rest == "future_tokens":
        return (Piece(_HEAD + "future_tokens.weight"),)
    if rest == "action_positions":
        return (Piece(_HEAD + "position_embedding.weight"),)
    module, _, leaf = rest.partition(".")
    if module in _BY_EMBODIMENT:
        return (Piece(f"{_HEAD}{_BY_EMBODIMENT[module]}.{'W' if leaf == 'weight' else 'b'}", entry=embodiment),)
    return (Piece(f"{_HEAD}{_SHARED[module]}.{leaf}"),)


def _blocks(release: Release) -> tuple[str, Mapping[str, tuple[str, ...]]]:
    """The prefix of the tower's blocks, and the names in them."""
    if release is N17:
        return release.vision + "blocks.", _PRE_NORM
    return release.vision + "encoder.layers.", _SIGLIP


def _vision_name(rest: str, release: Release) -> str:
    """The stored name of a tensor of the tower outside its blocks."""
    if release is N17:
        rest = rest.replace("patch_embedding", "patch_embed.proj").replace("position_embedding", "pos_embed.weight")
        rest = rest.replace("deepstack.", "deepstack_merger_list.")
        for ours, theirs in _MERGER.items():
            rest = rest.replace(f".{ours}.", f".{theirs}.")
        return release.vision + rest
    if rest.startswith("merger."):
        _, module, leaf = rest.split(".")
        return f"{release.connector}{_CONNECTORS[release][module]}.{leaf}"
    rest = rest.replace("position_embedding", "position_embedding.weight")
    return release.vision + ("" if rest.startswith("post_") else "embeddings.") + rest


def _rows(config: GrootConfig, part: str, stack: str, module: str) -> tuple[int | None, ...]:
    if part == "vision":
        return (config.vision.width,) * 3
    if part == "language":
        c = config.language
        if module == "gate_up_proj":
            return (c.mlp_dim, c.mlp_dim)
        return (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
    width = config.head.vl_width if stack == "vl_layers" else config.head.width
    return (width,) * (2 if module == "kv_proj" else 3)


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
        return 1 + max((_layer(n.removeprefix(self.prefix), start) for n in self.shapes), default=-1)

    def value(self, key: str) -> Any:
        """Return a setting, None if config.json has none. Dots separate nested keys."""
        found: Any = self.stated
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def size(self, key: str, published: int) -> int:
        name = key.rpartition(".")[2]
        return size_of({name: self.value(key)}, name, Path(self.where) / "config.json", published)


def _layer(name: str, start: str) -> int:
    match = re.match(re.escape(start) + r"(?:\w+\.)?(\d+)\.", name)
    return -1 if match is None else int(match[1])


def infer_config(
    shapes: Mapping[str, tuple[int, ...]], release: Release, stated: Mapping[str, Any], arrangement: Arrangement,
    where: str,
) -> GrootConfig:  # fmt: skip
    """Return the architecture of stored weights, checked against Isaac-GR00T's config.json (`stated`, may be empty).

    Sizes that no shape shows are as stated, or as published: widths of heads, language layers in use, denoising steps.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    stored = _Stored(shapes, prefix_of(shapes) or "", stated, where)
    check_config(stated, f"checkpoint {where}", release)
    published = _PUBLISHED[release]
    try:
        config = GrootConfig(
            vision=_vision(stored, published.vision, release),
            language=_language(stored, published.language, release),
            head=_head(stored, published.head),
            arrangement=arrangement,
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


def _vision(shape: _Stored, published: VisionConfig, release: Release) -> VisionConfig:
    start, blocks = release.vision, _blocks(release)[0]
    frames, merge = published.frames, published.merge
    if release is N17:
        width, _, frames, patch, _ = shape(start + "patch_embed.proj.weight", 5)
        positions, _ = shape(start + "pos_embed.weight", 2)
        out_width, joined = shape(start + "merger.linear_fc2.weight", 2)
        merge, mlp_dim = round((joined / width) ** 0.5), shape(blocks + "0.mlp.linear_fc1.weight", 2)[0]
    else:
        positions, width = shape(start + "embeddings.position_embedding.weight", 2)
        if release is N16:
            patch = round((shape(start + "embeddings.patch_embedding.weight", 2)[1] / 3) ** 0.5)
        else:
            patch = shape(start + "embeddings.patch_embedding.weight", 4)[2]
        out_width, joined = shape(f"{release.connector}{_CONNECTORS[release]['fc1']}.weight", 2)
        merge, mlp_dim = round((joined / width) ** 0.5), shape(blocks + "0.mlp.fc1.weight", 2)[0]
    depth, levels = shape.depth(blocks), shape.depth(start + "deepstack_merger_list.")
    head = published.head_dim
    if width % head:
        raise ConfigError(f"vision.width {width}: expected heads of {head}, as the published one's are")
    return VisionConfig(
        published.kind, width, depth, mlp_dim, width // head, patch, frames, merge, positions,
        # Blocks with a deepstack output are equally spaced: 5, 11 and 17 of 24.
        tuple(depth * (j + 1) // (levels + 1) - 1 for j in range(levels)), out_width,
    )  # fmt: skip


def _language(shape: _Stored, published: QwenConfig, release: Release) -> QwenConfig:
    start = release.language + "layers.0."
    (head_dim,) = shape(start + "self_attn.q_norm.weight", 1)
    queries, width = shape(start + "self_attn.q_proj.weight", 2)
    stored, half = shape.depth(release.language + "layers."), head_dim // 2
    # Of Qwen3-VL, row and column each have 5/16 of the frequencies: 20 of 64.
    side = 5 * half // 16 if published.sections[1] else 0
    return QwenConfig(
        width=width, depth=shape.size("select_layer", min(published.depth, stored)),
        mlp_dim=shape(start + "mlp.gate_proj.weight", 2)[0], heads=queries // head_dim,
        kv_heads=shape(start + "self_attn.k_proj.weight", 2)[0] // head_dim, head_dim=head_dim,
        vocab_size=shape(_table(release, shape.shapes, shape.prefix), 2)[0], theta=published.theta,
        sections=(half - 2 * side, side, side), final_norm=published.final_norm,
    )  # fmt: skip


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
