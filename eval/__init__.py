"""Evaluations of policies built with vla_accel."""

import sys
from types import TracebackType


def _say_end(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Of a program interrupted while it imports, before `eval.script` could say so, in the same words."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.__excepthook__(kind, error, where)


if sys.argv[0] == "-m":  # `python -m eval.NAME`, which imports this before the script itself; other programs differ
    sys.excepthook = _say_end
