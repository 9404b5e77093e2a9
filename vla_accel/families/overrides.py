"""What a user's configuration says of a checkpoint, over what its folder says, and whether both fit the model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from vla_accel.checkpoints.lerobot import is_lerobot
from vla_accel.checkpoints.lora import Lora, read_lora
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import Preset, load_preset
from vla_accel.transforms.tokenizer import Tokenizer

C = TypeVar("C")
P = TypeVar("P", bound=Processor)
_log = logging.getLogger("vla_accel")
_SIZES = ("action_horizon", "max_token_len", "discrete_state_input")


def adapter_of(folder: Path, settings: PolicyConfig) -> tuple[Lora | None, Path]:
    """Return the adapter to fold in, if any, and the folder whose settings and statistics count.

    lerobot saves an adapter with the statistics that it was trained with, and those count.
    """
    if settings.checkpoint.lora is None:
        return None, folder
    lora = read_lora(Path(settings.checkpoint.lora))
    return lora, lora.folder if is_lerobot(lora.folder) else folder


def resized(config: C, settings: PolicyConfig) -> C:
    """A family's config, as the folder says it, with the sizes of the user's configuration. A size that contradicts the
    folder is logged. Settings that the family lacks were refused before."""
    made: Any = config
    given = {name: value for name in _SIZES if (value := getattr(settings.checkpoint, name)) is not None}
    warn_of_contradictions(given, vars(made))
    return dataclasses.replace(made, **given)


def warn_of_contradictions(given: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Log each setting of `checkpoint:` that contradicts the folder; `told`: the folder's values, None where it has
    not."""
    for name, value in given.items():
        if told.get(name) is not None and told[name] != value:
            _log.warning("checkpoint.%s: %s instead of the checkpoint's own %s", name, value, told[name])


def refuse_asset(settings: PolicyConfig, folder: Path) -> None:
    """Raise ConfigError for `asset_id` with a folder that has no `assets` to choose from."""
    if (asset := settings.checkpoint.asset_id) is not None:
        raise ConfigError(f"checkpoint.asset_id: expected openpi's folder, with assets/{asset}, got {folder}")


def robot_of(told: Preset, settings: PolicyConfig) -> Preset:
    """The user's preset, if there is one, instead of what lerobot's folder says: the robot's keys and conventions may
    be another's; how images are resized, and which actions are relative to the state, is the checkpoint's training.
    Raises ConfigError for other sizes and for other relative actions."""
    if settings.preset is None:
        return told
    given = load_preset(settings.preset)
    for name in ("state", "action"):
        expected, got = (getattr(preset, f"{name}_dim") for preset in (told, given))
        if got != expected:
            raise ConfigError(f"preset: expected {expected} numbers of {name}, got {settings.preset}'s {got}")
    if given.resize not in (Preset.resize, told.resize):
        raise ConfigError(f"preset.resize: expected {told.resize}, as the checkpoint was trained, got {given.resize}")
    relative = told.delta_actions or given.delta_actions
    if given.delta_actions not in ((), relative):
        expected, got = list(relative), list(given.delta_actions)
        raise ConfigError(f"preset.delta_actions: expected {expected}, as the checkpoint was trained, got {got}")
    if len(given.images) != len(told.images):
        counts = len(given.images), settings.preset, len(told.images)
        _log.warning("preset: %d cameras of %s, where the checkpoint was trained with %d", *counts)
    # With actions relative to the state the robot gets targets, of which a preset without them does not know.
    motion = given.motion_dims if given.delta_actions == relative else None
    return dataclasses.replace(given, resize=told.resize, delta_actions=relative, motion_dims=motion)


def processor_of(
    kind: type[P], config: Any, preset: Preset, scales: tuple[Normaliser, Normaliser], tokenizer: Tokenizer,
    settings: PolicyConfig, **more: Any,
) -> P:  # fmt: skip
    """The transforms around a model of `config`; `scales`: of state and actions; `more` fields. Raises CheckpointError,
    ConfigError for what does not fit the model."""
    check_vocabulary(tokenizer, config.vocab_size, settings)
    return kind(
        tokenizer=tokenizer, state=scales[0], actions=scales[1], image_size=config.vision.image_size,
        action_dim=config.action_dim, max_token_len=config.max_token_len, default_prompt=settings.default_prompt,
        preset=preset, **more,
    )  # fmt: skip


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, settings: PolicyConfig) -> None:
    """Raise CheckpointError where a tokenizer has tokens that a model of `vocab_size` has not: another model's."""
    if tokenizer.vocab_size > vocab_size:
        its = f"tokenizer {settings.checkpoint.tokenizer or ''}".rstrip()
        raise CheckpointError(f"{its}: expected at most the model's {vocab_size} tokens, got {tokenizer.vocab_size}")
