"""Store a run: `python -m benchmarks.store runs/x.json --name NAME` writes benchmarks/results/NAME.json, without the
timings of each call and the paths of the machine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from eval.harness.report import read_result
from eval.script import run_script
from vla_accel.cli.options import Argument, Written
from vla_accel.errors import ConfigError
from vla_accel.files import replacing, without_folders

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Arguments:
    """Store a result, such as `python -m eval.libero` writes, in benchmarks/results."""

    result: Annotated[Path, Argument("RESULT", positional=True)]
    """Result file of a benchmark."""
    name: str
    """Name of the stored file without its suffix."""
    note: str = ""
    """A note that is stored with the figures."""
    folder: Annotated[Path, Written(folder=True)] = RESULTS
    """Where NAME.json goes."""


def slim(result: dict[str, Any], note: str = "") -> dict[str, Any]:
    """The part of a result that is kept."""
    episodes = [{k: v for k, v in e.items() if k not in ("timings_ms", "video", "wall_s")} for e in result["episodes"]]
    kept = {k: v for k, v in result.items() if k not in ("episodes", "figure", "videos")}
    kept["command"] = without_folders(kept["command"])
    kept["launches"] = [{**s, "command": without_folders(s["command"])} for s in kept["launches"]]
    if metadata := kept["policy"].get("metadata"):  # a policy that is not bundled is named by its folder
        metadata = {**metadata, "policy": Path(metadata["policy"]).name}
        kept["policy"] = {**kept["policy"], "metadata": metadata}
    return {"note": note, **kept, "episodes": episodes}


def run(arguments: Arguments) -> None:
    """Write the slim copy atomically. Raises ConfigError if the file is not a result."""
    if not arguments.name or Path(arguments.name).name != arguments.name:
        raise ConfigError(f"name: expected a file's name without folder, got {arguments.name!r}")
    result, _ = read_result(arguments.result)
    target = arguments.folder / f"{arguments.name}.json"
    head = slim(result, arguments.note)
    episodes = head.pop("episodes")
    # One episode a line: a diff shows which episodes changed.
    lines = ",\n".join("  " + json.dumps(e) for e in episodes)
    text = json.dumps(head, indent=1)[:-2] + ',\n "episodes": [\n' + lines + "\n ]\n}\n"
    json.loads(text)
    with replacing(target) as temporary:
        temporary.write_text(text)
    print(json.dumps({"stored": target.name, "bytes": target.stat().st_size}))


main = partial(run_script, "benchmarks.store", Arguments, run)


if __name__ == "__main__":
    sys.exit(main(None))
