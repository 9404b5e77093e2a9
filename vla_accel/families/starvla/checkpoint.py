"""Folders that `vla-accel convert` makes of starVLA's checkpoints: the network's sizes, its weights, and the robot's
transforms.

Such a folder has `config.json` (starVLA's config.yaml, with a `type`), `model.safetensors` with starVLA's own tensor
names, and `dataset_statistics.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import Processors, denoising_steps
from vla_accel.checkpoints.stacks import Shapes, layer_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, unknown
from vla_accel.families.overrides import check_vocabulary, resized, transforms_of
from vla_accel.families.qwen import TOKENIZER
from vla_accel.families.starvla.network import OftConfig, QwenOft
from vla_accel.families.starvla.robots import MIXES, Robot, Scaling
from vla_accel.families.vla_jepa.checkpoint import StoredNames, trained_robot
from vla_accel.families.vla_jepa.network import Size, VlaJepa, VlaJepaConfig
from vla_accel.families.vla_jepa.transforms import Gripper, VlaJepaProcessor
from vla_accel.nn.dit import DitConfig
from vla_accel.nn.mlp_head import stored_name
from vla_accel.transforms.normalisation import Normaliser, finite_array
from vla_accel.transforms.tokenizer import Tokenizer, load_line_tokenizer

TYPE = "starvla"
SUFFIXES = (".pt", ".safetensors")
"""Of the checkpoints in a run's folder."""
STATISTICS = "dataset_statistics.json"
NAMES = StoredNames("qwen_vl_interface.model.", "action_model.")
END = "<|im_end|>\n<|im_start|>assistant\n"
QUERY = "🔍"
"""QwenOFT's token of an action."""
_HEADS = {"DiT-B": 64, "DiT-L": 48}
FRAMEWORKS = ("QwenGR00T", "QwenOFT", "QwenPI")


def framework_of(content: Mapping[str, Any]) -> str | None:
    """Return starVLA's name of the framework in a converted folder's config.json; None if it is another folder's."""
    framework = content.get("framework")
    return framework.get("name") if content.get("type") == TYPE and isinstance(framework, Mapping) else None


def unconverted(folder: Path) -> str | None:
    """Return what to do about a folder of a starVLA run, or one of a framework that is not supported."""
    path = folder / "config.json"
    if path.is_file() and (name := framework_of(read_json(path))) is not None:
        return f"expected starVLA's {' or '.join(FRAMEWORKS)}, got {name}"
    if (folder / STATISTICS).is_file() and (folder / "config.yaml").is_file():
        found = sorted(p for p in folder.glob("checkpoints/*") if p.suffix in SUFFIXES)
        return (
            "expected a converted checkpoint, got the folder of a starVLA run; type vla-accel convert "
            f"{found[-1] if found else folder / 'checkpoints' / 'NAME.pt'} OUTPUT"
        )
    return None


def load_folder(framework: str, folder: Path, settings: PolicyConfig) -> tuple[VlaJepa | QwenOft, VlaJepaProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", SafetensorsWeights(folder)
    content = read_json(path)
    robot, statistics = _robot(folder, content, settings.checkpoint.embodiment)
    oft = framework == "QwenOFT"
    read = {"QwenOFT": _oft, "QwenGR00T": _groot, "QwenPI": _pi}[framework]
    config = resized(read(weights.shapes, content, path), settings)
    tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, TOKENIZER)
    check_vocabulary(tokenizer, config.language.vocab_size, settings)
    template, condition = _prompt(tokenizer, config, content, path)
    state = Normaliser.identity(robot.preset.state_dim)
    if config.head.state and robot.state is not None:
        state = _scaling(statistics, "state", robot.state, robot.preset.state_dim, folder)
    gripper = Gripper(robot.preset.action_dim - 1, 0.5)
    actions = _scaling(statistics, "action", robot.actions, robot.preset.action_dim, folder)
    scaled = Processors(trained_robot(robot.preset, settings), state, actions)
    processor = transforms_of(
        VlaJepaProcessor, config, scaled, tokenizer, settings, config=config, template=template, condition=condition,
        clip_state=1.0 if robot.state == "q99" and config.head.state else None,
        binary_state=robot.preset.state_dim - 1 if robot.binary else None,
        snap=gripper if robot.binary else None,
        binarize=None if robot.binary else gripper,
    )  # fmt: skip
    model = (QwenOft if oft else VlaJepa).empty(config)
    recipe = {name: _pieces(name, config, weights.shapes) for name in model.state_dict()}
    dead = list(NAMES.dead)
    if config.layerwise:
        # The rows are decoded as they are, and no block reads the last language layer.
        start, unread = NAMES.language + "layers.", ("action_model.model.proj_out_1.", "action_model.model.proj_out_2.")
        dead += [n for n in weights.shapes if n.startswith(unread) or layer_of(n, start) >= config.language.depth]
    if not config.head.state:
        dead += [name for name in weights.shapes if name.startswith("action_model.state_encoder.")]
    return fitted(model, weights, recipe, str(folder), f"starVLA's {framework}", dead), processor


