"""`vla-accel inspect ENGINE`: layers, precisions, profiles and size of a built engine. Ends with one JSON line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vla_accel.cli.common import print_json, print_table
from vla_accel.cli.options import Argument


@dataclass(frozen=True)
class Inspect:
    """Show what is inside an engine file."""

    engine: Annotated[Path, Argument("ENGINE", positional=True)]
    """A .engine file, or the beginning of the name of one that `vla-accel cache list` shows."""
    layers: bool = False
    """List every layer, in the table and in the JSON."""


def main(options: Inspect, words: list[str]) -> int:
    """Print what an engine file holds."""
    from vla_accel.engines.cache import default_folder
    from vla_accel.engines.tensorrt_inspect import inspect

    path = options.engine
    if not path.exists():  # a narrow terminal breaks names
        cached = [file for file in default_folder().glob("*.engine") if file.name.startswith(str(path))]
        path = cached[0] if len(cached) == 1 else path
    found = inspect(path)
    source = {
        "engine inspector": "engine inspector: layers as they run",
        "description": "description written at the build: layers as parsed, before fusion",
    }[found["source"]]
    size, layers = f"{found['bytes'] / 1e6:.1f} MB", len(found["layers"])
    print(
        f"{found['file']}: {size}, {found['library']} {found['version']}, {found['target']}, {layers} layers\n{source}"
    )
    print_table("layers by type", ("type", "count"), [[k, str(v)] for k, v in found["types"].items()])
    print_table("layers by precision", ("dtype", "count"), [[k, str(v)] for k, v in found["dtypes"].items()])
    rows = [
        [str(i), name, *(" x ".join(map(str, shape)) for shape in shapes)]
        for i, profile in enumerate(found["profiles"])
        for name, shapes in profile.items()
    ]
    print_table("profiles", ("profile", "input", "min", "opt", "max"), rows)
    if options.layers:
        cells = [[layer["name"], layer["type"], layer["dtype"]] for layer in found["layers"]]
        print_table("layers", ("layer", "type", "dtype"), cells)
    else:
        found = {**found, "layers": len(found["layers"])}
    print_json(found)
    return 0
