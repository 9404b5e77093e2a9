"""Each weight lies once where it is read, and is there no earlier than it is needed: counted in bytes of live tensors,
of a small model as it is and of the published sizes on the meta device."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.gpus import H200
from tests.support.scales import scales_of_any
from tests.support.tiny import PARTS, Kind, draw, tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import NativeOptions, TensorrtOptions
from vla_accel.errors import DeviceMemoryError
from vla_accel.families.bench import bench_card
from vla_accel.families.groot.family import GROOT
from vla_accel.families.loading import load
from vla_accel.families.pi0.family import PI0, PI05
from vla_accel.families.pi0.native import Pi0Store
from vla_accel.families.prompted import PromptShape
from vla_accel.kernels.gpu import Gpu
from vla_accel.nn.calibration import calibrate
from vla_accel.nn.flow import Schedule
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.memory import Counted, free_memory, tensors_in
from vla_accel.nn.native_vision import VisionWeights
from vla_accel.policy import footprint

BF16 = PolicyConfig(num_steps=2, precision="bf16", device="cpu")
NATIVE = BF16.with_specs(dict.fromkeys(PARTS, EngineSpec("native")))
EAGER = BF16.with_specs(dict.fromkeys(PARTS, EngineSpec("eager")))
FP8 = NATIVE.with_specs(dict.fromkeys(PARTS, EngineSpec("native", precision="fp8")))


def policy_of(folder: Path, config: PolicyConfig, *, whole: bool = False) -> OptimizedPolicy:
    """A warm policy, with scales for whatever asks for them."""
    checkpoint = replace(load(folder, config, dtype=torch.bfloat16, whole=whole), calibrated=scales_of_any())
    policy = OptimizedPolicy(checkpoint, config)
    policy.warm_up()
    return policy


def actions(policy: OptimizedPolicy) -> np.ndarray:
    return policy.infer(tiny_observation(), noise=draw(policy, 0))["actions"]


def live() -> list[torch.Tensor]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("config", [NATIVE, FP8, EAGER, replace(EAGER, denoise=EngineSpec("native"))])
def test_a_policy_read_part_by_part_computes_the_same_bits(
    folders: dict[Kind, Path], kind: Kind, config: PolicyConfig
) -> None:
    """As one whose model was read as a whole; with other steps, too, and the embeddings on the host."""
    whole, parts = policy_of(folders[kind], config, whole=True), policy_of(folders[kind], config)
    want = actions(whole)
    np.testing.assert_array_equal(actions(parts), want)
    if config.kv_cache.engine == "native":
        on_host = policy_of(folders[kind], replace(config, native=NativeOptions(embeddings="host")))
        np.testing.assert_array_equal(actions(on_host), want)
    np.testing.assert_array_equal(actions(parts.with_steps(3)), actions(whole.with_steps(3)))


@pytest.mark.slow
@pytest.mark.parametrize("config", [NATIVE, FP8, EAGER])
def test_each_weight_is_there_once(tmp_path: Path, config: PolicyConfig) -> None:
    write_tiny_checkpoint(tmp_path, "pi05", seed=1)
    earlier, known = live(), Counted("cpu")
    known.add(earlier)
    policy = policy_of(tmp_path, config)
    told = policy.memory()
    assert told["unused"] == 0 and told["host"] == 0
    assert told["total"] == sum(told["weights"].values()) == policy.metadata["memory"]["total"]
    # All that lives and has the size of one of the model's products is in what was told.
    held = (policy.store.tensors(), policy.pipelines.eager_weights())
    assert known.add(t for found in held for tensors in found.values() for t in tensors) == told["total"]
    sizes = {p.numel() for n, p in policy.model.named_parameters() if p.ndim == 2 and p.numel() > 300}
    assert len(sizes) > 6
    assert known.add(t for t in live() if t.numel() in sizes and t.ndim == 2 and t.is_floating_point()) == 0


def test_dead_weights_are_never_read(folders: dict[Kind, Path]) -> None:
    """The prefix's last MLP and output projection: nothing reads what they compute."""
    for config in (NATIVE, EAGER):
        policy = policy_of(folders["pi05"], config)
        last = policy.model.prefix.layers[-1]
        dead = (last.o_proj, last.gate_up_proj, last.down_proj, last.post_attention_layernorm)
        assert all(part.weight.is_meta for part in dead)
    assert not last.qkv_proj.weight.is_meta