def _pieces(name: str, config: VlaJepaConfig, shapes: Shapes) -> tuple[Piece, ...]:
    if name.startswith("head.") and isinstance(config, OftConfig):
        return (Piece(f"action_model.model.{stored_name(name.removeprefix('head.'))}"),)
    return (Piece(NAMES.table(shapes)),) if name == "embed.weight" else NAMES.pieces(name, config)


# -- sizes --------------------------------------------------------------------------------------------------------


def _pi(shapes: Shapes, content: Mapping[str, Any], path: Path) -> VlaJepaConfig:
    return _groot(shapes, content, path, layerwise=True)


def _groot(shapes: Shapes, content: Mapping[str, Any], path: Path, *, layerwise: bool = False) -> VlaJepaConfig:
    action = _section(content, "framework.action_model", path)
    transformer = action.get("diffusion_model_cfg") or {}
    steps = denoising_steps(action, "num_inference_timesteps", path, 4)
    heads = {"LayerwiseFM": size_of(transformer, "attention_head_dim", path, 64)} if layerwise else _HEADS
    kind = action.get("action_model_type", next(iter(heads)))
    if kind not in heads:
        raise CheckpointError(f"{path}: action_model_type: expected {' or '.join(heads)}, got {kind!r:.60}")
    for name, section, only in (
        ("add_pos_embed", action, True), ("interleave_self_attention", transformer, True),
        ("norm_type", transformer, "ada_norm"), ("positional_embeddings", transformer, None),
        ("use_canonical_forward", transformer, True),
    ):  # fmt: skip
        if section.get(name, only) != only:
            raise CheckpointError(f"{path}: {name}: expected {only}, got {section[name]!r:.60}")
    state = _include_state(content, path)
    buckets = size_of(action, "num_timestep_buckets", path, 1000)
    head = NAMES.head(shapes, heads[kind], buckets, path, state=state, final=not layerwise)
    state_dim = shapes.get("action_model.state_encoder.layer1.weight", (0, 1))[1]
    found = {
        "action_dim": NAMES.action_dim(shapes, path),
        "hidden_size": None if layerwise else head.hidden,
        "max_seq_len": head.longest_chunk,
    }
    found |= {"num_target_vision_tokens": head.future, **({"state_dim": state_dim} if state else {})}
    compare_sizes([(n, action.get(n), size) for n, size in found.items() if size is not None], str(path.parent))
    if not layerwise:  # There, starVLA makes as many blocks as the language model has layers, whatever the file says.
        compare_sizes([("num_layers", transformer.get("num_layers"), head.depth)], str(path.parent))
    return _sized(
        VlaJepaConfig, shapes, content, path, head=head, condition=0, layerwise=layerwise, state_dim=state_dim,
        num_steps=steps, action_dim=found["action_dim"],
    )  # fmt: skip


def _oft(shapes: Shapes, content: Mapping[str, Any], path: Path) -> OftConfig:
    shape = shapes_by_name(shapes, "", str(path.parent))
    hidden, width = shape("action_model.model.fc1.weight", 2)
    action_dim = shape("action_model.model.fc2.weight", 2)[0]
    action = _section(content, "framework.action_model", path)
    compare_sizes([("action_dim", action.get("action_dim"), action_dim)], str(path.parent))
    if _include_state(content, path):
        raise CheckpointError(
            f"{path}: include_state: expected false for QwenOFT: a state in the prompt is not supported"
        )
    head = DitConfig(vl_width=width, hidden=hidden, state=False)
    return _sized(OftConfig, shapes, content, path, head=head, condition=_horizon(action, path), action_dim=action_dim)


