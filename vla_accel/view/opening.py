"""The option `--view`: rerun, rerun://HOST:PORT or rerun:FILE.rrd."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vla_accel.errors import ConfigError
from vla_accel.files import require_writable, user_path
from vla_accel.view.live import LiveView
from vla_accel.view.view import OFF, View


@dataclass(frozen=True)
class Target:
    """Where a view goes: an address, a file, or a viewer that is started here if neither is named."""

    address: str = ""
    file: Path | None = None


def check_view(text: str) -> Target:
    """Return the target that `--view` names. Raises ConfigError for other text, OutputError for an unwritable file."""
    kind, colon, rest = text.partition(":")
    if kind == "rerun" and not colon:
        return Target()
    if kind == "rerun" and re.fullmatch(r"//(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", rest):
        return Target(address=rest[2:])
    if kind == "rerun" and rest.endswith(".rrd"):
        file = user_path(rest)
        require_writable(file, "view")
        return Target(file=file)
    raise ConfigError(f"view: expected rerun, rerun://HOST:PORT or rerun:FILE.rrd, got {text!r}")


def open_view(view: View | str | None) -> View:
    """Return the view that `--view` names; None for one that shows nothing. A `View` is returned unchanged.

    Raises:
        ConfigError: another text, or a viewer that cannot be started.
        OutputError: the file cannot be written.
        DependencyError: rerun is not installed.
    """
    if view is None:
        return OFF
    if isinstance(view, View):
        return view
    target = check_view(view)
    from vla_accel.view.viewer import RerunViewer

    return LiveView(RerunViewer(target.address, target.file))
