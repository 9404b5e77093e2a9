"""Checkpoints to models: every key is accounted for, or loading raises and lists what is wrong.

Two dialects are read: this package's own (canonical names, config in `config.json`), and openpi's PyTorch one. Only
safetensors files are opened; no pickle is ever loaded.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_accel.config import from_mapping, read_mapping
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.files import replacing
from vla_accel.models.pi0 import Pi0, Pi0Config

FORMAT = "vla_accel.checkpoint/1"
_OPENPI = "paligemma_with_expert."


def read_config(folder: Path) -> Pi0Config:
    """The architecture in a checkpoint folder's own `config.json`. Raises CheckpointError."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"checkpoint {folder}: expected config.json, found {_listing(folder)}")
    try:
        content = read_mapping(path)
        if content.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path}: expected format {FORMAT!r}")
        return from_mapping(Pi0Config, content)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the `model*.safetensors` in a folder, memory-mapped, on the CPU.

    Raises CheckpointError for a missing, damaged or doubled file or key.
    """
    from safetensors import SafetensorError, safe_open

    # By name: other safetensors in the folder (calibration scales, a processor's state) are not weights.
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise CheckpointError(f"checkpoint {path}: expected model.safetensors, found {_listing(path)}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 - not a mapping
                    if key in tensors:
                        raise CheckpointError(f"checkpoint {path}: key {key} is in more than one file")
                    tensors[key] = reader.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint {file}: damaged safetensors file: {error}") from error
    return tensors


def load_checkpoint(path: str | Path, config: Pi0Config | None = None) -> Pi0:
    """A model with the checkpoint's weights, in the dtypes stored, on the CPU, in eval mode.

    Args: `path`: a folder or one safetensors file; `config`: needed where the folder has no config of ours.
    Raises CheckpointError that lists keys missing, left over or misshaped, and non-finite weights.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"checkpoint {path}: no such file or folder")
    config = config or read_config(path if path.is_dir() else path.parent)
    return load_tensors(read_tensors(path), config, str(path))


def load_tensors(tensors: Mapping[str, Tensor], config: Pi0Config, where: str) -> Pi0:
    """As `load_checkpoint`, from tensors already read, of either dialect; the mapping is not changed."""
    if any(key.startswith(_OPENPI) for key in tensors):
        tensors = from_openpi(tensors, config, where)
    with torch.device("meta"):
        model = Pi0(config)
    expected = model.state_dict()
    problems = _differences(expected, tensors)
    if problems:
        raise CheckpointError(f"checkpoint {where} does not fit {config.kind}: " + "; ".join(problems))
    broken = [k for k, v in tensors.items() if not torch.isfinite(v).all()]
    if broken:
        raise CheckpointError(f"checkpoint {where}: non-finite values in {_some(broken)}")
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    return model.requires_grad_(False).eval()


