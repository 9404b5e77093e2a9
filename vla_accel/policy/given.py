"""What a caller gives besides observations, checked: noise, and the previous chunks of real-time chunking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from vla_accel.config import RtcConfig
from vla_accel.errors import ConfigError, ObservationError, of_one
from vla_accel.families.family import Family
from vla_accel.transforms.observations import real_numbers


def given_noise(noise: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Noise as float32 of `shape` (batch, horizon, action_dim). Raises ObservationError."""
    noise = real_numbers(noise, "noise")
    if noise.shape != shape:
        # `OptimizedPolicy.infer` added the batch's axis.
        one = shape[0] == 1 and noise.shape[:1] == (1,)
        expected, got = (shape[1:], noise.shape[1:]) if one else (shape, noise.shape)
        raise ObservationError(f"noise: expected shape {expected}, got {got}")
    return noise.astype(np.float32)


def refuse_unused_rtc(family: Family, rtc: RtcConfig) -> None:
    """Raise ConfigError for a setting of real-time chunking that the family would ignore."""
    for field in fields(rtc):
        value = getattr(rtc, field.name)
        if value != field.default and field.name not in family.rtc_settings:
            known = ", ".join(family.rtc_settings)
            why = f"which takes only {known} of rtc" if known else "which has no real-time chunking"
            raise ConfigError(f"rtc.{field.name}: expected none for {family.name}, {why}, got {value!r}")


def guidance(
    family: Family,
    model: Any,
    rtc: RtcConfig,
    processor: Any,
    inputs: Sequence[Any],
    chunks: Sequence[np.ndarray | None] | None,
    delays: Sequence[int | None] | None,
) -> dict[str, np.ndarray] | None:
    """The guidance of a `Feed`, by name, a row an observation; None when none brings a previous chunk.

    Args: `model`: sizes; `inputs`: what `processor` prepared; `chunks`, `delays`: one for each, or None. Raises
    ObservationError.
    """
    nothing = [None] * len(inputs)
    chunks, delays = nothing if chunks is None else chunks, nothing if delays is None else delays
    for name, given in (("prev_chunks", chunks), ("inference_delays", delays)):
        if len(given) != len(inputs):
            raise ObservationError(f"{name}: expected one for each of {len(inputs)} observations, got {len(given)}")
    found: dict[str, np.ndarray] | None = None
    horizon, _ = family.action_shape(model)
    for row, (one, chunk, delay) in enumerate(zip(inputs, chunks, delays, strict=True)):
        if chunk is None and delay is None:
            continue
        with of_one(row, len(inputs)):
            if chunk is None or delay is None:
                missing = "prev_chunk" if chunk is None else "inference_delay"
                raise ObservationError(f"expected prev_chunk and inference_delay together, got no {missing}")
            if isinstance(delay, (bool, np.bool_)) or not isinstance(delay, (int, np.integer)) or delay < 0:
                raise ObservationError(f"inference_delay: expected a number of actions, 0 or more, got {delay!r:.60}")
            previous = processor.begin(chunk, one)
            if len(previous) > horizon:
                raise ObservationError(f"prev_chunk: expected at most {horizon} actions, got {len(previous)}")
            one_row = family.guide(model, rtc, previous, int(delay))
        if found is None:
            found = {n: np.zeros((len(inputs), *a.shape), a.dtype) for n, a in one_row.items()}
        for name, array in one_row.items():
            found[name][row] = array
    return found
