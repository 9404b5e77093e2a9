"""The policies that one thread serves, by name: loaded when they are asked for, put away when memory is short.

Knows nothing about requests; what a policy costs is told by whoever loads it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.remote import wire
from vla_accel.remote.metadata import batches_prev_chunks, supports_prev_chunk

logger = logging.getLogger("vla_accel.server")

OPTIONS = ("prev_chunk", "inference_delay")
"""Keyword arguments of `infer` that may travel with an observation."""


class Served:
    """A policy and what it can do."""

    def __init__(self, policy: Any, name: str = "", size: int = 0) -> None:
        self.policy, self.name, self.size = policy, name, size
        self.real_time_chunking = supports_prev_chunk(policy)
        self.batches = hasattr(policy, "infer_batch")
        self.mixed = batches_prev_chunks(policy)

    def hello(self, names: list[str]) -> bytes:
        """The first frame that a client gets: the policy's metadata. Raises WireError if it cannot be sent."""
        told = {**(getattr(self.policy, "metadata", None) or {}), wire.REAL_TIME_CHUNKING: self.real_time_chunking}
        return wire.pack(told | ({wire.POLICIES: names} if names else {}))


class Shelf:
    """Several policies of which as many are loaded as `budget` bytes hold, those used last; the first is the default.

    `loads`: for each name, what makes the policy and tells its bytes. All are loaded once by `start`, so that one that
    cannot be is an error then, and clients can be told about each.
    """

    def __init__(self, loads: Mapping[str, Callable[[], tuple[Any, int]]], budget: int | None = None) -> None:
        if not loads:
            raise ConfigError("policy: expected at least one, got none")
        self._loads, self._budget = loads, budget
        self._sizes: dict[str, int] = {}
        self._loaded: dict[str, Served] = {}  # the one used last stands last
        self.hellos: dict[str, bytes] = {}
        """By name; "" is the default policy's."""
        self.batches = False

    @classmethod
    def of(cls, policy: Any) -> Shelf:
        """A shelf with one policy that has no name and stays, or the shelf that it is already."""
        return policy if isinstance(policy, cls) else cls.later(lambda: policy)

    @classmethod
    def later(cls, load: Callable[[], Any]) -> Shelf:
        """A shelf with one policy that has no name, made when the shelf starts."""
        return cls({"": lambda: (load(), 0)})

    @property
    def names(self) -> list[str]:
        """The names to choose from; none where there is one policy without a name."""
        return [name for name in self._loads if name]

    @property
    def loaded(self) -> list[str]:
        """What is loaded now, the one used last at the end."""
        return list(self._loaded)

    def start(self) -> None:
        """Load each policy once. Raises what loading raised, and WireError for metadata that cannot be sent."""
        for name in reversed(list(self._loads)):  # so that the default is the last to be put away
            served = self.get(name)
            self.hellos[name] = served.hello(self.names)
            self.batches |= served.batches
        self.hellos[""] = self.hellos[next(iter(self._loads))]

    def get(self, name: str) -> Served:
        """The policy of a name, loaded; "" is the default. Raises ObservationError that lists the known names."""
        name = name or next(iter(self._loads))
        if name not in self._loads:
            raise ObservationError(f"{wire.POLICY}: expected one of {', '.join(self.names)}, got {name!r:.60}")
        if name not in self._loaded:
            self._make_room(self._sizes.get(name, 0))
            policy, size = self._loads[name]()
            self._sizes[name] = size
            self._loaded[name] = Served(policy, name, size)
            self._make_room(0, keep=name)
        self._loaded[name] = self._loaded.pop(name)
        return self._loaded[name]

    def _make_room(self, needed: int, keep: str = "") -> None:
        """Put away what was not used for the longest time until `needed` bytes more fit the budget."""
        while self._budget is not None and sum(s.size for s in self._loaded.values()) + needed > self._budget:
            oldest = next((name for name in self._loaded if name != keep), None)
            if oldest is None:
                if keep:
                    logger.warning("policy %s alone takes more than the memory budget", keep)
                return
            del self._loaded[oldest]
            gc.collect()  # engines and graphs hold each other
            logger.warning("policy %s was put away: the memory budget is %d MiB", oldest, self._budget >> 20)
