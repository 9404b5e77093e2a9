"""The loops of fused ops: what a build measures, and which launches a step has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.groot_folders import CONFIG, tensors
from tests.support.in_memory import MemoryWeights
from tests.support.streamed_support import EXPERTS, LOOPS, Loops
from vla_accel.families.groot.checkpoint import infer_config, load_groot
from vla_accel.kernels.config import Choice
from vla_accel.nn import kernel_choices
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import LayerLoop
from vla_accel.nn.native_dit import NativeTransformer, TransformerWeights, step_tables


def groot_loop() -> LayerLoop:
    stored = MemoryWeights(tensors())
    model = load_groot(stored, infer_config(stored.shapes, CONFIG, "small"), 2, "small")
    model = model.placed(torch.device("cpu"), torch.float32)
    weights = TransformerWeights.of(model, "fp32")
    with torch.inference_mode():
        return NativeTransformer(weights, step_tables(model, weights, Schedule.uniform(2)), model.config, 2)


BUILDS: dict[str, tuple[Callable[[], LayerLoop], set[str]]] = {
    "pi05": (lambda: Loops(LOOPS["demo x 4"]).fused("bf16"), {"out", "down", "up", "qkv", "attention"}),
    "pi0": (lambda: Loops(LOOPS["grouped"]).fused("bf16"), {"out", "down", "up", "qkv", "attention", "mix"}),
    "smolvla": (
        lambda: Loops(EXPERTS["50 actions"]).fused("bf16"),
        {"out", "down", "up", "qkv", "attention", "cross", "mix"},
    ),
    "groot": (groot_loop, {"out", "down", "up", "qkv", "q"}),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_build_measures_every_op_with_each_of_its_configs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate runs, whatever was chosen before; products that write moments come before those that read them."""
    measured: list[str] = []

    def run_all(what: str, configs: Sequence[Any], run: Callable[[Any], object], *_: Any) -> Choice:
        measured.append(what.split()[0])
        for config in configs:
            run(config)
        return Choice(configs[-1], dict.fromkeys(map(str, configs), 1.0))

    monkeypatch.setattr(kernel_choices, "measure", run_all)
    build, kinds = BUILDS[name]
    with torch.inference_mode():
        loop = build()
    assert set(measured) == kinds == set(loop.choices.chosen)
    assert list(dict.fromkeys(measured))[:2] == ["out", "down"]
    assert all(f"; {kind} " in loop.choices.detail for kind in kinds)
