"""TensorRT-RTX builds without a GPU: the demo policy, SigLIP's and Gemma's layers, and builds that fail."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.scales import scales_of_any
from tests.support.small_components import small
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.component import Component, Island, TensorSpec
from vla_accel.config import TensorrtOptions
from vla_accel.engines import tensorrt_builder
from vla_accel.engines.onnx import OnnxFile, export, module_at
from vla_accel.engines.tensorrt_builder import Plan, build_plan, layer_counts, pick_profile, profiles_of
from vla_accel.engines.tensorrt_library import Capability, Library, load_library
from vla_accel.engines.tensorrt_plan import body_of
from vla_accel.errors import ConfigError, EngineError
from vla_accel.families.loading import load
from vla_accel.families.pi0.network import Pi0, Pi0Config
from vla_accel.fp8 import Scales
from vla_accel.nn.denoise import denoise_component
from vla_accel.nn.flow import Schedule
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.prefix_components import kv_cache_component, vision_component
from vla_accel.nn.siglip import SiglipConfig, SiglipVision
from vla_accel.nn.variants import QuantisedKvCache

pytestmark = pytest.mark.tensorrt
TARGETS: list[Capability] = [(8, 9), (12, 0)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library("tensorrt_rtx")


@pytest.fixture(scope="module")
def demo() -> Pi0:
    model = load(NAMED["demo"], dtype=torch.bfloat16).model
    assert isinstance(model, Pi0)
    return model.requires_grad_(False)


class Exported(dict[str, tuple[Component, OnnxFile]]):
    """The demo's components, each exported and compared with eager on first use."""

    def __init__(self, demo: Pi0, folder: Path) -> None:
        self.demo, self.folder = demo, folder

    def __missing__(self, name: str) -> tuple[Component, OnnxFile]:
        if name == "vision":
            component = vision_component(self.demo, 1, 2)
        elif name == "kv_cache":
            component = kv_cache_component(self.demo, 1, 2, 20, False)
        else:
            prefix_tokens = 2 * self.demo.config.vision.tokens + 20
            component = body_of(denoise_component(self.demo, 1, prefix_tokens, Schedule.uniform(10), False))
        (folder := self.folder / name).mkdir()
        module = module_at(component, "fp16" if name == "vision" else "auto")
        self[name] = component, export(component, module, folder)
        return self[name]


@pytest.fixture(scope="module")
def exported(demo: Pi0, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(demo, tmp_path_factory.mktemp("exported"))


def build(library: Library, graph: OnnxFile, component: Component, target: Capability = (8, 9), **given: Any) -> Plan:
    options = TensorrtOptions(**given.pop("options", {}))
    return build_plan(library, graph, component, options, targets=[target], ahead=True, **given)


# The others are built small in test_build_cli.py, and exported small in test_onnx_export.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vision", "kv_cache", "denoise"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_demo_builds(library: Library, exported: Any, name: str, target: Capability) -> None:
    component, graph = exported[name]
    assert graph.similarity > 0.99999
    plan = build(library, graph, component, target)
    # Weights are in the engine, once; the rest is small.
    assert graph.weight_bytes < plan.size < 1.6 * graph.weight_bytes + 6e6
    dtypes = layer_counts(plan)
    if name == "vision":
        # The tower computes in half; what is BF16 is the bridge and the projector, nothing else.
        assert dtypes["half"] > 10 * dtypes["bf16"] > 0
        assert torch.float16 in graph.dtypes
    else:
        assert "half" not in dtypes and dtypes["bf16"] > 100


@pytest.mark.slow
def test_the_step_takes_the_time_as_an_input(exported: Any) -> None:
    component, graph = exported["denoise"]
    expected = ["noisy", "keys", "values", "target", "weights", "dt", "time", "gain", "condition"]
    assert [s.name for s in component.inputs] == expected
    # One step, not ten: two attention products a layer and one softmax.
    assert graph.operators["Softmax"] == 6


@pytest.mark.slow
def test_profiles_are_the_whole_range_or_those_requested(library: Library, exported: Any) -> None:
    component, graph = exported["vision"]
    ((low, best, high),) = (p["images"] for p in build(library, graph, component).profiles)
    assert (low[1], best[1], high[1]) == (1, 4, 4)
    plan = build(library, graph, component, options={"profiles": ("images.1=1:1:2", "images.1=3:3:4")})
    assert [p["images"][1][1] for p in plan.profiles] == [1, 3]
    both = build_plan(library, graph, component, TensorrtOptions(), targets=TARGETS, ahead=True)
    assert both.target == "sm89+sm120" and both.size > 1e6


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"weight_streaming": True}, {"optimization_level": 1, "workspace_mb": 64}], ids=str
)
def test_options_reach_the_builder(library: Library, tmp_path: Path, options: Any, monkeypatch: Any) -> None:
    seen: dict[str, Any] = {}
    real = tensorrt_builder._build

    def spy(builder: Any, network: Any, config: Any, stop: Any) -> Any:
        trt = library.trt
        seen["weight_streaming"] = config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING)
        seen["optimization_level"] = config.builder_optimization_level
        seen["workspace_mb"] = config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) >> 20
        return real(builder, network, config, stop)

    monkeypatch.setattr(tensorrt_builder, "_build", spy)
    component = small()
    graph = export(component, component.module, tmp_path, verify=False)
    assert build(library, graph, component, options=options).size > 0
    assert {k: seen[k] for k in options} == options
    assert seen["weight_streaming"] == options.get("weight_streaming", False)


