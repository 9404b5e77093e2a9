"""The loop's first step overlaps the prefix: who waits for what, with streams and events that only write it down. Bits
are compared on a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.streamed_support import EXPERTS, LOOPS, LoopCase, Loops
from tests.support.tiny_smolvla import tiny_config, tiny_model
from vla_accel.families.smolvla.native import SmolVlaPrefix, SmolVlaPrefixWeights
from vla_accel.nn import overlap as module
from vla_accel.nn.overlap import Overlap

CPU = torch.device("cpu")


class Event:
    made = 0

    def __init__(self) -> None:
        self.name, Event.made = Event.made, Event.made + 1

    def record(self) -> None:
        LINES.append(f"recorded {self.name}")


class Stream:
    device = CPU

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: Event) -> None:
        LINES.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: Stream) -> None:
        LINES.append(f"{self.name} waits for {other.name}")


LINES: list[str] = []


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        LINES.append(f"on {stream.name}")
        yield

    LINES.clear()
    Event.made = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(module, "_stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    return LINES


def test_streams_wait_for_what_they_read(lines: list[str]) -> None:
    overlap = Overlap(CPU, 2, lambda layer: lines.append(f"layer {layer} completed"))
    for event in (overlap.begun, *overlap.layers):
        event.record()
    with overlap.consumer():
        overlap.wait(1)
    assert lines == [
        "recorded 0", "recorded 1", "recorded 2",
        "side waits for 0", "on side", "side waits for 2", "layer 1 completed",
        "main waits for side",
    ]  # fmt: skip


@pytest.mark.parametrize("every", [2, 3, 0])
def test_layers_completed_one_by_one_are_those_completed_together(every: int, lines: list[str]) -> None:
    """SmolVLA's keys and values of crossing layers, in float32."""
    model = tiny_model(tiny_config(self_every=every))
    depth = model.config.expert.depth
    with torch.inference_mode():
        weights = SmolVlaPrefixWeights.of(model, "fp32", None, "gpu")
        stack = weights.stack
        program = SmolVlaPrefix(weights, 2, 3, 4)
        generator = torch.Generator().manual_seed(0)
        given = {
            "image_tokens": torch.randn(2, 3, stack.table.shape[1], generator=generator),
            "tokens": torch.randint(0, 9, (2, 4), generator=generator),
            "state": torch.randn(2, weights.state.weight.shape[1], generator=generator),
            "lengths": torch.tensor([8, 6], dtype=torch.int32),
        }

        def made() -> dict[str, Tensor]:
            shape = (depth, 2, 8, stack.stack.block.kv_heads, stack.stack.block.head_dim)
            return {name: torch.full(shape, float("nan")) for name in ("keys", "values")}

        want, got = made(), made()
        program(given, want)
        overlap = program.overlapped(got)
        program(given, got)
        assert lines == [f"recorded {event}" for event in range(depth + 1)]
        for layer in range(depth):
            overlap.wait(layer)
    for name in want:
        assert want[name].isfinite().all()
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case", [LOOPS["demo"], LOOPS["grouped"], EXPERTS["17 actions"], EXPERTS["three sequences"]], ids=str
)
def test_a_layer_reads_nothing_before_its_turn(case: LoopCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are NaN until a layer has waited for them. A launch is dependent unless it comes first, after an
    event, or after torch code that writes rows."""
    loops = Loops(case, beyond=0.0)
    loop, inputs, state, noise = loops.fused("fp32"), loops.placed("cpu", torch.float32), loops.state, loops.noise
    want, got = noise.clone(), noise.clone()
    late = inputs | {key: torch.full_like(inputs[key], float("nan")) for key in ("keys", "values")}
    told: list[Any] = []

    def wait(layer: int) -> None:
        told.append(layer)
        for key in ("keys", "values"):
            late[key][layer] = inputs[key][layer]

    def noted(module: ModuleType, name: str) -> Any:
        run = getattr(module, name)

        def op(*given: Any, **options: Any) -> Any:
            told.append((name, loop.chain.advance()))  # As a launch does.
            return run(*given, **options)

        return op

    module = sys.modules[type(loop).__module__]
    for one in ("gemm", "cross_attention", "suffix_attention", "flow_step"):
        if hasattr(module, one):
            monkeypatch.setattr(module, one, noted(module, one))
    loop.chain.early = True
    with torch.inference_mode():
        loop.run(inputs, state, want)
        behind = [told.copy(), told.clear()][0]
        with loop.chain:
            loop.first_step(late, state, got, wait)
        assert torch.isnan(late["keys"]).sum() == 0
        second = len(told)
        with loop.chain:
            loop.other_steps(late, state, got)
    assert torch.equal(got, want) and torch.isfinite(want).all() and not torch.equal(want, noise)
    waits = [index for index, one in enumerate(told) if isinstance(one, int)]
    assert [told[index] for index in waits] == list(range(len(inputs["keys"])))
    assert all(told[index + 1][0] in ("gemm", "cross_attention") for index in waits)

    def mixes(launches: list[Any]) -> set[int]:
        """The products after a step of π0, whose first row torch writes."""
        after = {i + 1 for i, one in enumerate(launches) if isinstance(one, tuple) and one[0] == "flow_step"}
        return after - {len(launches)} if state is not None and loop.weights.mix is not None else set()

    def late_of(launches: list[Any]) -> set[int]:
        return {i for i, one in enumerate(launches) if isinstance(one, tuple) and not one[1]}

    assert late_of(behind) == {0} | mixes(behind)
    assert late_of(told) == {0, second, *(index + 1 for index in waits)} | mixes(told)
