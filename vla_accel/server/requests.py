"""From a frame to requests that the policy can be given, or one clear error. Knows nothing about sockets or turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel.remote import wire
from vla_accel.transforms.numbers import real_numbers


@dataclass(frozen=True)
class Request:
    """One observation, and the keyword arguments of `infer` that travelled with it."""

    observation: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def parse(frame: Any, *, real_time_chunking: bool) -> Request:
    """The request in a frame.

    Args: `real_time_chunking`: whether the policy takes `prev_chunk` and `inference_delay`.
    Raises WireError for what is no openpi message, ObservationError for real-time chunking that cannot be. The
    observation itself is the policy's to check.
    """
    observation = wire.unpack_map(frame)
    given = [key for key in (wire.PREV_CHUNK, wire.INFERENCE_DELAY) if key in observation]
    if not given:
        return Request(observation)
    if not real_time_chunking:
        raise ObservationError(f"{given[0]}: this policy does not support real-time chunking")
    if len(given) == 1:
        raise ObservationError(f"expected {wire.PREV_CHUNK} and {wire.INFERENCE_DELAY} together, got only {given[0]}")
    options = {
        "prev_chunk": _chunk(observation.pop(wire.PREV_CHUNK)),
        "inference_delay": _delay(observation.pop(wire.INFERENCE_DELAY)),
    }
    return Request(observation, options)


def _chunk(value: Any) -> np.ndarray:
    chunk = real_numbers(value, wire.PREV_CHUNK)
    if chunk.ndim != 2 or not chunk.size:
        raise ObservationError(f"{wire.PREV_CHUNK}: expected (k, action_dim) numbers, got shape {chunk.shape}")
    return chunk


def _delay(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ObservationError(f"{wire.INFERENCE_DELAY}: expected ticks as an integer of 0 or more, got {value!r:.60}")
    return int(value)
