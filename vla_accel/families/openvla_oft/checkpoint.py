"""Folders of openvla-oft: the network's sizes, its weights, and the robot's transforms.

openvla-oft saves the model in shards, and head and projector of the state as pickles next to them, which `vla-accel
convert` makes safetensors of (`vla_accel.families.openvla_oft.convert`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import Processors
from vla_accel.checkpoints.lora import fold, read_lora
from vla_accel.checkpoints.qwen import language_pieces
from vla_accel.checkpoints.settings import check, fixed, neutral, read, refuse
from vla_accel.checkpoints.stacks import ShapeOf, Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import (
    JoinedWeights,
    Piece,
    SafetensorsWeights,
    Weights,
    listing,
    read_json,
    size_of,
)
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.openvla_oft.network import LlamaConfig, OpenVlaOft, OpenVlaOftConfig, TowerConfig
from vla_accel.families.openvla_oft.transforms import BOS, OftProcessor
from vla_accel.families.overrides import check_vocabulary, resized, robot_of, transforms_of
from vla_accel.nn.mlp_head import stored_name
from vla_accel.transforms.normalisation import Normaliser, finite_array, scale_between
from vla_accel.transforms.robots import ALOHA, LIBERO, Preset, load_preset
from vla_accel.transforms.tokenizer import load_line_tokenizer

TYPE, TOKENIZER = "openvla", "openvla/openvla-7b"
STATISTICS = "dataset_statistics.json"
HEAD, PROJECTOR = "action_head", "proprio_projector"
"""The first parts of the names of the files next to the model's."""
UNSUPPORTED = {
    "noisy_action_projector": "a diffusion head is not supported, only the one trained by L1 regression",
    "vision_backbone": "FiLM is not supported",
}
"""Files of a run that this package cannot run, and why."""
_HEADS = 16
"""Of both towers; no shape shows them."""
_TOWERS = {"dino": "vision_backbone.featurizer.", "siglip": "vision_backbone.fused_featurizer."}
_LANGUAGE = "language_model.model."
_BLOCK = {
    "layer_norm1": "norm1", "qkv_proj": "attn.qkv", "out_proj": "attn.proj", "layer_norm2": "norm2", "fc1": "mlp.fc1",
    "fc2": "mlp.fc2", "layer_scale1": "ls1.scale_factor", "layer_scale2": "ls2.scale_factor",
}  # fmt: skip
_TOWER = {
    "patch_embedding": "patch_embed.proj", "position_embedding": "pos_embed", "class_token": "cls_token",
    "register_tokens": "reg_token",
}  # fmt: skip
_TIMM = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
_SETTINGS = (
    read("model_type text_config norm_stats"),
    fixed("vision_backbone_id", "", "dinosiglip-vit-so-224px"),
    fixed("llm_backbone_id", "", "llama2-7b-pure"),
    fixed("use_fused_vision_backbone", "one tower is not supported", True),
    fixed("image_sizes", "", [224, 224]),
    fixed("timm_model_ids", "", _TIMM),
    fixed("timm_override_act_layers", "", [None, None]),
    neutral("image_resize_strategy", "images are squares of the model's size before it applies"),
    neutral("arch_specifier hf_llm_id llm_max_length output_projector_states", "openvla-oft's inference reads none"),
    neutral("n_action_bins pad_token_id pad_to_multiple_of", "for actions as tokens, and for training"),
    neutral("_name_or_path architectures auto_map dtype torch_dtype transformers_version", "where it comes from"),
)
"""The fields of config.json."""
_TEXT = (
    read("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"),
    read("rms_norm_eps"),
    fixed("model_type", "", "llama"),
    fixed("hidden_act", "", "silu"),
    fixed("rope_theta", "", 10_000.0),
    refuse("attention_bias mlp_bias rope_scaling", "Llama 2 has none"),
    neutral("bos_token_id eos_token_id pad_token_id tie_word_embeddings use_cache", "for decoding tokens"),
    neutral("attention_dropout initializer_range max_position_embeddings pretraining_tp", "training"),
    neutral("_name_or_path architectures dtype torch_dtype transformers_version", "where it comes from"),
    neutral(
        "id2label label2id length_penalty max_length num_beam_groups num_beams num_return_sequences "
        "repetition_penalty return_dict temperature top_k top_p typical_p",
        "transformers' defaults",
    ),
)
"""The fields of its `text_config`."""


