"""The command line: `vla-accel COMMAND …`. Each command is a module of its own, imported when it is called."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from vla_accel.errors import VlaAccelError

COMMANDS: dict[str, tuple[str, str]] = {}
"""Command to (module, one line of help). The module has `main(arguments: list[str]) -> int`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 a check failed or an error was reported, 2 wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from vla_accel import __version__

        print(f"vla-accel {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        print(f"vla-accel: unknown command {name}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    except VlaAccelError as error:
        print(f"vla-accel {name}: {error}", file=sys.stderr)
        return 1


def usage() -> str:
    """The list of commands."""
    width = max((len(name) for name in COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()]
    return "\n".join(["usage: vla-accel COMMAND [options]", "", *lines, "", "vla-accel COMMAND --help says more."])
