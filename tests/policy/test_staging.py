"""How a call's inputs get into the staging buffers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from vla_accel.policy.staging import PARALLEL_BYTES, fill

SIDE = 300


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


@pytest.mark.parametrize("form", ["plain", "read-only", "flipped", "channels first"])
def test_large_rows_are_copied_in_every_form(form: str) -> None:
    assert image().nbytes > PARALLEL_BYTES
    rows = [image(0), image(1)]
    if form == "read-only":
        rows = [np.frombuffer(row.tobytes(), np.uint8).reshape(row.shape) for row in rows]
    elif form == "flipped":
        rows = [row[::-1, ::-1] for row in rows]
    elif form == "channels first":
        rows = [np.moveaxis(np.ascontiguousarray(np.moveaxis(row, -1, 0)), 0, -1) for row in rows]
    buffer = np.full((4, SIDE, SIDE, 3), 7, np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill("images", list(buffer[1:3]), rows)
    np.testing.assert_array_equal(buffer[1:3], rows)
    assert (buffer[[0, 3]] == 7).all()


def test_a_large_row_of_another_dtype_is_refused() -> None:
    slot = np.zeros((SIDE, SIDE, 3), np.uint8)
    with pytest.raises(TypeError, match="Cannot cast"):
        fill("images", [slot], [image().astype(np.int8)])
    assert not slot.any()