@dataclass(frozen=True)
class Robot:
    """What openvla-oft's code says of a robot, and no file.

    Attributes:
        preset: Its conventions.
        horizon: Actions of a chunk.
        ends: The statistics that scale.
        gripper: The number of the gripper if its action becomes -1 or 1.
        before: As in `OftProcessor`.
    """

    preset: Preset
    horizon: int
    ends: tuple[str, str] = ("q01", "q99")
    gripper: int | None = None
    before: int | None = None


_ALOHA = dataclasses.replace(
    ALOHA, optional_images=(), delta_actions=(), flipped=(), gripper="none", gripper_dims=(),
)  # fmt: skip
ROBOTS = {"libero": Robot(LIBERO, 8, gripper=6), "aloha": Robot(_ALOHA, 25, ("min", "max"), before=256)}
"""By a word in the name of the data."""


def is_openvla(content: Mapping[str, Any]) -> bool:
    """Return whether config.json is OpenVLA's."""
    return content.get("model_type") == TYPE


def unmerged(folder: Path) -> str | None:
    """Return what to do about the folder of a run whose adapter is not merged."""
    adapter = folder / "lora_adapter"
    if any(folder.glob(f"{HEAD}--*")) and adapter.is_dir():
        return (
            "expected openvla-oft's merged model, got a run with its adapter; load the model that it was trained from, "
            f"with checkpoint.lora: {adapter}"
        )
    return None


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[OpenVlaOft, OftProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    lora = None if settings.checkpoint.lora is None else read_lora(Path(settings.checkpoint.lora))
    run = folder if lora is None else lora.folder.parent
    path, content = folder / "config.json", read_json(folder / "config.json")
    check(content, _SETTINGS, path, "OpenVLA")
    weights = JoinedWeights({"": weights or SafetensorsWeights(folder), **side_files(run)})
    data, statistics = read_statistics(run, content, settings.checkpoint.embodiment)
    robot = robot_of_data(data, settings)
    config = resized(read_sizes(weights.shapes, content, robot, run, path), settings)
    preset = robot_of(robot.preset, settings)
    tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, TOKENIZER)
    check_vocabulary(tokenizer, config.language.vocab_size, settings)
    if (ids := tokenizer.encode("x", add_bos=True))[:1] != [BOS]:
        raise CheckpointError(f"tokenizer: expected Llama's, which begins with token {BOS}, got {ids}")
    state = Normaliser.identity(preset.state_dim)
    if config.state_dim:
        state = scaling(statistics, "proprio", robot.ends, config.state_dim, run)
    saved = Processors(preset, state, scaling(statistics, "action", robot.ends, config.action_dim, run))
    processor = transforms_of(
        OftProcessor, config, saved, tokenizer, settings,
        side=config.dino.image_size, state_dim=config.state_dim, before=robot.before,
        gripper=robot.gripper if preset.state == robot.preset.state else None,
    )  # fmt: skip
    model = OpenVlaOft.empty(config)
    recipe = {name: pieces(name, config) for name in model.state_dict()}
    dead = [name for name in weights.shapes if _is_dead(name, config)]
    fitted(model, weights, recipe, str(folder), "OpenVLA-OFT", dead)
    return fold(model, lora, lambda name: pieces(name, config), dead), processor


def side_files(run: Path) -> dict[str, Weights]:
    """Return the weights of head and projector, by the prefix of their names. Raises CheckpointError."""
    for name, why in UNSUPPORTED.items():
        if found := sorted(run.glob(f"{name}--*")):
            raise CheckpointError(f"checkpoint {run}: {found[0].name}: {why}")
    files: dict[str, Weights] = {}
    for name in (HEAD, PROJECTOR):
        found, pickles = (sorted(run.glob(f"{name}--*.{suffix}")) for suffix in ("safetensors", "pt"))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise CheckpointError(f"checkpoint {run}: expected one {name}--*.safetensors, found {names}")
        if pickles and not found:
            raise CheckpointError(
                f"checkpoint {run}: expected {pickles[0].stem}.safetensors, got a pickle; type vla-accel convert {run} "
                f"{run}"
            )
        if found:
            files[f"{name}."] = SafetensorsWeights(found[0])
    if f"{HEAD}." not in files:
        raise CheckpointError(
            f"checkpoint {run}: expected {HEAD}--*.safetensors, found {listing(run)}: OpenVLA without openvla-oft's "
            "head, whose actions are tokens, is not supported"
        )
    return files


