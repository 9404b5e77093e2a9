"""What the measurements of families with Qwen3-VL share: a tokenizer, and the inputs of transformers' Qwen3-VL."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vla_accel.families.bench import DummyTokenizer

_LEAD, _END = (151_644, 872, 198), (151_645, 198)
IMAGE, _VISION_START, _VISION_END = 151_655, 151_652, 151_653
_PIECES = re.compile(r"<\|\w+\|>|</?img>|<IMG_CONTEXT>|\n|\d| (?=\d)|[<>.]|[^\s<>.\d]+")
"""As many pieces as Qwen's tokenizer makes of the parts of a prompt that are always the same."""


class PieceTokenizer(DummyTokenizer):
    """Replaces Qwen's tokenizer: a token for each word and each special token."""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return [zlib.crc32(piece.encode()) % self.vocab_size for piece in _PIECES.findall(text)]


@dataclass(frozen=True)
class QueryTokenizer(PieceTokenizer):
    """Gives the token `query`, whose outputs a model reads, the number 0, which no other has."""

    query: str

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        found: list[int] = []
        for index, part in enumerate(text.split(self.query)):
            found += [0] * (index > 0)
            found += [max(1, token) for token in super().encode(part, add_bos=add_bos)]
        return found


def qwen_ids(views: int, size: tuple[int, int], text: Sequence[int]) -> list[int]:
    """Return the tokens of a user's turn: images of a size (height, width) in pixels, and the tokens of a text."""
    slots = [IMAGE] * (size[0] * size[1] // 1024)
    return [*_LEAD, *([_VISION_START, *slots, _VISION_END] * views), *text, *_END]


def qwen_patches(pixels: Tensor) -> Tensor:
    """Return the rows of images (N, 3, H, W): every frame twice, in blocks of 2 x 2 patches of 16 pixels."""
    count, _, height, width = pixels.shape
    split = pixels[:, None].expand(-1, 2, -1, -1, -1).reshape(count, 2, 3, height // 32, 2, 16, width // 32, 2, 16)
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * height * width // 256, -1)
