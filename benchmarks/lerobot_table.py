"""Tables of lerobot's settings in docs/lerobot_fields.md, from the tables that the reader of its folders works with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from benchmarks.markdown import rows
from vla_accel.checkpoints.lerobot_fields import FIELDS, RELEASES, Setting, shown
from vla_accel.checkpoints.lerobot_steps import STEPS

_USES = {"read": "honoured", "neutral": "changes no action", "refused": "refused"}


def _use(setting: Setting) -> str:
    if setting.use != "fixed":
        return _USES[setting.use]
    return f"must be {' or '.join(f'`{shown(v)}`' for v in setting.values)}"


def _names(setting: Setting) -> str:
    return ", ".join(f"`{name}`" for name in setting.names)


def _releases(setting: Setting) -> str:
    first, last = setting.since, setting.until
    if first == last:
        return first
    return f"{first} to {last}"


def _fields(kind: str, _: object) -> str:
    order = [*_USES, "fixed"]
    settings = sorted(FIELDS[kind], key=lambda s: (order.index(s.use), RELEASES.index(s.since)))
    body = [[_names(s), _releases(s), _use(s), s.reason] for s in settings]
    return rows(["field", "lerobot", "here", "what it is"], body)


def steps(_: object) -> str:
    """A row for each setting of each step of the saved pipelines."""
    body: list[list[str]] = []
    for name, settings in STEPS.items():
        body += _step(name, settings)
    return rows(["step", "setting", "here", "what it is"], body)


def _step(name: str, settings: Iterable[Setting]) -> list[list[str]]:
    found = [[f"`{name}`", _names(s), _use(s), s.reason] for s in settings]
    return found or [[f"`{name}`", "none", "", ""]]


FIELD_TABLES: dict[str, Callable[[object], str]] = {
    f"lerobot_{kind}": functools.partial(_fields, kind) for kind in FIELDS
}
"""A table for each policy class, by its name on the page."""
