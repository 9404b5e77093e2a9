"""lerobot's folders of Multi-task DiT: the network's sizes, its weights, and the robot's transforms."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
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
from vla_accel.checkpoints.lerobot_statistics import ACTION, STATE
from vla_accel.checkpoints.stacks import Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.diffusion_policy.checkpoint import (
    check_statistics,
    read_frames,
    read_scheduler,
    read_size,
    scaled,
)
from vla_accel.families.multi_task_dit.network import MultiTaskDit, MultiTaskDitConfig, Size
from vla_accel.families.multi_task_dit.transforms import TaskProcessor, prompt_ids
from vla_accel.families.overrides import check_vocabulary, robot_of
from vla_accel.nn.clip import ClipTextConfig, ClipVisionConfig
from vla_accel.nn.resnet import Camera
from vla_accel.transforms.robots import Preset
from vla_accel.transforms.tokenizer import Tokenizer, load_line_tokenizer

TOKENIZER = "openai/clip-vit-base-patch16"
_CLIP = ("clip-vit-base-patch16", "clip-vit-base-patch32", "clip-vit-large-patch14", "clip-vit-large-patch14-336")
"""OpenAI's models. Others that are called CLIP have other activations or heads."""
_CLIP_HEAD = 64
_STEPS = 100
"""lerobot's default of `num_integration_steps`."""
_OBSERVATION, _HEAD = "observation_encoder.", "noise_predictor."
_TEXT = _OBSERVATION + "text_encoder."
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BLOCK = {
    "qkv_proj": _QKV, "out_proj": ("self_attn.out_proj",), "fc1": ("mlp.fc1",), "fc2": ("mlp.fc2",),
}  # fmt: skip
_IMAGE_EMBEDDINGS = {"class_token": "embeddings.class_embedding", "pre_layernorm.": "pre_layrnorm.",
                     "patch_embedding.": "embeddings.patch_embedding."}  # fmt: skip
_IMAGE_POSITIONS = "embeddings.position_embedding.weight"
_TEXT_EMBEDDINGS = {"embed.": "embeddings.token_embedding.", "positions": "embeddings.position_embedding.weight",
                    "final_norm.": "final_layer_norm."}  # fmt: skip
_ENDS = {"time_in": "time_mlp.1", "time_out": "time_mlp.3", "action_in": "input_proj", "action_out": "output_proj"}
_ACTION_BLOCK = {"modulation": "adaLN_modulation.1", "fc1": "mlp.0", "fc2": "mlp.2"}


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[MultiTaskDit, TaskProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_settings(path, ("multi_task_dit",))
    saved = read_processors(folder, content, Preset.resize, weights)
    config = read_sizes(content, weights.shapes, saved.max_token_len, path)
    check_statistics(saved, len(config.cameras), config.state_dim, path)
    name = saved.tokenizer or required(content, "text_encoder_name", str, path)
    tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, name)
    check_vocabulary(tokenizer, config.text.vocab_size, settings)
    processor = TaskProcessor(
        state=saved.state,
        actions=saved.actions,
        action_dim=config.action_dim,
        preset=robot_of(saved.preset, settings),
        frame_shapes=(config.frame,) * len(config.cameras),
        cameras=saved.cameras,
        history=config.history,
        first=config.history - 1,
        tokenizer=tokenizer,
        max_token_len=config.max_token_len,
        default_prompt=settings.default_prompt,
        last_token=_last_token(tokenizer, config),
    )
    config = dataclasses.replace(config, cameras=scaled(processor))
    model, names = MultiTaskDit.empty(config), Names(weights.shapes)
    recipe = {name: names.pieces(name, config) for name in model.state_dict()}
    dead = [name for name in weights.shapes if names.is_dead(name)]
    return fitted(model, weights, recipe, str(folder), "Multi-task DiT", [*dead, *buffers(weights.shapes)]), processor


def _last_token(tokenizer: Tokenizer, config: MultiTaskDitConfig) -> int:
    """Return the token that ends a prompt: CLIP's has the highest number."""
    ids, last = prompt_ids(tokenizer, "a"), config.text.vocab_size - 1
    if len(ids) < 3 or ids[-1] != last:
        raise CheckpointError(f"tokenizer: expected CLIP's, which ends prompts in {last}, got another model's: {ids}")
    return last