def test_a_foreign_timing_cache_is_replaced(library: Library, tmp_path: Path) -> None:
    component = small()
    graph = export(component, component.module, tmp_path, verify=False)
    timing = tmp_path / "timing"
    timing.write_bytes(b"not a timing cache")
    assert build(library, graph, component, timing_cache=timing).size > 0
    first = timing.read_bytes()
    assert first and first != b"not a timing cache"
    assert build(library, graph, component, timing_cache=timing).size > 0
    timing.unlink()
    assert build(library, graph, component, timing_cache=timing, options={"timing_cache": False}).size > 0
    assert not timing.exists()


class Watcher:
    """Records a build's progress."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.open: set[str] = set()
        self.steps = 0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        assert parent is None or parent in self.open
        self.phases.append(phase)
        self.open.add(phase)

    def step(self, phase: str, step: int) -> None:
        self.steps += 1

    def finish(self, phase: str) -> None:
        self.open.discard(phase)


@pytest.mark.slow
def test_a_build_reports_its_progress_and_stops_on_ctrl_c(library: Library, exported: Any, monkeypatch: Any) -> None:
    component, graph = exported["vision"]
    whole, stopped, join = Watcher(), Watcher(), threading.Thread.join
    build(library, graph, component, progress=whole)
    assert whole.phases[0] == "Building engine" and len(whole.phases) > 3 and not whole.open

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        if timeout is not None and self.name == "tensorrt-build":
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(library, graph, component, progress=stopped)
    assert stopped.steps < whole.steps / 2
    assert not [t for t in threading.enumerate() if t.name == "tensorrt-build"]


# -- full size ----------------------------------------------------------------------------------------------------


def filled(module: nn.Module) -> nn.Module:
    """Random weights for a module on the meta device."""
    module = module.to_empty(device="cpu").requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1, generator=generator)
    return module.eval()


@pytest.mark.slow
def test_siglip_of_the_published_width_in_fp16(library: Library, tmp_path: Path) -> None:
    """Layers of width 1152: one engine with every weight in it."""
    depth = 8
    with torch.device("meta"):
        tower = SiglipVision(SiglipConfig(depth=depth))
        for part in (*tower.layers, tower.post_layernorm):
            part.half()
    tower = filled(tower)
    component = Component(
        "siglip",
        tower,
        (TensorSpec("pixels", (2, 3, 224, 224), torch.float32, {0: (1, 4)}),),
        (TensorSpec("features", (2, 256, 1152), torch.float16),),
    )
    graph = export(component, tower, tmp_path, verify=False)
    assert graph.operators["Softmax"] == depth and torch.float16 in graph.dtypes
    plan = build(library, graph, component, TARGETS[-1])
    stored = 2 * sum(p.numel() for p in tower.parameters())
    assert stored < plan.size < 1.05 * stored, "two bytes a weight, each once"
    dtypes = layer_counts(plan)
    assert dtypes["half"] > 55 * depth and dtypes["float"] < 20, "float32: the embeddings, as in the model"


@pytest.mark.slow
def test_gemma_layers_with_fp8_weights(library: Library, tmp_path: Path) -> None:
    """Two layers of a prefix: the first whole with its MLP in FP8, the second up to its keys and values."""
    width, hidden = 1024, 8192
    prefix = GemmaConfig(width, 2, hidden)
    config = Pi0Config(vision=SiglipConfig(16, 1, 16, 1), prefix=prefix, expert=GemmaConfig(64, 2, 64), vocab_size=64)
    with torch.device("meta"):
        model = Pi0(config).to_compute_dtype(torch.bfloat16)
    model = filled(model)
    assert isinstance(model, Pi0)
    module = QuantisedKvCache(model, scales_of_any(8.0))
    shape = (2, 1, 24, 1, 256)
    images = TensorSpec("image_tokens", (1, 16, width), torch.bfloat16)
    tokens = TensorSpec("tokens", (1, 8), torch.int64, {1: (1, 8)})
    outputs = (TensorSpec("keys", shape, torch.bfloat16), TensorSpec("values", shape, torch.bfloat16))
    component = Component("kv_cache", module.requires_grad_(False), (images, tokens), outputs)
    graph = export(component, module, tmp_path)
    assert graph.similarity is not None and graph.similarity > 0.9999
    # Input and weight of both products of the MLP.
    assert graph.operators["QuantizeLinear"] == graph.operators["DequantizeLinear"] == 4
    mlp = 3 * width * hidden
    for target in TARGETS:
        plan = build(library, graph, component, target)
        # The MLP is most of it: at two bytes a weight it alone would be twice as large.
        rest = graph.weight_bytes - 2 * mlp
        assert mlp + rest < plan.size < 1.1 * mlp + rest + 5e6
        assert layer_counts(plan)["fp8"] == 4
    with pytest.raises(EngineError, match=r"torch\.float8_e4m3fn needs compute capability 8\.9 or newer, got 8\.6"):
        build(library, graph, component, (8, 6))


# -- builds that fail ---------------------------------------------------------------------------------------------


class Determinant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.det(x)


class Eigenvalues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x).real


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "output", "message"),
    [
        (Determinant(), (2,), r"square: TensorRT-RTX .* has no ONNX operator Det \(node "),
        (Eigenvalues(), (2, 3), r"square: ONNX has no operator for aten\.linalg_eig"),
    ],
)
def test_a_missing_operator_is_named(
    library: Library, tmp_path: Path, module: nn.Module, output: tuple[int, ...], message: str
) -> None:
    spec, result = TensorSpec("x", (2, 3, 3), torch.float32), TensorSpec("y", output, torch.float32)
    component = Component("square", module, (spec,), (result,))
    with pytest.raises(EngineError, match=message):
        build(library, export(component, module, tmp_path), component)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ((9, 0), r"TensorRT-RTX does not run on compute capability 9\.0; it runs on 7\.5, 8\.0, 8\.6, 8\.9, 12\.0"),
        ((10, 0), r"TensorRT-RTX does not run on compute capability 10\.0"),
        ((7, 5), r"torch\.bfloat16 needs compute capability 8\.0 or newer, got 7\.5"),
    ],
)
def test_a_target_that_cannot_be_is_refused(library: Library, exported: Any, target: Any, message: str) -> None:
    component, graph = exported["vision"]
    with pytest.raises(EngineError, match=message):
        build(library, graph, component, target)


def test_too_little_memory_is_reported_before_building(library: Library, exported: Any, monkeypatch: Any) -> None:
    assert 2**28 < (tensorrt_builder.available_memory() or 0) < 2**45
    component, graph = exported["vision"]
    monkeypatch.setattr(tensorrt_builder, "available_memory", lambda: 100 * 2**20)
    with pytest.raises(EngineError, match=r"vision: building needs about 0\.5 GiB of memory, 0\.1 GiB is free"):
        build(library, graph, component)
    monkeypatch.setattr(tensorrt_builder, "available_memory", lambda: None)
    assert build(library, graph, component).size > 1e6


@pytest.mark.slow
def test_the_librarys_errors_are_in_the_message(library: Library, exported: Any) -> None:
    component, graph = exported["vision"]
    # The lean runtime that version compatibility needs is not part of TensorRT-RTX.
    with pytest.raises(EngineError, match=r"vision: build for 8\.9 .*: .*libnvinfer_lean"):
        build(library, graph, component, options={"version_compatible": True})
    # The library accepts and ignores this one.
    with pytest.raises(EngineError, match="has no hardware compatibility; build for each of the targets"):
        build(library, graph, component, options={"hardware_compatible": True})
    # The next build has no such error.
    assert build(library, graph, component).size > 1e6


def test_a_library_without_cross_builds_says_so(library: Library, exported: Any, monkeypatch: Any) -> None:
    component, graph = exported["vision"]
    plain = Library("tensorrt", object(), "10.16.1")
    monkeypatch.setattr(Library, "take_errors", lambda self: "")
    with pytest.raises(EngineError, match=r"TensorRT 10\.16\.1 builds only for the GPU it runs on, got target 8\.9"):
        build_plan(plain, graph, component, TensorrtOptions(), targets=[(8, 9)], ahead=True)


def views() -> Component:
    spec = TensorSpec("images", (1, 2, 8), torch.float32, {1: (1, 4)})
    return Component("vision", nn.Identity(), (spec,), (spec,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("images.1=1:2", r"expected INPUT\.DIMENSION=MIN:OPT:MAX, got 'images\.1=1:2'"),
        ("images.2=1:2:3", r"images\.2 is not dynamic; dynamic are: images\.1"),
        ("pixels.1=1:2:3", r"pixels\.1 is not dynamic"),
        ("images.1=1:2:5", r"expected 1 <= MIN <= OPT <= MAX <= 4"),
        ("images.1=0:2:4", r"expected 1 <= MIN"),
        ("images.1=2:1:4", r"expected 1 <= MIN"),
    ],
)
def test_a_wrong_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profiles_of(views(), TensorrtOptions(profiles=(text,)))


def test_the_profile_of_a_shape_has_the_nearest_optimum() -> None:
    profiles = profiles_of(views(), TensorrtOptions(profiles=("", "images.1=1:2:4", "images.1=1:1:4")))
    assert [pick_profile(profiles, {"images": (1, n, 8)}, "vision") for n in (1, 2, 3, 4)] == [2, 1, 0, 0]
    profiles = profiles_of(views(), TensorrtOptions(profiles=("images.1=1:1:1", "images.1=3:3:4")))
    for shape in ((1, 2, 8), (1, 3)):
        with pytest.raises(EngineError, match=r"vision: no optimization profile covers images .*; the engine has: "):
            pick_profile(profiles, {"images": shape}, "vision")


def test_a_profile_that_does_not_fit_the_graph_is_refused(library: Library, exported: Any) -> None:
    component, graph = exported["vision"]
    spec = dataclasses.replace(component.inputs[0], shape=(1, 2, 112, 224, 3))
    with pytest.raises(EngineError, match=r"vision\.images: the profile's .* does not fit the graph's"):
        build(library, graph, dataclasses.replace(component, inputs=(spec,)))


def test_a_precision_without_a_variant_or_scales_is_refused(demo: Pi0) -> None:
    component = kv_cache_component(demo, 1, 2, 20, False)
    with pytest.raises(EngineError, match="kv_cache: FP8 needs calibrated scales"):
        module_at(component, "fp8")
    one = Scales({"prefix.layers.0.gate_up_proj": 1.0}, 1, "test", "none", "none")
    some = kv_cache_component(demo, 1, 2, 20, False, scales=one)
    with pytest.raises(EngineError, match=r"no calibrated scale of prefix\.layers\.0\.down_proj; calibrate again"):
        module_at(some, "fp8")
    with pytest.raises(EngineError, match="kv_cache: expected a precision of auto, fp8, got fp16"):
        module_at(component, "fp16")
    assert module_at(component, "bf16") is component.module is module_at(component, "auto")
    tower = module_at(vision_component(demo, 1, 2), "fp16")
    assert [m.name for m in tower.modules() if isinstance(m, Island)] == ["siglip"]
