"""lerobot's folders of Evo-1: the network's sizes, its weights, and the robot's transforms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import (
    buffers,
    denoising_steps,
    features,
    length_of,
    read_processors,
    read_settings,
    required,
)
from vla_accel.checkpoints.lerobot_statistics import ACTION
from vla_accel.checkpoints.qwen import language_pieces
from vla_accel.checkpoints.stacks import Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.evo1.network import Evo1, Evo1Config, HeadConfig
from vla_accel.families.evo1.transforms import Evo1Processor, Gripper, arrangement_of
from vla_accel.families.overrides import check_vocabulary, resized, robot_of, transforms_of
from vla_accel.nn.intern_vision import InternVisionConfig
from vla_accel.nn.qwen_language import QwenConfig
from vla_accel.transforms.tokenizer import load_line_tokenizer

TOKENIZER = "OpenGVLab/InternVL3-1B-hf"
"""The tokenizer on the hub, where config.json names none."""
_VLM, _HEAD = "model.embedder.model.", "model.action_head."
_TOWER, _LANGUAGE, _PROJECTOR = _VLM + "vision_tower.", _VLM + "language_model.", _VLM + "multi_modal_projector."
SIGNS = (_HEAD + "seq_pool_proj.weight", _TOWER + "embeddings.cls_token")
"""Two tensors that no other model has."""
_TABLES = (_HEAD + "time_pos_enc.pe", _HEAD + "action_encoder.pos_encoding.pe")
"""Tables of sines and cosines, which are always the same."""
_VISION_HEAD = 64
_LARGER = 1536
"""From this width on, Qwen2.5's heads have 128 numbers, and 64 below it."""
_BLOCK = {
    "layer_norm1": ("layernorm_before",), "layer_norm2": ("layernorm_after",), "fc1": ("mlp.fc1",),
    "qkv_proj": ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "fc2": ("mlp.fc2",),
    "out_proj": ("attention.projection_layer",), "layer_scale1": ("lambda_1",), "layer_scale2": ("lambda_2",),
}  # fmt: skip
_EMBEDDINGS = {
    "class_embedding": "cls_token", "position_embedding": "position_embeddings",
    "patch_embedding.weight": "patch_embeddings.projection.weight",
    "patch_embedding.bias": "patch_embeddings.projection.bias",
}  # fmt: skip
_MERGER = {"norm": "layer_norm", "fc1": "linear_1", "fc2": "linear_2"}
_CROSS = {
    "layer_norm1": "norm1.", "layer_norm2": "norm2.", "q_proj": "attn.in_proj_", "kv_proj": "attn.in_proj_",
    "out_proj": "attn.out_proj.", "fc1": "ff.0.", "fc2": "ff.2.",
}  # fmt: skip
_SHARED = {"norm": "norm_out", "pool": "seq_pool_proj"}
_BY_EMBODIMENT = {
    "state_in": "state_encoder.fc1", "state_out": "state_encoder.fc2", "action_in": "action_encoder.W1",
    "action_mix": "action_encoder.W2", "action_out": "action_encoder.W3", "decode_in": "mlp_head.fc1",
    "decode_out": "mlp_head.fc2",
}  # fmt: skip


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[Evo1, Evo1Processor]:  # fmt: skip
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_settings(path, ("evo1",))
    saved = read_processors(folder, content, "antialias", weights)
    if any(camera.kind != "identity" for camera in saved.cameras):
        raise CheckpointError(f"{path}: normalization_mapping: VISUAL: expected IDENTITY, as lerobot's Evo-1 has it")
    name = required({"vlm_model_name": TOKENIZER, **content}, "vlm_model_name", str, path)
    tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, name)
    slots = size_of(content, "max_views", path, 3)
    config = replace(read_sizes(weights.shapes, content, path), arrangement=arrangement_of(tokenizer, slots))
    config = resized(config, settings)
    check_vocabulary(tokenizer, config.language.vocab_size, settings)
    gripper = _gripper(content, saved.preset.action_dim, path)
    spare = _spare_cameras(content, path)
    preset = saved.preset if spare else replace(saved.preset, optional_images=())
    robot = replace(saved, preset=robot_of(preset, settings))
    processor = transforms_of(
        Evo1Processor, config, robot, tokenizer, settings, config=config, gripper=gripper,
        most_missing=spare if settings.preset is None else None,
    )  # fmt: skip
    model, embodiments = Evo1.empty(config), size_of(content, "num_categories", path, 1)
    entry = content.get("default_embodiment_id")
    entry = 0 if entry is None else entry
    if type(entry) is not int or not 0 <= entry < embodiments:
        raise CheckpointError(f"{path}: default_embodiment_id: expected 0 to {embodiments - 1}, got {entry!r:.60}")
    recipe = {name: pieces(name, config, entry if embodiments > 1 else None) for name in model.state_dict()}
    return fitted(model, weights, recipe, str(folder), "Evo-1", [*_TABLES, *buffers(weights.shapes)]), processor


