"""Count the weights of the published models, without a GPU: `python -m benchmarks.memory --output
memory_counted.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from eval.script import run_script
from vla_accel.cli.common import say
from vla_accel.cli.options import Written
from vla_accel.config import EnginePrecision, EngineSpec, NativeOptions
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.files import without_folders, write_json
from vla_accel.fp8 import FORMATS, Scales
from vla_accel.measure.systems import configs
from vla_accel.nn.flow import Schedule
from vla_accel.policy.footprint import weight_bytes
from vla_accel.progress import going_on


@dataclass(frozen=True)
class Arguments:
    """Count bytes of weights by component and configuration."""

    output: Annotated[Path, Written()]
    """JSON report."""
    families: tuple[str, ...] = ("pi05", "pi0", "smolvla", "groot")
    """Model families."""


SMALLEST = "smallest"
"""All that may be in FP8 or INT8, and the embeddings in host memory."""


def dummy_scales(value: float = 1.0) -> Scales:
    """The same scale for every product, because only sizes matter here."""
    return Scales(_Same(value), 1, "dummy", "none", "none")


class _Same(dict[str, float]):
    def __init__(self, value: float) -> None:
        self.value = value

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: str) -> float:
        return self.value


def parameters(name: str) -> int:
    """How many a family's published size has. Raises ConfigError for a family that is not there."""
    family = family_named(name)
    return sum(
        parameter.numel() for parameter in family.network_class.empty(bench_card(family).published()).parameters()
    )


def counted(name: str) -> dict[str, dict[str, Any]]:
    """For each native system of `bench`, and `SMALLEST` if that is smaller: `bytes` by component for an ordinary
    observation of the family's published size, `low`: precisions other than BF16, `on_host`: uncounted embeddings."""
    family = family_named(name)
    card = bench_card(family)
    config = card.published()
    processor: Any = card.dummy(config, card.views)
    model = card.random(config, seed=0, device="meta", dtype=torch.bfloat16)
    inputs = [processor.prepare(processor.example())]
    scales = dummy_scales()

    def count(low: Mapping[str, EnginePrecision], on_host: bool = False) -> dict[str, Any]:
        base = EngineSpec("native", native=NativeOptions(embeddings="host" if on_host else "gpu"))
        specs = {part: replace(base, precision=low.get(part, "auto")) for part in family.parts}
        shape = family.shape(config, inputs, Schedule.uniform(card.sweep[0]), specs)
        return {"low": low, "on_host": on_host, "bytes": weight_bytes(model, family, shape, specs, scales)}

    found: dict[str, dict[str, Any]] = {}
    for name, system in configs(family).items():
        specs = system.specs(family.parts)
        low: dict[str, EnginePrecision] = {n: s.precision for n, s in specs.items() if s.precision in FORMATS}
        if name.startswith("native-") and not name.endswith("-host"):
            found[name] = count(low)
    able = family.capabilities
    every: dict[str, EnginePrecision] = dict.fromkeys(able.quantised, "fp8")
    smallest = count(every, on_host=bool(able.host_embeddings))
    if all(sum(smallest["bytes"].values()) < sum(one["bytes"].values()) for one in found.values()):
        found[SMALLEST] = smallest
    return found


def run(arguments: Arguments) -> None:
    """Raises ConfigError for an unknown family."""
    for name in arguments.families:
        family_named(name)  # before the first is counted
    families = {}
    for name in arguments.families:
        with going_on(f"counting {name}", say):
            families[name] = counted(name)
    command = ["python", "-m", "benchmarks.memory", *without_folders(sys.argv[1:])]
    report = {"schema": "vla_accel.memory/1", "command": command, "families": families}
    write_json(arguments.output, report)
    print(json.dumps({"stored": arguments.output.name, "families": list(families)}))


if __name__ == "__main__":
    sys.exit(run_script("benchmarks.memory", Arguments, run, None))
