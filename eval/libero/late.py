"""`python -m eval.libero.late`: success in LIBERO against latency; see `eval.harness.late`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eval.harness import late
from eval.libero.__main__ import Arguments as LiberoArguments
from eval.libero.benchmark import LIBERO


@dataclass(frozen=True, kw_only=True)
class Arguments(LiberoArguments, late.Arguments):
    """Success in LIBERO against latency, with plain chunks and with real-time chunking: one JSON, one picture."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return late.main(LIBERO, Arguments, sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    sys.exit(main())
