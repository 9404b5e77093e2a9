"""`python -m eval.libero.tune CHECKPOINT …`: `vla-accel tune` with LIBERO as its benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eval.harness.tuning import opener
from eval.libero.benchmark import LIBERO
from eval.script import concluded
from vla_accel.cli.options import read
from vla_accel.cli.tune import Tune
from vla_accel.cli.tune import main as search

episodes = opener(LIBERO)
"""`vla-accel tune --benchmark libero` finds it here."""


@dataclass(frozen=True)
class Arguments(Tune):
    """Find the fastest configuration of a checkpoint on this machine that agrees with FP32 eager and succeeds as often
    in LIBERO. Writes tuned.yaml, tune.json and a report; the same command continues an interrupted search."""

    benchmark: str | None = "libero"
    """Benchmark for gate two, success on paired episodes: libero, or your own as MODULE:FUNCTION."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if words is None else words)

    def tune() -> int:
        chosen = read(Arguments, given, "python -m eval.libero.tune")

        return search(chosen, [*given, "--benchmark", str(chosen.benchmark)])

    return concluded(tune)


if __name__ == "__main__":
    sys.exit(main())
