"""Evaluations of policies built with vla_accel."""

import sys
from types import TracebackType


def _say_end(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Report an interrupt during the imports, before `eval.script` can, in the same words."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.__excepthook__(kind, error, where)


if sys.argv[0] == "-m":  # `python -m eval.NAME` imports this before the script
    sys.excepthook = _say_end
