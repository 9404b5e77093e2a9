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
    Processors,
    denoising_steps,
    features,
    is_lerobot_config,
    read_processors,
    read_settings,
    required,
)
from vla_accel.checkpoints.lerobot_settings import ACTION_FRAME, PACK, STATE_FRAME
from vla_accel.checkpoints.lerobot_statistics import STATE
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
    MolmoVisionConfig,
)
from vla_accel.families.molmoact2.settings import ADAPTER, EXPERT, IMAGES, KNOWN, MODEL, PROCESSOR, TEXT, VISION
from vla_accel.families.molmoact2.transforms import Joints, MolmoProcessor, MolmoPrompt
from vla_accel.families.overrides import processor_of, resized, robot_of
from vla_accel.numeric import round_up
from vla_accel.transforms.normalisation import Normaliser, finite_array, scale_between
from vla_accel.transforms.robots import Preset
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
# lerobot's budget of a prompt, in tokens: words that are always the same, an instruction, and a margin.
_VIEW_TOKENS, _WORDS, _UNIT = 196, 80 + 32 + 32, 64


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[MolmoAct2, MolmoProcessor]:  # fmt: skip
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_json(path)
    if saved := is_lerobot_config(content):
        content = read_settings(path, (MODEL_TYPE,))
        base, config = authors_folder(content, path, settings)
        tokenizer = load_line_tokenizer(base, None, str(base))
        config, robot, fields = _lerobot(folder, content, weights, config, settings)
    else:
        config, tokenizer = read_model(folder), load_line_tokenizer(folder, settings.checkpoint.tokenizer, str(folder))
        base = folder
        config, robot, fields = _published(folder, config, settings)
    prompt = _with_tokens(fields["prompt"], tokenizer, base, config)
    config = _laid_out(config, prompt, tokenizer, base, len(robot.preset.images))
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


def with_steps(config: MolmoAct2Config, content: Mapping[str, Any], path: Path) -> MolmoAct2Config:
    """Return the sizes with the denoising steps of lerobot's config.json, if it has any."""
    if content.get("num_inference_steps") is None:
        return config
    return replace(config, num_steps=denoising_steps(content, "num_inference_steps", path))


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
    config: MolmoAct2Config, prompt: MolmoPrompt, tokenizer: Tokenizer, base: Path, views: int
) -> MolmoAct2Config:  # fmt: skip
    """Return the config with where the images of a prompt are, and which tokens the expert does not see."""
    edge, between = prompt.layout(tokenizer)
    content = read_json(base / "config.json")
    eos = content.get("eos_token_id") if content.get("action_mode") == "both" else None
    if eos is not None and type(eos) is not int:
        raise CheckpointError(f"{base / 'config.json'}: eos_token_id: expected a token, got {eos!r:.60}")
    ids = prompt.tokens(tokenizer, prompt.text("do it", np.zeros(1), views), views)
    return replace(config, edge=edge, between=between, hidden=hidden_tokens(ids, eos))


def hidden_tokens(ids: Sequence[int], eos: int | None) -> tuple[int, ...]:
    """Return the places of `eos` in a prompt, as `MolmoAct2Config.hidden`: from its end except the first token's."""
    found = [index if index == 0 else index - len(ids) for index, token in enumerate(ids) if token == eos]
    return tuple(sorted(found, key=lambda index: (index < 0, index)))


# -- the robot ----------------------------------------------------------------------------------------------------