def test_what_is_asked_for_later_is_read_again(folders: dict[Kind, Path]) -> None:
    """Another precision of one checkpoint, next to the first, from the file and not from what was rounded."""
    checkpoint = load(folders["pi05"], dtype=torch.bfloat16, whole=False)
    native, exact = (OptimizedPolicy(checkpoint, c) for c in (NATIVE, replace(EAGER, precision="fp32")))
    first = actions(native)
    alone = OptimizedPolicy(load(folders["pi05"], whole=False), replace(EAGER, precision="fp32"))
    np.testing.assert_array_equal(actions(exact), actions(alone))
    np.testing.assert_array_equal(actions(native), first)
    again = exact.with_steps(3)
    assert again.model is exact.model is not native.model


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations make inside, at most at once; `kind`: of which device type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.now, self.most = kind, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default:
            return result  # what stands on the meta device for a weight that was let go
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.kind:
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def test_calibration_has_one_block_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt")
    prefix = GemmaConfig(width=64, depth=12, mlp_dim=512, heads=2, kv_heads=1, head_dim=32)
    expert = replace(prefix, width=16, mlp_dim=16)
    write_tiny_checkpoint(tmp_path, "pi05", prefix=prefix, expert=expert)
    model: Any = load(tmp_path, dtype=torch.float32, whole=False).model
    observation = (np.ones((1, 28, 28, 3), np.uint8), np.ones(3, np.int64), np.zeros(8, np.float32))
    with Peak("cpu") as peak:
        calibrate(model, [observation], "test")
    sizes = {n: p.numel() * 4 for n, p in model.named_parameters() if n.startswith("prefix.")}
    block = sum(size for name, size in sizes.items() if ".layers.0." in name)
    assert sum(sizes.values()) > 10 * block
    assert block < peak.most < 6 * block
    assert all(p.is_meta for p in model.parameters()), "the weights are let go again"


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_calibration_reads_weights_as_they_are_stored(tmp_path: Path, kind: Kind) -> None:
    """Weights in FP16 that are not read yet give the scales of the same weights in memory."""
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt")
    write_tiny_checkpoint(tmp_path, kind)
    file = tmp_path / "model.safetensors"
    save_file({name: value.half() for name, value in load_file(file).items()}, file)
    observation = (np.full((2, 28, 28, 3), 9, np.uint8), np.arange(1, 4), np.zeros(8, np.float32))
    stored: Any = load(tmp_path, whole=False).model
    held: Any = load(tmp_path).model
    assert held.prefix.layers[0].qkv_proj.weight.dtype == torch.float16
    assert calibrate(stored, [observation], "test").amax == calibrate(held, [observation], "test").amax


def published(family: Any) -> tuple[Any, PromptShape]:
    model = bench_card(family).random(bench_card(family).published(), seed=0, device="cpu", dtype=torch.bfloat16)
    return model, PromptShape(1, Schedule.uniform(10), bench_card(family).views, 32, True)


def engines(
    vision: str = "auto", kv_cache: str = "auto", denoise: str = "auto", **native: Any
) -> dict[str, EngineSpec]:
    given = dict(zip(PARTS, (vision, kv_cache, denoise), strict=True))
    options = NativeOptions(**native)
    return {n: EngineSpec("native", precision=p, native=options) for n, p in given.items()}  # type: ignore[arg-type]


def weights_of(family: Any, **chosen: Any) -> dict[str, int]:
    model, shape = published(family)
    return footprint.weight_bytes(model, family, shape, engines(**chosen), scales_of_any())


