"""`python -m eval.libero`: evaluate a policy in LIBERO; see `eval.harness.command` for output and exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eval.harness import command, options
from eval.harness.benchmark import Benchmark
from eval.libero.benchmark import LIBERO, from_sampled
from vla_accel.cli.options import Folder


@dataclass(frozen=True, kw_only=True)
class Arguments(options.Arguments):
    """Evaluate a policy in LIBERO by openpi's protocol."""

    suite: str = "libero_spatial"
    """libero_spatial, libero_object, libero_goal, libero_10 or libero_90; or LIBERO-PRO's variants of the first four,
    by ending: _lan (reworded instructions), _object (other objects), _swap (places exchanged), _task (other tasks).
    Several with commas between them: each is reported apart, and all together."""
    policy: str = "demo"
    """A checkpoint's folder or name on the hub, "demo" for the bundled one, ws://host:port, or lerobot:FOLDER for ACT
    or Diffusion Policy by lerobot's own code."""
    starts: Folder = None
    """A folder that has one of start states of each suite, sampled by `eval.demo.states`, to begin from instead
    of the shipped ones."""

    def played(self, benchmark: Benchmark) -> Benchmark:
        if self.starts is None:
            return benchmark
        suites = [name.strip() for name in self.suite.split(",")]
        for name in suites:
            benchmark.check_suite(name)
        return from_sampled(benchmark, self.starts, suites, self.tasks)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command.main(LIBERO, Arguments, sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    sys.exit(main())
