"""Checkpoint folders of π0 and π0.5: this package's own, openpi's (PyTorch) and lerobot's.

Each folder is read into the sizes of the network, the recipe of its weights and the robot's transforms.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted, is_own, read_config
from vla_accel.checkpoints.lerobot import (
    Processors,
    buffers,
    denoising_steps,
    is_lerobot,
    is_migrated,
    read_processors,
    read_settings,
    required,
)
from vla_accel.checkpoints.lora import fold
from vla_accel.checkpoints.paligemma import (
    DEAD,
    EMBEDDINGS,
    NAMES,
    STACKS,
    compared_variant,
    dialect_of,
    stack_sizes,
    tower_sizes,
)
from vla_accel.checkpoints.stacks import Shapes, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, listing, read_json, size_of, some
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
from vla_accel.families.pi0.network import Kind, Pi0, Pi0Config
from vla_accel.transforms.normalisation import Normaliser, load_scales, statistics_by_asset
from vla_accel.transforms.processing import Processor, PromptForm
from vla_accel.transforms.robots import BY_ASSET, load_preset, of_another
from vla_accel.transforms.tokenizer import PALIGEMMA_HUB, Tokenizer, load_tokenizer

_log = logging.getLogger("vla_accel.checkpoints")
_KIND_SIGNS: dict[Kind, tuple[str, ...]] = {
    "pi0": ("state_proj.weight", "action_time_mlp_in.weight"),
    "pi05": ("time_mlp_in.weight", STACKS["expert"] + "norm.dense.weight"),
}
_Read = tuple[Pi0Config, Processors, Tokenizer]
"""The content of a folder without its weights."""


def load_folder(folder: Path, settings: PolicyConfig, weights: Weights | None = None) -> tuple[Pi0, Processor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    lora, described = adapter_of(folder, settings)
    weights = weights or SafetensorsWeights(folder)
    lerobot = is_lerobot(described)
    read = _lerobot if lerobot else _own if _is_own(folder, weights) else _openpi
    config, saved, tokenizer = read(described, weights, settings)
    needed = max(saved.preset.action_dim, saved.preset.state_dim if config.kind == "pi0" else 0)
    if needed > config.action_dim:
        raise ConfigError(f"preset: expected at most {config.action_dim} state and action dimensions, got {needed}")
    # lerobot's π0 appends a newline to the instruction; openpi cleans the text, too.
    form: PromptForm = "line" if lerobot and config.kind == "pi0" else "cleaned"
    discrete = config.discrete_state_input
    processor = processor_of(Processor, config, saved, tokenizer, settings, discrete_state=discrete, prompt_form=form)
    model = load_weights(weights, config, str(folder))
    return fold(model, lora, lambda name: NAMES.pieces(name, config), (*DEAD, EMBEDDINGS[1])), processor


def load_weights(weights: Weights, config: Pi0Config, where: str) -> Pi0:
    """Return the network of tensors under this package's, openpi's or lerobot's names, which are read when they are
    needed. Raises CheckpointError that lists tensors that are missing, left over or misshaped."""
    network = Pi0.empty(config)
    recipe: dict[str, tuple[Piece, ...]] = {name: (Piece(name),) for name in network.state_dict()}
    dialect, prefix = dialect_of(weights.shapes)
    dead: list[str] = []
    if dialect != "vla_accel":
        recipe = {n: tuple(Piece(prefix + p.name, p.rows) for p in NAMES.pieces(n, config)) for n in recipe}
        tables = [prefix + e for e in EMBEDDINGS if prefix + e in weights.shapes]
        # Since transformers 5, training unties the table from the head, which nothing reads. lerobot's folders often
        # hold two different tables. openpi ties them, so a difference means that other code wrote the folder.
        if len(tables) == 2 and dialect == "openpi" and not torch.equal(*(weights.read(table) for table in tables)):
            _log.warning("checkpoint %s: %s and %s differ: the first is read", where, *tables)
        if tables:
            recipe["embed.weight"] = (Piece(tables[0]),)
        dead = [*tables, *(prefix + d for d in DEAD), *buffers(weights.shapes)]
    return fitted(network, weights, recipe, where, config.kind, dead)


# -- sizes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stated:
    """Sizes that the config or the user states; None: not stated. `variants`: of prefix and expert."""

    kind: Kind | None = None
    action_dim: int | None = None
    action_horizon: int | None = None
    max_token_len: int | None = None
    discrete_state_input: bool | None = None
    image_size: int | None = None
    variants: tuple[str | None, str | None] = (None, None)


def infer_config(shapes: Shapes, prefix: str, stated: Stated, where: str) -> Pi0Config:
    """Return the architecture of weights under openpi's names, checked against the stated sizes.

    No weight shows the action horizon and the longest prompt: the horizon must be stated, the prompt defaults to
    openpi's 48 tokens for π0 and 200 for π0.5.

    Raises:
        CheckpointError: A tensor is missing, or weights and stated sizes contradict each other.
    """
    kind = kind_of(shapes)
    if kind is None:
        signs = " or of π0.5 ".join(f"({', '.join(names)})" for names in _KIND_SIGNS.values())
        found = [name for names in _KIND_SIGNS.values() for name in names if prefix + name in shapes]
        raise CheckpointError(
            f"checkpoint {where}: expected weights of π0 {signs}, found {some(found) or 'none of them'}"
        )
    shape = shapes_by_name(shapes, prefix, where)
    if stated.action_horizon is None:
        raise CheckpointError(
            f"checkpoint {where}: expected config.json with action_horizon, which no weight shows; or set "
            "checkpoint.action_horizon in the configuration"
        )
    table = next((e for e in EMBEDDINGS if prefix + e in shapes), EMBEDDINGS[0])
    vocabulary, _ = shape(table, 2)
    discrete = stated.discrete_state_input
    try:
        config = Pi0Config(
            kind=kind,
            vision=tower_sizes(shapes, prefix, shape),
            prefix=stack_sizes("prefix", shapes, prefix, shape),
            expert=stack_sizes("expert", shapes, prefix, shape),
            vocab_size=vocabulary,
            action_dim=shape("action_in_proj.weight", 2)[1],
            action_horizon=stated.action_horizon,
            max_token_len=stated.max_token_len or (200 if kind == "pi05" else 48),
            discrete_state_input=kind == "pi05" if discrete is None else discrete,
        )
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error
    pairs: list[tuple[str, object, object]] = [
        ("kind", stated.kind, config.kind),
        ("action_dim", stated.action_dim, config.action_dim),
        ("image_size", stated.image_size, config.vision.image_size),
        compared_variant("prefix", stated.variants[0], config.prefix, where),
        compared_variant("expert", stated.variants[1], config.expert, where),
    ]
    compare_sizes(pairs, where)
    if config.kind == "pi0" and config.discrete_state_input:
        raise CheckpointError(f"checkpoint {where}: discrete_state_input: expected false for π0, got true")
    return config


def kind_of(shapes: Shapes) -> Kind | None:
    """Return the model whose tensors these are, under any project's names; None for neither and for both."""
    _, prefix = dialect_of(shapes)
    found: list[Kind] = [kind for kind, names in _KIND_SIGNS.items() if any(prefix + n in shapes for n in names)]
    return found[0] if len(found) == 1 else None


