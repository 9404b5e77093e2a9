"""π0's and π0.5's checkpoint folders: this package's, openpi's (PyTorch: `model.safetensors` and `assets/`), lerobot's.

Each to the same thing: sizes, and the transforms around the model. Knows nothing of engines.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints.checkpoint import is_own, read_config
from vla_accel.checkpoints.dialects import UNREAD, Stated, dialect_of, infer_config, pieces
from vla_accel.checkpoints.lerobot import is_lerobot, read_folder
from vla_accel.checkpoints.lerobot_steps import is_migrated
from vla_accel.checkpoints.lora import fold
from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.overrides import (
    adapter_of,
    processor_of,
    refuse_asset,
    resized,
    robot_of,
    warn_of_contradictions,
)
from vla_accel.families.pi0.checkpoint import load_weights
from vla_accel.families.pi0.network import Pi0, Pi0Config
from vla_accel.pictures import PixelValues
from vla_accel.transforms.normalisation import Normaliser, NormKind, load_statistics, statistics_by_asset
from vla_accel.transforms.processing import Processor, PromptForm
from vla_accel.transforms.robots import BY_ASSET, Preset, load_preset, of_another
from vla_accel.transforms.tokenizer import PALIGEMMA_HUB, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class _Described:
    """All that a folder says, besides its weights."""

    config: Pi0Config
    preset: Preset
    scales: tuple[Normaliser, Normaliser]
    tokenizer: Tokenizer
    prompt_state_dim: int | None = None
    prompt_form: PromptForm = "cleaned"
    pixels: PixelValues | None = None


def load_folder(
    folder: Path, settings: PolicyConfig, *, device: str | torch.device, dtype: torch.dtype | None
) -> tuple[Pi0, Processor]:
    """The model, none of whose weights is read yet, and the robot's transforms; see
    `vla_accel.checkpoints.loading.load`."""
    lora, told = adapter_of(folder, settings)
    if is_lerobot(told):
        weights = SafetensorsWeights(folder)
        described = _lerobot(told, weights, settings)
    elif _is_ours(folder):
        described = _ours(folder, settings)
        weights = SafetensorsWeights(folder)
    else:
        weights = SafetensorsWeights(folder)
        described = _openpi(folder, weights, settings)
    config = described.config
    needed = max(described.preset.action_dim, described.preset.state_dim if config.kind == "pi0" else 0)
    if needed > config.action_dim:
        raise ConfigError(f"preset: {needed} state or action dimensions do not fit a model of {config.action_dim}")
    processor = processor_of(
        Processor, config, described.preset, described.scales, described.tokenizer, settings,
        discrete_state=config.discrete_state_input, prompt_state_dim=described.prompt_state_dim,
        prompt_form=described.prompt_form, pixels=described.pixels,
    )  # fmt: skip
    model = load_weights(weights, config, str(folder), device=device, dtype=dtype)
    if lora is not None:
        fold(model, lora, lambda name: pieces(name, config), UNREAD)
    return model, processor


def _is_ours(folder: Path) -> bool:
    """Our config says so itself; without any config, canonical names do, and then the config is what is missing."""
    path = folder / "config.json"
    if path.is_file():
        return is_own(read_json(path))
    return dialect_of(SafetensorsWeights(folder).shapes)[0] == "vla_accel"


def _ours(folder: Path, settings: PolicyConfig) -> _Described:
    refuse_asset(settings, folder)
    config = resized(read_config(folder, Pi0Config), settings)
    preset = load_preset(settings.preset or "libero")
    scales = _openpi_statistics(folder / "norm_stats.json", config)
    return _Described(config, preset, scales, load_tokenizer(folder, settings.checkpoint.tokenizer))


def _openpi(folder: Path, weights: SafetensorsWeights, settings: PolicyConfig) -> _Described:
    """openpi's folder: weights, `assets/<asset_id>/norm_stats.json`, and the config.json that its converter writes;
    `pi05`, `max_token_len` and `discrete_state_input` in it are ours (`vla-accel convert`)."""
    path = folder / "config.json"
    content = read_json(path) if path.is_file() else {}
    if not path.is_file() and is_migrated(folder):  # lerobot's, but for that file
        raise CheckpointError(f"checkpoint {folder}: expected config.json, found {listing(folder)}")
    asset, statistics = _asset(folder, settings.checkpoint.asset_id)
    sizes = ("action_dim", "action_horizon", "max_token_len")
    told: dict[str, Any] = {name: size_of(content, name, path) for name in sizes if content.get(name) is not None}
    given = {name: value for name in sizes[1:] if (value := getattr(settings.checkpoint, name)) is not None}
    warn_of_contradictions(given, told)
    told |= given
    stated = Stated(
        kind=None if "pi05" not in content else ("pi05" if content["pi05"] else "pi0"),
        variants=(content.get("paligemma_variant"), content.get("action_expert_variant")),
        **told,
    )
    _, prefix = dialect_of(weights.shapes)
    config = infer_config(weights.shapes, prefix, stated, str(folder))
    name = settings.preset or content.get("preset") or _preset_of(asset, folder)
    if of_another(name, asset):
        raise ConfigError(f"preset: expected {BY_ASSET[asset]}, as assets/{asset} says, or a YAML file, got {name}")
    # openpi's one π0 for LIBERO was trained with a delta transform that its π0.5 does not have.
    preset = load_preset("pi0_libero" if name == "libero" and config.kind == "pi0" else name)
    discrete = settings.checkpoint.discrete_state_input
    if discrete is None:
        discrete = content.get("discrete_state_input")
    else:
        warn_of_contradictions({"discrete_state_input": discrete}, content)
    if discrete is None:
        discrete = preset.discrete_state_input
    if discrete is not None and config.kind == "pi05":
        config = dataclasses.replace(config, discrete_state_input=bool(discrete))
    tokenizer = load_tokenizer(folder, settings.checkpoint.tokenizer, elsewhere=True)
    return _Described(config, preset, _openpi_statistics(statistics, config), tokenizer)


def _preset_of(asset: str, folder: Path) -> str:
    """The robot that statistics are of. Those directly in the folder (".") do not say."""
    if asset == ".":
        return "libero"
    if asset not in BY_ASSET:
        raise CheckpointError(
            f"checkpoint {folder}: expected statistics of {', '.join(BY_ASSET)}, got assets/{asset}: say which robot's "
            "conventions they have, as preset: in the configuration (a shipped preset's name or a YAML file)"
        )
    return BY_ASSET[asset]


def _lerobot(folder: Path, weights: SafetensorsWeights, settings: PolicyConfig) -> _Described:
    refuse_asset(settings, folder)
    told = read_folder(folder, weights)
    _, prefix = dialect_of(weights.shapes)
    stated = Stated(
        kind="pi05" if told.kind == "pi05" else "pi0",
        action_dim=told.action_dim,
        action_horizon=told.horizon,
        max_token_len=told.max_token_len,
        image_size=told.image_size,
        variants=told.variants,
    )
    config = resized(infer_config(weights.shapes, prefix, stated, str(folder)), settings)
    config = dataclasses.replace(config, num_steps=told.num_steps, trained_delay=told.trained_delay)
    saved = told.processors
    preset = robot_of(saved.preset, settings)
    hub = saved.tokenizer.get("tokenizer_name") or PALIGEMMA_HUB
    tokenizer = load_tokenizer(folder, settings.checkpoint.tokenizer, elsewhere=True, hub=hub)
    # lerobot's π0 leaves the instruction as it is and ends it by a newline; openpi's cleans it.
    form: PromptForm = "line" if told.kind == "pi0" else "cleaned"
    scales = saved.state, saved.actions
    return _Described(config, preset, scales, tokenizer, told.prompt_state_dim, form, saved.pixels)


# -- statistics ---------------------------------------------------------------------------------------------------


def _openpi_statistics(path: Path, config: Pi0Config) -> tuple[Normaliser, Normaliser]:
    statistics = load_statistics(path)
    kind: NormKind = "quantile" if config.kind == "pi05" else "mean_std"
    return Normaliser.of(statistics["state"], kind, "state"), Normaliser.of(statistics["actions"], kind, "actions")


def _asset(folder: Path, wanted: str | None) -> tuple[str, Path]:
    """The asset's name and its statistics file; a base checkpoint holds those of several robots."""
    found = statistics_by_asset(folder / "assets")
    if (folder / "norm_stats.json").is_file():
        found["."] = folder / "norm_stats.json"
    if wanted is not None:
        found = {**_without_assets(folder), **found}
        if wanted not in found:
            raise CheckpointError(
                f"checkpoint {folder}: expected assets/{wanted}/norm_stats.json, found {', '.join(found) or 'none'}"
            )
        return wanted, found[wanted]
    found = found or _without_assets(folder)
    if len(found) != 1:
        told = f"found {', '.join(found)}: choose one as checkpoint.asset_id" if found else f"found {listing(folder)}"
        raise CheckpointError(f"checkpoint {folder}: expected one assets/<asset_id>/norm_stats.json, {told}")
    return next(iter(found.items()))


def _without_assets(folder: Path) -> dict[str, Path]:
    """RLinf's layout: `<asset_id>/norm_stats.json` in the folder itself. Other checkpoints inside are left out."""
    found = {}
    for file in sorted((*folder.glob("*/norm_stats.json"), *folder.glob("*/*/norm_stats.json"))):
        between = file.relative_to(folder).parts[:-1]
        above = [folder.joinpath(*between[: depth + 1]) for depth in range(len(between))]
        if between[0] != "assets" and not any((place / "config.json").is_file() for place in above):
            found["/".join(between)] = file
    return found
