"""lerobot's folders of ACT: the network's sizes, its weights, and the robot's transforms."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import buffers, features, read_processors, read_settings, required
from vla_accel.checkpoints.lerobot_statistics import ENVIRONMENT, STATE
from vla_accel.checkpoints.stacks import Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.act.network import Act, ActConfig
from vla_accel.families.overrides import robot_of
from vla_accel.nn.resnet import Camera, ResNetConfig
from vla_accel.transforms.frames import FrameProcessor

_ROOT, _DEAD = "model.", "model.vae_encoder"
_SIDES = ("height", "width")
_log = logging.getLogger("vla_accel.checkpoints")


def load_folder(folder: Path, settings: PolicyConfig, weights: Weights | None = None) -> tuple[Act, FrameProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_settings(path, ("act",))
    saved = read_processors(folder, content, "antialias", weights)
    inputs, _ = features(content, path)
    shapes = {key: image_shape(key, f, path) for key, f in inputs.items() if f.get("type") == "VISUAL"}
    if len(shapes) != len(saved.cameras):
        raise CheckpointError(f"{path}: expected images of all {len(shapes)} cameras, got {len(saved.cameras)}")
    preset = robot_of(saved.preset, settings)
    processor = FrameProcessor(
        preset=preset, state=saved.state, actions=saved.actions, action_dim=preset.action_dim,
        frame_shapes=tuple(shapes.values()), cameras=saved.cameras, temporal_ensemble=read_ensemble(content, path),
    )  # fmt: skip
    scales = processor.pixel_scales.astype(float).tolist()
    cameras = tuple(
        Camera(*shape, tuple(mean), tuple(deviation))
        for shape, (mean, deviation) in zip(shapes.values(), scales, strict=True)
    )
    dims = {key: inputs[key]["shape"][0] if key in inputs else 0 for key in (STATE, ENVIRONMENT)}
    config = read_sizes(weights.shapes, content, cameras, (dims[STATE], dims[ENVIRONMENT], preset.action_dim), path)
    if processor.temporal_ensemble is not None:
        _log.warning(
            "%s: temporal_ensemble_coeff %g: AsyncRunner, the evaluation and lerobot's plugin average the chunks of an "
            "episode; `infer` returns each chunk as it is", folder, processor.temporal_ensemble,
        )  # fmt: skip
    model = Act.empty(config)
    recipe = {name: (Piece(_ROOT + name),) for name in model.state_dict()}
    dead = [*buffers(weights.shapes), *(name for name in weights.shapes if name.startswith(_DEAD))]
    return fitted(model, weights, recipe, str(folder), "ACT", dead), processor


def read_ensemble(content: Mapping[str, Any], path: Path) -> float | None:
    """Return the coefficient of temporal ensembling, None without. Raises CheckpointError for one that lerobot refuses
    as well."""
    coefficient, steps = content.get("temporal_ensemble_coeff"), content.get("n_action_steps")
    if coefficient is None:
        return None
    if type(coefficient) not in (int, float) or not math.isfinite(coefficient):
        raise CheckpointError(f"{path}: temporal_ensemble_coeff: expected a number or null, got {coefficient!r:.60}")
    if steps != 1:
        raise CheckpointError(f"{path}: n_action_steps: expected 1 with temporal_ensemble_coeff, got {steps!r:.60}")
    return float(coefficient)


def image_shape(key: str, feature: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Return height and width of a camera's images. Raises CheckpointError for a feature of another form."""
    shape = feature.get("shape")
    if not isinstance(shape, list) or len(shape) != 3 or shape[0] != 3:
        raise CheckpointError(f"{path}: {key}: expected shape [3, height, width], got {shape!r:.60}")
    height, width = (size_of(dict(zip(_SIDES, shape[1:], strict=True)), side, path) for side in _SIDES)
    return height, width


def read_sizes(
    shapes: Shapes, content: Mapping[str, Any], cameras: tuple[Camera, ...], dims: tuple[int, int, int], path: Path
) -> ActConfig:
    """Return the architecture that the shapes show, checked against config.json.

    Args:
        shapes: Of the stored tensors.
        content: config.json.
        cameras: Of the policy.
        dims: Numbers of the state, the environment and an action, as config.json says.
        path: Of config.json, for errors.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    folder = str(path.parent)
    shape = shapes_by_name(shapes, _ROOT, folder)
    hidden, width = shape("encoder.layers.0.linear1.weight", 2)
    horizon, _ = shape("decoder_pos_embed.weight", 2)
    actions, _ = shape("action_head.weight", 2)
    depths = {name: depth_of(shapes, f"{_ROOT}{name}.layers.") for name in ("encoder", "decoder")}
    activation = required(content, "feedforward_activation", str, path)
    if activation not in ("relu", "gelu"):
        raise CheckpointError(f"{path}: feedforward_activation: expected relu or gelu, got {activation!r:.60}")
    # No weight shows the heads.
    heads = size_of(content, "n_heads", path)
    try:
        config = ActConfig(
            cameras, *dims, horizon, ResNetConfig(required(content, "vision_backbone", str, path)), width, heads,
            hidden, activation, depths["encoder"], depths["decoder"], shape("encoder_latent_input_proj.weight", 2)[1],
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    pairs = [
        ("action's shape", dims[2], actions), ("chunk_size", size_of(content, "chunk_size", path), horizon),
        ("dim_model", size_of(content, "dim_model", path), width),
        ("dim_feedforward", size_of(content, "dim_feedforward", path), hidden),
        ("n_encoder_layers", size_of(content, "n_encoder_layers", path), depths["encoder"]),
        ("n_decoder_layers", size_of(content, "n_decoder_layers", path), depths["decoder"]),
        ("latent_dim", size_of(content, "latent_dim", path), config.latent_dim),
    ]  # fmt: skip
    compare_sizes(pairs, folder)
    return config
