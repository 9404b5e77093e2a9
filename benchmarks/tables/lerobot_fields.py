"""Tables of lerobot's settings in docs/lerobot_fields.md, from the tables that the package's reader uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables.table import Table
from vla_accel.checkpoints.lerobot_settings import FIELDS, RELEASES, STEPS, releases
from vla_accel.checkpoints.settings import Setting, shown

_USES = {"read": "honoured", "neutral": "changes no action", "refused": "refused"}


def _row(setting: Setting) -> dict[str, str]:
    fixed = f"must be {' or '.join(f'`{shown(value)}`' for value in setting.values)}"
    first, *_, last = (*releases(setting), releases(setting)[-1])
    return {
        "names": ", ".join(f"`{name}`" for name in setting.names),
        "releases": first if first == last else f"{first} to {last}",
        "use": _USES.get(setting.use, fixed),
        "reason": setting.reason,
    }


def _fields(kind: str) -> list[dict[str, str]]:
    order = [*_USES, "fixed"]
    return [_row(s) for s in sorted(FIELDS[kind], key=lambda s: (order.index(s.use), RELEASES.index(releases(s)[0])))]


def _steps(_: object) -> list[dict[str, Any]]:
    """A row for each setting of each step of the saved pipelines."""
    empty = {"names": "none", "use": "", "reason": ""}
    return [{"step": name, **row} for name, found in STEPS.items() for row in (*map(_row, found),) or (empty,)]


_REST = {"here": "{use}", "meaning": "{reason}"}
FIELD_TABLES: dict[str, Callable[[Any], str]] = {
    f"lerobot_{kind}": Table({"field": "{names}", "lerobot": "{releases}", **_REST}, lambda _, kind=kind: _fields(kind))
    for kind in FIELDS
}
"""A table for each policy class, by its name on the page."""
steps = Table({"step": "`{step}`", "setting": "{names}", **_REST}, _steps)
