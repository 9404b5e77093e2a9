"""Tables of lerobot's settings in docs/lerobot_fields.md, from the tables that the package's reader uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.tables.table import table
from vla_accel.checkpoints.lerobot_settings import FIELDS, RELEASES, STEPS, releases
from vla_accel.checkpoints.settings import Setting, shown

_USES = {"read": "honored", "neutral": "changes no action", "refused": "refused"}


def _row(setting: Setting) -> dict[str, str]:
    fixed = f"must be {' or '.join(f'`{shown(value)}`' for value in setting.values)}"
    first, *_, last = (*releases(setting), releases(setting)[-1])
    return {
        "names": ", ".join(f"`{name}`" for name in setting.names),
        "releases": first if first == last else f"{first} to {last}",
        "use": _USES.get(setting.use, fixed),
        "reason": setting.reason,
    }


def _fields(kind: str, _: object) -> str:
    order = [*_USES, "fixed"]
    found = sorted(FIELDS[kind], key=lambda s: (order.index(s.use), RELEASES.index(releases(s)[0])))
    return table("field = {names} | lerobot = {releases} | here = {use} | meaning = {reason}", map(_row, found))


def steps(_: object) -> str:
    """A row for each setting of each step of the saved pipelines."""
    empty = {"names": "none", "use": "", "reason": ""}
    rows = [{"step": name, **row} for name, found in STEPS.items() for row in (*map(_row, found),) or (empty,)]
    return table("step = `{step}` | setting = {names} | here = {use} | meaning = {reason}", rows)


FIELD_TABLES: dict[str, Callable[[Any], str]] = {f"lerobot_{kind}": partial(_fields, kind) for kind in FIELDS}
"""A table for each policy class, by its name on the page."""