# -- this package's own folders -----------------------------------------------------------------------------------


def _is_own(folder: Path, weights: Weights) -> bool:
    path = folder / "config.json"
    # Canonical names without any config: reading the config then reports that it is missing.
    return is_own(read_json(path)) if path.is_file() else dialect_of(weights.shapes)[0] == "vla_accel"


def _own(folder: Path, weights: Weights, settings: PolicyConfig) -> _Read:
    refuse_asset(settings, folder)
    config = resized(read_config(folder, Pi0Config), settings)
    saved = Processors(load_preset(settings.preset or "libero"), *_scales(folder / "norm_stats.json", config))
    return config, saved, load_tokenizer(folder, settings.checkpoint.tokenizer)


def _scales(path: Path, config: Pi0Config) -> tuple[Normaliser, Normaliser]:
    return load_scales(path, "quantile" if config.kind == "pi05" else "mean_std")


# -- openpi -------------------------------------------------------------------------------------------------------


def _openpi(folder: Path, weights: Weights, settings: PolicyConfig) -> _Read:
    """Read openpi's folder: `assets/<asset_id>/norm_stats.json`, and the config.json of its converter.

    `pi05`, `max_token_len`, `discrete_state_input` and `preset` in config.json are additions of `vla-accel convert`.
    """
    path = folder / "config.json"
    content = read_json(path) if path.is_file() else {}
    if not path.is_file() and is_migrated(folder):  # lerobot's folder without its config
        raise CheckpointError(f"checkpoint {folder}: expected config.json, found {listing(folder)}")
    asset, statistics = _asset(folder, settings.checkpoint.asset_id)
    names = ("action_dim", "action_horizon", "max_token_len")
    sizes: dict[str, Any] = {name: size_of(content, name, path) for name in names if content.get(name) is not None}
    overrides = {name: value for name in names[1:] if (value := getattr(settings.checkpoint, name)) is not None}
    warn_of_contradictions(overrides, sizes)
    stated = Stated(
        kind=None if "pi05" not in content else ("pi05" if content["pi05"] else "pi0"),
        variants=(content.get("paligemma_variant"), content.get("action_expert_variant")),
        **{**sizes, **overrides},
    )
    _, prefix = dialect_of(weights.shapes)
    config = infer_config(weights.shapes, prefix, stated, str(folder))
    name = settings.preset or content.get("preset") or _preset_of(asset, folder)
    if of_another(name, asset):
        raise ConfigError(f"preset: expected {BY_ASSET[asset]}, which assets/{asset} names, or a YAML file, got {name}")
    # openpi's π0 for LIBERO was trained with a delta transform that its π0.5 does not have.
    preset = load_preset("pi0_libero" if name == "libero" and config.kind == "pi0" else name)
    discrete = settings.checkpoint.discrete_state_input
    if discrete is not None:
        warn_of_contradictions({"discrete_state_input": discrete}, content)
    for other in (content.get("discrete_state_input"), preset.discrete_state_input):
        discrete = other if discrete is None else discrete
    if discrete is not None and config.kind == "pi05":
        config = dataclasses.replace(config, discrete_state_input=bool(discrete))
    tokenizer = load_tokenizer(folder, settings.checkpoint.tokenizer, elsewhere=True)
    return config, Processors(preset, *_scales(statistics, config)), tokenizer


