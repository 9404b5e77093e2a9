"""The engine that each component requested, the one it got, and why. Every fallback is recorded here."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field

from vla_accel.errors import EngineError

_log = logging.getLogger("vla_accel")


@dataclass(frozen=True)
class LedgerEntry:
    """One component's engine. `reason`: why not the requested one, or why "auto" chose it; `detail`: what runs."""

    component: str
    requested: str
    used: str
    reason: str = ""
    detail: str = ""

    @property
    def fell_back(self) -> bool:
        return self.requested not in (self.used, "auto")


@dataclass
class Ledger:
    """The newest entry of each component of a policy or pipeline. `strict` turns a fallback into an error."""

    strict: bool = False
    entries: dict[str, LedgerEntry] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set, repr=False, compare=False)
    """Warnings so far; each is logged once, also for new shapes or numbers of steps."""
    _cached: tuple[tuple[LedgerEntry, ...], tuple[dict[str, object], ...]] = field(
        default=((), ()), init=False, repr=False, compare=False
    )

    def record(self, entry: LedgerEntry) -> None:
        """Keep an entry; a fallback is also logged as a warning, or raises EngineError when strict."""
        if entry.fell_back:
            message = f"{entry.component}: requested engine {entry.requested}, using {entry.used}: {entry.reason}"
            if self.strict:
                raise EngineError(f"strict mode: {message}")
            self.warn(message)
        self.entries[entry.component] = entry

    def warn(self, message: str, about: str | None = None) -> None:
        """Log a warning once. `about` identifies it; by default the message does."""
        if (about or message) not in self.warned:
            _log.warning(message)
        self.warned.add(about or message)

    def add(self, component: str, detail: str) -> None:
        """Append to the detail of a component's entry."""
        entry = self.entries[component]
        self.entries[component] = dataclasses.replace(entry, detail=f"{entry.detail}, {detail}")

    def as_list(self) -> list[dict[str, object]]:
        """Plain data for metadata, JSON and the result of each call. The caller may change it."""
        entries = tuple(self.entries.values())
        known, rows = self._cached
        if entries != known:
            rows = tuple({**dataclasses.asdict(e), "fell_back": e.fell_back} for e in entries)
            # One assignment: another thread must not see new entries with old rows.
            self._cached = entries, rows
        return [row.copy() for row in rows]
