"""The policies of a server by name: loaded on first use, and unloaded when they exceed the memory budget."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.remote import wire
from vla_accel.remote.metadata import batches_prev_chunks, supports_prev_chunk

logger = logging.getLogger("vla_accel.server")


class LoadedPolicy:
    """A policy with its capabilities, as the policy declares them."""

    def __init__(self, policy: Any, name: str = "", size: int = 0) -> None:
        self.policy, self.name, self.size = policy, name, size
        self.real_time_chunking = supports_prev_chunk(policy)
        self.batches = hasattr(policy, "infer_batch")
        self.mixed = batches_prev_chunks(policy)

    def metadata_frame(self, names: list[str]) -> bytes:
        """The first frame of a connection. Raises WireError for metadata that cannot be sent."""
        metadata = {**(getattr(self.policy, "metadata", None) or {}), wire.REAL_TIME_CHUNKING: self.real_time_chunking}
        return wire.pack(metadata | ({wire.POLICIES: names} if names else {}))


class PolicyRegistry:
    """Policies by name, of which the most recently used stay loaded within a memory budget.

    Args:
        loaders: for each name, a function that returns the policy and its size in bytes. The first is the default.
        budget: bytes for all loaded policies; None for no limit.
    """

    def __init__(self, loaders: Mapping[str, Callable[[], tuple[Any, int]]], budget: int | None = None) -> None:
        if not loaders:
            raise ConfigError("policy: expected at least one, got none")
        self._loaders, self.budget = loaders, budget
        self._default = next(iter(loaders))
        self._sizes: dict[str, int] = {}
        self._loaded: dict[str, LoadedPolicy] = {}  # least recently used first
        self.metadata_frames: dict[str, bytes] = {}  # by name; "" is the default policy
        self.batches = False

    @classmethod
    def single(cls, load: Callable[[], Any]) -> PolicyRegistry:
        """A registry of one policy without a name, which `start` loads."""
        return cls({"": lambda: (load(), 0)})

    @classmethod
    def containing(cls, policy: Any) -> PolicyRegistry:
        """A registry of one policy without a name; a registry is returned unchanged."""
        return policy if isinstance(policy, cls) else cls.single(lambda: policy)

    @property
    def names(self) -> list[str]:
        """The names that clients can choose from; empty for a single policy without a name."""
        return [name for name in self._loaders if name]

    @property
    def loaded(self) -> list[str]:
        """Names of the loaded policies, least recently used first."""
        return list(self._loaded)

    def start(self) -> None:
        """Load each policy once, so that errors appear at the start: WireError, and whatever a loader raises."""
        for name in reversed(list(self._loaders)):  # the default last, so that it stays loaded
            loaded = self.get(name)
            self.metadata_frames[name] = loaded.metadata_frame(self.names)
            self.batches |= loaded.batches
        self.metadata_frames[""] = self.metadata_frames[self._default]

    def get(self, name: str) -> LoadedPolicy:
        """The policy of this name ("" for the default), loaded. Raises ObservationError for an unknown name."""
        name = name or self._default
        if name not in self._loaders:
            raise ObservationError(f"{wire.POLICY}: expected one of {', '.join(self.names)}, got {name!r:.60}")
        if name not in self._loaded:
            self._unload_until_free(self._sizes.get(name, 0))
            policy, self._sizes[name] = self._loaders[name]()
            self._loaded[name] = LoadedPolicy(policy, name, self._sizes[name])
            self._unload_until_free(0, keep=name)
        self._loaded[name] = self._loaded.pop(name)
        return self._loaded[name]

    def _unload_until_free(self, needed: int, keep: str = "") -> None:
        while self.budget is not None and sum(p.size for p in self._loaded.values()) + needed > self.budget:
            oldest = next((name for name in self._loaded if name != keep), None)
            if oldest is None:
                if keep:
                    logger.warning("policy %s alone exceeds the memory budget", keep)
                return
            del self._loaded[oldest]
            gc.collect()  # engines and CUDA graphs reference each other
            logger.warning("unloaded policy %s: the memory budget is %d MiB", oldest, self.budget >> 20)
