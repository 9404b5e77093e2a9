"""Folders of X-VLA, lerobot's and those of its own project: the network's sizes, one domain's weights, and the robot's
transforms."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import (
    Processors,
    denoising_steps,
    features,
    is_lerobot_config,
    read_processors,
    read_settings,
    required,
)
from vla_accel.checkpoints.lerobot_settings import DOMAIN, IMAGENET, TO_AXIS_ANGLE, TOKENIZE
from vla_accel.checkpoints.lerobot_statistics import ACTION
from vla_accel.checkpoints.settings import check, fixed, neutral, read
from vla_accel.checkpoints.stacks import Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import SafetensorsWeights, Weights, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.overrides import check_vocabulary, resized, transforms_of, warn_of_contradictions
from vla_accel.families.xvla.names import SIGN, TOWER, StoredNames
from vla_accel.families.xvla.network import Xvla, XvlaConfig
from vla_accel.families.xvla.transforms import XvlaProcessor
from vla_accel.nn.bart import BartConfig
from vla_accel.nn.davit import DavitConfig, Size, Stage
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.robots import LIBERO, XVLA_LIBERO, load_preset
from vla_accel.transforms.tokenizer import load_line_tokenizer

_log = logging.getLogger("vla_accel")
TOKENIZER = "facebook/bart-large"
LIBERO_DOMAIN = 3


@dataclass(frozen=True)
class Mode:
    """An action space: numbers of the network's action and of the robot's (None: the size in config.json), and those
    of grippers."""

    action_dim: int | None
    robot: int | None
    grippers: tuple[int, ...] = ()


MODES = {
    "ee6d": Mode(20, 20, (9, 19)),
    "joint": Mode(14, 14, (6, 13)),
    "agibot_ee6d": Mode(20, 20),
    "franka_joint7": Mode(20, 7),
    "so101_bimanual": Mode(20, 12, (5, 11)),
    "auto": Mode(None, None),
}
_AXIS_ANGLE_DIM, _POSE_STATE = 7, 10
"""Numbers of an action in axis-angle, and of a state with a pose."""
_VIEWS, _TEXT_TOKENS = 3, 50
"""Of X-VLA's own project, whose code has them as constants."""
_OWN = (
    read("model_type florence_config action_mode"),
    read("hidden_size depth mlp_ratio num_domains len_soft_prompts dim_time max_len_seq use_hetero_proj", "sizes"),
    read("num_heads num_actions real_action_dim", "what no weight shows"),
    read("max_action_dim", "size of an action of auto, checked against the weights"),
    neutral("soft_prompt_length", "the project's code reads len_soft_prompts"),
    fixed("use_proprio", "a policy without a state is not supported", True),
    neutral("_name_or_path architectures auto_map dtype torch_dtype transformers_version", "where it comes from"),
    neutral("bos_token_id eos_token_id pad_token_id is_encoder_decoder tie_word_embeddings", "for decoding tokens"),
    neutral("id2label label2id return_dict", "transformers' defaults"),
)
"""The fields of its config.json."""

# -- folders ------------------------------------------------------------------------------------------------------


def load_folder(folder: Path, settings: PolicyConfig, weights: Weights | None = None) -> tuple[Xvla, XvlaProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content, saved, tokens = read_json(path), None, _TEXT_TOKENS
    if is_lerobot_config(content):
        content = read_settings(path, ("xvla",))
        saved = read_processors(folder, content, "corner", weights)
        tokens = _text_tokens(saved, path)
    else:
        check(content, _OWN, path, "X-VLA's own project")
    model = load_network(weights, domain_of(saved, settings, folder), content, path, tokens, settings)
    hub = (saved and saved.tokenizer) or content.get("tokenizer_name") or TOKENIZER
    tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, hub)
    config = model.config
    check_vocabulary(tokenizer, config.encoder.vocab_size, settings)
    processor = transforms_of(
        XvlaProcessor, config, robot_of(saved, settings, content, path), tokenizer, settings, config=config,
        frame_shape=_frame_shape(content, path), resizes=saved is not None,
    )  # fmt: skip
    return model, processor


def load_network(
    weights: Weights, domain: int, content: Mapping[str, Any], path: Path, tokens: int, settings: PolicyConfig
) -> Xvla:  # fmt: skip
    """Return the network of a domain. `content`: of config.json at `path`; `tokens`: of a prompt, with its padding."""
    names = StoredNames.of(weights.shapes, domain)
    model = Xvla.empty(resized(read_sizes(weights.shapes, names, content, path, tokens), settings))
    recipe = {name: names.pieces(name, model.config) for name in model.state_dict()}
    return fitted(model, weights, recipe, str(path.parent), "X-VLA", names.dead(weights.shapes))