def _spare_cameras(content: Mapping[str, Any], path: Path) -> int:
    """Return how many cameras may be missing: `empty_cameras`, less those that lerobot added itself."""
    allowed = content.get("empty_cameras", 0)
    if type(allowed) is not int or allowed < 0:
        raise CheckpointError(f"{path}: empty_cameras: expected a whole number of 0 or more, got {allowed!r:.60}")
    added = sum("empty_camera" in name for name in features(content, path)[0])
    return max(0, allowed - added)


def read_sizes(shapes: Shapes, content: Mapping[str, Any], path: Path) -> Evo1Config:
    """Return the architecture that the shapes show, checked against config.json at `path`.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    where = str(path.parent)
    shape = shapes_by_name(shapes, "", where)
    horizon = size_of(content, "chunk_size", path)
    chunk, hidden = _product(shapes, _HEAD + "mlp_head.fc2", where)
    state_hidden, state_dim = _product(shapes, _HEAD + "state_encoder.fc1", where)
    width = shape(_HEAD + "norm_out.weight", 1)[0]
    vision, language = _vision(shapes, where), _language(shapes, where)
    views, image_tokens = size_of(content, "max_views", path, 3), vision.image_tokens
    longest = size_of(content, "max_text_length", path, 1024)
    if longest <= views * image_tokens:
        least = views * image_tokens + 1
        raise CheckpointError(f"{path}: max_text_length: expected at least {least}, for {views} images, got {longest}")
    _, outputs = features(content, path)
    try:
        config = Evo1Config(
            vision=vision,
            language=language,
            head=HeadConfig(
                depth=depth_of(shapes, _HEAD + "transformer_blocks."), heads=size_of(content, "num_heads", path, 8),
                state_hidden=state_hidden, hidden=hidden,
            ),
            state_dim=state_dim,
            action_dim=chunk // horizon,
            robot_action_dim=length_of(outputs, ACTION, path),
            action_horizon=horizon,
            num_steps=denoising_steps(content, "num_inference_timesteps", path, 32),
            max_token_len=longest - views * image_tokens,
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error
    found = {
        "embed_dim": width, "hidden_dim": hidden, "state_hidden_dim": state_hidden, "max_state_dim": state_dim,
        "max_action_dim": config.action_dim, "num_layers": config.head.depth, "vlm_num_layers": language.depth,
        "image_resolution": [vision.side, vision.side],
    }  # fmt: skip
    compare_sizes([(name, content.get(name), size) for name, size in found.items()], where)
    return config


def pieces(name: str, config: Evo1Config, entry: int | None = None) -> tuple[Piece, ...]:
    """Return the stored tensors that make up one canonical tensor, in order along its first axis. `entry`: the
    embodiment, where projections are stored for several."""
    part, _, rest = name.partition(".")
    if part == "embed":
        return (Piece(_LANGUAGE + "embed_tokens.weight"),)
    if part == "language":
        is_layer = rest.startswith("layers.")
        return language_pieces(rest, _LANGUAGE, config.language) if is_layer else (Piece(_LANGUAGE + rest),)
    if part == "vision":
        return _vision_pieces(rest, config)
    module, _, leaf = rest.partition(".")
    if module == "layers":
        index, module, leaf = leaf.split(".")
        start, width = {"q_proj": 0, "kv_proj": 1}.get(module), config.language.width
        stored = f"{_HEAD}transformer_blocks.{index}.{_CROSS[module]}{leaf}"
        return (Piece(stored) if start is None else Piece(stored, (1 + start) * width, start=start * width),)
    if module in _SHARED:
        return (Piece(f"{_HEAD}{_SHARED[module]}.{leaf}"),)
    stored = _HEAD + _BY_EMBODIMENT[module]
    return (Piece(f"{stored}.linear.{leaf}"),) if entry is None else (Piece(f"{stored}.{leaf}", entry=entry),)


def _vision_pieces(name: str, config: Evo1Config) -> tuple[Piece, ...]:
    if match := re.fullmatch(r"layers\.(\d+)\.(\w+)(\.\w+)?", name):
        index, module, leaf = match.groups()
        stored = _BLOCK[module]
        rows = config.vision.width if len(stored) > 1 else None
        return tuple(Piece(f"{_TOWER}encoder.layer.{index}.{part}{leaf or ''}", rows) for part in stored)
    if name.startswith("merger."):
        _, module, leaf = name.split(".")
        return (Piece(f"{_PROJECTOR}{_MERGER[module]}.{leaf}"),)
    return (Piece(f"{_TOWER}embeddings.{_EMBEDDINGS[name]}", frame="patch" not in name),)


def _product(shapes: Shapes, name: str, where: str) -> tuple[int, int]:
    """Outputs and inputs of a projection, which may be stored for several embodiments, transposed."""
    several = shapes.get(name + ".weight", ())
    if len(several) == 3:
        return several[2], several[1]
    outputs, inputs = shapes_by_name(shapes, "", where)(name + ".linear.weight", 2)
    return outputs, inputs


def _vision(shapes: Shapes, where: str) -> InternVisionConfig:
    shape, first = shapes_by_name(shapes, "", where), _TOWER + "encoder.layer.0."
    width, _, patch, _ = shape(_TOWER + "embeddings.patch_embeddings.projection.weight", 4)
    out_width, joined = shape(_PROJECTOR + "linear_1.weight", 2)
    try:
        return InternVisionConfig(
            width=width, depth=depth_of(shapes, _TOWER + "encoder.layer."), heads=width // _VISION_HEAD,
            mlp_dim=shape(first + "mlp.fc1.weight", 2)[0], patch_size=patch, merge=math.isqrt(joined // width),
            positions=shape(_TOWER + "embeddings.position_embeddings", 3)[1] - 1, out_width=out_width,
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error


def _language(shapes: Shapes, where: str) -> QwenConfig:
    shape, first = shapes_by_name(shapes, "", where), _LANGUAGE + "layers.0."
    vocabulary, width = shape(_LANGUAGE + "embed_tokens.weight", 2)
    head_dim = 64 if width < _LARGER else 128
    try:
        return QwenConfig(
            width=width, depth=depth_of(shapes, _LANGUAGE + "layers."),
            mlp_dim=shape(first + "mlp.gate_proj.weight", 2)[0],
            heads=width // head_dim, kv_heads=shape(first + "self_attn.k_proj.weight", 2)[0] // head_dim,
            head_dim=head_dim, vocab_size=vocabulary, theta=1e6, sections=(head_dim // 2, 0, 0), final_norm=True,
            qk_norm=False, qkv_bias=True,
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error


def _gripper(content: Mapping[str, Any], action_dim: int, path: Path) -> Gripper | None:
    """The gripper in config.json, which lerobot prefers to its saved step."""
    if content.get("binarize_gripper") in (None, False):
        return None
    required(content, "binarize_gripper", bool, path)
    dim = required(content, "gripper_index", int, path)
    threshold, below, above = (
        required(content, f"gripper_{name}", float, path)
        for name in ("threshold", "below_threshold_value", "above_threshold_value")
    )
    if not 0 <= dim < action_dim:
        raise CheckpointError(f"{path}: gripper_index: expected 0 to {action_dim - 1}, got {dim}")
    return Gripper(dim, threshold, below, above)
