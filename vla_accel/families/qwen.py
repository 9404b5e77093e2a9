"""What families with Qwen3-VL share: their shape, and the prompt as a chat."""

from __future__ import annotations

from dataclasses import dataclass, field

from vla_accel.errors import CheckpointError
from vla_accel.families.prompted import TextShape
from vla_accel.nn.qwen_language import LEAD, Arrangement, Layout
from vla_accel.nn.qwen_vision import Grid
from vla_accel.transforms.tokenizer import Tokenizer

TOKENIZER = "Qwen/Qwen3-VL-2B-Instruct"
"""The tokenizer of every Qwen3-VL, on the hub."""
_VIEW = "<|vision_start|><|vision_end|>"


@dataclass(frozen=True)
class LayoutShape(TextShape):
    """`grid`: rows and columns of tokens of an image; `arrangement`: where images are in a prompt."""

    grid: Grid
    arrangement: Arrangement = field(default_factory=Arrangement)

    @property
    def layout(self) -> Layout:
        return Layout(self.views, self.grid, self.tokens, self.arrangement)

    @property
    def title(self) -> str:
        rows, columns = self.grid
        return f"{self.views} views of {rows} x {columns} tokens and {self.tokens} text tokens"


def user_turn(tokenizer: Tokenizer, images: int, text: str) -> list[int]:
    """Return the tokens of a user's turn of so many images, whose own tokens are left out, and a text that ends it.

    Raises CheckpointError for the tokenizer of another model.
    """
    ids = tokenizer.encode(f"<|im_start|>user\n{_VIEW * images}{text}", add_bos=False)
    view, end = tokenizer.encode(_VIEW, add_bos=False), LEAD + 2 * images
    if len(view) != 2 or ids[LEAD:end] != view * images:
        raise CheckpointError(
            f"tokenizer: expected Qwen3-VL's, with {LEAD} tokens before the first view and two for each, got "
            f"another model's: {ids[:end]}"
        )
    return ids
