"""What the scripts that time kernels share: options, the head of a report, rows of JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vla_accel.files import user_path
from vla_accel.machine import hardware, software


def options_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--output`, described by the first line of a module's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--output", type=user_path, required=True)
    return parser


def report_head(module: str, device: torch.device) -> dict[str, Any]:
    """The command (without folders), hardware and versions of a report."""
    command = ["python", "-m", f"benchmarks.{module}", *(Path(word).name for word in sys.argv[1:])]
    return {"command": command, "hardware": hardware(device), "software": software()}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], gpu: str) -> tuple[int, int]:
    """Write each row as a JSON line once it is known. Returns the number of rows, and of those with a false `right`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    wrong = count = 0
    with torch.inference_mode(), path.open("w") as file:
        for row in rows:
            wrong, count = wrong + (row.get("right") is False), count + 1
            print(json.dumps({"gpu": gpu, **row}), file=file, flush=True)
    return count, wrong


def reason(error: BaseException) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
