"""Checks of what a caller passes besides observations, and a warning for states far outside the training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from vla_accel.config import PolicyConfig, RtcConfig
from vla_accel.engines import ENGINES
from vla_accel.errors import ConfigError, ObservationError, of_one, unknown
from vla_accel.families.family import Family
from vla_accel.ledger import Ledger
from vla_accel.nn.network import Network
from vla_accel.policy.pipeline import PREVIOUS
from vla_accel.transforms.normalisation import FAR, Range
from vla_accel.transforms.observations import real_numbers


def checked_noise(noise: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return noise as float32 of `shape`, whose first axis is the batch. Raises ObservationError."""
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
            why = f"which reads only {known} of rtc" if known else "which has no real-time chunking"
            raise ConfigError(f"rtc.{field.name}: expected none for {family.name}, {why}, got {value!r}")


def check_engines(family: Family, config: PolicyConfig) -> None:
    """Raise ConfigError for an unknown engine, and for one that the rest of the configuration rules out."""
    specs = config.specs(family.parts)
    for part, spec in specs.items():
        for engine in (spec.engine, *spec.fallback):
            if engine not in (*ENGINES, "auto"):
                raise ConfigError(unknown(f"{part}.engine", engine, ("auto", *ENGINES)))
            if config.deterministic and engine != "auto" and ENGINES[engine].by_time:
                expected = "an engine that does not choose kernels by measuring them"
                raise ConfigError(f"deterministic: {part}: expected {expected}, such as native, got {engine}")
    on_host = [part for part, spec in specs.items() if spec.native.embeddings == "host"]
    unread = [part for part in on_host if part not in family.capabilities.host_embeddings]
    if unread and (config.native.embeddings == "gpu" or unread == on_host):
        have = ", ".join(family.capabilities.host_embeddings) or "no component"
        raise ConfigError(
            f"{unread[0]}.native.embeddings: expected gpu, because {family.name} supports host for {have}, got host"
        )


def is_warm(config: PolicyConfig, chunks: Sequence[np.ndarray | None] | None) -> bool:
    """Return whether a call starts from previous chunks. Raises ObservationError if only some observations have one,
    because a warm start has other denoising steps."""
    if config.warm_start is None or chunks is None:
        return False
    warm = sum(chunk is not None for chunk in chunks)
    if warm not in (0, len(chunks)):
        raise ObservationError(
            f"prev_chunks: expected one for every observation or for none (warm_start), got {warm} for {len(chunks)}"
        )
    return warm > 0


def guidance(
    family: Family,
    config: PolicyConfig,
    model: Network,
    processor: Any,
    inputs: Sequence[Any],
    chunks: Sequence[np.ndarray | None] | None,
    delays: Sequence[int | None] | None,
) -> dict[str, np.ndarray] | None:
    """Return the guidance of a `Feed` by name, a row for each observation; None if no observation has a previous chunk.

    Raises ObservationError if a count differs from the observations', a chunk comes without a delay and without
    `warm_start`, one of them is no chunk of actions or no number of actions, or the family refuses the delay.
    """
    count, horizon = len(inputs), model.config.action_horizon
    chunks, delays = [None] * count if chunks is None else chunks, [None] * count if delays is None else delays
    for name, values in (("prev_chunks", chunks), ("inference_delays", delays)):
        if len(values) != count:
            raise ObservationError(f"{name}: expected one for each of {count} observations, got {len(values)}")
    found: dict[str, np.ndarray] = {}
    for row, (one, chunk, delay) in enumerate(zip(inputs, chunks, delays, strict=True)):
        if chunk is None and delay is None:
            continue
        with of_one(row, count):
            if chunk is None or (delay is None and config.warm_start is None):
                missing = "prev_chunk" if chunk is None else "inference_delay"
                raise ObservationError(f"expected prev_chunk and inference_delay together, got no {missing}")
            previous, arrays = processor.normalize_actions(chunk, one), {}
            if len(previous) > horizon:
                raise ObservationError(f"prev_chunk: expected at most {horizon} actions, got {len(previous)}")
            if delay is not None:
                if isinstance(delay, (bool, np.bool_)) or not isinstance(delay, (int, np.integer)) or delay < 0:
                    expected = "a number of actions, 0 or more"
                    raise ObservationError(f"inference_delay: expected {expected}, got {delay!r:.60}")
                arrays = family.chunking.guide(model.config, config.rtc, previous, int(delay))
            if config.warm_start is not None:
                # The missing actions repeat the last one: the flow starts there with a plausible action.
                held = np.pad(previous, ((0, horizon - len(previous)), (0, 0)), mode="edge")
                arrays = {**arrays, PREVIOUS: held}
        for name, array in arrays.items():
            found.setdefault(name, np.zeros((count, *array.shape), array.dtype))[row] = array
    return found or None


class StateCheck:
    """Warns once if a robot's state is far outside the range of the checkpoint's statistics, to which a model answers
    with a plausible chunk of actions."""

    _WARNING = "states are far outside"

    def __init__(self, processor: Any, ledger: Ledger) -> None:
        """`processor`: a family's transforms; those without `ranges` are not checked."""
        self._processor, self._ledger = processor, ledger
        found: Range | None = getattr(processor, "ranges", {}).get("state")
        self._range = found if found is not None and found.known else None
        self._widest = self._range and self._range.widened(FAR)

    def check(self, inputs: Any) -> None:
        """Warn if the state of a prepared observation has a number beyond `FAR` spans."""
        if self._range is None or self._widest is None or self._WARNING in self._ledger.warned:
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
