"""Folders of MolmoAct2, its authors' own and lerobot's: the network's sizes, its weights, and the robot's transforms.

lerobot's folder has all weights, and names the authors' folder, whose sizes and tokenizer it needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.checkpoint import fitted
from vla_accel.checkpoints.lerobot import (
    denoising_steps,
    is_lerobot_config,
    read_settings,
    required,
)
from vla_accel.checkpoints.lora import MergedWeights
from vla_accel.checkpoints.settings import Setting, check
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.molmoact2.network import (
    Markers,
    MolmoAct2,
    MolmoAct2Config,
    MolmoExpertConfig,
    MolmoTextConfig,
)
from vla_accel.families.molmoact2.robot import lerobot_robot, published_robot
from vla_accel.families.molmoact2.settings import ADAPTER, EXPERT, IMAGES, KNOWN, MODEL, PROCESSOR, TEXT, VISION
from vla_accel.families.molmoact2.transforms import MolmoProcessor, MolmoPrompt
from vla_accel.families.overrides import processor_of, resized
from vla_accel.nn.molmo_vision import MolmoVisionConfig
from vla_accel.numeric import round_up
from vla_accel.transforms.tokenizer import Tokenizer, files_from_hub, load_line_tokenizer

MODEL_TYPE = "molmoact2"
_FILES = ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
_VISION, _TEXT, _EXPERT = "model.vision_backbone.", "model.transformer.", "model.action_expert."
SIGNS = (_EXPERT + "context_k_proj.weight", _TEXT + "wte.new_embedding")
"""Two tensors that no other model has."""
_DEAD = ("lm_head.weight", _TEXT + "ln_f.weight", _TEXT + "rotary_emb.inv_freq")
_BLOCK = {
    "qkv_proj": ("attention.wq", "attention.wk", "attention.wv"), "out_proj": ("attention.wo",),
    "fc1": ("feed_forward.w1",), "fc2": ("feed_forward.w2",), "layer_norm1": ("attention_norm",),
    "layer_norm2": ("ffn_norm",),
}  # fmt: skip
_LAYER = {
    "qkv_proj": "self_attn.att_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "o_proj": "self_attn.attn_out", "gate_up_proj": "mlp.ff_proj", "down_proj": "mlp.ff_out",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
}  # fmt: skip
_POOLING = {
    "q_proj": ("image_pooling_2d.wq",), "kv_proj": ("image_pooling_2d.wk", "image_pooling_2d.wv"),
    "out_proj": ("image_pooling_2d.wo",), "gate_up_proj": ("image_projector.w1", "image_projector.w3"),
    "down_proj": ("image_projector.w2",),
}  # fmt: skip
_ACTIONS = {
    "dense": ("modulation.linear",), "qkv_proj": ("self_attn.qkv",), "o_proj": ("self_attn.out_proj",),
    "cross_q": ("cross_attn.q_proj",), "cross_out": ("cross_attn.out_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "down_proj": ("mlp.down_proj",),
}  # fmt: skip
_SMALL = {
    "context.key_proj": "context_k_proj", "context.value_proj": "context_v_proj",
    "expert.dense": "final_layer.modulation.linear", "time_mlp_in": "time_embed.1", "time_mlp_out": "time_embed.3",
    "action_in_proj": "action_embed", "action_out_proj": "final_layer.linear",
}  # fmt: skip


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[MolmoAct2, MolmoProcessor]:  # fmt: skip
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_json(path)
    if saved := is_lerobot_config(content):
        content = read_settings(path, (MODEL_TYPE,))
        weights = merged(content, weights, path)
        base, config = authors_folder(content, path, settings)
        tokenizer = load_line_tokenizer(base, None, str(base))
        config, robot, fields = lerobot_robot(folder, content, weights, config, settings)
    else:
        config, tokenizer = read_model(folder), load_line_tokenizer(folder, settings.checkpoint.tokenizer, str(folder))
        base = folder
        config, robot, fields = published_robot(folder, config, settings)
    prompt = _with_tokens(fields["prompt"], tokenizer, base, config)
    whole = saved and sees_whole_prompt(content)
    config = _laid_out(config, prompt, tokenizer, base, len(robot.preset.images), whole=whole)
    config = resized(config, settings)
    processor = processor_of(
        MolmoProcessor, config, robot, tokenizer, settings, discrete_state=True,
        padded_state=robot.preset.state_dim, **{**fields, "prompt": prompt},
    )  # fmt: skip
    return load_network(weights, config, str(folder), "model." if saved else ""), processor


def authors_folder(
    content: Mapping[str, Any], path: Path, settings: PolicyConfig
) -> tuple[Path, MolmoAct2Config]:  # fmt: skip
    """Return the folder that lerobot's config.json names, or its copy from the hub, and the sizes in it."""
    source = settings.checkpoint.tokenizer or required(content, "checkpoint_path", str, path)
    hint = ", or name the folder of the model that it was trained from as checkpoint.tokenizer"
    base = files_from_hub(source, _FILES, hint)
    return base, read_model(base)


