"""Components as ONNX that was compared with the module, and everything that is refused."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support import (
    evo1_folders,
    groot_folders,
    molmoact2_folders,
    tiny_multi_task_dit,
    tiny_smolvla,
    vla_jepa_folders,
    xvla_folders,
)
from tests.support.agreement import assert_as_near
from tests.support.scales import calibrated
from tests.support.tiny import random_model, tiny_config
from vla_accel import OptimizedPolicy
from vla_accel.component import Component, TensorSpec
from vla_accel.engines import onnx
from vla_accel.engines.onnx import SIMILARITY, compare, examples, export
from vla_accel.errors import DependencyError, EngineError
from vla_accel.families.family import family_named
from vla_accel.families.pi0.network import Pi0
from vla_accel.fp8 import E4M3
from vla_accel.nn.denoise import DenoiseStep, denoise_component
from vla_accel.nn.flow import Schedule
from vla_accel.nn.prefix_components import kv_cache_component, vision_component
from vla_accel.nn.variants import QuantisedKvCache

pytestmark = pytest.mark.tensorrt


class Layer(nn.Module):
    """Two products and a nonlinearity, in any dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.nn.functional.gelu(self.a(x), approximate="tanh"))


def layer(dtype: torch.dtype = torch.float32, most: int = 6) -> Component:
    x = TensorSpec("x", (2, 8), dtype, {0: (1, most)})
    return Component("layer", Layer(dtype).requires_grad_(False), (x,), (TensorSpec("y", (2, 4), dtype),))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_graph_is_the_module_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    component = layer(dtype)
    before = {n: p.clone() for n, p in component.module.named_parameters()}
    graph = export(component, component.module, tmp_path)
    assert all(p.dtype == dtype and torch.equal(p, before[n]) for n, p in component.module.named_parameters())
    assert graph.similarity is not None and graph.similarity > 1 - 1e-9
    assert dtype in graph.dtypes and sum(graph.operators.get(n, 0) for n in ("MatMul", "Gemm")) == 2
    size = torch.tensor([], dtype=dtype).element_size()
    assert graph.weight_bytes >= size * (8 * 16 + 16 + 16 * 4 + 4)
    assert graph.path.read_bytes()[:1] and (tmp_path / "layer.onnx.data").is_file(), "weights have a file of their own"


def test_both_ends_of_a_range_are_compared(tmp_path: Path, monkeypatch: Any) -> None:
    component = layer()
    seen: list[tuple[int, ...]] = []
    real = onnx._in_float32
    monkeypatch.setattr(onnx, "_in_float32", lambda m, x: seen.append(tuple(x[0].shape)) or real(m, x))
    export(component, component.module, tmp_path)
    assert seen == [(6, 8), (1, 8)]


@pytest.mark.slow
def test_another_modules_graph_is_refused(tmp_path: Path) -> None:
    component = layer()
    graph = export(component, component.module, tmp_path, verify=False)
    assert graph.similarity is None
    other = Layer()
    with torch.no_grad():
        other.a.weight[0] += 1.0
    with pytest.raises(EngineError, match=rf"layer\.y: the ONNX graph differs .*: cosine 0\.\d+, .*{SIMILARITY}"):
        compare(component, other, graph.path)


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0.0


