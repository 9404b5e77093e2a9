"""Every option of `EngineSpec`: the engines that read it, what it changes there, and that it is refused elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from tests.support.gpus import H200
from tests.support.scales import scales_of_any
from tests.support.small_components import small
from tests.support.tiny import random_model, tiny_config
from vla_accel.component import Component, Island
from vla_accel.config import EngineName, EnginePrecision, EngineSpec, load_config
from vla_accel.engines import build
from vla_accel.engines.eager import EagerEngine
from vla_accel.engines.native import NativeEngine
from vla_accel.engines.onnx import module_at
from vla_accel.engines.tensorrt_builder import _set_flags, profiles_of
from vla_accel.engines.tensorrt_plan import cache_of, obtain
from vla_accel.engines.torch_tensorrt import conversion_options, island_module
from vla_accel.errors import ConfigError, EngineError
from vla_accel.families.pi0.native import Pi0Store
from vla_accel.ledger import Ledger
from vla_accel.nn.denoise import denoise_component
from vla_accel.nn.flow import Schedule
from vla_accel.nn.prefix_components import kv_cache_component, vision_component
from vla_accel.policy import ahead_of_time
from vla_accel.runtime import Runtime, current

CPU = torch.device("cpu")
MODEL = random_model(tiny_config("pi05")).to_compute_dtype(torch.bfloat16)
NATIVE, RTX, TORCH = {"native"}, {"tensorrt_rtx"}, {"torch_tensorrt"}
ONNX = {"tensorrt", "tensorrt_rtx"}

PRECISIONS: dict[str, set[str]] = {
    "auto": {"auto", "fp32", "bf16", "fp16", "fp8", "int8"},
    "eager": {"auto", "fp32", "bf16"},
    "native": {"auto", "fp32", "bf16", "fp16", "fp8", "int8"},
    **{name: {"auto", "fp32", "bf16", "fp16", "fp8"} for name in ("tensorrt", "tensorrt_rtx", "torch_tensorrt")},
}


def names(kind: type, before: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):
        made = field.default_factory
        if dataclasses.is_dataclass(made):
            yield from names(made, f"{before}{field.name}.")
        else:
            yield before + field.name


def spec(engine: str, option: str, value: Any, **more: Any) -> EngineSpec:
    """A spec as a file has it."""
    block, _, inner = option.rpartition(".")
    content = {"engine": engine, **more, **({block: {inner: value}} if block else {option: value})}
    if option == "keep":
        content["precision"] = "fp8"
    return load_config({"engines": {"vision": content}}).engines["vision"]


def computed(given: EngineSpec) -> tuple[Any, ...]:
    """Outputs and ledger details of vision and kv_cache in the native engine, and the prepared weights."""
    store = Pi0Store(MODEL, scales_of_any())
    found: list[Any] = []
    for component in (vision_component(MODEL, 1, 2, store), kv_cache_component(MODEL, 1, 2, 32, True, store)):
        engine = build(component, given, device=CPU, ledger=Ledger())
        generator = torch.Generator().manual_seed(0)
        for name, tensor in engine.inputs.items():
            if tensor.is_floating_point():
                tensor.normal_(generator=generator)
            else:
                tensor.fill_(40 if name == "lengths" else 1)
        engine.run()
        found += [*(tensor.float().sum().item() for tensor in engine.outputs.values()), engine.detail]
        given = dataclasses.replace(given, keep=())
    return (*found, *sorted(map(str, store.prepared)))


def gpu_of_program(given: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPU that a program finds when it runs."""
    seen: list[Any] = []

    def program(_: EngineSpec) -> Any:
        def run(inputs: Any, outputs: Any) -> None:
            seen.append(current(CPU).gpu)

        run.detail = ""  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with dataclasses.replace(Runtime.of(CPU), gpu=H200).open():
        NativeEngine(Component("part", torch.nn.Identity(), (), (), native=program), CPU, given).run()
    return seen