def pieces(name: str, config: OpenVlaOftConfig) -> tuple[Piece, ...]:
    """Return the stored tensors that make up a canonical one."""
    part, _, rest = name.partition(".")
    if part in _TOWERS:
        if match := re.fullmatch(r"layers\.(\d+)\.(\w+)(\..+)?", rest):
            return (Piece(f"{_TOWERS[part]}blocks.{match[1]}.{_BLOCK[match[2]]}{match[3] or ''}"),)
        module, dot, leaf = rest.partition(".")
        return (Piece(f"{_TOWERS[part]}{_TOWER[module]}{dot}{leaf}", frame=not dot),)
    if rest.startswith("layers."):
        return language_pieces(rest, _LANGUAGE, config.language)
    return (Piece({
        "projector": f"projector.{rest}",
        "embed": f"{_LANGUAGE}embed_tokens.{rest}",
        "language": f"{_LANGUAGE}{rest}",
        "state": f"{PROJECTOR}.{rest}",
        "head": f"{HEAD}.model.{stored_name(rest)}" if part == "head" else "",
    }[part]),)  # fmt: skip


def _is_dead(name: str, config: OpenVlaOftConfig) -> bool:
    """Whether nothing reads a stored tensor: the last block of a tower and what follows it, and the head of tokens."""
    for part, start in _TOWERS.items():
        last = f"{start}blocks.{getattr(config, part).depth}."
        if name.startswith((last, f"{start}norm.", f"{start}attn_pool.")):
            return True
    return name == "language_model.lm_head.weight"


# -- sizes --------------------------------------------------------------------------------------------------------


def robot_of_data(data: str, settings: PolicyConfig) -> Robot:
    """Return the constants of the robot of a set of data: openvla-oft's own, or the user's."""
    known = next((robot for word, robot in ROBOTS.items() if word in data.lower()), None)
    if known is not None:
        return known
    if settings.preset is None or settings.checkpoint.action_horizon is None:
        raise CheckpointError(
            f"{STATISTICS}: expected data of {' or '.join(ROBOTS)}, got {data}, whose chunk length and "
            "robot are in no file; set checkpoint.action_horizon and preset in the configuration"
        )
    return Robot(load_preset(settings.preset), settings.checkpoint.action_horizon)