def _lerobot(
    folder: Path, content: Mapping[str, Any], weights: Weights, config: MolmoAct2Config,
    settings: PolicyConfig,
) -> tuple[MolmoAct2Config, Processors, dict[str, Any]]:  # fmt: skip
    """Return sizes, robot and more fields of the transforms of lerobot's folder."""
    path = folder / "config.json"
    if (tag := settings.checkpoint.embodiment) is not None:
        raise ConfigError(f"checkpoint.embodiment: lerobot's folder has one robot, expected none, got {tag!r}")
    saved = read_processors(folder, content, "stretched", weights)
    pack, where = saved.before[PACK], folder / "policy_preprocessor.json"
    keys = required(pack, "image_keys", list, where)
    inputs, _ = features(content, path)
    cameras = [name for name, feature in inputs.items() if feature.get("type") == "VISUAL"]
    if not keys or len(set(keys)) != len(keys) or not set(keys) <= set(cameras):
        raise CheckpointError(
            f"{where}: image_keys: expected some of {', '.join(cameras)}, each once, got {keys!r:.200}"
        )
    # The step decides which cameras there are, and their order.
    others = {name: feature for name, feature in inputs.items() if name not in cameras}
    ordered = {**{key: inputs[key] for key in keys}, **others}
    saved = read_processors(folder, {**content, "input_features": ordered}, "stretched", weights)
    if any(camera.kind != "identity" for camera in saved.cameras):
        raise CheckpointError(
            f"{path}: normalization_mapping: VISUAL: expected IDENTITY, as lerobot's MolmoAct2 has it"
        )
    horizon = size_of(content, "chunk_size", path)
    if pack.get("chunk_size") != horizon:
        raise CheckpointError(f"{where}: chunk_size: expected config.json's {horizon}, got {pack.get('chunk_size')}")
    preset = robot_of(saved.preset, settings)
    fallback = required(pack, "allow_image_key_fallback", bool, where)
    if not settings.preset:
        preset = replace(preset, optional_images=preset.images if fallback else ())
    names = {word: required(pack, word, str, where) for word in ("setup_type", "control_mode")}
    wrap = {word: required(pack, f"add_{word.partition('_')[0]}_tokens", bool, where) for word in names}
    prompt = _prompt(
        names, wrap, required(pack, "normalize_language", bool, where), size_of(pack, "num_state_tokens", where)
    )
    config = replace(
        with_steps(config, content, path), action_horizon=horizon, real_actions=_real(pack, config, saved, where),
        max_token_len=_longest(config, preset, pack.get("max_sequence_length"), where),
    )  # fmt: skip
    fields = {
        "prompt": prompt, "joints": _joints(saved, folder), "plain_state": saved.state.unscaled,
        # Their order in a preset of the user's is the user's.
        "by_name": () if settings.preset else tuple(sorted(range(len(keys)), key=keys.__getitem__)),
    }  # fmt: skip
    return config, replace(saved, preset=preset), fields


def _real(pack: Mapping[str, Any], config: MolmoAct2Config, saved: Processors, where: Path) -> int:
    real, expected = size_of(pack, "env_action_dim", where), saved.preset.action_dim
    if real != expected or real > config.action_dim:
        raise CheckpointError(f"{where}: env_action_dim: expected {expected}, at most {config.action_dim}, got {real}")
    return real


def _longest(config: MolmoAct2Config, preset: Preset, stated: object, where: Path) -> int:
    """The longest prompt without its images: lerobot bounds it with them."""
    views = len(preset.images)
    whole = round_up(views * _VIEW_TOKENS + _WORDS + preset.state_dim, _UNIT)
    whole = whole if stated is None else size_of({"max_sequence_length": stated}, "max_sequence_length", where)
    if (longest := whole - views * config.image_tokens) < 1:
        raise CheckpointError(f"{where}: max_sequence_length: expected more than {views} images' tokens, got {whole}")
    return longest


def _joints(saved: Processors, folder: Path) -> Joints | None:
    found = []
    for steps, name in ((saved.before, STATE_FRAME), (saved.after, ACTION_FRAME)):
        step = steps.get(name, {})
        values = [
            finite_array(step.get(word), f"{folder}: {name}: {word}") for word in ("joint_signs", "joint_offsets")
        ]
        signs, offsets = values
        if (signs is None) != (offsets is None) or (
            signs is not None and offsets is not None and len(signs) != len(offsets)
        ):
            raise CheckpointError(f"{folder}: {name}: expected as many joint_signs as joint_offsets, or neither")
        found.append(None if signs is None or offsets is None else Joints(signs, offsets))
    state, action = found
    same = (state is None) == (action is None)
    if state is not None and action is not None:
        same = np.array_equal(state.signs, action.signs) and np.array_equal(state.offsets, action.offsets)
        fits = len(state.signs) <= min(saved.preset.state_dim, saved.preset.action_dim)
        if not fits or not np.array_equal(abs(state.signs), np.ones(len(state.signs))):
            raise CheckpointError(
                f"{folder}: joint_signs: expected 1 or -1 for joints of state and action, got {state.signs}"
            )
    if not same:
        raise CheckpointError(f"{folder}: expected the same joint_signs and joint_offsets of state and actions")
    return state