def domain_of(saved: Processors | None, settings: PolicyConfig, folder: Path) -> int:
    """Return the domain: the user's, the saved step's, or LIBERO's for its preset. Raises ConfigError without one."""
    own = None if saved is None or DOMAIN not in saved.before else saved.before[DOMAIN].get("domain_id", 0)
    if own is not None and (type(own) is not int or own < 0):
        raise CheckpointError(f"checkpoint {folder}: {DOMAIN}: expected a domain_id of 0 or more, got {own!r:.60}")
    if (domain := settings.checkpoint.domain) is not None:
        warn_of_contradictions({"domain": domain}, {"domain": own})
        return domain
    if own is not None:
        return own
    if settings.preset is not None and load_preset(settings.preset) == XVLA_LIBERO:
        return LIBERO_DOMAIN
    raise ConfigError(
        f"checkpoint.domain: expected the number of the robot's domain, which {folder} does not state, got "
        "none; set it in the configuration (3 for LIBERO, others in docs/models/xvla.md)"
    )


def robot_of(saved: Processors | None, settings: PolicyConfig, content: Mapping[str, Any], path: Path) -> Processors:
    """Return the robot with the scaling of its state and its actions.

    Raises:
        CheckpointError: It is unclear what an action is, or images are normalised by other numbers than ImageNet's.
        ConfigError: The preset does not fit the actions or the scaling, or nothing describes the robot.
    """
    preset = None if settings.preset is None else load_preset(settings.preset)
    robot = preset or (saved and saved.preset)
    if robot is None:
        raise ConfigError(
            f"preset: expected a robot preset, because {path.parent} does not describe its robot, got none"
        )
    if saved is not None and saved.pixels is not None:
        raise CheckpointError(f"{path}: normalization_mapping: expected IDENTITY for VISUAL, got another one")
    if saved is not None and IMAGENET not in saved.before:
        _log.warning("%s: no step %s: images are normalised as in lerobot's evaluation", path.parent, IMAGENET)
    if saved is not None and TO_AXIS_ANGLE in saved.after:
        if preset is None and robot.images == LIBERO.images:
            robot = XVLA_LIBERO  # lerobot's environment makes its state, whatever the features say
        robot = replace(robot, action_dim=_AXIS_ANGLE_DIM, pose="axis_angle", motion_dims=())
    mode = _mode(content, path)
    own = MODES[mode].robot or (saved.preset.action_dim if saved else size_of(content, "real_action_dim", path))
    posed = robot.pose == "axis_angle"
    expected = _AXIS_ANGLE_DIM if posed else own
    if robot.action_dim != expected:
        what = f"preset {settings.preset}" if preset else f"{path}: {ACTION}"
        error = ConfigError if preset else CheckpointError
        raise error(
            f"{what}: expected {expected} numbers of an action of {'pose axis_angle' if posed else mode}, got "
            f"{robot.action_dim}; for LIBERO name preset: xvla_libero in the configuration"
        )
    if posed and (not mode.endswith("ee6d") or robot.state_dim < _POSE_STATE):
        raise ConfigError(
            f"preset.pose axis_angle: expected actions of ee6d and a state of at least {_POSE_STATE} numbers "
            f"(position, two columns of a rotation, 0), got {mode} and {robot.state_dim}; for LIBERO name preset: "
            "xvla_libero in the configuration"
        )
    scales = (None, None) if saved is None else (saved.state, saved.actions)
    state, actions = (
        Normaliser.identity(count) if own is None or own.kind == "identity" else own
        for own, count in zip(scales, (robot.state_dim, robot.action_dim), strict=True)
    )
    if posed and actions.kind != "identity":
        raise CheckpointError(f"{path}: {ACTION}: expected no scaling of poses that become axis-angles, found one")
    return Processors(robot, state, actions)


# -- sizes --------------------------------------------------------------------------------------------------------