def _sized(kind: Any, shapes: Shapes, content: Mapping[str, Any], path: Path, **sizes: Any) -> Any:
    horizon = _horizon(_section(content, "framework.action_model", path), path)
    vision, language = NAMES.backbone(shapes, path)
    if sizes.get("layerwise"):
        language = replace(language, depth=sizes["head"].blocks("all")[-1] + 1)
    try:
        return kind(
            vision=vision, language=language, resize=_image_size(content, path), filter="bicubic",
            action_horizon=horizon, **sizes,
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {path.parent}: {error}") from error


def _horizon(action: Mapping[str, Any], path: Path) -> int:
    if action.get("action_horizon") is None and action.get("future_action_window_size") is not None:
        return 1 + size_of(action, "future_action_window_size", path)
    return size_of(action, "action_horizon", path)


def _include_state(content: Mapping[str, Any], path: Path) -> bool:
    """Whether the state is an input. starVLA's own files have it as text, too."""
    value = _section(content, "datasets.vla_data", path).get("include_state")
    known = {"True": True, "False": False, "None": False}
    if str(value) not in known:
        raise CheckpointError(f"{path}: include_state: expected true or false, got {value!r:.60}")
    return known[str(value)]


def _image_size(content: Mapping[str, Any], path: Path) -> Size:
    """The size that the training data have: starVLA's loader makes them 224 x 224 by default."""
    data = _section(content, "datasets.vla_data", path)
    value = data.get("obs_image_size") or data.get("image_size") or (data.get("default_image_resolution") or [])[-2:]
    width, height = value or (224, 224)
    other = _section(content, "framework", path).get("obs_image_size")
    if other not in (None, [width, height]):
        raise CheckpointError(
            f"{path}: framework.obs_image_size: expected {[width, height]}, as in datasets.vla_data, got {other!r:.60}"
        )
    return size_of({"obs_image_size": height}, "obs_image_size", path), size_of({"width": width}, "width", path)


def _section(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    found: Any = content
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: expected {name}, got {found!r:.60}")
    return found


# -- the robot ----------------------------------------------------------------------------------------------------


def _robot(folder: Path, content: Mapping[str, Any], wanted: str | None) -> tuple[Robot, Mapping[str, Any]]:
    path, statistics = folder / "config.json", read_json(folder / STATISTICS)
    mix = _section(content, "datasets.vla_data", path).get("data_mix")
    if mix not in MIXES:
        raise CheckpointError(f"{path}: {unknown('data_mix', mix, MIXES)}: other scalings exist only in starVLA's code")
    robots, names = MIXES[mix], sorted(statistics)
    name = wanted or (names[0] if len(names) == 1 else None)
    if name is None or name not in names:
        got = "choose one as checkpoint.embodiment" if name is None else f"got {name!r}"
        raise CheckpointError(f"{folder / STATISTICS}: expected statistics of {', '.join(names)}; {got}")
    if len(robots) > 1 and name not in robots:
        raise CheckpointError(f"{folder / STATISTICS}: expected {' or '.join(robots)}, got {name!r}")
    return robots.get(name, next(iter(robots.values()))), _absolute(statistics[name], folder / STATISTICS)


def _absolute(statistics: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The statistics of absolute actions, where a file has those of several kinds of actions."""
    if "action" in statistics or not statistics.keys() & {"abs", "delta", "rel"}:
        return statistics
    found = statistics.get("abs")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: expected statistics of abs actions, got {', '.join(sorted(statistics))}")
    return found if "action" in found else {"action": found}


def _scaling(statistics: Mapping[str, Any], kind: str, scaling: Scaling, count: int, folder: Path) -> Normaliser:
    """The scaling of all numbers but the gripper's, the last, which stays as it is."""
    where, table = f"{folder / STATISTICS}: {kind}", statistics.get(kind)
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{where}: expected statistics, got {table!r:.60}")
    names = ("min", "max") if scaling == "min_max" else ("q01", "q99")
    low, high = (finite_array(table.get(name), f"{where}: {name}") for name in names)
    if low is None or high is None or low.shape != (count,) or high.shape != (count,):
        raise CheckpointError(f"{where}: expected {' and '.join(names)} of {count} numbers")
    mask = table.get("mask") if kind == "action" else None
    if mask not in (None, scaled := [True] * (count - 1) + [False]):
        raise CheckpointError(f"{where}: mask: expected {scaled}, got {mask!r:.120}")
    same = np.arange(count) == count - 1
    if kind == "state":  # A number that never changes stays as it is.
        same |= low == high
    return Normaliser("quantile", np.where(same, -1.0, low), np.where(same, 2.0, high - low))


def _prompt(
    tokenizer: Tokenizer, config: VlaJepaConfig, content: Mapping[str, Any], path: Path
) -> tuple[str, int | None]:
    """Return the prompt with `{instruction}`, and the token whose outputs are read, if it is not all."""
    template = _section(content, "datasets.vla_data", path).get("CoT_prompt", "{instruction}")
    if not isinstance(template, str) or template.count("{instruction}") != 1:
        raise CheckpointError(f"{path}: CoT_prompt: expected a text with one {{instruction}}, got {template!r:.60}")
    if not config.condition:
        return template + END, None
    found = tokenizer.encode(QUERY, add_bos=False)
    if len(found) != 1:
        raise CheckpointError(f"tokenizer: expected {QUERY} as one token, got {found}: another model's tokenizer")
    suffix = oft_suffix(config.condition)
    return template.replace("{instruction}", "{instruction}" + suffix) + END, found[0]


def oft_suffix(count: int) -> str:
    """Return what QwenOFT adds to an instruction for `count` actions; nothing for 0."""
    return f" Please predict the next {count} robot actions: <action>{QUERY * count}<action>." if count else ""
