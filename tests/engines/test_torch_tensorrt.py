"""Torch-TensorRT without its package, which needs a CUDA torch and a GPU: versions, options, parts, and failures."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.scales import calibrated
from tests.support.tiny import random_model, tiny_config
from vla_accel.component import Component, Island, TensorSpec
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import tensorrt_library, torch_tensorrt
from vla_accel.engines.tensorrt_library import Library
from vla_accel.engines.torch_tensorrt import (
    Flavour,
    build_islands,
    conversion_options,
    convert,
    find_flavour,
    island_module,
)
from vla_accel.errors import DependencyError, EngineError
from vla_accel.nn.denoise import denoise_component
from vla_accel.nn.flow import Schedule
from vla_accel.nn.prefix_components import kv_cache_component, vision_component

CPU = torch.device("cpu")


def versions(**given: str | None) -> dict[str, str | None]:
    names = ("torch", "torch-tensorrt", "torch-tensorrt-rtx", "tensorrt", "tensorrt-rtx")
    return {n: given.get(n.replace("-", "_")) for n in names}


@pytest.mark.parametrize(
    ("version", "library", "flavour"),
    [
        ("2.11.0", "10.15.1.29", "tensorrt"),
        ("2.14.0", "11.1.0", "tensorrt"),
        ("2.11.0", "1.4.0.76", "tensorrt_rtx"),
        ("2.14.0", "1.6.1", "tensorrt_rtx"),
    ],
)
def test_versions_that_work_together(version: str, library: str, flavour: Any) -> None:
    given = {"torch": f"{version}+cu130", f"torch_{flavour}": version, flavour: library}
    assert find_flavour(versions(**given)) == Flavour(version, flavour)
    if flavour == "tensorrt":  # of two installed packages, the one on TensorRT
        other = versions(**given, torch_tensorrt_rtx=version, tensorrt_rtx="1.7.1")
        assert find_flavour(other) == Flavour(version, flavour)


@pytest.mark.parametrize(
    ("torch_version", "package", "version", "library", "parts"),
    [
        ("2.13.0", "tensorrt", None, None, ("not installed", "'torch-tensorrt==2.13.*'", "'tensorrt==11.0.*'")),
        ("2.9.1", "tensorrt", None, None, ("known for torch 2.9", "for torch 2.11, 2.12, 2.13, 2.14")),
        ("2.13.0", "tensorrt", "2.11.0", "10.15.1", ("works with torch 2.11, got torch 2.13.0", "torch 2.13: ")),
        ("2.11.0", "tensorrt", "2.11.0", "11.0.0", ("with TensorRT 10.15, got 11.0.0", "'tensorrt==10.15.*'")),
        ("2.11.0", "tensorrt", "2.11.0", None, ("works with TensorRT 10.15, none is installed",)),
        ("2.11.0", "tensorrt_rtx", "2.11.0", "1.7.1", ("TensorRT-RTX 1.4, got 1.7.1", "'tensorrt-rtx-cu13==1.4.*'")),
        ("2.15.0", "tensorrt", "2.15.0", None, ("expected torch-tensorrt 2.11, 2.12, 2.13, 2.14, got 2.15",)),
    ],
)
def test_a_wrong_version_names_those_that_work(
    torch_version: str, package: str, version: str | None, library: str | None, parts: tuple[str, ...]
) -> None:
    with pytest.raises(DependencyError) as refused:
        find_flavour(versions(torch=torch_version, **{f"torch_{package}": version, package: library}))
    assert all(part in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(("gpu", "parts"), [(False, "a CUDA build of torch and a GPU"), (True, "does not import")])
def test_a_package_that_cannot_be_imported_is_named(gpu: bool, parts: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch_tensorrt, "find_flavour", lambda: Flavour("2.13.0", "tensorrt"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(DependencyError, match=parts):
        torch_tensorrt.load_torch_tensorrt()


def test_only_the_typing_option_depends_on_the_version() -> None:
    options = TensorrtOptions(refit=True, optimization_level=4, workspace_mb=8, weight_streaming=True)
    for version in torch_tensorrt.PAIRS:
        given = conversion_options(version, options)
        assert given.get("use_explicit_typing") is (True if version < (2, 13) else None)
        assert given["require_full_compilation"] is True and given["immutable_weights"] is False
        assert given["enable_weight_streaming"] is True and "enabled_precisions" not in given
        assert (given["optimization_level"], given["workspace_size"]) == (4, 8 << 20)
        assert "optimization_level" not in conversion_options(version, TensorrtOptions())


def quantised(model: Any) -> Component:
    return kv_cache_component(model, 1, 2, 9, False, scales=calibrated(model))


def spec(precision: Any = "auto", **options: Any) -> EngineSpec:
    return EngineSpec("torch_tensorrt", precision=precision, tensorrt=TensorrtOptions(**options))


@pytest.mark.slow
def test_vision_is_one_part_and_the_prefix_one_an_mlp() -> None:
    model = random_model(tiny_config("pi05"))

    def islands(component: Component, precision: Any, **options: Any) -> list[str]:
        module = island_module(component, spec(precision, **options))
        return [i.name for i, _, _ in torch_tensorrt._recorded(component, module, CPU)]

    assert islands(vision_component(model, 1, 2), "fp16") == ["siglip"]
    assert islands(quantised(model), "fp8") == ["mlp0", "mlp1"], "three layers, the last without an MLP"
    assert islands(quantised(model), "fp8", whole=True)[-1] == "kv_cache", "whole: the prefix itself"
    assert islands(denoise_component(model, 1, 17, Schedule.uniform(2), False), "auto", whole=True) == ["denoise"]
    with pytest.raises(EngineError, match=r"denoise: torch_tensorrt finds no part to build at precision auto; .*whole"):
        island_module(denoise_component(model, 1, 17, Schedule.uniform(2), False), spec())


def test_a_part_is_recorded_with_its_own_inputs() -> None:
    model = random_model(tiny_config("pi05"))
    component = vision_component(model, 1, 2)
    module = island_module(component, spec("fp16"))
    ((island, inputs, outputs),) = torch_tensorrt._recorded(component, module, CPU)
    assert tuple(inputs[0].shape) == (2, 3, 28, 28) and inputs[0].dtype == torch.float32
    assert tuple(outputs[0].shape) == (2, 4, 12) and outputs[0].dtype == torch.float16
    assert torch.equal(island.inner(*inputs), outputs[0])
    assert not island._forward_hooks


class Unsupported(RuntimeError):
    pass


def package(function: Any) -> Any:
    return SimpleNamespace(dynamo=SimpleNamespace(convert_exported_program_to_serialized_trt_engine=function))


def function_of(body: Any, version: tuple[int, int]) -> Any:
    """A function with the real one's parameters."""
    names = ", ".join(f"{n}=None" for n in conversion_options(version, TensorrtOptions()))
    space: dict[str, Any] = {"body": body}
    exec(f"def convert(exported, *, arg_inputs, {names}, **kwargs): return body(exported, arg_inputs, locals())", space)
    return space["convert"]


def mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).requires_grad_(False), (torch.ones(2, 4),)


def test_a_part_is_converted_whole() -> None:
    module, inputs = mlp()
    calls: list[Any] = []

    def body(exported: Any, arg_inputs: Any, given: Any) -> bytes:
        calls.append((exported, arg_inputs, given))
        return b"engine"

    content, about = convert(package(function_of(body, (2, 13))), "2.13.0", "mlp", module, inputs, spec())
    assert content == b"engine" and about["coverage"]["operators"] == 3
    assert set(about["seconds"]) == {"export", "build"}
    exported, arg_inputs, given = calls[0]
    assert isinstance(exported, torch.export.ExportedProgram) and arg_inputs == list(inputs)
    assert given["require_full_compilation"] is True and given["kwargs"] == {}


@pytest.mark.slow
def test_a_quantiser_is_one_operator_in_what_is_converted() -> None:
    model = random_model(tiny_config("pi05"))
    module = quantised(model).variants["fp8"]()
    inner = next(m for m in module.modules() if isinstance(m, Island)).inner
    targets: list[str] = []

    def body(exported: Any, arg_inputs: Any, given: Any) -> bytes:
        targets.extend(str(n.target) for n in exported.graph.nodes if n.op == "call_function")
        return b"engine"

    convert(package(function_of(body, (2, 11))), "2.11.0", "mlp0", inner, (torch.ones(1, 5, 18),), spec("fp8"))
    assert targets.count("tensorrt.quantize_op.default") == 4