def read_sizes(shapes: Shapes, names: StoredNames, content: Mapping[str, Any], path: Path, tokens: int) -> XvlaConfig:
    """Return the architecture that the shapes show, checked against config.json.

    Raises:
        CheckpointError: A tensor is missing, a setting is not supported, or weights and config.json contradict each
            other.
    """
    folder = str(path.parent)
    stored = shapes_by_name(shapes, names.prefix, folder)
    florence = required(content, "florence_config", dict, path)
    mode = MODES[_mode(content, path)]
    width = stored("transformer.norm.weight", 1)[0]
    domains, soft = stored(SIGN, 2)
    action_dim = stored("transformer.action_decoder.bias.weight", 2)[1]
    time_dim = size_of(content, "dim_time", path, 32)
    inputs = stored("transformer.action_encoder.fc.weight", 2)[1] // width
    if (state_dim := inputs - action_dim - time_dim) < 1:
        raise CheckpointError(
            f"{path}: dim_time: expected at most {inputs - action_dim - 1}, as the weights have {inputs} inputs with "
            f"{action_dim} of an action, got {time_dim}"
        )
    if names.domain >= domains:
        raise CheckpointError(f"checkpoint {folder}: domain: expected 0 to {domains - 1}, got {names.domain}")
    own = required({"use_hetero_proj": False, **content}, "use_hetero_proj", bool, path)
    try:
        config = XvlaConfig(
            vision=_vision(shapes, names, florence, path), encoder=_encoder(shapes, names, florence, path), width=width,
            depth=depth_of(shapes, f"{names.prefix}transformer.blocks."), heads=size_of(content, "num_heads", path, 16),
            mlp_dim=stored("transformer.blocks.0.mlp.fc1.weight", 2)[0], image_size=_image_size(content, path),
            views=_views(content, path), soft_prompts=soft // width,
            positions=stored("transformer.pos_emb", 3)[1], time_dim=time_dim, own_projections=own,
            grippers=mode.grippers, state_dim=state_dim, action_dim=action_dim,
            action_horizon=size_of(content, "chunk_size" if is_lerobot_config(content) else "num_actions", path, 30),
            num_steps=denoising_steps(content, "num_denoising_steps", path),
            max_token_len=tokens, pad_token=_pad_token(florence, path),
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    pairs = [
        ("hidden_size", content.get("hidden_size"), width), ("depth", content.get("depth"), config.depth),
        ("num_domains", content.get("num_domains"), domains),
        ("len_soft_prompts", content.get("len_soft_prompts"), config.soft_prompts),
        ("max_len_seq", content.get("max_len_seq"), config.positions),
        ("mlp_ratio", content.get("mlp_ratio"), config.mlp_dim / width),
        ("action_mode", mode.action_dim or content.get("max_action_dim"), action_dim),
        ("max_state_dim", content.get("max_state_dim"), config.state_dim),
    ]  # fmt: skip
    compare_sizes(pairs, folder)
    return config


def _mode(content: Mapping[str, Any], path: Path) -> str:
    name = str(content.get("action_mode", "ee6d")).lower()
    if name not in MODES:
        raise CheckpointError(f"{path}: action_mode: expected {', '.join(MODES)}, got {name!r:.60}")
    return name


def _vision(shapes: Shapes, names: StoredNames, florence: Mapping[str, Any], path: Path) -> DavitConfig:
    """Heads, strides and windows leave no trace in the weights; without a value Florence-2's count."""
    content = required(florence, "vision_config", dict, path)
    _expect(content, path, "vision_config", model_type=("davit", "florence_vision"), activation_function=("gelu",))
    for name, expected in (("image_pos_embed", "learned_abs_2d"), ("visual_temporal_embedding", "COSINE")):
        if name in content:
            _expect(content[name], path, f"vision_config.{name}", type=(expected,))
    sources = content.get("image_feature_source", _SOURCES)
    if [*sources] != _SOURCES:
        raise CheckpointError(f"{path}: image_feature_source: expected {_SOURCES}, got {sources!r:.60}")
    tower, found = names.prefix + TOWER, shapes_by_name(shapes, "", str(path.parent))
    count = depth_of(shapes, f"{tower}convs.")
    convs = [found(names(f"vision.stages.{i}.conv.weight"), 4) for i in range(count)]
    widths = [conv[0] for conv in convs]

    def each(name: str, default: Any) -> list[Any]:
        value = content.get(name, default)
        kind = bool if name == "patch_prenorm" else int
        if not isinstance(value, list) or len(value) != count or any(type(one) is not kind for one in value):
            raise CheckpointError(
                f"{path}: vision_config.{name}: expected one for each of {count} stages, got {value!r:.60}"
            )
        return value

    stages = [
        Stage(width, depth_of(shapes, f"{tower}blocks.{i}."), heads, groups, conv[2], stride, padding, before)
        for i, (width, conv, heads, groups, stride, padding, before) in enumerate(zip(
            widths, convs, each("num_heads", [w // 32 for w in widths]), each("num_groups", [w // 32 for w in widths]),
            each("patch_stride", [4, *[2] * (count - 1)]), each("patch_padding", [3, *[1] * (count - 1)]),
            each("patch_prenorm", [False, *[True] * (count - 1)]), strict=True,
        ))
    ]  # fmt: skip
    hidden, rows = found(names("vision.stages.0.halves.1.fc1.weight"), 2)[0], found(names("rows.weight"), 2)[0]
    return DavitConfig(tuple(stages), size_of(content, "window_size", path, 12), hidden // widths[0], rows)


_SOURCES = ["spatial_avg_pool", "temporal_avg_pool"]


def _encoder(shapes: Shapes, names: StoredNames, florence: Mapping[str, Any], path: Path) -> BartConfig:
    content = required(florence, "text_config", dict, path)
    _expect(content, path, "text_config", activation_function=("gelu",), scale_embedding=(False,))
    stored, layer = shapes_by_name(shapes, "", str(path.parent)), names("encoder.layers.0.fc1.weight")
    rows, width = stored(names("encoder.positions.weight"), 2)
    return BartConfig(
        width, depth_of(shapes, layer.partition("0.fc1")[0]), stored(layer, 2)[0],
        size_of(content, "encoder_attention_heads", path, 16), stored(names.table, 2)[0], rows,
    )  # fmt: skip


def _expect(content: Any, path: Path, where: str, **values: tuple[Any, ...]) -> None:
    """Raise CheckpointError if a setting, where it is present, has another value."""
    for name, expected in values.items():
        if not isinstance(content, Mapping) or content.get(name, expected[0]) not in expected:
            raise CheckpointError(
                f"{path}: {where}: expected {name} {' or '.join(map(str, expected))}, got {content!r:.80}"
            )


def _pad_token(florence: Mapping[str, Any], path: Path) -> int:
    value = florence.get("pad_token_id", florence["text_config"].get("pad_token_id", 1))
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{path}: pad_token_id: expected a token, got {value!r:.60}")
    return value


def _text_tokens(saved: Processors, path: Path) -> int:
    """The length of prompts with their padding."""
    padding = saved.before.get(TOKENIZE, {}).get("padding", "max_length")
    if padding != "max_length":
        raise CheckpointError(f"{path.parent}: {TOKENIZE}: padding: expected max_length, got {padding!r:.60}")
    return saved.max_token_len


def _image_size(content: Mapping[str, Any], path: Path) -> Size | None:
    if not is_lerobot_config(content):
        file = path.with_name("preprocessor_config.json")
        images = read_json(file) if file.is_file() else {}
        mean, deviation = [*IMAGENET_MEAN], [*IMAGENET_DEVIATION]
        _expect(images, file, "images", image_mean=(mean,), image_std=(deviation,), do_normalize=(True,))
        size = required(images, "size", dict, file) if images else {}
        return size_of(size, "height", file, 224), size_of(size, "width", file, 224)
    value = content.get("resize_imgs_with_padding")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(side) is not int or side < 1 for side in value):
        raise CheckpointError(f"{path}: resize_imgs_with_padding: expected a height and a width, got {value!r:.60}")
    return value[0], value[1]


def _frame_shape(content: Mapping[str, Any], path: Path) -> Size:
    """The size of the first camera's images."""
    if not is_lerobot_config(content):
        return 224, 224
    shapes = [f.get("shape") for f in features(content, path)[0].values() if f.get("type") == "VISUAL"]
    if not shapes or not isinstance(shapes[0], list) or len(shapes[0]) != 3:
        raise CheckpointError(f"{path}: input_features: expected a camera of shape [3, height, width], got {shapes}")
    return shapes[0][1], shapes[0][2]


def _views(content: Mapping[str, Any], path: Path) -> int:
    """The views, as lerobot counts them when it loads a folder: a camera that it saved as empty counts twice."""
    if not is_lerobot_config(content):
        return _VIEWS
    cameras = sum(feature.get("type") == "VISUAL" for feature in features(content, path)[0].values())
    empty = content.get("empty_cameras", 0)
    if type(empty) is not int or empty < 0:
        raise CheckpointError(f"{path}: empty_cameras: expected a whole number of 0 or more, got {empty!r:.60}")
    return max(size_of(content, "num_image_views", path, 1), cameras + empty)
