"""Rows reach their staging buffers with every byte, whatever their layout in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vla_accel.errors import EngineError
from vla_accel.policy.staging import fill

HEIGHT, WIDTH = 6, 7
LARGE = np.random.default_rng(0).integers(0, 256, (40, 40, 4), dtype=np.uint8)
LARGE.setflags(write=False)
LAYOUTS: dict[str, Callable[[], np.ndarray]] = {
    "contiguous": lambda: LARGE[:HEIGHT, :WIDTH, :3].copy(),
    "channels first": lambda: LARGE.transpose(2, 0, 1)[:3, :HEIGHT, :WIDTH].copy().transpose(1, 2, 0),
    "with a fourth channel": lambda: LARGE[:HEIGHT, :WIDTH, :3],
    "channels in reverse": lambda: LARGE[:HEIGHT, :WIDTH, 2::-1],
    "mirrored": lambda: LARGE[:HEIGHT, WIDTH - 1 :: -1, :3].copy()[:, ::-1],
    "turned by 180 degrees": lambda: LARGE[:HEIGHT, :WIDTH, :3].copy()[::-1, ::-1],
    "upside down": lambda: LARGE[:HEIGHT, :WIDTH, :3].copy()[::-1],
    "a part of a larger one": lambda: LARGE[..., :3].copy()[5 : 5 + HEIGHT, 9 : 9 + WIDTH],
    "every second pixel": lambda: LARGE[..., :3].copy()[: 2 * HEIGHT : 2, : 2 * WIDTH : 2],
    "transposed": lambda: LARGE[:WIDTH, :HEIGHT, :3].copy().transpose(1, 0, 2),
    "repeated": lambda: np.broadcast_to(LARGE[:1, :1, :3], (HEIGHT, WIDTH, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [HEIGHT, HEIGHT - 2])
def test_a_row_of_every_layout_is_copied(layout: str, rows: int) -> None:
    """Also one that is shorter than its buffer, whose rest becomes zero."""
    row = LAYOUTS[layout]()[:rows]
    assert row.shape == (rows, WIDTH, 3)
    slot = np.full((HEIGHT, WIDTH, 3), 99, np.uint8)
    fill("images", [slot], [row])
    assert slot[:rows].tolist() == row.tolist() and not slot[rows:].any()


def test_a_row_of_another_type_or_shape_is_refused() -> None:
    for layout in LAYOUTS.values():
        with pytest.raises(EngineError, match="images: expected dtype uint8, got float32"):
            fill("images", [np.zeros((HEIGHT, WIDTH, 3), np.uint8)], [layout().astype(np.float32)])
        with pytest.raises(EngineError, match="images: expected shape"):
            fill("images", [np.zeros((HEIGHT, WIDTH + 1, 3), np.uint8)], [layout()])


def test_empty_rows_are_copied() -> None:
    slot = np.ones((0, 4, 3), np.uint8)
    fill("images", [slot], [slot.copy()])
