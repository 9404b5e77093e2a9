"""Transforms and observations for a GR00T with random weights, whose tokenizer and statistics cannot be had."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError
from vla_accel.models.groot import GrootConfig
from vla_accel.models.groot_language import LEAD
from vla_accel.transforms.groot import GrootProcessor
from vla_accel.transforms.groot_images import Cropping
from vla_accel.transforms.modalities import Group, Groups
from vla_accel.transforms.robots import LIBERO

VIEWS = ("observation/image", "observation/wrist_image", "observation/right_wrist_image", "observation/back_image")
PROMPT = "pick up the black bowl between the plate and the ramekin and place it on the plate"
_PIECES = re.compile(r"<\|\w+\|>|\n|[^\s<]+")


@dataclass(frozen=True)
class _Words:
    """A stand-in for Qwen's tokenizer, whose files cannot be bundled: a token a word, about as many as that."""

    vocab_size: int

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        del add_bos
        return [zlib.crc32(piece.encode()) % self.vocab_size for piece in _PIECES.findall(text)]

    def finish(self, ids: list[int]) -> list[int]:
        return ids


def processor(config: GrootConfig, views: int) -> GrootProcessor:
    """LIBERO's transforms with any number of views, statistics that change nothing, and every row of a chunk."""
    if not 1 <= views <= len(VIEWS):
        raise ConfigError(f"views: expected 1 to {len(VIEWS)}, got {views}")

    def groups(count: int) -> Groups:
        return Groups((Group("all", count, low=-np.ones(count), high=np.ones(count), clipped=False),))

    unit = config.vision.unit
    side = unit * round(256 / unit)
    return GrootProcessor(
        tokenizer=_Words(config.language.vocab_size),
        state=groups(LIBERO.state_dim),
        actions=groups(LIBERO.action_dim),
        preset=replace(LIBERO, images=VIEWS[:views], ignored_images=()),
        cropping=Cropping("bicubic", edge=side, crop=1.0, target=(side, side), unit=unit),
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        rows=config.action_horizon,
        lead=LEAD,
    )


def observation(transforms: GrootProcessor, rng: np.random.Generator) -> dict[str, Any]:
    """Noise for images, a standard normal state, a LIBERO prompt of about 20 tokens."""
    preset, size = transforms.preset, (*transforms.cropping.target, 3)
    images = {k: rng.integers(0, 256, size, dtype=np.uint8) for k in preset.images}
    return {**images, preset.state[0]: rng.standard_normal(preset.state_dim), preset.prompt: PROMPT}