def _differences(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[str]:
    missing = sorted(expected.keys() - got.keys())
    extra = sorted(got.keys() - expected.keys())
    shapes = [
        f"{k} (expected {tuple(expected[k].shape)}, got {tuple(got[k].shape)})"
        for k in expected.keys() & got.keys()
        if expected[k].shape != got[k].shape
    ]
    kinds = [f"{k} ({got[k].dtype})" for k in expected.keys() & got.keys() if not got[k].is_floating_point()]
    named = (("missing", missing), ("left over", extra), ("misshaped", sorted(shapes)), ("not float", kinds))
    return [f"{len(keys)} {what}: {_some(keys)}" for what, keys in named if keys]


def _some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _listing(path: Path) -> str:
    if not path.is_dir():
        return "no such folder" if not path.exists() else "a file"
    return ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "an empty folder"


def save_checkpoint(state: Mapping[str, Tensor], config: Pi0Config, folder: Path) -> None:
    """Write canonical weights and config into a folder; each file appears whole or not at all."""
    from safetensors.torch import save_file

    with replacing(folder / "model.safetensors") as temporary:
        save_file({k: v.contiguous() for k, v in state.items()}, str(temporary))
    content = {"format": FORMAT, **dataclasses.asdict(config)}
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


# -- openpi's dialect ---------------------------------------------------------------------------------------------

_DEAD = (
    # Never read by the model: the expert's head, and the prefix's final norm (only K and V leave the prefix).
    r"paligemma_with_expert\.gemma_expert\.lm_head\.weight",
    r"paligemma_with_expert\.paligemma\.model\.language_model\.norm\.weight",
    # Dead after the last prefix layer's keys and values; kept in the model, so not listed here.
)
_VISION = r"paligemma_with_expert\.paligemma\.model\.vision_tower\.vision_model\."
_RENAMES: tuple[tuple[str, str], ...] = (
    (_VISION + r"embeddings\.patch_embedding\.(.+)", r"vision.patch_embedding.\1"),
    (_VISION + r"embeddings\.position_embedding\.weight", r"vision.position_embedding"),
    (_VISION + r"encoder\.layers\.(\d+)\.self_attn\.out_proj\.(.+)", r"vision.layers.\1.out_proj.\2"),
    (_VISION + r"encoder\.layers\.(\d+)\.mlp\.(.+)", r"vision.layers.\1.\2"),
    (_VISION + r"encoder\.layers\.(\d+)\.(layer_norm\d\..+)", r"vision.layers.\1.\2"),
    (_VISION + r"post_layernorm\.(.+)", r"vision.post_layernorm.\1"),
    (r"paligemma_with_expert\.paligemma\.model\.multi_modal_projector\.linear\.(.+)", r"projector.\1"),
    (r"((?:action|state|time)_\w+\..+)", r"\1"),
    (r"paligemma_with_expert\.gemma_expert\.model\.norm\.(.+)", r"expert.norm.\1"),
)
_STACKS = (
    ("paligemma_with_expert.paligemma.model.language_model.layers.", "prefix.layers."),
    ("paligemma_with_expert.gemma_expert.model.layers.", "expert.layers."),
)
_EMBEDDINGS = (
    "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight",
    "paligemma_with_expert.paligemma.lm_head.weight",
)


def from_openpi(tensors: Mapping[str, Tensor], config: Pi0Config, where: str) -> dict[str, Tensor]:
    """openpi's keys to canonical ones; q, k, v and gate, up become one matrix each.

    Keys that the model never reads are dropped by name; keys that are not known stay, so that the caller reports
    them. Raises CheckpointError if an expected piece of a fused matrix is missing or the two embeddings differ.
    """
    rest = {k: v for k, v in tensors.items() if not any(re.fullmatch(d, k) for d in _DEAD)}
    result: dict[str, Tensor] = {}
    tables = [rest.pop(k) for k in _EMBEDDINGS if k in rest]
    if len(tables) == 2 and not torch.equal(*tables):
        raise CheckpointError(f"checkpoint {where}: {' and '.join(_EMBEDDINGS)} are tied, but differ")
    if tables:
        result["embed.weight"] = tables[0]
    missing: list[str] = []

    def fuse(target: str, prefix: str, parts: tuple[str, ...], suffix: str) -> None:
        names = [f"{prefix}{p}.{suffix}" for p in parts]
        found = [n for n in names if n in rest]
        if not found:
            return  # reported as the missing fused key, under its canonical name
        missing.extend(n for n in names if n not in rest)
        if len(found) == len(names):
            result[target] = torch.cat([rest.pop(n) for n in names])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    vision = _VISION.replace("\\", "") + "encoder.layers."
    for i in range(config.vision.depth):
        for suffix in ("weight", "bias"):
            fuse(f"vision.layers.{i}.qkv_proj.{suffix}", f"{vision}{i}.", qkv, suffix)
    for source, target in _STACKS:
        for i in range(config.prefix.depth):
            fuse(f"{target}{i}.qkv_proj.weight", f"{source}{i}.", qkv, "weight")
            fuse(f"{target}{i}.gate_up_proj.weight", f"{source}{i}.", ("mlp.gate_proj", "mlp.up_proj"), "weight")
    if missing:
        raise CheckpointError(f"checkpoint {where}: {len(missing)} missing: {_some(missing)}")
    for key, value in rest.items():
        result[_rename(key)] = value
    return result


def _rename(key: str) -> str:
    for source, target in _STACKS:
        if key.startswith(source):
            return target + re.sub(r"\.(?:self_attn|mlp)\.", ".", key[len(source) :])
    for pattern, replacement in _RENAMES:
        if re.fullmatch(pattern, key):
            return re.sub(pattern, replacement, key)
    return key


def describe(config: Pi0Config, model: Pi0) -> dict[str, Any]:
    """What a breakdown or metadata says of a model."""
    return {
        "kind": config.kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "action_horizon": config.action_horizon,
        "action_dim": config.action_dim,
    }
