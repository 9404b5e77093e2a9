"""Transforms for a GR00T with random weights, whose tokenizer and statistics cannot be had."""

from __future__ import annotations

import re
import zlib

import numpy as np

from vla_accel.families.groot.images import Cropping
from vla_accel.families.groot.language import LEAD
from vla_accel.families.groot.modalities import Group, Groups
from vla_accel.families.groot.network import GrootConfig
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.families.stand_in import Words, libero
from vla_accel.transforms.robots import LIBERO

_PIECES = re.compile(r"<\|\w+\|>|\n|[^\s<]+")


class _Words(Words):
    """In place of Qwen's tokenizer."""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return [zlib.crc32(piece.encode()) % self.vocab_size for piece in _PIECES.findall(text)]


def processor(config: GrootConfig, views: int) -> GrootProcessor:
    """LIBERO's transforms with any number of views, statistics that change nothing, and every row of a chunk."""

    def groups(count: int) -> Groups:
        return Groups((Group("all", count, low=-np.ones(count), high=np.ones(count), clipped=False),))

    unit = config.vision.unit
    side = unit * round(256 / unit)
    return GrootProcessor(
        tokenizer=_Words(config.language.vocab_size),
        state=groups(LIBERO.state_dim),
        actions=groups(LIBERO.action_dim),
        preset=libero(views),
        cropping=Cropping("bicubic", edge=side, crop=1.0, target=(side, side), unit=unit),
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        rows=config.action_horizon,
        lead=LEAD,
    )