class Names:
    """lerobot's names of canonical tensors. transformers may store CLIP's encoders without `vision_model` and
    `text_model`."""

    def __init__(self, shapes: Shapes) -> None:
        towers = "model.vision_model.", "text_encoder.text_model."
        self.vision, self.text = (
            tower if any(f".{tower}" in name for name in shapes) else tower.partition(".")[0] + "." for tower in towers
        )
        self.rotates = any(".attn.qkv_proj." in name for name in shapes)
        self.separate = any(name.startswith(f"{_OBSERVATION}vision_encoders.") for name in shapes)

    def encoder(self, index: str | int) -> str:
        """Return the start of the names of an image encoder."""
        encoder = f"vision_encoders.{index}." if self.separate else "vision_encoder."
        return f"{_OBSERVATION}{encoder}{self.vision}"

    def is_dead(self, name: str) -> bool:
        """Return whether nothing reads a stored tensor."""
        return name.endswith(".embeddings.position_ids") or ".post_layernorm." in name

    def pieces(self, name: str, config: MultiTaskDitConfig) -> tuple[Piece, ...]:
        """Return the stored tensors that make up one canonical tensor, in order along its first axis."""
        part, _, rest = name.partition(".")
        if part == "head":
            return (self._of_head(rest),)
        if part == "text":
            if rest.startswith("projection."):
                return (Piece(_TEXT + rest),)
            return _tower(rest, _TEXT + self.text, config.text.width, _TEXT_EMBEDDINGS)
        index, _, rest = rest.partition(".")
        start, patches = self.encoder(index), config.vision.tokens
        if rest in ("class_position", "position_embedding"):
            first = rest == "class_position"
            return (Piece(start + _IMAGE_POSITIONS, 1 if first else patches, start=0 if first else 1),)
        return _tower(rest, start, config.vision.width, _IMAGE_EMBEDDINGS)

    def _of_head(self, name: str) -> Piece:
        if name == "positions":
            return Piece(_HEAD + "pos_embedding", frame=True)
        module, _, leaf = name.partition(".")
        if module != "layers":
            return Piece(f"{_HEAD}{_ENDS[module]}.{leaf}")
        index, module, leaf = leaf.split(".")
        attention = {"qkv_proj": "attn.qkv_proj.", "out_proj": "attn.out_proj."}
        if not self.rotates:
            attention = {"qkv_proj": "multihead_attn.in_proj_", "out_proj": "multihead_attn.out_proj."}
        stored = attention.get(module) or f"{_ACTION_BLOCK[module]}."
        return Piece(f"{_HEAD}transformer_blocks.{index}.{stored}{leaf}")


def _tower(name: str, start: str, width: int, others: Mapping[str, str]) -> tuple[Piece, ...]:
    """Return the stored tensors of a tensor of CLIP's encoders, whose names begin with `start`."""
    if match := re.fullmatch(r"layers\.(\d+)\.(\w+)\.(\w+)", name):
        index, module, leaf = match.groups()
        stored = _BLOCK.get(module, (module,))
        rows = width if len(stored) > 1 else None
        return tuple(Piece(f"{start}encoder.layers.{index}.{part}.{leaf}", rows) for part in stored)
    ours = next(ours for ours in others if name.startswith(ours))
    return (Piece(start + others[ours] + name.removeprefix(ours)),)


# -- sizes --------------------------------------------------------------------------------------------------------