def _preset_of(asset: str, folder: Path) -> str:
    """Return the robot of an asset. Statistics in the folder itself (".") do not name one."""
    if asset == ".":
        return "libero"
    if asset not in BY_ASSET:
        raise CheckpointError(
            f"checkpoint {folder}: expected statistics of {', '.join(BY_ASSET)}, got assets/{asset}: set preset: in "
            "the configuration to the robot's conventions (a shipped preset's name or a YAML file)"
        )
    return BY_ASSET[asset]


def _asset(folder: Path, wanted: str | None) -> tuple[str, Path]:
    """Return the asset's name and its statistics. A base checkpoint has those of several robots."""
    found = statistics_by_asset(folder / "assets")
    if (folder / "norm_stats.json").is_file():
        found["."] = folder / "norm_stats.json"
    if wanted is not None:
        found = {**_rlinf_assets(folder), **found}
        if wanted not in found:
            raise CheckpointError(
                f"checkpoint {folder}: expected assets/{wanted}/norm_stats.json, found {', '.join(found) or 'none'}"
            )
        return wanted, found[wanted]
    found = found or _rlinf_assets(folder)
    if len(found) != 1:
        got = f"found {', '.join(found)}: choose one as checkpoint.asset_id" if found else f"found {listing(folder)}"
        raise CheckpointError(f"checkpoint {folder}: expected one assets/<asset_id>/norm_stats.json, {got}")
    return next(iter(found.items()))


def _rlinf_assets(folder: Path) -> dict[str, Path]:
    """Return statistics in RLinf's layout, `<asset_id>/norm_stats.json` in the folder itself, without those of other
    checkpoints inside the folder."""
    found = {}
    for file in sorted((*folder.glob("*/norm_stats.json"), *folder.glob("*/*/norm_stats.json"))):
        between = file.relative_to(folder).parts[:-1]
        above = [folder.joinpath(*between[: depth + 1]) for depth in range(len(between))]
        if between[0] != "assets" and not any((parent / "config.json").is_file() for parent in above):
            found["/".join(between)] = file
    return found


# -- lerobot ------------------------------------------------------------------------------------------------------


def _lerobot(folder: Path, weights: Weights, settings: PolicyConfig) -> _Read:
    refuse_asset(settings, folder)
    path = folder / "config.json"
    content = read_settings(path, ("pi0", "pi05"))
    saved = read_processors(folder, content, "bilinear", weights)
    resolution = required(content, "image_resolution", list, path)
    if len(resolution) != 2 or resolution[0] != resolution[1]:
        raise CheckpointError(f"{path}: expected a square image_resolution, got {resolution}")
    horizon, delay = size_of(content, "chunk_size", path), content.get("rtc_training_max_delay")
    if delay is not None and (type(delay) is not int or not 0 <= delay < horizon):
        raise CheckpointError(f"{path}: rtc_training_max_delay: expected 0 to {horizon - 1}, got {delay!r:.60}")
    stated = Stated(
        kind=content["type"],
        action_dim=required(content, "max_action_dim", int, path),
        action_horizon=horizon,
        max_token_len=saved.max_token_len,
        image_size=int(resolution[0]),
        variants=(content.get("paligemma_variant"), content.get("action_expert_variant")),
    )
    config = resized(infer_config(weights.shapes, dialect_of(weights.shapes)[1], stated, str(folder)), settings)
    steps = denoising_steps(content, "num_inference_steps", path)
    config = dataclasses.replace(config, num_steps=steps, trained_delay=delay)
    tokenizer = load_tokenizer(
        folder, settings.checkpoint.tokenizer, elsewhere=True, hub=saved.tokenizer or PALIGEMMA_HUB
    )
    return config, dataclasses.replace(saved, preset=robot_of(saved.preset, settings)), tokenizer
