"""Count the weights of the published models, without a GPU: `python -m benchmarks.memory --output
memory_counted.json`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from eval.script import run_script
from vla_accel.cli.common import say
from vla_accel.cli.options import Written
from vla_accel.families.family import family_named
from vla_accel.files import without_folders, write_json
from vla_accel.measure.memory import counted
from vla_accel.progress import going_on


@dataclass(frozen=True)
class Arguments:
    """Count bytes of weights by component and configuration."""

    output: Annotated[Path, Written()]
    """JSON report."""
    families: tuple[str, ...] = ("pi05", "pi0", "smolvla", "groot")
    """Model families."""


def run(arguments: Arguments) -> None:
    """Raises ConfigError for an unknown family."""
    for name in arguments.families:
        family_named(name)  # before the first is counted
    families = {}
    for name in arguments.families:
        with going_on(f"counting {name}", say):
            families[name] = counted(name)
    found = {name: {system: asdict(one) for system, one in counts.items()} for name, counts in families.items()}
    command = ["python", "-m", "benchmarks.memory", *without_folders(sys.argv[1:])]
    report = {"schema": "vla_accel.memory/1", "command": command, "families": found}
    write_json(arguments.output, report)
    print(json.dumps({"stored": arguments.output.name, "families": list(found)}))


if __name__ == "__main__":
    sys.exit(run_script("benchmarks.memory", Arguments, run, None))
