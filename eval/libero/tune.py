"""`python -m eval.libero.tune CHECKPOINT …`: `vla-accel tune` with LIBERO as its benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eval.harness.tuning import opener
from eval.libero.benchmark import LIBERO

episodes = opener(LIBERO)
"""`vla-accel tune --benchmark libero` finds it here."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from vla_accel.cli import main as command

    return command(["tune", *(sys.argv[1:] if words is None else words), "--benchmark", "libero"])


if __name__ == "__main__":
    sys.exit(main())
