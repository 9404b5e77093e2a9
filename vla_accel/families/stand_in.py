"""Transforms and observations for a network with random weights, whose tokenizer and statistics cannot be had."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.overrides import P, processor_of
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import LIBERO, Preset

VIEWS = ("observation/image", "observation/wrist_image", "observation/right_wrist_image", "observation/back_image")
PROMPT = "pick up the black bowl between the plate and the ramekin and place it on the plate"


@dataclass(frozen=True)
class Words:
    """A stand-in for a tokenizer whose files cannot be bundled: a token a word, about as many as it has."""

    vocab_size: int

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        words = text.replace("\n", " \n").split(" ")
        ids = [3 + zlib.crc32(word.encode()) % (self.vocab_size - 3) for word in words if word]
        return [2, *ids] if add_bos else ids

    def finish(self, ids: list[int]) -> list[int]:
        return ids


def libero(views: int) -> Preset:
    """LIBERO's robot with any number of views."""
    if not 1 <= views <= len(VIEWS):
        raise ConfigError(f"views: expected 1 to {len(VIEWS)}, got {views}")
    return replace(LIBERO, images=VIEWS[:views], ignored_images=())


def processor(config: Any, views: int, kind: type[P] = Processor, **more: Any) -> P:
    """LIBERO's transforms with any number of views and statistics that change nothing; `kind` of them, and `more`
    fields."""
    scales, more = (Normaliser.identity(8), Normaliser.identity(7)), {"discrete_state": False, **more}
    return processor_of(kind, config, libero(views), scales, Words(config.vocab_size), PolicyConfig(), **more)


def observation(
    transforms: Any, size: tuple[int, int], rng: np.random.Generator, prompt: str = PROMPT
) -> dict[str, Any]:  # fmt: skip
    """Noise for images of `size` (height, width), a state whose normalised numbers are standard normal, and a LIBERO
    prompt of about 20 tokens."""
    preset = transforms.preset
    images = {k: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for k in preset.images}
    state = transforms.state_at(rng.standard_normal(preset.state_dim))
    return {**images, **preset.split(state), preset.prompt: prompt}