@pytest.mark.slow
@pytest.mark.parametrize("family", [PI05, PI0])
def test_the_published_sizes_fit_into_small_gpus(family: Any) -> None:
    """Decimal gigabytes of weights; an ordinary shape's buffers take a few hundred megabytes more."""
    plain, prefix = weights_of(family), weights_of(family, kv_cache="fp8")
    vision = weights_of(family, vision="fp8", kv_cache="fp8")
    smallest = weights_of(family, vision="fp8", kv_cache="fp8", denoise="fp8", embeddings="host")
    stored = json.loads((Path(__file__).parents[2] / "benchmarks/results/memory_counted.json").read_text())
    told = stored["families"][family.name]
    for name, found in (("native-bf16", plain), ("native-fp8", prefix), ("native-fp8-vision", vision)):
        assert told[name]["bytes"] == found, name
    assert sum(plain.values()) < 6.4e9 and sum(vision.values()) < 4.2e9 and sum(smallest.values()) < 2.8e9
    # What one reads of the published sizes: two bytes, or one, of each product's weights.
    assert plain["denoise"] > 2 * 300e6 and prefix["vision"] == plain["vision"] > 1.9 * vision["vision"]
    table = 2 * 257_152 * 2048
    assert plain["kv_cache"] - weights_of(family, embeddings="host")["kv_cache"] == table


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_loading_takes_little_more_than_the_result(precision: str) -> None:
    """One layer in float32, in which norms are folded, at π0.5's published size."""
    model, shape = published(PI05)
    twin = model.away(footprint._Sizes(model)).placed(torch.device("meta"), torch.bfloat16)
    store = Pi0Store(twin, scales_of_any())
    specs = engines(precision, precision)
    with Peak("meta") as peak:
        for component in PI05.components(twin, shape, store=store):
            assert component.native is not None
            component.native(specs[component.name])
    final = sum(Counted("meta").add(tensors) for tensors in store.tensors().values())
    prefix = model.config.prefix
    layer = 4 * prefix.width * (prefix.qkv_dim + prefix.heads * prefix.head_dim + 3 * prefix.mlp_dim)
    print(f"{precision}: peak {peak.most / 1e9:.3f} GB, weights {final / 1e9:.3f} GB, a layer {layer / 1e9:.3f} GB")
    assert final < peak.most < final + layer


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.\nmore of this")


