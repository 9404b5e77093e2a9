"""Which settings of another project's file this package honours, which change nothing, and which it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KnownSettings:
    """The settings that a file may have. Any other is refused, unless it is null, false, zero or empty.

    Attributes:
        read: Settings that are honoured, by the code that reads them.
        neutral: Settings that change no action: those of training, and those that other settings switch off.
        fixed: Settings of which some values alone are supported, with these values.
    """

    read: frozenset[str] = frozenset()
    neutral: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, read: str, neutral: str = "", **fixed: tuple[object, ...]) -> KnownSettings:
        """Settings by their names, which spaces separate."""
        return cls(frozenset(read.split()), frozenset(neutral.split()), fixed)

    def refused(self, content: Mapping[str, Any], start: str = "") -> list[str]:
        """Return the settings of `content` that are refused, each as "name value"; `start` precedes each name."""
        return [f"{start}{name} {value!r:.60}" for name, value in content.items() if not self._allows(name, value)]

    def _allows(self, name: str, value: object) -> bool:
        if name in self.fixed:
            return value is None or value in self.fixed[name]
        return name in self.read or name in self.neutral or value in (None, False, "", [], {})