def read_sizes(shapes: Shapes, content: Mapping[str, Any], robot: Robot, run: Path, path: Path) -> OpenVlaOftConfig:
    """Return the architecture that the shapes show, checked against the robot and config.json at `path`."""
    shape = shapes_by_name(shapes, "", str(path.parent))
    text = content.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{path}: text_config: expected Llama's settings, got {text!r:.60}")
    check(text, _TEXT, path, "Llama", "text_config.")
    hidden, joined = shape(f"{HEAD}.model.fc1.weight", 2)
    action_dim, _ = shape(f"{HEAD}.model.fc2.weight", 2)
    state_dim = shapes.get(f"{PROJECTOR}.fc1.weight", (0, 0))[1]
    wanted = robot.preset.action_dim, robot.preset.state_dim
    if action_dim != wanted[0] or state_dim not in (0, wanted[1]):
        raise CheckpointError(
            f"checkpoint {run}: expected actions of {wanted[0]} numbers and states of {wanted[1]}, got {action_dim} "
            f"and {state_dim}"
        )
    try:
        config = OpenVlaOftConfig(
            dino=_tower("dino", shapes, shape, path), siglip=_tower("siglip", shapes, shape, path),
            language=_language(shapes, shape, text, path), projector_dim=shape("projector.fc1.weight", 2)[0],
            hidden=hidden, state_dim=state_dim, action_dim=action_dim, action_horizon=robot.horizon,
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {path.parent}: {error}") from error
    compare_sizes([(f"{HEAD}: width", joined, config.language.width * action_dim)], str(run))
    return config


def _tower(part: str, shapes: Shapes, shape: ShapeOf, path: Path) -> TowerConfig:
    start = _TOWERS[part]
    width, _, _, patch = shape(f"{start}patch_embed.proj.weight", 4)
    mlp_dim, _ = shape(f"{start}blocks.0.mlp.fc1.weight", 2)
    _, tokens, _ = shape(f"{start}pos_embed", 3)
    registers = 0
    if f"{start}reg_token" in shapes:
        registers = 1 + shape(f"{start}reg_token", 3)[1]
    pixels = _pixels(list(_TOWERS).index(part), path.parent / "preprocessor_config.json")
    return TowerConfig(
        # The last block is not run.
        width, depth_of(shapes, f"{start}blocks.") - 1, mlp_dim, _HEADS, patch * math.isqrt(tokens),
        patch, registers=registers, scaled=f"{start}blocks.0.ls1.scale_factor" in shapes, **pixels,
    )  # fmt: skip


def _pixels(index: int, path: Path) -> dict[str, Any]:
    """The mean and the deviation of the pixels of one tower; the published ones if there is no file."""
    published = OpenVlaOftConfig()
    content = read_json(path) if path.is_file() else {}
    found = {}
    for name, field in (("means", "mean"), ("stds", "deviation")):
        towers = content.get(name, [getattr(tower, field) for tower in (published.dino, published.siglip)])
        where = f"{path}: {name}"
        values = finite_array(towers[index], where) if isinstance(towers, Sequence) and len(towers) == 2 else None
        if values is None or values.shape != (3,) or (name == "stds" and (values <= 0).any()):
            raise CheckpointError(f"{where}: expected three numbers for each of two towers, got {towers!r:.80}")
        found[field] = tuple(values.tolist())
    return found


def _language(shapes: Shapes, shape: ShapeOf, text: Mapping[str, Any], path: Path) -> LlamaConfig:
    usual, first = LlamaConfig(), f"{_LANGUAGE}layers.0."
    queries, width = shape(f"{first}self_attn.q_proj.weight", 2)
    vocabulary, _ = shape(f"{_LANGUAGE}embed_tokens.weight", 2)
    heads = size_of(text, "num_attention_heads", path, usual.heads)
    head_dim = size_of(text, "head_dim", path, max(1, width // heads))
    eps = text.get("rms_norm_eps", usual.eps)
    if type(eps) is not float or not 0 < eps < 1:
        raise CheckpointError(f"{path}: text_config.rms_norm_eps: expected a number from 0 to 1, got {eps!r:.60}")
    config = LlamaConfig(
        width, depth_of(shapes, f"{_LANGUAGE}layers."), shape(f"{first}mlp.gate_proj.weight", 2)[0],
        queries // head_dim, shape(f"{first}self_attn.k_proj.weight", 2)[0] // head_dim, head_dim, vocabulary, eps,
    )  # fmt: skip
    stated = {
        "hidden_size": width, "intermediate_size": config.mlp_dim, "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "vocab_size": vocabulary,
    }  # fmt: skip
    compare_sizes([(name, text.get(name), found) for name, found in stated.items()], str(path.parent))
    return config


# -- statistics ---------------------------------------------------------------------------------------------------


def read_statistics(run: Path, content: Mapping[str, Any], wanted: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name of one set of data and its statistics: of the run, or of config.json if the run has none."""
    path = run / STATISTICS
    table = read_json(path) if path.is_file() else content.get("norm_stats") or {}
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{path}: expected statistics by the name of their data, got {table!r:.60}")
    names = sorted(table)
    if wanted is None and len(names) == 1:
        (wanted,) = names
    name = next((n for n in (wanted, f"{wanted}_no_noops") if n in table), None)
    if name is None:
        got = "choose one as checkpoint.embodiment" if wanted is None else f"got {wanted!r}"
        raise CheckpointError(f"{path}: expected statistics of {', '.join(names) or 'the data'}; {got}")
    if not isinstance(table[name], Mapping):
        raise CheckpointError(f"{path}: {name}: expected statistics of actions, got {table[name]!r:.60}")
    return name, table[name]


def scaling(statistics: Mapping[str, Any], kind: str, ends: tuple[str, str], count: int, run: Path) -> Normaliser:
    """Return the scaling of `count` numbers, the original's."""
    where = f"{run / STATISTICS}: {kind}"
    scale = scale_between(statistics.get(kind), ends, lambda span: span + 1e-8, where)
    if len(scale.low) != count:
        raise CheckpointError(f"{where}: expected {' and '.join(ends)} of {count} numbers, got {len(scale.low)}")
    return scale