def test_a_policy_that_does_not_fit_says_what_would(folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One error, and no slow fallback, even where auto could step down."""
    monkeypatch.setattr(VisionWeights, "of", out_of_memory)
    monkeypatch.setattr(footprint, "weight_bytes", lambda *a: sizes(*a))
    policy = OptimizedPolicy(load(folders["pi05"], dtype=torch.bfloat16, whole=False), NATIVE)

    def sizes(model: Any, family: Any, shape: Any, specs: Any, scales: Any) -> dict[str, int]:
        del model, family, shape, scales
        on_host = specs["kv_cache"].native.embeddings == "host"
        return {"vision": 838_000_000, "kv_cache": 3_700_000_000 if on_host else 4_800_000_000}

    want = r"cpu: out of memory: the weights need 5\.64 GB \(vision 0\.84 GB, kv_cache 4\.80 GB\), .*; "
    want += r"5\.20 GB of 8\.00 GB were free; weights of 4\.54 GB would fit: native: "
    want += r"\{embeddings: host\} \(CUDA out of memory\. Tried to allocate 96\.00 MiB\.\)$"
    policy._free = (5_200_000_000, 8_000_000_000)
    with pytest.raises(DeviceMemoryError, match=want):
        policy.warm_up()
    policy._free = (4_000_000_000, 8_000_000_000)
    with pytest.raises(DeviceMemoryError, match="no smaller configuration of this model would fit"):
        policy.warm_up()


def test_a_precision_that_no_engine_has_is_not_advised(
    folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 of a policy in FP32."""
    real, failures = VisionWeights.of, iter([out_of_memory])
    monkeypatch.setattr(VisionWeights, "of", lambda *given: next(failures, real)(*given))
    monkeypatch.setattr(footprint.Gpu, "of", lambda _: H200)
    checkpoint = load(folders["pi05"], dtype=torch.float32, whole=False)
    policy = OptimizedPolicy(checkpoint, replace(NATIVE, precision="fp32"))
    with pytest.raises(DeviceMemoryError, match="no smaller configuration of this model would fit"):
        policy.warm_up()


@pytest.mark.parametrize(("gpu", "low"), [(H200, "fp8"), (replace(H200, capability=(8, 6)), "int8")])
@pytest.mark.parametrize("scaled", [True, False])
def test_smaller_configurations_are_those_that_the_gpu_has(
    gpu: Gpu, low: str, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights alone need no scales."""
    monkeypatch.setattr(Gpu, "of", lambda _: gpu)
    vision, prefix, expert = (f"{part}: {{engine: native, precision: {low}}}" for part in PARTS)
    host = "native: {embeddings: host}"
    parts = (expert, prefix, f"{vision}, {prefix}") if scaled else (expert,)
    texts = [text for text, _ in footprint.smaller(PI05, engines(), torch.device("cuda"), scaled)]
    assert texts == [host, *(f"{part}{end}" for part in parts for end in ("", f", {host}"))]


def test_smaller_configurations_are_of_components_that_can_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever engines, options and fallbacks the others have."""
    monkeypatch.setattr(Gpu, "of", lambda _: H200)
    rtx = EngineSpec("tensorrt_rtx", ("native", "eager"), tensorrt=TensorrtOptions(refit=True))
    specs = {"vision": EngineSpec("eager"), "kv_cache": rtx, "denoise": EngineSpec("native")}
    found = dict(footprint.smaller(PI05, specs, torch.device("cuda"), True))
    assert [*found] == [
        "denoise: {engine: native, precision: fp8}",
        "kv_cache: {engine: native, precision: fp8}",
        "vision: {engine: native, precision: fp8}, kv_cache: {engine: native, precision: fp8}",
    ]
    assert next(iter(found.values())) == {**specs, "denoise": EngineSpec("native", precision="fp8")}
    groot: dict[str, EngineSpec] = dict.fromkeys(PARTS, EngineSpec("native"))
    texts = [text for text, _ in footprint.smaller(GROOT, groot, torch.device("cuda"), True)]
    assert texts and not any("host" in text for text in texts), "its program does not read them from there"


def test_weights_are_counted_whatever_engines_the_components_have(folders: dict[Kind, Path]) -> None:
    model = load(folders["pi05"], dtype=torch.bfloat16, whole=False).model
    chain = EngineSpec("native", ("tensorrt", "eager"), tensorrt=TensorrtOptions(refit=True))
    low = EngineSpec("eager", ("native",), precision="fp8")
    specs = {"vision": EngineSpec("eager"), "kv_cache": chain, "denoise": low}
    shape = PromptShape(1, Schedule.uniform(2), 2, 32, True)
    found = footprint.weight_bytes(model, PI05, shape, specs, None)
    assert all(size > 0 for size in found.values())


def test_tensors_are_found_wherever_they_are() -> None:
    a, b = torch.zeros(4), torch.zeros(8)
    assert list(map(id, tensors_in({"a": [a, (b, "text")], "b": None, "c": EngineSpec()}))) == [id(a), id(b)]
    counted = Counted("cpu")
    assert counted.add([a, a[:2], b]) == 48 and counted.add([a]) == 0
    assert Counted("meta").add([a]) == 0 and Counted("meta").add(torch.empty(2, 3, device="meta").unbind()) == 24


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_limit_is_asked_of_a_device_with_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fraction(device: Any) -> float:
        assert isinstance(device, int), "torch refuses a device without a number here"
        return 0.5 if device == 1 else 0.0

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert free_memory(torch.device(name)) == (480, 500)