def merged(content: Mapping[str, Any], weights: Weights, path: Path) -> Weights:
    """Return the weights of lerobot's policy, with the adapter merged that its config.json names."""
    if content.get("train_mode_vlm") != "lora" and not content.get("enable_lora_vlm"):
        return weights
    rank, alpha = (size_of(content, name, path) for name in ("lora_rank", "lora_alpha"))
    return MergedWeights(weights, "model.", rank, alpha, path)


def sees_whole_prompt(content: Mapping[str, Any]) -> bool:
    """Return whether the expert sees every token of a prompt, by lerobot's config.json: lerobot's main branch, unlike
    0.6.1, hides tokens from the expert of "both" alone."""
    return "train_mode_vlm" in content and content.get("action_mode") == "continuous"


def load_network(weights: Weights, config: MolmoAct2Config, where: str, start: str) -> MolmoAct2:
    """Return the network. `start`: precedes the names of the stored tensors."""
    model = MolmoAct2.empty(config)
    recipe = {
        name: tuple(replace(piece, name=start + piece.name) for piece in pieces(name, config, weights.shapes, start))
        for name in model.state_dict()
    }
    return fitted(model, weights, recipe, where, "MolmoAct2", [start + name for name in _DEAD])


def pieces(
    name: str, config: MolmoAct2Config, shapes: Mapping[str, tuple[int, ...]], start: str = ""
) -> tuple[Piece, ...]:  # fmt: skip
    """Return the stored tensors that make up one canonical tensor, in order along its first axis. `start`: precedes
    their names in `shapes`."""
    if name == "embed.weight":
        tables = (_TEXT + "wte.embedding", _TEXT + "wte.new_embedding")
        return tuple(Piece(table, shapes.get(start + table, (0,))[0]) for table in tables)
    owner, _, leaf = name.rpartition(".")
    if owner in _SMALL:
        return (Piece(f"{_EXPERT}{_SMALL[owner]}.{leaf}"),)
    part, _, rest = name.partition(".")
    if part == "pooling":
        rows = {"kv_proj": config.vision.pool_width, "gate_up_proj": config.vision.hidden}
        return _joined(_VISION, _POOLING, rest, rows)
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", rest):
        index, inner = match.groups()
        if part == "vision":
            return _joined(
                f"{_VISION}image_vit.transformer.resblocks.{index}.", _BLOCK, inner, {"qkv_proj": config.vision.width}
            )
        if part == "expert":
            return _joined(f"{_EXPERT}blocks.{index}.", _ACTIONS, inner, {"gate_up_proj": config.expert.mlp_dim})
        module, _, leaf = inner.partition(".")
        stored, rows = f"{_TEXT}blocks.{index}.{_LAYER[module]}.{leaf}", config.prefix.mlp_dim
        if module != "gate_up_proj":
            return (Piece(stored),)
        # The files have the gate last.
        return Piece(stored, rows, start=rows), Piece(stored, rows, start=0)
    return (Piece(f"{_VISION}image_vit.{rest.replace('position_embedding', 'positional_embedding')}"),)


def _joined(start: str, table: Mapping[str, tuple[str, ...]], name: str, rows: Mapping[str, int]) -> tuple[Piece, ...]:
    module, _, leaf = name.partition(".")
    return tuple(Piece(f"{start}{stored}.{leaf}", rows.get(module)) for stored in table[module])


# -- the model ----------------------------------------------------------------------------------------------------