def test_an_ignored_option_or_a_missing_engine_is_an_error() -> None:
    module, inputs = mlp()

    def bare(exported: Any, *, arg_inputs: Any, require_full_compilation: bool = True, **kwargs: Any) -> bytes:
        return b"engine"

    with pytest.raises(DependencyError, match=r"2\.12\.0 does not know the options .*use_explicit_typing"):
        convert(package(bare), "2.12.0", "mlp", module, inputs, spec())
    with pytest.raises(EngineError, match=r"mlp: torch-tensorrt 2\.13\.0 returned no engine"):
        convert(package(function_of(lambda *a: b"", (2, 13))), "2.13.0", "mlp", module, inputs, spec())


def old_style(exported: Any, arg_inputs: Any, given: Any) -> bytes:
    # As 2.11 does: log, then use what was never assigned.
    try:
        raise Unsupported("Conversion of function aten.foo not currently supported!")
    except Unsupported:
        logging.getLogger("torch_tensorrt.dynamo._compiler").error("a whole graph", exc_info=True)
    raise UnboundLocalError("interpreter_result")


def new_style(exported: Any, arg_inputs: Any, given: Any) -> bytes:
    try:
        raise Unsupported("Conversion of function aten.foo not currently supported!")
    except Unsupported as error:
        raise Unsupported("Conversion of module with its whole graph") from error


@pytest.mark.parametrize(("body", "version"), [(old_style, (2, 11)), (new_style, (2, 13))])
def test_what_cannot_be_converted_is_named(body: Any, version: tuple[int, int], caplog: Any) -> None:
    module, inputs = mlp()
    number = f"{version[0]}.{version[1]}.0"
    with pytest.raises(EngineError, match=rf"siglip: torch-tensorrt {number} cannot convert it whole: .*aten\.foo not"):
        convert(package(function_of(body, version)), number, "siglip", module, inputs, spec())
    assert "whole graph" not in caplog.text
    assert not logging.getLogger("torch_tensorrt.dynamo._compiler").filters


def test_parts_are_built_once_and_kept(tmp_path: Path, monkeypatch: Any) -> None:
    model = random_model(tiny_config("pi05"))
    calls: list[int] = []

    def body(exported: Any, arg_inputs: Any, given: Any) -> bytes:
        calls.append(1)
        return b"engine" * 10

    flavour = Flavour("2.13.0", "tensorrt_rtx")
    monkeypatch.setattr(torch_tensorrt, "load_torch_tensorrt", lambda: (package(function_of(body, (2, 13))), flavour))
    monkeypatch.setattr(torch_tensorrt, "load_library", lambda name: Library("tensorrt_rtx", object(), "1.5.0"))
    monkeypatch.setattr(tensorrt_library, "gpu_identity", lambda device: {"gpu": "none", "driver": "1"})
    wanted, component = spec("fp8", cache=str(tmp_path)), quantised(model)
    first = build_islands(component, wanted, CPU)
    assert [(i.name, o.built) for i, o, _ in first] == [("mlp0", True), ("mlp1", True)] and len(calls) == 2
    about = first[0][1].entry.about
    assert about["coverage"]["operators"] == about["coverage"]["in_engine"] > 4 and about["name"] == "kv_cache-mlp0"
    assert about["target"] == "sm80+sm86+sm89+sm120" and about["torch_tensorrt"] == "2.13.0"
    again = build_islands(component, wanted, CPU)
    assert [o.built for _, o, _ in again] == [False, False] and len(calls) == 2
    first[0][1].entry.path.write_bytes(b"cut")
    third = build_islands(component, wanted, CPU)
    assert [o.built for _, o, _ in third] == [True, False] and "truncated: 3 of 60" in third[0][1].note
    assert all(isinstance(s, TensorSpec) for s in third[0][2].inputs)
