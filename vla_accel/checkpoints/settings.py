"""Tables of the settings in another project's files: which are honoured, which change no action, and which are refused.

lerobot's config.json and pipelines, Isaac-GR00T's files and peft's adapters each have such a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vla_accel.errors import CheckpointError

Use = Literal["read", "fixed", "neutral", "refused"]


@dataclass(frozen=True)
class Setting:
    """Settings of the same kind.

    Attributes:
        names: Their names.
        use: "read": this package honours it. "fixed": one of `values` is required. "neutral": no action depends on it.
            "refused": any value that does not switch it off is an error.
        reason: Its meaning, or why it may be ignored. Part of the error message.
        since: First release that saves it; empty: all up to `until`.
        until: Last release that saves it; empty: all since `since`.
        values: The supported values of a fixed setting.
    """

    names: tuple[str, ...]
    use: Use
    reason: str = ""
    since: str = ""
    until: str = ""
    values: tuple[object, ...] = ()

    def why_not(self, name: str, value: object) -> str | None:
        """Return why a value of a fixed setting is refused; None if it is accepted."""
        if self.use == "fixed" and not any(value is v or (value == v and type(value) is not bool) for v in self.values):
            expected = " or ".join(shown(v) for v in self.values if v is not None or len(self.values) == 1)
            reason = f": {self.reason}" if self.reason else ""
            return f"{name}: expected {expected}, got {shown(value):.60}{reason}"
        return None


def read(names: str, reason: str = "", since: str = "", until: str = "") -> Setting:
    """Settings that the reader of the file honours; spaces separate the names."""
    return Setting(tuple(names.split()), "read", reason, since, until)


def neutral(names: str, reason: str, since: str = "", until: str = "") -> Setting:
    """Settings that change no action."""
    return Setting(tuple(names.split()), "neutral", reason, since, until)


def refuse(names: str, reason: str, since: str = "", until: str = "") -> Setting:
    """Settings of which any value that does not switch them off is an error."""
    return Setting(tuple(names.split()), "refused", reason, since, until)


def fixed(names: str, reason: str, *values: object, since: str = "", until: str = "") -> Setting:
    """Settings of which only some values are supported."""
    return Setting(tuple(names.split()), "fixed", reason, since, until, values)


def is_off(value: object) -> bool:
    """Return whether a value switches its setting off: null, false, zero or empty."""
    return value in (None, False, "", [], {})


def shown(value: object) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False, default=repr)


def refused(content: Mapping[str, Any], settings: Sequence[Setting], known: str, start: str = "") -> Iterator[str]:
    """Yield the reason for each refused setting of a file. Unknown settings are refused unless they are off.

    Args:
        content: The settings by name.
        settings: The known ones.
        known: The software whose settings are known, for the error message.
        start: Precedes each name in the message, such as "state.".
    """
    table = {name: setting for setting in settings for name in setting.names}
    others: dict[str | None, list[str]] = {}
    for name, value in content.items():
        setting = table.get(name)
        if setting is not None and (reason := setting.why_not(start + name, value)):
            yield reason
        elif (setting is None or setting.use == "refused") and not is_off(value):
            others.setdefault(setting and setting.reason, []).append(f"{start}{name} {value!r:.60}")
    unknown = others.pop(None, [])
    for reason, names in others.items():
        yield f"expected no settings {', '.join(names)}: {reason}"
    if unknown:
        yield (
            f"expected settings of {known}, got {', '.join(unknown)}: another version may compute something else with "
            "it; if it changes no action, remove it from the file"
        )


def check(content: Mapping[str, Any], settings: Sequence[Setting], where: object, known: str, start: str = "") -> None:
    """Raise CheckpointError, which begins with `where`, for the refused settings of a file."""
    if found := [*refused(content, settings, known, start)]:
        raise CheckpointError(f"{where}: {'; '.join(found)}")
