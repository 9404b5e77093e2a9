"""From a frame to requests that the policy can be given, or one clear error. Knows nothing about sockets or turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel.remote import wire
from vla_accel.transforms.observations import real_numbers


@dataclass(frozen=True)
class Request:
    """One observation, and the keyword arguments of `infer` that travelled with it."""

    observation: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What a frame asks: of which policy ("" where it does not say), and what. `several`: a list is the answer."""

    policy: str
    observations: list[dict[str, Any]]
    several: bool = False


def read(frame: Any, *, named: bool, most: int) -> Asked:
    """What a frame asks.

    Args:
        frame: as a client sent it.
        named: whether the server has policies to choose from.
        most: observations that one request may have.

    Raises:
        WireError: no openpi message.
        ObservationError: a list of observations or a name that is none, or too many observations.
    """
    content = wire.unpack_map(frame)
    policy = content.pop(wire.POLICY, "") if named else ""
    if not isinstance(policy, str):
        raise ObservationError(f"{wire.POLICY}: expected a name, got {policy!r:.60}")
    if content.keys() != {wire.BATCH}:
        return Asked(policy, [content])
    observations = content[wire.BATCH]
    if not isinstance(observations, list) or not observations:
        raise ObservationError(f"{wire.BATCH}: expected a list of observations, got {observations!r:.60}")
    if len(observations) > most:
        raise ObservationError(
            f"{wire.BATCH}: expected at most {most} observations in one request, got {len(observations)}; send several "
            "requests, or let the server take more: --max-observations"
        )
    for index, one in enumerate(observations):
        if not isinstance(one, dict) or not all(isinstance(key, str) for key in one):
            raise ObservationError(f"{wire.BATCH}[{index}]: expected a map with text keys, got {one!r:.60}")
    return Asked(policy, observations, True)


def request_of(observation: dict[str, Any], *, real_time_chunking: bool) -> Request:
    """An observation apart from what travelled with it.

    Args: `real_time_chunking`: whether the policy takes `prev_chunk` and `inference_delay`.
    Raises ObservationError for real-time chunking that cannot be. The observation itself is the policy's to check.
    """
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
