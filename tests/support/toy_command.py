"""The toy benchmark's command line. Apart from the benchmark, so that worker processes need not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.harness import command, options
from eval.harness.benchmark import Benchmark
from tests.support.toy_benchmark import TOY


@dataclass(frozen=True, kw_only=True)
class Arguments(options.Arguments):
    """Play the toy."""

    suite: str = "line"
    policy: str = "none"


def main(words: Sequence[str], benchmark: Benchmark = TOY) -> int:
    """Run the command line; returns the exit code."""
    return command.main(benchmark, Arguments, words)
