"""The bytes of a published model's weights on a GPU by configuration, counted without a GPU and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vla_accel.config import EnginePrecision, EngineSpec, NativeOptions
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.fp8 import FORMATS, Scales
from vla_accel.measure.systems import configs
from vla_accel.policy.footprint import weight_bytes

SMALLEST = "smallest"
"""All that may be in FP8 or INT8, and the embeddings in host memory."""


def dummy_scales(value: float = 1.0) -> Scales:
    """The same scale for every product that is asked for, where only sizes matter."""
    return Scales(_Same(value), 1, "dummy", "none", "none")


class _Same(dict[str, float]):
    def __init__(self, value: float) -> None:
        self.value = value

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: str) -> float:
        return self.value


@dataclass(frozen=True)
class Count:
    """`bytes` by component; `low`: precisions other than BF16; `on_host`: embeddings in host memory do not count."""

    low: Mapping[str, EnginePrecision]
    on_host: bool
    bytes: Mapping[str, int]


def parameters(name: str) -> int:
    """How many a family's published size has. Raises ConfigError for a family that is not there."""
    family = family_named(name)
    return sum(parameter.numel() for parameter in family.network(bench_card(family).published()).parameters())


def counted(name: str) -> dict[str, Count]:
    """Bytes of each native system of `bench`, and of `SMALLEST` if that is smaller, for an ordinary observation of a
    family's published size. Raises ConfigError for an unknown family."""
    family = family_named(name)
    card = bench_card(family)
    config = card.published()
    processor: Any = card.dummy(config, card.views)
    model = card.random(config, seed=0, device="meta", dtype=torch.bfloat16)
    inputs = [processor.prepare(processor.example())]
    scales = dummy_scales()

    def count(low: Mapping[str, EnginePrecision], on_host: bool = False) -> Count:
        base = EngineSpec("native", native=NativeOptions(embeddings="host" if on_host else "gpu"))
        specs = {part: replace(base, precision=low.get(part, "auto")) for part in family.parts}
        shape = family.shape(config, inputs, card.sweep[0], specs)
        return Count(low, on_host, weight_bytes(model, family, shape, specs, scales))

    found: dict[str, Count] = {}
    for name, system in configs(family).items():
        specs = system.specs(family.parts)
        low: dict[str, EnginePrecision] = {n: s.precision for n, s in specs.items() if s.precision in FORMATS}
        if name.startswith("native-") and not name.endswith("-host"):
            found[name] = count(low)
    able = family.capabilities
    every: dict[str, EnginePrecision] = dict.fromkeys(able.quantised, "fp8")
    smallest = count(every, on_host=bool(able.host_embeddings))
    if all(sum(smallest.bytes.values()) < sum(one.bytes.values()) for one in found.values()):
        found[SMALLEST] = smallest
    return found
