"""lerobot's folders of FastWAM: the network's sizes, its weights, and the robot's transforms.

The image encoder and the text encoder are not in them: both come from Wan 2.2's folder in diffusers' layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import (
    Processors,
    buffers,
    denoising_steps,
    read_processors,
    read_settings,
    required,
)
from vla_accel.checkpoints.lerobot_settings import TOGGLE
from vla_accel.checkpoints.stacks import Shapes, shapes_by_name
from vla_accel.checkpoints.weights import (
    INDEX,
    JoinedWeights,
    Piece,
    SafetensorsWeights,
    SmallWeights,
    Weights,
    read_json,
    size_of,
)
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.fastwam.network import FastWam, FastWamConfig
from vla_accel.families.fastwam.text import FILE, Prompts, TextEncoder, load_encoder, read_prompts
from vla_accel.families.fastwam.transforms import FastWamProcessor
from vla_accel.families.overrides import resized, robot_of
from vla_accel.files import user_path
from vla_accel.images.autoencoder import WanEncoderConfig
from vla_accel.nn.wan import WanConfig
from vla_accel.numeric import resolve_dtype
from vla_accel.transforms.tokenizer import files_from_hub, load_line_tokenizer

WAN, TOKENIZER = "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "google/umt5-xxl"
_MIX = "model.mot.mixtures."
SIGNS = (_MIX + "video.patch_embedding.weight", _MIX + "action.action_encoder.weight")
"""Two tensors that no other model has."""
_VAE, _NUMBERS = "vae:", "vae.config:"
_IMAGINES = (_MIX + "video.head.", _VAE + "decoder.", _VAE + "post_quant_conv.")
_ENCODER_FILE = "diffusion_pytorch_model.safetensors"
_FIXED: tuple[tuple[str, str, Any, Any], ...] = (
    ("video_dit_config", "video_attention_mask_mode", "bidirectional", "first_frame_causal"),
    ("video_dit_config", "seperated_timestep", False, True),
    ("video_dit_config", "fuse_vae_embedding_in_latents", True, True),
    ("video_dit_config", "action_conditioned", False, False),
    ("video_dit_config", "has_image_input", False, False),
    ("video_dit_config", "patch_size", None, [1, 2, 2]),
    ("action_scheduler", "num_train_timesteps", 1000, 1000),
)
"""Settings inside those of config.json, with lerobot's default and the only supported value."""
_TRAINED = (SIGNS[1], _MIX + "action.head.weight", "model.proprio_encoder.weight")
_OLD = re.compile(r"model\.mot\.mixtures\.(video|action)\.blocks\.(\d+)\.(.+)")
_SMALL = {
    "patch": _MIX + "video.patch_embedding", "state": "model.proprio_encoder",
    "action_in": _MIX + "action.action_encoder", "action_out": _MIX + "action.head",
}  # fmt: skip
_EMBEDDINGS = {
    "text_in": "text_embedding.0", "text_mix": "text_embedding.2", "time_in": "time_embedding.0",
    "time_mix": "time_embedding.2", "time_out": "time_projection.1",
}  # fmt: skip
_BLOCK = {
    "qkv_proj": ("self_attn.q", "self_attn.k", "self_attn.v"), "out_proj": ("self_attn.o",),
    "q_norm": ("self_attn.norm_q",), "k_norm": ("self_attn.norm_k",), "text_norm": ("norm3",),
    "text_q": ("cross_attn.q",), "text_kv": ("cross_attn.k", "cross_attn.v"), "text_out": ("cross_attn.o",),
    "text_q_norm": ("cross_attn.norm_q",), "text_k_norm": ("cross_attn.norm_k",), "fc1": ("ffn.0",), "fc2": ("ffn.2",),
}  # fmt: skip
_ROTATED = ("self_attn.q", "self_attn.k", "self_attn.norm_q", "self_attn.norm_k")


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[FastWam, FastWamProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_settings(path, ("fastwam",))
    if content.get("proprio_dim", 0) is None:
        raise CheckpointError(f"{path}: proprio_dim: expected a whole number, got null: a state is required")
    if missing := [name for name in _TRAINED if name not in weights.shapes]:
        raise CheckpointError(
            f"checkpoint {folder}: expected a trained policy, got one without {', '.join(missing)}; "
            "lerobot/fastwam_base is only where training starts: pass a fine-tuned folder, such as "
            "lerobot/fastwam_libero_uncond_2cam224"
        )
    if (most := settings.checkpoint.max_token_len) is not None:
        raise ConfigError(
            f"checkpoint.max_token_len: expected none, got {most}: FastWAM attends to the padding of its prompts, "
            "whose length is a part of its training"
        )
    saved = _processors(folder, content, weights)
    preset = robot_of(saved.preset, settings)
    if len(preset.images) != len(saved.preset.images):
        expected, got = len(saved.preset.images), len(preset.images)
        raise ConfigError(f"preset: expected {expected} cameras, which fill the checkpoint's image, got {got}")
    vae = _part(folder, settings, "vae", ("config.json", _ENCODER_FILE))
    latents = read_json(vae / "config.json")
    config = resized(read_sizes(weights.shapes, content, path, _vae_sizes(latents, vae / "config.json")), settings)
    processor = FastWamProcessor(
        state=saved.state,
        actions=saved.actions,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        default_prompt=settings.default_prompt,
        preset=preset,
        config=config,
        prompts=_prompts(folder, content, config, settings),
        toggled=_toggled(saved, config, path),
    )
    numbers = {f"latent_{kind}": _latents(latents, kind, config, vae / "config.json") for kind in ("mean", "std")}
    files = {"": weights, _VAE: SafetensorsWeights(vae / _ENCODER_FILE), _NUMBERS: SmallWeights(numbers)}
    joined = JoinedWeights(files)
    model, stored = FastWam.empty(config), joined.shapes
    recipe = {name: pieces(name, config, stored) for name in model.state_dict()}
    # What imagines video, and what joins several frames.
    dead = [n for n in stored if n.startswith(_IMAGINES) or (n.startswith(_VAE) and ".time_conv." in n)]
    dead += buffers(weights.shapes)
    return fitted(model, joined, recipe, str(folder), "FastWAM", dead), processor


def prompts_of(folder: Path, settings: PolicyConfig) -> Prompts:
    """Return the prompts of a checkpoint, with the text encoder."""
    content = read_settings(folder / "config.json", ("fastwam",))
    shape = shapes_by_name(SafetensorsWeights(folder).shapes, "", str(folder))
    return _read(folder, content, shape(_MIX + "action.text_embedding.0.weight", 2)[1], settings, encoder=True)


def pieces(name: str, config: FastWamConfig, stored: Shapes) -> tuple[Piece, ...]:
    """Return the stored tensors that make up one canonical tensor, in order along its first axis."""
    part, _, rest = name.partition(".")
    if part == "vae":
        return (Piece(_VAE + _encoder_name(rest, config.vae), frame=True),)
    if part.startswith("latent_"):
        return (Piece(_NUMBERS + name),)
    if part in _SMALL:
        return (Piece(f"{_SMALL[part]}.{rest}", frame=part == "patch"),)
    owner, _, leaf = rest.rpartition(".")
    if owner in _EMBEDDINGS:
        return (Piece(f"{_MIX}{part}.{_EMBEDDINGS[owner]}.{leaf}"),)
    _, index, inner = rest.split(".", 2)
    block = f"model.mot.layers.{index}.blocks.{part}."
    # Folders that were saved before the blocks of both moved into one layer.
    old = f"{_MIX}{part}.blocks.{index}."
    start = old if f"{old}modulation" in stored else block
    if inner == "modulation":
        return (Piece(start + inner, frame=True),)
    module, _, leaf = inner.partition(".")
    rows = config.video.attended if len(_BLOCK[module]) > 1 else None
    return tuple(
        Piece(f"{start}{theirs}.{leaf}", rows, pairs=config.video.head_dim if theirs in _ROTATED else None)
        for theirs in _BLOCK[module]
    )


def _encoder_name(name: str, config: WanEncoderConfig) -> str:
    """diffusers' name of a tensor of the encoder."""
    middle = ("resnets.0", "attentions.0", "resnets.1")
    if not name.startswith("blocks."):
        start = {"last": "quant_conv"}.get(name.partition(".")[0])
        return f"{start}.{name.partition('.')[2]}" if start else f"encoder.{name}"
    _, index, rest = name.split(".", 2)
    if (place := int(index) - len(config.multipliers)) >= 0:
        rest = re.sub(r"^qkv\.", "to_qkv.", rest).replace("shortcut.", "conv_shortcut.")
        return f"encoder.mid_block.{middle[place]}.{rest}"
    _, inner, rest = rest.split(".", 2)
    if int(inner) == config.blocks:
        return f"encoder.down_blocks.{index}.downsampler.resample.1.{rest.partition('.')[2]}"
    return f"encoder.down_blocks.{index}.resnets.{inner}.{rest.replace('shortcut.', 'conv_shortcut.')}"


def read_sizes(shapes: Shapes, content: Mapping[str, Any], path: Path, vae: WanEncoderConfig) -> FastWamConfig:
    """Return the architecture that the shapes show, checked against config.json at `path`.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    where = str(path.parent)
    current = {_OLD.sub(r"model.mot.layers.\2.blocks.\1.\3", name): value for name, value in shapes.items()}
    shape = shapes_by_name(current, "", where)
    stacks = {}
    for stack in ("video", "action"):
        own = required(content, f"{stack}_dit_config", dict, path)
        first = f"model.mot.layers.0.blocks.{stack}."
        depth = 1 + max((int(name.split(".")[3]) for name in current if f".blocks.{stack}." in name), default=-1)
        attended, width = shape(first + "self_attn.q.weight", 2)
        head_dim = size_of(own, "attn_head_dim", path)
        sizes = {
            "hidden_dim": width, "ffn_dim": shape(first + "ffn.0.weight", 2)[0], "num_layers": depth,
            "num_heads": attended // head_dim, "text_dim": shape(f"{_MIX}{stack}.text_embedding.0.weight", 2)[1],
            "freq_dim": shape(f"{_MIX}{stack}.time_embedding.0.weight", 2)[1],
        }  # fmt: skip
        compare_sizes([(f"{stack}_dit_config.{n}", own.get(n), size) for n, size in sizes.items()], where)
        stacks[stack] = WanConfig(
            width=width, mlp_dim=sizes["ffn_dim"], heads=sizes["num_heads"], head_dim=head_dim, depth=depth,
            text_dim=sizes["text_dim"], freq_dim=sizes["freq_dim"], eps=float(own.get("eps", 1e-6)),
        )  # fmt: skip
    for part, name, default, expected in _FIXED:
        if (got := required(content, part, dict, path).get(name, default)) != expected:
            raise CheckpointError(f"{path}: {part}.{name}: expected {expected}, got {got!r:.60}")
    size = required(content, "image_size", list, path)
    if len(size) != 2:
        raise CheckpointError(f"{path}: image_size: expected a height and a width, got {size!r:.60}")
    height, width = (size_of({"image_size": side}, "image_size", path) for side in size)
    action_dim, state_dim = shape(SIGNS[1], 2)[1], shape(_TRAINED[2], 2)[1]
    compare_sizes(
        [("action_dim", content.get("action_dim"), action_dim), ("proprio_dim", content.get("proprio_dim"), state_dim)],
        where,
    )
    try:
        return FastWamConfig(
            vae=vae, **stacks, image_size=(height, width), text_rows=size_of(content, "tokenizer_max_len", path, 128),
            state_dim=state_dim, action_dim=action_dim, action_horizon=size_of(content, "action_horizon", path),
            num_steps=denoising_steps(content, "num_inference_steps", path), shift=_shift(content, path),
            noise_seed=_seed(content, path),
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error


def _shift(content: Mapping[str, Any], path: Path) -> float:
    found = content.get("sigma_shift")
    found = required(content, "action_scheduler", dict, path).get("infer_shift") if found is None else found
    if not isinstance(found, (int, float)) or isinstance(found, bool) or not found > 0:
        raise CheckpointError(f"{path}: sigma_shift or action_scheduler.infer_shift: expected above 0, got {found!r}")
    return float(found)


def _seed(content: Mapping[str, Any], path: Path) -> int | None:
    seed = content.get("inference_seed")
    if seed is not None and (type(seed) is not int or seed < 0):
        raise CheckpointError(f"{path}: inference_seed: expected a whole number or null, got {seed!r}")
    return seed


def _processors(folder: Path, content: Mapping[str, Any], weights: Weights) -> Processors:
    """lerobot joins the images in the order of the cameras' names, whatever the order in config.json."""
    features = content.get("input_features")
    ordered = {**content, "input_features": dict(sorted(features.items()))} if isinstance(features, dict) else content
    saved = read_processors(folder, ordered, "antialias", weights)
    if any(camera.kind != "identity" for camera in saved.cameras):
        raise CheckpointError(
            f"{folder}: normalization_mapping: VISUAL: expected IDENTITY, as lerobot's FastWAM has it"
        )
    return saved


def _toggled(saved: Processors, config: FastWamConfig, path: Path) -> tuple[int, ...]:
    dims = saved.after.get(TOGGLE, {}).get("toggle_dimensions", [])
    count = config.action_dim
    if not isinstance(dims, list) or any(type(dim) is not int or not -count <= dim < count for dim in dims):
        raise CheckpointError(f"{path.parent}: {TOGGLE}: expected dimensions of {count} actions, got {dims!r:.60}")
    return tuple(dim % count for dim in dims)


# -- Wan 2.2 ------------------------------------------------------------------------------------------------------


def _part(folder: Path, settings: PolicyConfig, part: str, files: tuple[str, ...]) -> Path:
    """Return the folder `part` of Wan 2.2: in the checkpoint's folder, or in what `checkpoint.wan` names."""
    source = settings.checkpoint.wan
    place = folder if source is None else user_path(source)
    if (place / part).is_dir():
        return place / part
    hint = f", or put its folder {part} into the checkpoint's folder, or name Wan 2.2's folder as checkpoint.wan"
    found = files_from_hub(source or WAN, [f"{part}/{name}" for name in files], hint)
    if INDEX in files:
        shards = sorted(set(read_json(found / INDEX)["weight_map"].values()))
        files_from_hub(source or WAN, [f"{part}/{name}" for name in shards], hint)
    return found


def _vae_sizes(content: Mapping[str, Any], path: Path) -> WanEncoderConfig:
    if content.get("_class_name") != "AutoencoderKLWan" or not content.get("is_residual"):
        found = content.get("_class_name"), content.get("is_residual")
        raise CheckpointError(f"{path}: expected Wan 2.2's AutoencoderKLWan, with is_residual, got {found}")
    factors, temporal = (required(content, name, list, path) for name in ("dim_mult", "temperal_downsample"))
    return WanEncoderConfig(
        size_of(content, "base_dim", path), tuple(factors), size_of(content, "num_res_blocks", path), tuple(temporal),
        size_of(content, "z_dim", path), size_of(content, "patch_size", path),
    )  # fmt: skip


def _latents(content: Mapping[str, Any], kind: str, config: FastWamConfig, path: Path) -> torch.Tensor:
    values = required(content, f"latents_{kind}", list, path)
    if len(values) != config.vae.latent or not all(isinstance(v, (int, float)) for v in values):
        raise CheckpointError(f"{path}: latents_{kind}: expected {config.vae.latent} numbers, got {len(values)}")
    return torch.tensor(values, dtype=torch.float32)


def _prompts(folder: Path, content: Mapping[str, Any], config: FastWamConfig, settings: PolicyConfig) -> Prompts:
    found = _read(folder, content, config.video.text_dim, settings, encoder=settings.checkpoint.text_encoder)
    if not found.rows and found.encoder is None:
        raise CheckpointError(
            f"checkpoint {folder}: expected {FILE}, the encoded instructions, found none; write it with `vla-accel "
            f'prompts {folder} "an instruction" …`, or load the 11 GB text encoder with '
            "`checkpoint: {text_encoder: true}`"
        )
    return found


def _read(folder: Path, content: Mapping[str, Any], width: int, settings: PolicyConfig, *, encoder: bool) -> Prompts:
    path = folder / "config.json"
    template, most = required(content, "prompt_template", str, path), size_of(content, "tokenizer_max_len", path, 128)
    if template.count("{task}") != 1:
        raise CheckpointError(f"{path}: prompt_template: expected one {{task}}, got {template!r}")
    rows = read_prompts(folder / FILE, template, width, most)
    made = None
    if encoder:
        place = _part(folder, settings, "text_encoder", ("config.json", INDEX))
        tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, TOKENIZER)
        chosen = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(chosen)
        made = TextEncoder(load_encoder(place), tokenizer, device, resolve_dtype(settings.precision, device))
    return Prompts(template, rows, width, most, made)