def read_sizes(content: Mapping[str, Any], shapes: Shapes, max_token_len: int, path: Path) -> MultiTaskDitConfig:
    """Return the sizes in a config.json, and those of CLIP that the shapes of the weights show. Raises
    CheckpointError."""
    inputs, outputs = features(content, path)
    for name in ("vision_encoder_name", "text_encoder_name"):
        model = required(content, name, str, path)
        if Path(model).name not in _CLIP:
            raise CheckpointError(f"{path}: {name}: expected OpenAI's CLIP ({', '.join(_CLIP)}), got {model!r:.80}")
    names, where = Names(shapes), str(path.parent)
    resize, frames = read_size(content.get("image_resize_shape"), path, "image_resize_shape"), read_frames(inputs, path)
    try:
        config = MultiTaskDitConfig(
            vision=_vision(names.encoder(0), shapes, where),
            text=_text(_TEXT + names.text, shapes, where),
            cameras=tuple(Camera(height, width) for height, width in frames),
            resize=resize,
            crop=_crop(content, [resize] if resize else frames, path),
            shared_encoder=not required(content, "use_separate_rgb_encoder_per_camera", bool, path),
            state_dim=length_of(inputs, STATE, path),
            action_dim=length_of(outputs, ACTION, path),
            history=size_of(content, "n_obs_steps", path),
            action_horizon=size_of(content, "horizon", path),
            width=size_of(content, "hidden_dim", path),
            depth=size_of(content, "num_layers", path),
            heads=size_of(content, "num_heads", path),
            time_dim=size_of(content, "timestep_embed_dim", path),
            rope_base=required(content, "rope_base", float, path) if names.rotates else None,
            positions=required(content, "use_positional_encoding", bool, path),
            max_token_len=max_token_len,
            **_objective(content, path),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    shape = shapes_by_name(shapes, _HEAD, where)
    pairs = [
        ("hidden_dim", config.width, shape("input_proj.weight", 2)[0]),
        ("num_layers", config.depth, depth_of(shapes, f"{_HEAD}transformer_blocks.")),
        ("timestep_embed_dim", config.time_dim, shape("time_mlp.1.weight", 2)[1]),
        ("use_rope", required(content, "use_rope", bool, path), names.rotates),
        ("use_separate_rgb_encoder_per_camera", not config.shared_encoder, names.separate),
    ]
    compare_sizes(pairs, where)
    return config


def _objective(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the scheduler and the steps of the objective in a config.json."""
    objective = required(content, "objective", str, path)
    if objective == "flow_matching":
        method = required(content, "integration_method", str, path)
        if method != "euler":
            raise CheckpointError(f"{path}: integration_method: expected euler, got {method!r:.60}: not supported")
        return {"scheduler": None, "num_steps": denoising_steps(content, "num_integration_steps", path, _STEPS)}
    if objective != "diffusion":
        raise CheckpointError(f"{path}: objective: expected diffusion or flow_matching, got {objective!r:.60}")
    train_steps = size_of(content, "num_train_timesteps", path)
    return {
        "scheduler": read_scheduler(content, train_steps, path),
        "num_steps": size_of(content, "num_inference_steps", path, train_steps),
    }


def _crop(content: Mapping[str, Any], whole: list[Size], path: Path) -> Size | None:
    """Return the size of the centre that CLIP sees. lerobot drops one that is larger than the images, too."""
    crop = read_size(content.get("image_crop_shape"), path, "image_crop_shape")
    fits = crop is None or all(crop[0] <= height and crop[1] <= width for height, width in whole)
    return crop if fits else None


def _vision(start: str, shapes: Shapes, where: str) -> ClipVisionConfig:
    shape = shapes_by_name(shapes, start, where)
    width, _, patch, _ = shape("embeddings.patch_embedding.weight", 4)
    side = math.isqrt(shape(_IMAGE_POSITIONS, 2)[0] - 1)
    return ClipVisionConfig(
        width=width, depth=depth_of(shapes, f"{start}encoder.layers."), heads=width // _CLIP_HEAD,
        mlp_dim=shape("encoder.layers.0.mlp.fc1.weight", 2)[0], patch_size=patch, image_size=side * patch,
    )  # fmt: skip


def _text(start: str, shapes: Shapes, where: str) -> ClipTextConfig:
    shape = shapes_by_name(shapes, start, where)
    vocabulary, width = shape("embeddings.token_embedding.weight", 2)
    return ClipTextConfig(
        width=width, depth=depth_of(shapes, f"{start}encoder.layers."), heads=width // _CLIP_HEAD,
        mlp_dim=shape("encoder.layers.0.mlp.fc1.weight", 2)[0], vocab_size=vocabulary,
        positions=shape("embeddings.position_embedding.weight", 2)[0],
    )  # fmt: skip
