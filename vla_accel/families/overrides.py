"""The user's configuration applied to a checkpoint's folder: sizes, adapter, robot and tokenizer, each checked against
the model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vla_accel.checkpoints.lerobot import Processors, is_lerobot
from vla_accel.checkpoints.lora import Lora, read_lora
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import Preset, load_preset
from vla_accel.transforms.tokenizer import Tokenizer

C = TypeVar("C")
P = TypeVar("P", bound=Processor)
T = TypeVar("T")
_log = logging.getLogger("vla_accel")
_SIZES = ("action_horizon", "max_token_len", "discrete_state_input")


def adapter_of(folder: Path, settings: PolicyConfig) -> tuple[Lora | None, Path]:
    """Return the adapter to fold in, if any, and the folder with the valid settings and statistics.

    lerobot saves an adapter with the statistics of its training, which replace those of the base.
    """
    if settings.checkpoint.lora is None:
        return None, folder
    lora = read_lora(Path(settings.checkpoint.lora))
    return lora, lora.folder if is_lerobot(lora.folder) else folder


def resized(config: C, settings: PolicyConfig) -> C:
    """Return the config of a folder with the sizes of the user's configuration; contradictions are logged."""
    made: Any = config
    sizes = {name: value for name in _SIZES if (value := getattr(settings.checkpoint, name)) is not None}
    warn_of_contradictions(sizes, vars(made))
    return dataclasses.replace(made, **sizes)


def warn_of_contradictions(overrides: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Log each setting of `checkpoint:` that contradicts the folder's own value in `found`, if it has one."""
    for name, value in overrides.items():
        if found.get(name) is not None and found[name] != value:
            _log.warning("checkpoint.%s: %s instead of the checkpoint's own %s", name, value, found[name])


def refuse_asset(settings: PolicyConfig, folder: Path) -> None:
    """Raise ConfigError for `asset_id` if the folder has no `assets`."""
    if (asset := settings.checkpoint.asset_id) is not None:
        raise ConfigError(f"checkpoint.asset_id: expected openpi's folder, with assets/{asset}, got {folder}")


def robot_of(saved: Preset, settings: PolicyConfig) -> Preset:
    """Return the user's preset, or the folder's one if the user names none.

    A user's preset may have other keys and conventions, but how images are resized and which actions are relative to
    the state is part of the training.

    Raises:
        ConfigError: The preset has other sizes, another resizing or other relative actions.
    """
    if settings.preset is None:
        return saved
    preset = load_preset(settings.preset)
    for name in ("state", "action"):
        expected, got = (getattr(one, f"{name}_dim") for one in (saved, preset))
        if got != expected:
            raise ConfigError(f"preset: expected {expected} numbers of {name}, got {settings.preset}'s {got}")
    if preset.resize not in (Preset.resize, saved.resize):
        raise ConfigError(f"preset.resize: expected {saved.resize}, as the checkpoint was trained, got {preset.resize}")
    relative = saved.delta_actions or preset.delta_actions
    if preset.delta_actions not in ((), relative):
        expected, got = list(relative), list(preset.delta_actions)
        raise ConfigError(f"preset.delta_actions: expected {expected}, as the checkpoint was trained, got {got}")
    if len(preset.images) != len(saved.images):
        counts = len(preset.images), settings.preset, len(saved.images)
        _log.warning("preset: %d cameras of %s, but the checkpoint was trained with %d", *counts)
    # With relative actions the robot gets targets. A preset without them may describe motion.
    motion = preset.motion_dims if preset.delta_actions == relative else None
    return dataclasses.replace(preset, resize=saved.resize, delta_actions=relative, motion_dims=motion)


def processor_of(
    kind: type[P], config: Any, saved: Processors, tokenizer: Tokenizer, settings: PolicyConfig, **fields: Any
) -> P:
    """Return the transforms of a model with a `Processor`, with more fields of their class `kind`. Raises as
    `transforms_of`."""
    check_vocabulary(tokenizer, config.vocab_size, settings)
    fields |= {"image_size": config.vision.image_size, "prompt_state_dim": saved.prompt_state_dim}
    return transforms_of(kind, config, saved, tokenizer, settings, pixels=saved.pixels, **fields)


def transforms_of(
    kind: Callable[..., T],
    config: Any,
    saved: Processors,
    tokenizer: Tokenizer,
    settings: PolicyConfig,
    /,
    **fields: Any,
) -> T:
    """Return the transforms of a model with a prompt, with more fields of their class `kind`.

    Raises:
        CheckpointError: The statistics do not fit the model.
        ConfigError: The preset does not fit the model.
    """
    return kind(
        tokenizer=tokenizer,
        state=saved.state,
        actions=saved.actions,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        default_prompt=settings.default_prompt,
        preset=saved.preset,
        **fields,
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, settings: PolicyConfig) -> None:
    """Raise CheckpointError if a tokenizer has more tokens than the model, so that it is another model's."""
    if tokenizer.vocab_size > vocab_size:
        name = f"tokenizer {settings.checkpoint.tokenizer or ''}".rstrip()
        raise CheckpointError(f"{name}: expected at most the model's {vocab_size} tokens, got {tokenizer.vocab_size}")
