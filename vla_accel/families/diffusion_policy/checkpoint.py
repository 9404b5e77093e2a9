"""lerobot's folders of Diffusion Policy: the network's sizes, its weights, and the robot's transforms.

Sizes are config.json's own: releases have other defaults. No weight shows the crop, the groups or the scheduler.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import fitted
from vla_accel.checkpoints.lerobot import (
    Processors,
    buffers,
    features,
    length_of,
    read_processors,
    read_settings,
    required,
)
from vla_accel.checkpoints.lerobot_statistics import ACTION, STATE
from vla_accel.checkpoints.stacks import Shapes
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.diffusion_policy.network import DiffusionPolicy, DiffusionPolicyConfig, Size
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler
from vla_accel.families.overrides import robot_of
from vla_accel.nn.resnet import Camera, ResNetConfig, feature_size
from vla_accel.transforms.frames import FrameProcessor
from vla_accel.transforms.robots import Preset

_ROOT = "diffusion."
_COMPILED = "_orig_mod."
"""In the names of a policy that lerobot compiled (compile_model)."""
_STORED = (
    (r"^encoders\.(\d+)\.backbone\.conv1\.", r"rgb_encoder.\1.backbone.0."),
    (r"^encoders\.(\d+)\.backbone\.bn1\.", r"rgb_encoder.\1.backbone.1."),
    (r"^encoders\.(\d+)\.backbone\.layer(\d)\.", lambda m: f"rgb_encoder.{m[1]}.backbone.{int(m[2]) + 3}."),
    (r"^encoders\.(\d+)\.keypoints\.", r"rgb_encoder.\1.pool.nets."),
    (r"^encoders\.(\d+)\.", r"rgb_encoder.\1."),
    (r"^unet\.time_in\.", "unet.diffusion_step_encoder.1."),
    (r"^unet\.time_out\.", "unet.diffusion_step_encoder.3."),
    (r"^unet\.last\.", "unet.final_conv.0.block.0."),
    (r"^unet\.last_norm\.", "unet.final_conv.0.block.1."),
    (r"^unet\.out\.", "unet.final_conv.1."),
    (r"^unet\.(down|mid|up)\.", r"unet.\1_modules."),
    (r"(unet\..*)\.conv(\d)\.", r"\1.conv\2.block.0."),
    (r"(unet\..*)\.norm(\d)\.", r"\1.conv\2.block.1."),
    (r"(unet\..*)\.film\.", r"\1.cond_encoder.1."),
    (r"(unet\..*)\.residual\.", r"\1.residual_conv."),
)
"""What is replaced in a canonical name to get the stored one."""


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[DiffusionPolicy, FrameProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_settings(path, ("diffusion",))
    config = read_sizes(content, weights.shapes, path)
    saved = read_processors(folder, content, Preset.resize, weights)
    processor = FrameProcessor(
        state=saved.state,
        actions=saved.actions,
        action_dim=config.action_dim,
        preset=robot_of(saved.preset, settings),
        frame_shapes=(config.frame,) * len(config.cameras),
        cameras=saved.cameras,
        history=config.history,
        first=config.history - 1,
    )
    check_statistics(saved, len(config.cameras), config.state_dim, path)
    config = dataclasses.replace(config, cameras=scaled(processor))
    model = DiffusionPolicy.empty(config)
    compiled = any(name.startswith(f"{_ROOT}unet.{_COMPILED}") for name in weights.shapes)
    recipe = {name: (Piece(stored_name(name, config, compiled=compiled)),) for name in model.state_dict()}
    counters = [name for name in weights.shapes if name.endswith(".num_batches_tracked")]
    dead = (*counters, *_places(weights, config, folder), *buffers(weights.shapes))
    return fitted(model, weights, recipe, str(folder), "its config.json", dead), processor


def check_statistics(saved: Processors, cameras: int, state_dim: int, path: Path) -> None:
    """Raise CheckpointError for statistics of other cameras or another state than config.json's at `path`."""
    if len(saved.cameras) != cameras or len(saved.state.low) != state_dim:
        raise CheckpointError(
            f"{path}: expected statistics of {cameras} cameras and {state_dim} numbers of {STATE}, got those of "
            f"{len(saved.cameras)} and {len(saved.state.low)}"
        )


def scaled(processor: FrameProcessor) -> tuple[Camera, ...]:
    """Return the cameras of transforms, with the scales of their pixels."""
    scales = zip(processor.frame_shapes, processor.pixel_scales.astype(float).tolist(), strict=True)
    return tuple(Camera(*shape, tuple(mean), tuple(deviation)) for shape, (mean, deviation) in scales)


def stored_name(name: str, config: DiffusionPolicyConfig, *, compiled: bool = False) -> str:
    """Return lerobot's name of a canonical tensor. `compiled`: as a policy with a compiled U-Net saves it."""
    for ours, theirs in _STORED:
        name = re.sub(ours, theirs, name)
    if config.shared_encoder:
        name = name.replace("rgb_encoder.0.", "rgb_encoder.")
    return _ROOT + (name.replace("unet.", f"unet.{_COMPILED}", 1) if compiled else name)


