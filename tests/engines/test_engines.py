"""Engines: fixed buffers, inputs that are checked, and the one function that may fall back."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec
from vla_accel.engines import ENGINES, Engine, build
from vla_accel.engines.eager import EagerEngine
from vla_accel.errors import ConfigError, EngineError
from vla_accel.ledger import Ledger, LedgerEntry

CPU = torch.device("cpu")


class Affine(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        return x * 2 + y


class Returns(nn.Module):
    def __init__(self, *results: Tensor) -> None:
        super().__init__()
        self.results = results

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.results if len(self.results) != 1 else self.results[0]


def component(module: nn.Module | None = None, outputs: tuple[TensorSpec, ...] | None = None) -> Component:
    f32 = torch.float32
    inputs = (TensorSpec("x", (2, 3), f32), TensorSpec("y", (2, 3), f32))
    return Component("affine", module or Affine(), inputs, outputs or (TensorSpec("z", (2, 3), f32),))


def engine(**kwargs: Any) -> Engine:
    return EagerEngine(component(**kwargs), CPU, EngineSpec())


def test_run_reads_and_fills_the_static_buffers_only() -> None:
    first, second = engine(), engine()
    second.bind("x", first.outputs["z"])
    x, z = first.inputs["x"], first.outputs["z"]
    assert second.inputs["x"] is z, "a bound output needs no copy"
    source = torch.ones(2, 3)
    first.write("x", source)
    for e in (first, second):
        e.write("y", torch.full((2, 3), 3.0))
    source.fill_(100)  # written already: the caller's tensor no longer matters
    first.run()
    second.run()
    assert z.tolist() == [[5.0] * 3] * 2 and second.outputs["z"].tolist() == [[13.0] * 3] * 2
    first.write("x", torch.zeros(2, 3))
    assert z.tolist() == [[5.0] * 3] * 2, "nothing is computed before run"
    first.run()
    assert z.tolist() == [[3.0] * 3] * 2 and first.inputs["x"] is x and first.outputs["z"] is z


@pytest.mark.parametrize("method", ["write", "bind"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("w", torch.zeros(2, 3), r"affine: no input 'w'; it has x, y"),
        ("z", torch.zeros(2, 3), r"affine: no input 'z'; it has x, y"),
        ("x", torch.zeros(1, 3), r"affine\.x: expected shape \(2, 3\), got \(1, 3\)"),
        ("x", torch.zeros(6), r"affine\.x: expected shape \(2, 3\), got \(6,\)"),
        ("y", torch.zeros(2, 3, dtype=torch.float64), r"affine\.y: expected dtype torch\.float32, got torch\.float64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(method: str, name: str, value: Tensor, message: str) -> None:
    e = engine()
    e.write("x", torch.ones(2, 3))
    e.write("y", torch.ones(2, 3))
    before = dict(e.inputs)
    with pytest.raises(EngineError, match=message):
        getattr(e, method)(name, value)
    assert e.inputs.keys() == before.keys()
    assert all(e.inputs[k] is v and bool((v == 1).all()) for k, v in before.items())


def test_bind_refuses_another_device() -> None:
    with pytest.raises(EngineError, match=r"affine\.x: expected device cpu, got meta"):
        engine().bind("x", torch.zeros(2, 3, device="meta"))


@pytest.mark.parametrize(
    ("results", "parts"),
    [
        ([torch.zeros(1, 3)], ("affine.z", "(2, 3) torch.float32", "(1, 3) torch.float32")),
        ([torch.zeros(2, 3).double()], ("affine.z", "torch.float64")),
        ([torch.zeros(2, 3)] * 2, ("affine", "1 outputs", "returned 2")),
    ],
)
def test_an_undeclared_output_is_named(results: list[Tensor], parts: tuple[str, ...]) -> None:
    with pytest.raises(EngineError) as refused:
        engine(module=Returns(*results)).run()
    assert all(part in str(refused.value) for part in parts)


def test_several_outputs_keep_their_order() -> None:
    specs = (TensorSpec("a", (2,), torch.float32), TensorSpec("b", (2,), torch.float32))
    e = engine(module=Returns(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])), outputs=specs)
    e.run()
    assert (e.outputs["a"].tolist(), e.outputs["b"].tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_ranges_of_a_tensor_must_hold_its_shape() -> None:
    TensorSpec("x", (2, 5), torch.float32, {1: (1, 8)})
    for ranges in ({1: (6, 8)}, {1: (1, 4)}, {2: (1, 8)}):
        with pytest.raises(ConfigError, match="tensor x: range"):
            TensorSpec("x", (2, 5), torch.float32, ranges)


# -- build and the ledger -----------------------------------------------------------------------------------------


class Refuses(EagerEngine):
    name = "refuses"

    def __init__(self, *_: Any) -> None:
        raise EngineError("no such GPU")


class IsWrong(EagerEngine):
    name = "is_wrong"

    def __init__(self, *_: Any) -> None:
        raise KeyError("a bug")


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "refuses", Refuses)
    monkeypatch.setitem(ENGINES, "is_wrong", IsWrong)


def spec(*names: str) -> EngineSpec:
    return EngineSpec(names[0], names[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [("refuses", "no such GPU"), ("native", "the native engine has no program")],
)
def test_a_fallback_is_recorded_and_logged_or_an_error(
    engine: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger()
    with caplog.at_level(logging.WARNING, "vla_accel"):
        built = build(component(), spec(engine, "eager"), device=CPU, ledger=ledger)
    assert isinstance(built, EagerEngine)
    (entry,), (message,) = ledger.as_list(), caplog.messages
    assert (entry["requested"], entry["used"], entry["fell_back"]) == (engine, "eager", True)
    assert str(entry["reason"]).startswith(f"{engine}: {reason}")
    assert message.startswith("affine: ") and f"{engine}: {reason}" in message and "using eager" in message
    for strict, fallback, error in ((True, ("eager",), "strict mode: affine: "), (False, (), "affine: no engine")):
        ledger = Ledger(strict=strict)
        with pytest.raises(EngineError, match=error) as refused:
            build(component(), spec(engine, *fallback), device=CPU, ledger=ledger)
        assert reason in str(refused.value) and str(refused.value).count("affine") == 1
        assert ledger.as_list() == []


def test_a_bug_in_an_engine_is_not_a_reason_to_fall_back() -> None:
    with pytest.raises(KeyError, match="a bug"):
        build(component(), spec("is_wrong", "eager"), device=CPU, ledger=Ledger())


@pytest.mark.parametrize("names", [("warp",), ("refuses", "warp")])
def test_an_unknown_engine_is_named(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"affine: expected an engine of eager.*, got 'warp'"):
        build(component(), spec(*names), device=CPU, ledger=Ledger())


def test_the_ledger_keeps_the_newest_entry_of_each_component() -> None:
    ledger = Ledger(strict=True)
    assert ledger.as_list() == []
    build(component(), spec("eager"), device=CPU, ledger=ledger)
    expected = {"component": "affine", "requested": "eager", "used": "eager", "reason": "", "fell_back": False}
    rows = ledger.as_list()
    assert rows == [{**expected, "detail": f"torch {torch.__version__}"}]
    rows[0]["used"] = "changed by a caller"
    rows.clear()
    for name, used in (("b", "eager"), ("affine", "other")):
        ledger.record(LedgerEntry(name, used, used))
    assert [(e["component"], e["used"]) for e in ledger.as_list()] == [("affine", "other"), ("b", "eager")]