def _prompt(words: Mapping[str, str], wrap: Mapping[str, bool], clean: bool, bins: int) -> MolmoPrompt:
    wrapped = []
    for name, word in words.items():
        start, end = (f"<{name.partition('_')[0]}_{side}>" for side in ("start", "end"))
        done = word.startswith(start) and word.endswith(end)
        wrapped.append(f"{start}{word}{end}" if word and wrap[name] and not done else word)
    return MolmoPrompt(0, "<im_start><im_end>", *wrapped, clean=clean, bins=bins)


def _published(
    folder: Path, config: MolmoAct2Config, settings: PolicyConfig
) -> tuple[MolmoAct2Config, Processors, dict[str, Any]]:  # fmt: skip
    """As `_lerobot`, of the authors' layout: norm_stats.json describes one robot or several."""
    path = folder / "config.json"
    content = read_json(path)
    statistics = folder / str(content.get("norm_stats_filename") or "norm_stats.json")
    table = read_json(statistics)
    tags = required(table, "metadata_by_tag", dict, statistics)
    tag = settings.checkpoint.embodiment or (next(iter(tags)) if len(tags) == 1 else None)
    if not isinstance(tags.get(tag), dict):
        raise ConfigError(
            f"checkpoint.embodiment: expected a robot of {statistics.name}, {', '.join(tags) or 'which has none'}, got "
            f"{tag!r}"
        )
    robot, where = tags[tag], Path(f"{statistics}: {tag}")
    mode = table.get("norm_mode", "min_max")
    if mode not in (names := {"q01_q99": ("q01", "q99"), "min_max": ("min", "max"), "q10_q90": ("q10", "q90")}):
        raise CheckpointError(f"{statistics}: norm_mode: expected {' or '.join(names)}, got {mode!r:.60}")
    state, actions = (
        _scale(robot.get(f"{name}_stats"), names[mode], f"{where}: {name}_stats") for name in ("state", "action")
    )
    still = _still(robot["state_stats"], f"{where}: state_stats")
    cameras = robot.get("camera_keys")
    if not isinstance(cameras, list) or not cameras or not all(isinstance(key, str) for key in cameras):
        raise CheckpointError(f"{where}: camera_keys: expected the names of cameras, got {cameras!r:.60}")
    if (steps := content.get("n_obs_steps")) != 1:
        raise CheckpointError(f"{path}: n_obs_steps: expected 1: a policy of several observations, got {steps!r:.60}")
    real, horizon = len(actions.low), size_of(robot, "action_horizon", where, config.action_horizon)
    if real > config.action_dim or horizon > config.action_horizon:
        raise CheckpointError(
            f"{where}: expected at most {config.action_horizon} actions of {config.action_dim} numbers"
        )
    preset = Preset(tuple(cameras), (STATE,), len(state.low), real, "task", tuple(cameras), resize="stretched")
    preset = robot_of(preset, settings)
    names = {word: str(robot.get(word) or "") for word in ("setup_type", "control_mode")}
    wrap = {word: _flag(content, f"add_{word.partition('_')[0]}_tokens", path) for word in names}
    prompt = _prompt(names, wrap, True, size_of(content, "num_state_tokens", path))
    config = replace(
        config, real_actions=real, action_horizon=horizon, max_token_len=_longest(config, preset, None, where)
    )
    return config, Processors(preset, state, actions), {"prompt": prompt, "still": still}


def _flag(content: Mapping[str, Any], key: str, path: Path) -> bool:
    return required({key: True, **content}, key, bool, path)


def _scale(table: Any, ends: tuple[str, str], where: str) -> Normaliser:
    return replace(scale_between(table, ends, lambda span: np.maximum(span, 1e-6), where), single=True)


def _still(table: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The numbers that never vary."""
    least, most = (finite_array(table.get(name), f"{where}: {name}") for name in ("min", "max"))
    return () if least is None or most is None else tuple(np.flatnonzero(least == most).tolist())