def _places(weights: Weights, config: DiffusionPolicyConfig, folder: Path) -> list[str]:
    """Return the stored places of the pixels, which are computed here. Raises CheckpointError if they are of images of
    another size."""
    found = [name for name in weights.shapes if name.startswith(_ROOT) and name.endswith(".pool.pos_grid")]
    height, width = feature_size(*config.seen)
    for name in found:
        if weights.shapes[name] != (height * width, 2):
            raise CheckpointError(
                f"checkpoint {folder}: {name}: expected {(height * width, 2)}, for images of {config.seen}, got "
                f"{weights.shapes[name]}"
            )
    return found


# -- sizes --------------------------------------------------------------------------------------------------------


def read_sizes(content: Mapping[str, Any], shapes: Shapes, path: Path) -> DiffusionPolicyConfig:
    """Return the sizes in a config.json; `shapes`: of the weights. Raises CheckpointError."""
    inputs, outputs = features(content, path)
    frames = read_frames(inputs, path)
    resize = read_size(content.get("resize_shape"), path, "resize_shape")
    train_steps = size_of(content, "num_train_timesteps", path)
    separate = any(name.startswith(f"{_ROOT}rgb_encoder.0.") for name in shapes)
    if "use_separate_rgb_encoder_per_camera" in content:  # the first releases do not have it
        separate = required(content, "use_separate_rgb_encoder_per_camera", bool, path)
    try:
        return DiffusionPolicyConfig(
            backbone=ResNetConfig(
                required(content, "vision_backbone", str, path),
                "group" if required(content, "use_group_norm", bool, path) else "batch",
            ),
            cameras=tuple(Camera(height, width) for height, width in frames),
            resize=resize,
            crop=_crop(content, resize, path),
            shared_encoder=not separate,
            keypoints=size_of(content, "spatial_softmax_num_keypoints", path),
            state_dim=length_of(inputs, STATE, path),
            action_dim=length_of(outputs, ACTION, path),
            history=size_of(content, "n_obs_steps", path),
            action_horizon=size_of(content, "horizon", path),
            widths=tuple(
                size_of({"down_dims": w}, "down_dims", path) for w in required(content, "down_dims", list, path)
            ),
            kernel=size_of(content, "kernel_size", path),
            groups=size_of(content, "n_groups", path),
            time_dim=size_of(content, "diffusion_step_embed_dim", path),
            scaled=required(content, "use_film_scale_modulation", bool, path),
            scheduler=read_scheduler(content, train_steps, path),
            num_steps=size_of(content, "num_inference_steps", path, train_steps),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_scheduler(content: Mapping[str, Any], train_steps: int, path: Path) -> NoiseScheduler:
    """Return the noise scheduler in a config.json. Raises CheckpointError, ConfigError."""
    texts = [
        required(content, name, str, path) for name in ("noise_scheduler_type", "beta_schedule", "prediction_type")
    ]
    start, end, bound = (
        required(content, name, float, path) for name in ("beta_start", "beta_end", "clip_sample_range")
    )  # fmt: skip
    kind, betas, prediction = texts
    clip = bound if required(content, "clip_sample", bool, path) else None
    return NoiseScheduler(kind, train_steps, betas, start, end, prediction, clip)  # type: ignore[arg-type]


def _crop(content: Mapping[str, Any], resize: Size | None, path: Path) -> Size | None:
    """Return the size of the centre that the ResNet sees. Where images are resized, lerobot takes `crop_ratio`."""
    if resize is None:
        return read_size(content.get("crop_shape"), path, "crop_shape")
    ratio = content.get("crop_ratio", 1.0)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise CheckpointError(f"{path}: crop_ratio: expected a number above 0, at most 1, got {ratio!r:.60}")
    return None if ratio == 1 else (int(resize[0] * ratio), int(resize[1] * ratio))


def read_size(value: Any, path: Path, name: str) -> Size | None:
    """Return (height, width), None for null. Raises CheckpointError."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"{path}: {name}: expected (height, width), got {value!r:.60}")
    height, width = (size_of({name: size}, name, path) for size in value)
    return height, width


def read_frames(inputs: Mapping[str, Any], path: Path) -> list[Size]:
    """Return height and width of each camera's feature. Raises CheckpointError for features other than cameras and the
    state."""
    others = [key for key, feature in inputs.items() if feature.get("type") != "VISUAL" and key != STATE]
    if others:
        raise CheckpointError(
            f"{path}: input_features: expected cameras and {STATE}, got {', '.join(others)}: not supported"
        )
    return [_frame(f.get("shape"), path, key) for key, f in inputs.items() if f.get("type") == "VISUAL"]


def _frame(shape: Any, path: Path, key: str) -> Size:
    """Return the height and width of a camera's feature."""
    size = read_size(shape[1:], path, key) if isinstance(shape, list) and shape[:1] == [3] else None
    if size is None:
        raise CheckpointError(f"{path}: {key}: expected the shape (3, height, width), got {shape!r:.60}")
    return size
