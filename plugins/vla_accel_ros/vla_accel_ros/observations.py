"""The newest message of every topic, joined to an observation of one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel_ros import images
from vla_accel_ros.contract import COMPRESSED, IMAGE, JOINT_STATE, Contract, Source


class StaleError(ObservationError):
    """A topic has no message, or none that is new enough."""


@dataclass(frozen=True)
class Sample:
    """A message's value, and its time in seconds of the node's clock."""

    value: np.ndarray
    stamp: float


@dataclass(frozen=True)
class Observation:
    """Values by key, and the age of the oldest in seconds."""

    values: dict[str, Any]
    age_s: float


class Stream:
    """The newest message of one source.

    Attributes:
        problem: why no messages come, as far as is known: another type, an incompatible QoS, no publisher.
        refused: the error of the newest message, if its content is refused.
        count: accepted messages.
    """

    def __init__(self, source: Source, max_age_s: float) -> None:
        self.source, self.max_age_s = source, max_age_s
        self.problem = self.refused = ""
        self.count = 0
        self._sample: Sample | None = None
        self._shape: tuple[int, ...] | None = None

    @property
    def topic(self) -> str:
        return self.source.channel.topic

    def restart(self) -> None:
        """Accept images of another size than before."""
        self._shape = None

    def receive(self, message: Any, now: float) -> None:
        """Decode a message that arrived at `now`. Errors are kept in `refused`."""
        try:
            sample = Sample(self._value(message), self._stamp(message, now))
        except ObservationError as error:
            self.refused = str(error)
            return
        self._sample, self.refused = sample, ""
        self.count += 1

    def current(self, now: float) -> Sample:
        """The newest sample. Raises StaleError if there is none of the last `max_age_s` seconds."""
        reason = self.refused or self.problem
        hint = f" ({reason})" if reason else ""
        sample = self._sample
        if sample is None:
            raise StaleError(f"{self.topic}: expected a message, got none{hint}")
        age = now - sample.stamp
        if age > self.max_age_s:
            raise StaleError(
                f"{self.topic}: expected a message from the last {self.max_age_s:g} s, got {age:.2f} s{hint}"
            )
        if age < -self.max_age_s:
            raise StaleError(
                f"{self.topic}: expected a stamp in the past, got {-age:.2f} s in the future: synchronise the clocks, "
                "or set align.timeline: receive"
            )
        return sample

    def age(self, now: float) -> float | None:
        """Seconds since the newest sample; None without one."""
        return None if self._sample is None else now - self._sample.stamp

    def _stamp(self, message: Any, now: float) -> float:
        if self.source.align.timeline == "receive":
            return now
        stamp = message.header.stamp
        seconds = stamp.sec + stamp.nanosec * 1e-9
        if seconds == 0:
            raise ObservationError(f"{self.topic}: expected a stamp, got 0: set align.timeline: receive")
        return seconds

    def _value(self, message: Any) -> np.ndarray:
        value = decode(self.source, message)
        shape = self._shape = self._shape or value.shape
        if value.shape != shape:
            raise ObservationError(
                f"{self.topic}: expected shape {shape}, that of the first message, got {value.shape}"
            )
        return value


class Observations:
    """The streams of a contract.

    Args:
        contract: names the topics and keys.
        max_age_s: age in seconds from which a message of a source with strategy `hold` is stale.
        max_skew_s: longest time in seconds between the oldest and the newest message of an observation.
    """

    def __init__(self, contract: Contract, max_age_s: float, max_skew_s: float) -> None:
        def limit(source: Source) -> float:
            own = {"asof": (source.align.tolerance_ms or 0) / 1e3, "drop": 1 / contract.fps}
            return own.get(source.align.strategy, max_age_s)

        self._max_skew_s = max_skew_s
        self._keys = {key: [Stream(s, limit(s)) for s in sources] for key, sources in contract.observations.items()}
        self.streams = [stream for streams in self._keys.values() for stream in streams]

    def restart(self) -> None:
        """Accept images of another size than before."""
        for stream in self.streams:
            stream.restart()

    def read(self, now: float) -> Observation:
        """The observation at `now`. Raises StaleError, which names every topic that is missing or too old."""
        samples: dict[str, list[Sample]] = {}
        stale: list[str] = []
        for key, streams in self._keys.items():
            for stream in streams:
                try:
                    samples.setdefault(key, []).append(stream.current(now))
                except StaleError as error:
                    stale.append(str(error))
        if stale:
            raise StaleError("; ".join(stale))
        stamps = {s.topic: sample.stamp for key, streams in self._keys.items()
                  for s, sample in zip(streams, samples[key], strict=True)}  # fmt: skip
        oldest, newest = min(stamps, key=stamps.__getitem__), max(stamps, key=stamps.__getitem__)
        if (skew := stamps[newest] - stamps[oldest]) > self._max_skew_s:
            raise StaleError(
                f"{oldest} and {newest}: expected messages within {self._max_skew_s:g} s, got {skew:.2f} s"
            )
        values = {key: found[0].value if len(found) == 1 else np.concatenate([one.value for one in found])
                  for key, found in samples.items()}  # fmt: skip
        return Observation(values, max(now - stamps[oldest], 0.0))


def decode(source: Source, message: Any) -> np.ndarray:
    """A message's image uint8 (height, width, 3) or numbers (n,), after the source's operators.

    Raises:
        ObservationError: names the topic.
    """
    topic, kind = source.channel.topic, source.channel.type
    read: Mapping[str, Callable[[Any, str], np.ndarray]] = {IMAGE: images.raw, COMPRESSED: images.compressed}
    if kind in read:
        value = read[kind](message, topic)
    else:
        value = _joints(source, message) if kind == JOINT_STATE else _array(source, message)
        if not np.isfinite(value).all():
            raise ObservationError(f"{topic}: expected finite numbers, got {value.tolist()}")
    for operator in source.operators:
        value = operator.forward(value)
    return value if source.channel.dtype in (None, "video") else value.astype(source.channel.dtype)


def _joints(source: Source, message: Any) -> np.ndarray:
    """The selected numbers, by the joints' names: messages have the joints in any order."""
    topic, order = source.channel.topic, {name: i for i, name in enumerate(message.name)}
    numbers = []
    for field, joint in source.names:
        if joint not in order:
            raise ObservationError(f"{topic}: expected joint {joint}, got {', '.join(order) or 'none'}")
        values = getattr(message, field)
        if len(values) != len(message.name):
            raise ObservationError(f"{topic}: expected {len(message.name)} numbers in {field}, got {len(values)}")
        numbers.append(values[order[joint]])
    return np.array(numbers, np.float64)


def _array(source: Source, message: Any) -> np.ndarray:
    if source.select and len(message.data) != len(source.select):
        raise ObservationError(
            f"{source.channel.topic}: expected {len(source.select)} numbers, as in select, got {len(message.data)}"
        )
    return np.array(message.data, np.float64)
