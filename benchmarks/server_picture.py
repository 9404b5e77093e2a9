"""The picture of requests a second on several GPUs: `python -m benchmarks.server_picture`, from the stored benches."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server_tables import GPUS_PICTURE, draw_server_gpus
from eval.script import run_script
from vla_accel.errors import ConfigError
from vla_accel.files import replacing

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Arguments:
    """Draw requests a second against clients."""

    results: Path = RESULTS
    """Folder with bench_server_*_h200.json; the picture goes there, too."""


def run(arguments: Arguments) -> None:
    """Raises ConfigError where there is no bench, DependencyError without matplotlib."""
    paths = sorted(arguments.results.glob("bench_server_*_h200.json"))
    if not paths:
        raise ConfigError(f"results: expected bench_server_*_h200.json in {arguments.results}, found none")
    figure = draw_server_gpus([json.loads(path.read_text()) for path in paths])
    with replacing(arguments.results / GPUS_PICTURE) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
    print(json.dumps({"stored": GPUS_PICTURE, "benches": len(paths)}))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 drawn, 1 something is missing."""
    return run_script("benchmarks.server_picture", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