class Fixed(nn.Module):
    """Takes exactly six rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(6, 8)


@pytest.mark.parametrize(
    ("module", "message"),
    [(Overflow(), r"layer\.y: the module gives 48 non-finite values"), (Fixed(), "layer: cannot be exported")],
)
def test_non_finite_values_and_fixed_dimensions_are_refused(tmp_path: Path, module: nn.Module, message: str) -> None:
    component = dataclasses.replace(layer(), module=module, outputs=(TensorSpec("y", (2, 8), torch.float32),))
    with pytest.raises(EngineError, match=message):
        export(component, component.module, tmp_path)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(tmp_path: Path, package: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    component = layer()
    with pytest.raises(DependencyError, match=rf"needs the package {package} .*pip install 'vla_accel\[onnx\]'"):
        export(component, component.module, tmp_path)


# -- the policy's own components ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pi05", "pi0"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("schedule", [None, "cubic"])
def test_steps_of_the_loop_are_the_component(kind: Any, padded: bool, schedule: Any) -> None:
    model = random_model(tiny_config(kind))
    component = denoise_component(model, 2, 11, Schedule.of(schedule, 4), padded)
    assert component.loop is not None
    loop = component.loop()
    assert loop.count == 4 and isinstance(loop.body.module, DenoiseStep)
    values = dict(zip([s.name for s in component.inputs], examples(component, lambda s: s.shape), strict=True))
    if padded:
        values["lengths"] = torch.tensor([11, 7], dtype=torch.int32)
    x = values[loop.start]
    for step in range(loop.count):
        given = {**values, **{n: r[step] for n, r in loop.rows.items()}, loop.carry[0]: x}
        x = loop.body.module(*(given[s.name] for s in loop.body.inputs))
    expected = component.module(*(values[s.name] for s in component.inputs))
    assert torch.allclose(x, expected, atol=1e-6), float((x - expected).abs().max())
    assert [s.name for s in loop.body.outputs] == [loop.carry[1]]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["prefix", "padded prefix", "step"])
def test_parts_of_a_policy_export(tmp_path: Path, part: str) -> None:
    if part == "step":
        loop = denoise_component(random_model(tiny_config("pi0")), 1, 17, Schedule.uniform(3), False).loop
        assert loop is not None
        component = loop().body
    else:
        component = kv_cache_component(random_model(tiny_config("pi05")), 1, 2, 9, part == "padded prefix")
    graph = export(component, component.module, tmp_path)
    assert graph.similarity is not None and graph.similarity > 0.999999


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # GR00T N1.6 and starVLA are made of the same modules as N1.7, N1.5 and VLA-JEPA.
    ["smolvla", "groot", "groot_n15", "vla_jepa", "evo1", "xvla", "molmoact2", "multi_task_dit"],
)
def test_every_component_of_a_family_exports(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name == "smolvla":
        # Where actions only cross, a row without a real token would attend to nothing.
        folder, observation = tmp_path / "smolvla", tiny_smolvla.observation(libero=True)
        tiny_smolvla.write_lerobot(folder, libero=True)
    elif name == "multi_task_dit":
        folder, observation = tiny_multi_task_dit.write_lerobot(tmp_path / name), tiny_multi_task_dit.observation(0, 2)
    else:
        made = {**groot_folders.OBSERVATIONS, "vla_jepa": vla_jepa_folders.observation}
        made |= {"evo1": evo1_folders.observation, "xvla": xvla_folders.observation}
        made |= {"molmoact2": lambda: molmoact2_folders.given()[0]}
        make = made[name]
        folder, observation = request.getfixturevalue("flow_folders")[name], make()
    policy = OptimizedPolicy.from_pretrained(folder, device="cpu")
    family, model = family_named(name), policy.model.whole()
    inputs = [policy.processor.prepare(observation)]
    shape = family.shape(model.config, inputs, Schedule.uniform(2), policy.specs)
    shape = dataclasses.replace(shape, padded=True) if hasattr(shape, "padded") else shape
    for component in family.components(model, shape):
        body = component.loop().body if component.loop else component
        graph = export(body, body.module, tmp_path)
        assert graph.similarity is not None and graph.similarity > 0.99999, component.name
        # TensorRT-RTX has no ScatterND.
        assert name == "smolvla" or not any("Scatter" in operator for operator in graph.operators)


def test_the_narrow_tower_is_the_component(tmp_path: Path) -> None:
    model = random_model(tiny_config("pi05")).to_compute_dtype(torch.bfloat16)
    component = vision_component(model, 2, 3)
    images = examples(component, lambda s: s.shape)
    exact = copy.deepcopy(component.module).float()(*images)
    narrow = component.variants["fp16"]()
    got, plain = narrow(*images), component.module(*images)
    assert got.dtype == plain.dtype == torch.bfloat16
    # Finer than BF16 but for the projector, which both have in BF16.
    assert_as_near(got, plain, exact, 1.0)
    tower = narrow.tower.inner
    assert {p.dtype for p in tower.layers.parameters()} == {torch.float16}  # pyright: ignore[reportAttributeAccessIssue]
    assert tower.patch_embedding.weight.dtype == torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    assert narrow.projector is model.projector, "the projector is the model's own, in BF16"
    assert {p.dtype for p in model.vision.layers.parameters()} == {torch.bfloat16}, (
        "the policy's own tower is untouched"
    )


# -- FP8 ----------------------------------------------------------------------------------------------------------


def prefix_inputs(model: Pi0) -> tuple[Tensor, Tensor]:
    """What the observation of `calibrated` gives the prefix."""
    rng = np.random.default_rng(3)
    images, tokens = rng.integers(0, 256, (2, 28, 28, 3), np.uint8), rng.integers(0, 40, 9)
    vision = vision_component(model, 1, 2).module
    return vision(torch.from_numpy(images)[None]), torch.from_numpy(tokens)[None]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_vision_with_pixel_maps_is_checked_on_images_that_count(tmp_path: Path, precision: Any) -> None:
    """A random pixel map leaves no image inside of the bars, so a graph without images would pass."""
    model = random_model(tiny_config("pi05")).to_compute_dtype(torch.bfloat16)
    component = vision_component(model, 1, 2, mapped=True)
    module = onnx.module_at(component, precision)
    images, maps = examples(component, lambda s: s.shape)
    size, plain = images.shape[-2], module(images, maps)
    for row, counts in ((0, False), (size - 1, False), (size // 2, True)):
        changed = images.clone()
        changed[:, :, row] = 255 - changed[:, :, row]
        assert torch.allclose(module(changed, maps), plain, atol=1e-2 if counts else 0.0) is not counts
    graph = export(component, module, tmp_path)
    assert graph.similarity is not None and graph.similarity > SIMILARITY


@pytest.mark.slow
def test_the_quantised_prefix_is_the_component_but_for_fp8() -> None:
    model = random_model(tiny_config("pi05"))
    component, inputs = kv_cache_component(model, 1, 2, 9, False), prefix_inputs(model)
    module = QuantisedKvCache(model, calibrated(model))
    for got, want in zip(module(*inputs), component.module(*inputs), strict=True):
        assert torch.equal(got[0], want[0]), "the first layer's keys and values come before any MLP"
        assert 1e-4 < float((got - want).norm() / want.norm()) < 0.05
    for island in module.mlps:
        for name in ("gate_up_proj", "down_proj"):
            getattr(island.inner, name).input_quantizer.disable()
            getattr(island.inner, name).weight_quantizer.disable()
    padded, lengths = kv_cache_component(model, 1, 2, 9, True), torch.tensor([14], dtype=torch.int32)
    for got, want in zip(module(*inputs, lengths), padded.module(*inputs, lengths), strict=True):
        assert torch.allclose(got, want, atol=1e-5), "the norm's weight is folded into gate and up"


@pytest.mark.slow
def test_quantisation_leaves_the_model_unchanged() -> None:
    model = random_model(tiny_config("pi05"))
    before = {n: p.clone() for n, p in model.named_parameters()}
    QuantisedKvCache(model, calibrated(model))(*prefix_inputs(model))
    assert {n: torch.equal(p, before[n]) for n, p in model.named_parameters()} == dict.fromkeys(before, True)
    assert type(model.prefix.layers[0].down_proj) is nn.Linear


def test_scales_are_powers_of_two_that_hold_every_value() -> None:
    model = random_model(tiny_config("pi05"))
    scales = calibrated(model)
    quantised = QuantisedKvCache(model, scales)
    for index, island in enumerate(quantised.mlps):
        for name in ("gate_up_proj", "down_proj"):
            linear = getattr(island.inner, name)
            for quantizer, most in (
                (linear.input_quantizer, scales.of(f"prefix.layers.{index}.{name}")),
                (linear.weight_quantizer, float(linear.weight.abs().max())),
            ):
                amax = float(quantizer.amax)
                assert most <= amax < 2 * most * 1.0001
                assert amax / 448 == E4M3.scale(most, power_of_two=True)
                assert float(np.frexp(amax / 448)[0]) == 0.5


@pytest.mark.slow
def test_quantisers_become_q_and_dq(tmp_path: Path) -> None:
    model = random_model(tiny_config("pi05")).to_compute_dtype(torch.bfloat16)
    component = kv_cache_component(model, 1, 2, 9, False)
    module = QuantisedKvCache(model, calibrated(model)).requires_grad_(False)
    graph = export(component, module, tmp_path)
    assert graph.operators["QuantizeLinear"] == graph.operators["DequantizeLinear"] == 2 * 4
    assert torch.float8_e4m3fn in graph.dtypes
    # The island alone agrees as closely as any graph.
    mlp = module.mlps[0].inner
    x = TensorSpec("x", (1, 5, 18), torch.bfloat16)
    alone = Component("mlp", mlp, (x,), (dataclasses.replace(x, name="y"),))  # pyright: ignore[reportArgumentType]
    assert (export(alone, mlp, tmp_path).similarity or 0) > SIMILARITY  # pyright: ignore[reportArgumentType]
