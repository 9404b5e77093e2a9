"""What a user's configuration says of a checkpoint, over what its folder says, and whether both fit the model."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.transforms.robots import Preset, load_preset
from vla_accel.transforms.tokenizer import Tokenizer

C = TypeVar("C")
_SIZES = ("action_horizon", "max_token_len", "discrete_state_input")


def resized(config: C, settings: PolicyConfig) -> C:
    """A family's config with the sizes that the user knows better, of those that it has."""
    made: Any = config
    known = {one.name for one in dataclasses.fields(made)}
    given = {name: getattr(settings.checkpoint, name) for name in _SIZES if name in known}
    return dataclasses.replace(made, **{name: value for name, value in given.items() if value is not None})


def robot_of(told: Preset, settings: PolicyConfig) -> Preset:
    """The user's preset, if there is one, instead of what lerobot's folder says: the robot's keys and conventions may
    be another's; how images are resized is the checkpoint's training. Raises ConfigError for another state."""
    if settings.preset is None:
        return told
    given = load_preset(settings.preset)
    if given.state_dim != told.state_dim:
        raise ConfigError(
            f"preset: expected {told.state_dim} numbers of state, got {settings.preset}'s {given.state_dim}"
        )
    return dataclasses.replace(given, resize=told.resize)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise CheckpointError where a tokenizer has tokens that a model of `vocab_size` has not."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(f"tokenizer: expected at most {vocab_size} tokens, got {tokenizer.vocab_size}")
