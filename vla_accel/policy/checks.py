"""Checks of what a caller passes besides observations, and a warning for states far outside the training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from vla_accel.config import PolicyConfig, RtcConfig
from vla_accel.engines import ENGINES
from vla_accel.errors import ConfigError, ObservationError, of_one, unknown
from vla_accel.families.family import Family
from vla_accel.ledger import Ledger
from vla_accel.transforms.normalisation import FAR, Range
from vla_accel.transforms.observations import real_numbers


def checked_noise(noise: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Return noise as float32 of `shape` (batch, horizon, action_dim). Raises ObservationError."""
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
        if value != field.default and field.name not in family.chunking.settings:
            known = ", ".join(family.chunking.settings)
            why = f"which takes only {known} of rtc" if known else "which has no real-time chunking"
            raise ConfigError(f"rtc.{field.name}: expected none for {family.name}, {why}, got {value!r}")


def check_engines(family: Family, config: PolicyConfig) -> None:
    """Raise ConfigError for an unknown engine, and for one that the rest of the configuration rules out."""
    specs = config.specs(family.parts)
    for part, spec in specs.items():
        for engine in (spec.engine, *spec.fallback):
            if engine not in (*ENGINES, "auto"):
                raise ConfigError(unknown(f"{part}.engine", engine, ("auto", *ENGINES)))
            if config.deterministic and engine != "auto" and ENGINES[engine].by_time:
                raise ConfigError(f"deterministic: {part}: {engine} picks the kernels that it measures as the fastest")
    on_host = [part for part, spec in specs.items() if spec.native.embeddings == "host"]
    unread = [part for part in on_host if part not in family.capabilities.host_embeddings]
    if unread and (config.native.embeddings == "gpu" or unread == on_host):
        have = ", ".join(family.capabilities.host_embeddings) or "no component"
        raise ConfigError(f"{unread[0]}.native.embeddings: host is for {have} of {family.name}, got it for {unread[0]}")


def guidance(
    family: Family,
    sizes: Any,
    rtc: RtcConfig,
    normalized: Sequence[tuple[np.ndarray, int] | None],
) -> dict[str, np.ndarray] | None:
    """Return the guidance of a `Feed` by name, a row for each observation; None if no observation has a previous chunk.

    Args:
        sizes: The model's sizes.
        normalized: For each observation its previous chunk float32 (k, A) and delay, or None.

    Raises:
        ObservationError: A chunk is longer than the horizon, or the family refuses the delay.
    """
    found: dict[str, np.ndarray] | None = None
    horizon, _ = family.action_shape(sizes)
    for row, one in enumerate(normalized):
        if one is None:
            continue
        previous, delay = one
        with of_one(row, len(normalized)):
            if len(previous) > horizon:
                raise ObservationError(f"prev_chunk: expected at most {horizon} actions, got {len(previous)}")
            arrays = family.chunking.guide(sizes, rtc, previous, delay)
        found = found or {n: np.zeros((len(normalized), *a.shape), a.dtype) for n, a in arrays.items()}
        for name, array in arrays.items():
            found[name][row] = array
    return found


def previous_chunks(
    processor: Any,
    inputs: Sequence[Any],
    chunks: Sequence[np.ndarray | None] | None,
    delays: Sequence[int | None] | None,
) -> list[tuple[np.ndarray, int] | None]:
    """Return each observation's previous chunk in the model's units and its delay, or None.

    Raises:
        ObservationError: A count differs from the observations', a chunk comes without a delay, or one of them is no
            chunk of actions or no number of actions.
    """
    count = len(inputs)
    chunks, delays = [None] * count if chunks is None else chunks, [None] * count if delays is None else delays
    for name, values in (("prev_chunks", chunks), ("inference_delays", delays)):
        if len(values) != count:
            raise ObservationError(f"{name}: expected one for each of {count} observations, got {len(values)}")
    found: list[tuple[np.ndarray, int] | None] = []
    for row, (one, chunk, delay) in enumerate(zip(inputs, chunks, delays, strict=True)):
        if chunk is None and delay is None:
            found.append(None)
            continue
        with of_one(row, count):
            if chunk is None or delay is None:
                missing = "prev_chunk" if chunk is None else "inference_delay"
                raise ObservationError(f"expected prev_chunk and inference_delay together, got no {missing}")
            if isinstance(delay, (bool, np.bool_)) or not isinstance(delay, (int, np.integer)) or delay < 0:
                raise ObservationError(f"inference_delay: expected a number of actions, 0 or more, got {delay!r:.60}")
            found.append((processor.normalize_actions(chunk, one), int(delay)))
    return found


class StateCheck:
    """Warns once if a robot's state is far outside the range of the checkpoint's statistics.

    The model reads such a state as a number that no training data had, and answers with a plausible chunk of actions.
    """

    _WARNING = "states are far outside"

    def __init__(self, processor: Any, ledger: Ledger) -> None:
        """`processor`: a family's transforms; those without `ranges` are not checked."""
        self._processor, self._ledger = processor, ledger
        ranges: Mapping[str, Range] = getattr(processor, "ranges", {})
        self._range = ranges.get("state")
        self._widest = None if self._range is None or not self._range.known else self._range.widened(FAR)

    def check(self, inputs: Any) -> None:
        """Warn if the state of a prepared observation has a number beyond `FAR` spans."""
        if self._widest is None or self._range is None or self._WARNING in self._ledger.warned:
            return
        (state,) = self._processor.before_scaling(inputs)["state"]
        outside = np.flatnonzero(self._widest.outside(state))
        if len(outside):
            first = int(outside[0])
            more = f", and {len(outside) - 1} other dimensions likewise" if len(outside) > 1 else ""
            names = " and ".join(self._processor.preset.state)
            expected = f"{self._range.describe(first)} ({self._range.meaning})"
            self._ledger.warn(
                f"{names}: expected dimension {first} in the range of the checkpoint's statistics, {expected}, got "
                f"{state[first]:.4g}, more than {FAR:g} spans outside{more}; `vla-accel doctor CHECKPOINT` shows the "
                "statistics",
                about=self._WARNING,
            )
