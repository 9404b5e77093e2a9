"""FP8: the rounding rule, scales with a fingerprint of their weights, and the products that each engine quantises."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.scales import scales_of_any
from tests.support.tiny import random_model, tiny_config, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig, cli, progress
from vla_accel.errors import CheckpointError, ConfigError, DependencyError, EngineError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.loading import find, load
from vla_accel.families.pi0.family import PI05
from vla_accel.families.pi0.native_loop import expert_weights
from vla_accel.fp8 import E4M3, FILE, Scales, fingerprint, read_scales, scales_for
from vla_accel.nn.calibration import calibrate, load_modelopt
from vla_accel.nn.native_prefix import PrefixWeights
from vla_accel.nn.native_vision import VisionWeights
from vla_accel.nn.quantised import QUANTISED, calibrated_products

CPU = torch.device("cpu")
PARTS = ("vision", "kv_cache", "denoise")
EAGER = PolicyConfig(num_steps=1, precision="bf16", device="cpu").with_specs(dict.fromkeys(PARTS, EngineSpec("eager")))
FP8 = replace(EAGER, kv_cache=EngineSpec("native", precision="fp8"))


def test_the_rule_uses_the_whole_range() -> None:
    for amax in (1e-3, 1.0, 447.0, 1e5):
        x = torch.tensor([amax, -amax, 2 * amax])
        stored = E4M3.saturated(x / E4M3.scale(amax))
        assert stored.dtype == torch.float8_e4m3fn
        assert stored.float().tolist() == [448.0, -448.0, 448.0], "largest is largest, beyond it saturates"
    assert E4M3.scale(0.0) > 0
    assert E4M3.scale(448.0, power_of_two=True) == 1.0 and E4M3.scale(449.0, power_of_two=True) == 2.0


MODEL = random_model(tiny_config("pi05"))
PRODUCTS = calibrated_products(MODEL.config)


def test_a_checkpoint_has_one_fingerprint_in_every_dtype() -> None:
    found = {fingerprint(random_model(tiny_config("pi05")).to(d), PRODUCTS) for d in (torch.float32, torch.bfloat16)}
    found.add(fingerprint(random_model(tiny_config("pi05")).to_compute_dtype(torch.bfloat16), PRODUCTS))
    assert found == {fingerprint(MODEL, PRODUCTS)}


def test_only_weights_of_vision_and_prefix_change_the_fingerprint() -> None:
    changed, before = random_model(tiny_config("pi05")), fingerprint(MODEL, PRODUCTS)
    for name, parameter in changed.named_parameters():
        old = parameter.data.clone()
        parameter.data.mul_(1.01)
        assert (fingerprint(changed, PRODUCTS) != before) == name.startswith(("vision.", "prefix.")), name
        parameter.data.copy_(old)


class Net(nn.Module):
    """One product that is much larger than its sample."""

    def __init__(self, rows: int = 8192, columns: int = 64) -> None:
        super().__init__()
        self.product = nn.Linear(columns, rows, bias=False)
        nn.init.constant_(self.product.weight, 1.0)


def test_every_column_and_the_shape_count() -> None:
    whole = fingerprint(Net(), ["product"])
    for column in range(64):
        net = Net()
        net.product.weight.data[:, column] = 2.0
        assert fingerprint(net, ["product"]) != whole, f"column {column}"
    assert fingerprint(Net(4096, 128), ["product"]) != whole


def scales(**changes: Any) -> Scales:
    amax = dict.fromkeys(PRODUCTS, 1.5)
    return replace(Scales(amax, 7, "some.npz", "0.1", fingerprint(MODEL, PRODUCTS)), **changes)


def test_scales_return_from_their_file(tmp_path: Path) -> None:
    assert read_scales(tmp_path) is None and scales_for(MODEL, tmp_path) is None
    assert scales().save(tmp_path) == tmp_path / FILE
    assert read_scales(tmp_path) == scales_for(MODEL, tmp_path) == scales()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "vla_accel.fp8_scales/1"}, r"format 1 has no fingerprint of the weights; calibrate again: vla-acc"),
        ({"format": "other"}, r"expected format .*fp8_scales/2' with a fingerprint and a table of amax.*calibrate ag"),
        ({"fingerprint": ""}, r"expected format .*fp8_scales/2' with a fingerprint.*calibrate again"),
        ({"amax": [1.0]}, "with a fingerprint and a table of amax"),
        ({"amax": {"a": 0.0, "b": "x", "c": 1.0}}, "expected positive numbers, got others at a, b"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = scales().save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=rf"FP8 scales .*{FILE}: .*{message}"):
        read_scales(tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="expected JSON"):
        read_scales(tmp_path)


def test_scales_of_other_weights_are_refused(tmp_path: Path) -> None:
    scales(fingerprint="0123").save(tmp_path)
    said = rf"{FILE}: they were measured on other weights \(fingerprint 0123, .*; calibrate again: vla-accel calibrate"
    with pytest.raises(CheckpointError, match=said):
        scales_for(MODEL, tmp_path)
    scales(amax={**dict.fromkeys(PRODUCTS, 1.0), "prefix.layers.9.o_proj": 1.0}).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"products that the model lacks: prefix\.layers\.9\.o_proj"):
        scales_for(MODEL, tmp_path)


def test_retrained_weights_in_the_same_folder_are_refused_in_fp8(tmp_path: Path) -> None:
    config = tiny_config("pi05")
    write_tiny_checkpoint(tmp_path, "pi05")
    model = load(tmp_path, device=CPU).model
    products = calibrated_products(config)
    Scales(dict.fromkeys(products, 32.0), 1, "test", "0", fingerprint(model, products)).save(tmp_path)
    policy = OptimizedPolicy.from_pretrained(tmp_path, FP8)
    assert "FP8: o_proj, gate_up_proj, down_proj" in str(policy.ledger.entries["kv_cache"].detail)
    assert policy.with_steps(2).scales is policy.scales is not None
    Scales(dict.fromkeys(products, 32.0), 1, "test", "0", "of others").save(tmp_path)
    with pytest.raises(CheckpointError, match="calibrate again"):
        OptimizedPolicy.from_pretrained(tmp_path, FP8)
    assert OptimizedPolicy.from_pretrained(tmp_path, EAGER).scales is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bundled_scales_belong_to_the_bundled_weights(dtype: torch.dtype) -> None:
    model = load("demo", device=CPU, dtype=dtype).model
    found = scales_for(model, find("demo"))
    assert found is not None and list(found.amax) == calibrated_products(model.config)


def test_native_programs_quantise_the_products_of_the_table() -> None:
    given, expert = scales_of_any(), MODEL.config.expert.block()
    stacks = {
        "vision": VisionWeights.of(MODEL, "fp8", given).stack,
        "kv_cache": PrefixWeights.of(MODEL, "fp8", given).stack,
    }
    found = {component: (stack.block.names, stack.blocks[0]) for component, stack in stacks.items()}
    found["denoise"] = expert.names, expert_weights(MODEL, "fp8").layers[0]
    for component, (names, products) in found.items():
        four = zip((names.qkv, names.out, names.up, names.down), products, strict=True)
        narrow = {name for name, product in four if product.weight.dtype == E4M3.dtype}
        assert narrow == set(QUANTISED[component]["native"].names), component


@pytest.mark.parametrize("component", ["vision", "kv_cache"])
def test_kept_products_stay_as_they_are(component: str, tmp_path: Path) -> None:
    names = QUANTISED[component]["native"].names
    write_tiny_checkpoint(tmp_path, "pi05")
    source = OptimizedPolicy.from_pretrained(tmp_path, EAGER)
    checkpoint = replace(source.checkpoint, calibrated=scales_of_any())
    observation = source.processor.example()
    noise = np.zeros(source.action_shape, np.float32)

    def answer(spec: EngineSpec) -> tuple[np.ndarray, str]:
        policy = OptimizedPolicy(checkpoint, replace(EAGER, **{component: spec}))
        raw = policy.infer_with_internals(observation, noise=noise)[1]
        return raw["image_tokens" if component == "vision" else "keys"], policy.ledger.entries[component].detail

    wide, _ = answer(EngineSpec("native"))
    whole, _ = answer(EngineSpec("native", precision="fp8"))
    errors: dict[tuple[str, ...], float] = {(): float(np.abs(whole - wide).mean())}
    for keep in ((names[0],), (names[-1],), names[:-1], names[1:]):
        found, detail = answer(EngineSpec("native", precision="fp8", keep=keep))
        left = [name for name in names if name not in keep]
        assert f"FP8: {', '.join(left)}, kept as they are: {', '.join(keep)}" in detail
        errors[keep] = float(np.abs(found - wide).mean())
    assert min(errors.values()) > 0 and max(errors[names[:-1]], errors[names[1:]]) < errors[()]


def test_products_that_cannot_be_kept_are_named() -> None:
    given = scales_of_any()
    with pytest.raises(EngineError, match="keep: expected some of qkv_proj, out_proj, fc1, fc2, got down_proj"):
        VisionWeights.of(MODEL, "fp8", given, ("down_proj",))
    with pytest.raises(EngineError, match="got all of them"):
        PrefixWeights.of(MODEL, "fp8", given, keep=QUANTISED["kv_cache"]["native"].names)
    for wrong in ({"engine": "eager", "precision": "fp8"}, {"engine": "native"}):
        with pytest.raises(ConfigError, match=r"keep: expected products of the native engine.*, got fc2"):
            EngineSpec(**wrong, keep=("fc2",))  # type: ignore[arg-type]


def test_the_ledger_names_the_quantised_products(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "pi05")
    source, spec = OptimizedPolicy.from_pretrained(tmp_path, EAGER), EngineSpec("native", precision="fp8")
    config = replace(EAGER, vision=spec, kv_cache=spec, denoise=spec)
    policy = OptimizedPolicy(replace(source.checkpoint, calibrated=scales_of_any()), config)
    policy.warm_up()
    entries = policy.ledger.entries
    assert "FP8: qkv_proj, out_proj, fc1, fc2" in entries["vision"].detail
    assert "FP8 weights only: qkv_proj, o_proj, gate_up_proj, down_proj" in entries["denoise"].detail
    rtx = QUANTISED["kv_cache"]["tensorrt_rtx"].described("fp8")
    assert "gate_up_proj, down_proj, scales powers of two" in rtx


def test_a_fallback_to_eager_records_the_other_precision(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "pi05")
    config = replace(EAGER, kv_cache=EngineSpec("tensorrt", ("eager",), precision="fp8"))
    policy = OptimizedPolicy.from_pretrained(tmp_path, config)
    entry = policy.ledger.entries["kv_cache"]
    assert (entry.requested, entry.used, entry.fell_back) == ("tensorrt", "eager", True)
    assert policy.model.dtype == torch.bfloat16
    assert "policy's own precision, bf16" in entry.detail and "fp8" in entry.detail


def test_a_configuration_needs_scales_where_inputs_are_quantised() -> None:
    fp8 = EngineSpec("native", precision="fp8")
    plain = EAGER.specs(PARTS)
    needs_scales = PI05.capabilities.needs_scales
    assert needs_scales(FP8.specs(PARTS)) and needs_scales({**plain, "vision": fp8})
    assert needs_scales({**plain, "kv_cache": EngineSpec("eager", fallback=("native",), precision="fp8")})
    assert not needs_scales(plain) and not needs_scales({**plain, "denoise": fp8})


def test_a_product_without_a_scale_is_named() -> None:
    with pytest.raises(EngineError, match=r"no calibrated scale of prefix\.layers\.0\.o_proj; calibrate again"):
        PrefixWeights.of(MODEL, "fp8", scales(amax={"prefix.layers.0.qkv_proj": 1.0}))


def test_without_modelopt_one_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("modelopt", "modelopt.torch", "modelopt.torch.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    unread: Any = SimpleNamespace()  # has no weights to read
    message = r"FP8 needs nvidia-modelopt \(.*\); pip install 'vla_accel\[onnx\]'"
    for call in (
        lambda: calibrate(MODEL, [], "test"),
        load_modelopt,
        lambda: bench_card(family_named("pi05")).calibrate(unread, [], ""),
    ):
        with pytest.raises(DependencyError, match=message):
            call()


def test_calibrate_reports_missing_modelopt_before_it_reads_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    assert cli.main(["calibrate", "no folder", "--observations", "no file.npz"]) == 1
    assert "FP8 needs nvidia-modelopt" in capsys.readouterr().err


def test_progress_is_reported_block_by_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt")
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    one = (np.zeros((1, 28, 28, 3), np.uint8), np.ones(3, np.int64), np.zeros(MODEL.config.action_dim, np.float32))
    seen = [tuple(value + i if value.dtype == np.uint8 else value for value in one) for i in (1, 2)]
    calibrate(MODEL, seen, "test")
    blocks = MODEL.config.vision.depth + MODEL.config.prefix.depth
    want = [f"calibrating: {100 * n // blocks} %" for n in range(1, blocks + 1)]
    assert capsys.readouterr().err.splitlines() == want
