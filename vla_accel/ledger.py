"""Which engine each component asked for, which it got, and why. A fallback that is not in here did not happen."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field

from vla_accel.errors import EngineError

_log = logging.getLogger("vla_accel")


@dataclass(frozen=True)
class LedgerEntry:
    """One component's engine. `reason` is empty when the engine asked for was built; where "auto" was asked for, it
    says why this one, which is no fallback."""

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
    told: set[str] = field(default_factory=set, repr=False, compare=False)
    """Warnings that were said; one that comes again with a new shape, or number of steps, is said once."""
    _shown: tuple[tuple[LedgerEntry, ...], tuple[dict[str, object], ...]] = field(
        default=((), ()), init=False, repr=False, compare=False
    )

    def record(self, entry: LedgerEntry) -> None:
        """Keep an entry; a fallback is also logged as a warning, or raises EngineError when strict."""
        if entry.fell_back:
            message = f"{entry.component}: asked for engine {entry.requested}, using {entry.used}: {entry.reason}"
            if self.strict:
                raise EngineError(f"strict mode: {message}")
            self.warn(message)
        self.entries[entry.component] = entry

    def warn(self, message: str, about: str | None = None) -> None:
        """Log a warning once. `about`: what makes it the same warning; None is the message itself."""
        if (about or message) not in self.told:
            _log.warning(message)
        self.told.add(about or message)

    def add(self, component: str, detail: str) -> None:
        """Say more of what runs inside a component that is there."""
        entry = self.entries[component]
        self.entries[component] = dataclasses.replace(entry, detail=f"{entry.detail}, {detail}")

    def as_list(self) -> list[dict[str, object]]:
        """Plain data for metadata and JSON, as every call returns it. The caller's own: it may be changed."""
        entries = tuple(self.entries.values())
        shown, rows = self._shown
        if entries != shown:
            rows = tuple({**dataclasses.asdict(e), "fell_back": e.fell_back} for e in entries)
            # In one assignment: another thread must not see new entries beside old rows.
            self._shown = entries, rows
        return [row.copy() for row in rows]