def read_model(folder: Path) -> MolmoAct2Config:
    """Return the sizes in the files of the authors' layout. Raises CheckpointError for another model."""
    path = folder / "config.json"
    content = _checked(read_json(path), MODEL, path)
    nested = {
        name: _checked(required(content, name, dict, path), table, f"{path}: {name}")
        for name, table in {
            "vit_config": VISION, "adapter_config": ADAPTER, "text_config": TEXT, "action_expert_config": EXPERT,
        }.items()
    }  # fmt: skip
    vit, adapter, text, expert = nested.values()
    real = size_of(content, "max_action_dim", path)
    if content.get("mask_action_dim_padding") is not True:
        raise CheckpointError(f"{path}: mask_action_dim_padding: expected true, which masks columns of padding")
    try:
        vision = _vision(vit, adapter, path)
        language = MolmoTextConfig(
            width=size_of(text, "hidden_size", path), depth=size_of(text, "num_hidden_layers", path),
            mlp_dim=size_of(text, "intermediate_size", path), heads=size_of(text, "num_attention_heads", path),
            kv_heads=size_of(text, "num_key_value_heads", path), head_dim=size_of(text, "head_dim", path),
            eps=required(text, "layer_norm_eps", float, path), theta=_theta(text, path),
        )  # fmt: skip
        width = size_of(expert, "hidden_size", path)
        multiple, hidden = (
            size_of(expert, "ffn_multiple_of", path),
            int(width * required(expert, "mlp_ratio", float, path)),
        )
        made = MolmoAct2Config(
            vision=vision, prefix=language,
            expert=MolmoExpertConfig(
                width, round_up(hidden, multiple), size_of(expert, "num_heads", path),
                size_of(expert, "num_layers", path), size_of(expert, "timestep_embed_dim", path),
            ),
            vocab_size=size_of(text, "vocab_size", path) + size_of(text, "additional_vocab_size", path),
            markers=_markers(content, folder, vision, path), action_dim=real, real_actions=real,
            action_horizon=size_of(content, "max_action_horizon", path),
            num_steps=denoising_steps(content, "flow_matching_num_steps", path),
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if adapter.get("text_hidden_size") != language.width:
        got = adapter.get("text_hidden_size")
        raise CheckpointError(f"{path}: adapter_config: text_hidden_size: expected {language.width}, got {got}")
    return made


def _checked(content: Mapping[str, Any], table: Sequence[Setting], where: object) -> Mapping[str, Any]:
    check(content, table, where, KNOWN)
    return content


def _vision(vit: Mapping[str, Any], adapter: Mapping[str, Any], path: Path) -> MolmoVisionConfig:
    layers, levels = size_of(vit, "num_hidden_layers", path), required(adapter, "vit_layers", list, path)
    if not levels or any(type(level) is not int or not -layers <= level < layers for level in levels):
        raise CheckpointError(f"{path}: vit_layers: expected some of {layers} layers, got {levels!r:.60}")
    size, patch = required(vit, "image_default_input_size", list, path), size_of(vit, "image_patch_size", path)
    if len(size) != 2 or size[0] != size[1] or type(size[0]) is not int:
        raise CheckpointError(f"{path}: image_default_input_size: expected a square, got {size!r:.60}")
    counted, found = [level % layers for level in levels], {}
    for table, name in ((vit, "vit_config"), (adapter, "adapter_config")):
        heads, wide = size_of(table, "num_attention_heads", path), size_of(table, "hidden_size", path)
        for key, expected in (("num_key_value_heads", heads), ("head_dim", wide // heads)):
            if table.get(key) != expected:
                raise CheckpointError(f"{path}: {name}: {key}: expected {expected}, got {table.get(key)!r:.60}")
        found[name] = wide, heads
    (width, heads), (pool, pool_heads) = found.values()
    made = MolmoVisionConfig(
        width=width, depth=max(counted) + 1, mlp_dim=size_of(vit, "intermediate_size", path), heads=heads,
        image_size=size[0], patch_size=patch, eps=required(vit, "layer_norm_eps", float, path),
        levels=tuple(counted), pool_width=pool, pool_heads=pool_heads,
        masked=required(adapter, "pooling_attention_mask", bool, path),
        hidden=size_of(adapter, "intermediate_size", path),
    )  # fmt: skip
    if vit.get("image_num_pos") != made.tokens:
        got = vit.get("image_num_pos")
        raise CheckpointError(f"{path}: image_num_pos: expected {made.tokens}, a position for each patch, got {got}")
    return made


def _theta(text: Mapping[str, Any], path: Path) -> float:
    """The base of the rotation; transformers 5 writes it into a table of its own as well."""
    rope = text.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{path}: rope_parameters: expected rope_type default, got {rope!r:.80}")
    return required(text if "rope_theta" in text else rope, "rope_theta", float, path)


def _markers(content: Mapping[str, Any], folder: Path, vision: MolmoVisionConfig, path: Path) -> Markers:
    """The tokens of an image, by config.json and processor_config.json."""
    where = folder / "processor_config.json"
    processor = _checked(read_json(where), PROCESSOR, where)
    images = _checked(required(processor, "image_processor", dict, where), IMAGES, f"{where}: image_processor")
    side = vision.image_size
    for key, expected in (("size", {"height": side, "width": side}), ("patch_size", vision.patch_size)):
        if images.get(key) != expected:
            raise CheckpointError(f"{where}: {key}: expected the model's {expected}, got {images.get(key)!r:.60}")
    ids = [size_of(content, f"image_{name}", path) for name in ("start_token_id", "patch_id", "col_id", "end_token_id")]
    columns = processor.get("use_single_crop_col_tokens")
    columns = processor.get("image_use_col_tokens", True) if columns is None else columns
    return Markers(ids[0], ids[1], ids[2] if columns else None, ids[3])


def _with_tokens(prompt: MolmoPrompt, tokenizer: Tokenizer, base: Path, config: MolmoAct2Config) -> MolmoPrompt:
    """Return a prompt with the tokenizer's own tokens."""
    path = base / "tokenizer_config.json"
    content, bos = read_json(path), []
    for name in ("bos_token", "eos_token"):
        word = content.get(name)
        word = word.get("content") if isinstance(word, dict) else word
        if not bos and isinstance(word, str) and word:
            bos = tokenizer.encode(word, add_bos=False)
    if len(bos) != 1:
        raise CheckpointError(f"{path}: expected bos_token or eos_token, one token, got {bos}")
    added = read_json(base / "tokenizer.json").get("added_tokens") or []
    specials = tuple(one["content"] for one in added if isinstance(one, dict) and isinstance(one.get("content"), str))
    marks = config.markers.start, config.markers.end
    if tokenizer.encode(prompt.view, add_bos=False) != [*marks]:
        got = tokenizer.encode(prompt.view, add_bos=False)
        raise CheckpointError(
            f"{base}: tokenizer: expected {prompt.view} as {[*marks]}, as config.json has it, got {got}"
        )
    for word in ("<state_start>", "<state_end>", "<state_0>", f"<state_{prompt.bins - 1}>", "<action_output>"):
        if len(got := tokenizer.encode(word, add_bos=False)) != 1:
            raise CheckpointError(
                f"{base}: tokenizer: expected {word} as one token, as num_state_tokens has it, got {got}"
            )
    return replace(prompt, bos=bos[0], specials=specials)


def _laid_out(
    config: MolmoAct2Config, prompt: MolmoPrompt, tokenizer: Tokenizer, base: Path, views: int, *, whole: bool
) -> MolmoAct2Config:
    """Return the config with where the images of a prompt are, and which tokens the expert does not see: none if it
    sees the `whole` prompt."""
    edge, between = prompt.layout(tokenizer)
    content = read_json(base / "config.json")
    eos = content.get("eos_token_id") if content.get("action_mode") == "both" and not whole else None
    if eos is not None and type(eos) is not int:
        raise CheckpointError(f"{base / 'config.json'}: eos_token_id: expected a token, got {eos!r:.60}")
    ids = prompt.tokens(tokenizer, prompt.text("do it", np.zeros(1), views), views)
    return replace(config, edge=edge, between=between, hidden=hidden_tokens(ids, eos))


def hidden_tokens(ids: Sequence[int], eos: int | None) -> tuple[int, ...]:
    """Return the places of `eos` in a prompt, as `MolmoAct2Config.hidden`: from its end except the first token's."""
    found = [index if index == 0 else index - len(ids) for index, token in enumerate(ids) if token == eos]
    return tuple(sorted(found, key=lambda index: (index < 0, index)))