class Recorder:
    """A builder's configuration, or a part of the library, that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return name

    def set_flag(self, *values: Any) -> None:
        self.calls.append(values)

    set_memory_pool_limit = set_flag


def builder_flags(given: EngineSpec) -> Any:
    config, part = Recorder(), Recorder()
    flags = SimpleNamespace(BuilderFlag=part, HardwareCompatibilityLevel=part, MemoryPoolType=part)
    flags.ProfilingVerbosity = part
    _set_flags(config, SimpleNamespace(trt=flags, title="a library"), given.tensorrt)  # type: ignore[arg-type]
    return vars(config)


def verified(given: EngineSpec) -> Any:
    """Whether the export is requested to compare the graph with the module."""

    def graph(content: str, component: Any, module: Any, verify: bool) -> Any:
        raise InterruptedError(verify)

    library: Any = SimpleNamespace(name="tensorrt_rtx", title="a library")
    exports: Any = SimpleNamespace(graph=graph)
    with pytest.raises(InterruptedError) as stopped:
        obtain(small(), given, library, [(8, 9)], device=CPU, exports=exports)
    return stopped.value.args


def targets(given: EngineSpec) -> Any:
    """The GPUs that `vla-accel build` refuses."""
    try:
        ahead_of_time.check_targets({"vision": given}, (), torch.bfloat16)
    except EngineError as error:
        return str(error)
    return None


def profiles(given: EngineSpec) -> Any:
    return profiles_of(vision_component(MODEL, 1, 2), given.tensorrt)


def is_whole(given: EngineSpec) -> bool:
    return isinstance(island_module(vision_component(MODEL, 1, 2), given), Island)


NATIVE, RTX, TORCH = {"native"}, {"tensorrt_rtx"}, {"torch_tensorrt"}
ONNX = {"tensorrt", "tensorrt_rtx"}
BUILDER: tuple[Any, ...] = (builder_flags, lambda given: conversion_options((2, 13), given.tensorrt))
OPTIONS: dict[str, tuple[Any, set[str], tuple[Callable[[EngineSpec], Any], ...]]] = {
    "keep": (("fc2",), NATIVE, (computed,)),
    "attention": ("sdpa", NATIVE, (computed,)),
    "native.kernels": ("portable", NATIVE, ()),  # test_portable_kernels_are_those_of_another_gpu
    "native.embeddings": ("host", NATIVE, (computed,)),
    "tensorrt.targets": (("sm90",), RTX, (targets,)),
    "tensorrt.profiles": (("images.1=1:2:2",), ONNX, (profiles,)),
    "tensorrt.optimization_level": (1, ONNX | TORCH, BUILDER),
    "tensorrt.workspace_mb": (64, ONNX | TORCH, BUILDER),
    "tensorrt.weight_streaming": (True, ONNX | TORCH, BUILDER),
    "tensorrt.refit": (True, ONNX | TORCH, BUILDER),
    "tensorrt.version_compatible": (True, ONNX | TORCH, BUILDER),
    "tensorrt.hardware_compatible": (True, ONNX | TORCH, BUILDER),
    "tensorrt.timing_cache": (False, ONNX, (builder_flags,)),
    "tensorrt.whole": (True, TORCH, (is_whole,)),
    "tensorrt.verify": (False, ONNX | TORCH, (verified,)),
    "tensorrt.cache": ("engines", ONNX | TORCH, (lambda given: cache_of(given.tensorrt).folder,)),
    "tensorrt.cache_gb": (1.5, ONNX | TORCH, (lambda given: cache_of(given.tensorrt).limit,)),
}
"""Each option with a value other than its default, the engines that read it, and functions of a spec that show it."""
WITH: dict[str, dict[str, Any]] = {"keep": {"precision": "fp8"}, "tensorrt.whole": {"precision": "fp16"}}


def test_the_table_has_every_option() -> None:
    assert {*names(EngineSpec)} - {"engine", "fallback", "precision"} == {*OPTIONS}


@pytest.mark.parametrize("engine", get_args(EngineName))
@pytest.mark.parametrize("option", OPTIONS)
def test_only_engines_that_read_an_option_accept_it(option: str, engine: str) -> None:
    value, readers, _ = OPTIONS[option]
    # Engine auto takes native or eager.
    if engine in readers or (engine == "auto" and "native" in readers and option != "keep"):
        assert spec(engine, option, value) != EngineSpec(engine)  # type: ignore[arg-type]
    else:
        with pytest.raises(ConfigError, match=rf"vision\.{option}: .*{engine}"):
            spec(engine, option, value)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "keep"])
def test_an_option_may_be_for_a_fallback(option: str) -> None:
    value, readers, _ = OPTIONS[option]
    spec("eager", option, value, fallback=[min(readers)])
    other = "native" if "native" not in readers else "tensorrt"
    with pytest.raises(ConfigError, match=rf"vision\.{option}: .*eager, {other}"):
        spec("eager", option, value, fallback=[other])


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_something(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    value, readers, effects = OPTIONS[option]
    for engine in sorted(readers):
        plain = EngineSpec(engine, **WITH.get(option, {}))  # type: ignore[arg-type]
        changed = spec(engine, option, value, **WITH.get(option, {}))
        for effect in effects:
            assert effect(changed) != effect(plain)


def test_portable_kernels_are_those_of_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_of_program(EngineSpec("native"), monkeypatch) == [H200]
    for kernels in ("portable", "triton"):
        assert gpu_of_program(spec("native", "native.kernels", kernels), monkeypatch) == [H200.portable]


@pytest.mark.parametrize("engine", get_args(EngineName))
@pytest.mark.parametrize("precision", get_args(EnginePrecision))
def test_a_precision_is_taken_by_the_engines_that_have_it(engine: Any, precision: Any) -> None:
    if precision in PRECISIONS[engine]:
        assert EngineSpec(engine, precision=precision).precision == precision
    else:
        with pytest.raises(ConfigError, match=rf"precision: .*{precision}.*got {engine}"):
            EngineSpec(engine, precision=precision)


def test_a_fallback_is_another_engine() -> None:
    for chain in (("eager", "eager"), ("native", "eager", "eager")):
        with pytest.raises(ConfigError, match="fallback: expected other engines than"):
            EngineSpec(chain[0], chain[1:])  # type: ignore[arg-type]


def test_options_of_all_native_engines_and_of_one_are_not_mixed() -> None:
    mixed = {"native": {"kernels": "portable"}, "vision": {"engine": "native", "native": {"embeddings": "host"}}}
    with pytest.raises(ConfigError, match=r"vision\.native: configured twice"):
        load_config(mixed).specs(("vision", "denoise"))
    eager = {"native": {"kernels": "portable"}, "vision": "eager", "denoise": {"engine": "tensorrt"}}
    with pytest.raises(ConfigError, match="native: expected a component in engine native, got vision eager"):
        load_config(eager).specs(("vision", "denoise"))
    eager["denoise"] = {"engine": "tensorrt", "fallback": ["native"]}
    specs = load_config(eager).specs(("vision", "denoise"))
    assert [s.native.kernels for s in specs.values()] == ["auto", "portable"]


def test_a_precision_is_that_of_the_products_and_not_of_the_outputs() -> None:
    """The actions are in float32 whatever computes them."""
    component = denoise_component(MODEL, 1, 17, Schedule.uniform(2), False)
    assert component.outputs[0].dtype == torch.float32
    assert module_at(component, "bf16") is component.module
    with pytest.raises(EngineError, match=r"denoise: expected a precision of .*, got fp32"):
        module_at(component, "fp32")
    assert EagerEngine.lacks(component, "bf16") is None
    assert EagerEngine.lacks(component, "fp32") is not None
