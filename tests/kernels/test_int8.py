"""INT8: weights by output channel, activations by tensor, exact sums; what is refused and what the ledger says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpus import A100, ARCHITECTURES, H200, ORIN, RTX_4090
from tests.support.runtimes import steered
from tests.support.scales import scales_of_any
from tests.support.scripts import lines_of, needs_triton
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.engines.native import why_not
from vla_accel.errors import CheckpointError, ConfigError, EngineError
from vla_accel.families.loading import load
from vla_accel.fp8 import E4M3, FORMATS, INT8, no_scales
from vla_accel.kernels import config as configs
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.gemm import int8
from vla_accel.kernels.gemm.choice import has_hopper_gemm, products_by
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.hopper import planned
from vla_accel.kernels.gemm.int8 import candidates, default
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import make_linear, pair
from vla_accel.kernels.gpu import Gpu
from vla_accel.measure.parity import compare, reference_of
from vla_accel.measure.random_policy import calibrate_on_noise, random_observations
from vla_accel.runtime import current

ROOT = Path(__file__).parents[2]
PARTS = ("vision", "kv_cache", "denoise")
BF16 = PolicyConfig(num_steps=2, precision="bf16", device="cpu").with_specs(dict.fromkeys(PARTS, EngineSpec("native")))
INT8_PREFIX = replace(BF16, kv_cache=EngineSpec("native", precision="int8"))
INT8_VISION = replace(INT8_PREFIX, vision=EngineSpec("native", precision="int8"))
INT8_EXPERT = replace(BF16, denoise=EngineSpec("native", precision="int8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    write_tiny_checkpoint(folder, "pi05")
    return folder


def policy_of(folder: Path, config: PolicyConfig) -> OptimizedPolicy:
    checkpoint = replace(load(folder, config, dtype=torch.bfloat16, whole=False), calibrated=scales_of_any())
    policy = OptimizedPolicy(checkpoint, config)
    policy.warm_up()
    return policy


# -- numbers ------------------------------------------------------------------------------------------------------


def test_each_output_has_a_scale_and_half_a_step_is_the_largest_error() -> None:
    weight = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 12)[:, None]
    weight[5] = 0
    layer = make_linear(weight, None, torch.bfloat16, 6.35, pad_k=8, pad_n=4, form=INT8)
    assert layer.weight.dtype == torch.int8 and layer.weight.shape == (16, 48) and layer.weight_scale is not None
    assert layer.input_scale_value == pytest.approx(6.35 / 127)
    scale = layer.weight_scale[:12]
    torch.testing.assert_close(scale[[0, 11]], weight[[0, 11]].abs().amax(1) / 127)
    error = (layer.weight[:12, :40].float() * scale[:, None] - weight).abs()
    assert bool((error <= scale[:, None] * 0.5001).all()) and int(layer.weight.abs().max()) == 127
    assert not layer.weight[12:].any() and not layer.weight[5].any() and not layer.weight[:, 40:].any()


def test_integers_are_the_nearest_and_saturate() -> None:
    values = torch.tensor([0.4, 0.5, -0.5, 1.5, -1.5, 126.6, 127.5, 500.0, -500.0])
    assert INT8.saturated(values).tolist() == [0, 1, 0, 2, -1, 127, 127, 127, -127]
    assert FORMATS == {"fp8": E4M3, "int8": INT8} and INT8.scale(12.7) == pytest.approx(0.1)
    assert no_scales("int8").startswith("INT8 needs calibrated scales next to the checkpoint (fp8_scales.json)")


@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_exact(bias: bool) -> None:
    """Against integers in int64: depths of a real MLP, where float32 would round the sums."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(100, 128, (3, 16_384), generator=generator, dtype=torch.int8)
    layer = make_linear(torch.randn(8, 16_384, generator=generator), torch.ones(8) if bias else None, torch.float32,
                        127.0, form=INT8)  # fmt: skip
    layer = replace(layer, weight=torch.randint(100, 128, (8, 16_384), generator=generator, dtype=torch.int8))
    assert layer.weight_scale is not None
    out = torch.empty(3, 8, dtype=torch.float64)
    gemm(x, layer, out)
    sums = x.long() @ layer.weight.long().T
    assert int(sums.max()) > 1 << 24
    want = sums.float() * layer.weight_scale
    assert torch.equal(out, (want + 1 if bias else want).double())


def test_paired_rows_keep_their_scales() -> None:
    weight = torch.randn(32, 24, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 33)[:, None]
    whole = make_linear(weight, None, torch.bfloat16, 1.0, form=INT8)
    paired = pair(whole)
    x = torch.randint(-127, 128, (5, 24), dtype=torch.int8)
    plain, mixed = torch.empty(5, 32), torch.empty(5, 32)
    gemm(x, whole, plain)
    gemm(x, paired, mixed)
    assert torch.equal(mixed.unflatten(1, (2, 2, 8)).transpose(1, 2).flatten(1), plain)


def test_no_hopper_kernel_is_taken_for_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables know BF16, FP16 and FP8, and would take an unknown one for BF16."""
    monkeypatch.setattr(Gpu, "of", lambda _: H200)
    weight = torch.empty(2048, 2048, device="meta")
    assert planned(H200, torch.bfloat16, Activation.NONE, 544, 2048, 2048) is not None
    with steered("cuda", torch.device("meta")):
        for inside in (True, False):
            quantised = make_linear(weight, None, torch.bfloat16, 1.0, form=INT8)
            assert not has_hopper_gemm(544, quantised, Activation.NONE, inside=inside)
        assert has_hopper_gemm(544, make_linear(weight, None, torch.bfloat16), Activation.NONE, inside=True)


# -- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_triton
def test_kernels_agree_with_their_references_to_the_last_bit() -> None:
    rows = [json.loads(line) for line in lines_of("interpret_int8")]
    assert len(rows) == 19
    for name, difference, share, largest in rows:
        if name.startswith("product"):
            assert difference == 0 and largest >= 127, name
        elif "quantised=False" in name:
            # Of exponentials in float32.
            assert difference <= 2e-6 * largest and largest > 5, name
        else:
            # Another CPU rounds a norm otherwise: a value near the middle may be one step off.
            assert difference <= 1 and share <= 0.02 and largest == 127, name


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("version", ["8.0", "9.0", "12.0"])
def test_every_tile_compiles_into_integer_tensor_cores(version: str, tmp_path: Path) -> None:
    """Without a GPU; on one with 163 KB of shared memory for a block, with 227 KB and with 99 KB."""
    rows = [json.loads(line) for line in lines_of("compile_each", "int8", version, cache=tmp_path)]
    assert len(rows) == 2 * len(candidates(ARCHITECTURES[version], 544)) + 1 and len(rows) >= 17
    for row in rows:
        assert row["fits"] and row["spilled"] <= 512, row
        assert row["integers"] and all(".s8.s8" in name for name in row["integers"]), row


def test_tiles_fit_the_gpu_and_the_rows() -> None:
    for gpu in ARCHITECTURES.values():
        for rows in (1, 33, 65, 129, 968):
            first, *others = candidates(gpu, rows)
            assert first == default(rows) and first not in others and first.shared <= 99 << 10
            assert len({str(tile) for tile in (first, *others)}) == 1 + len(others) >= 2
            assert all(tile.shared <= gpu.shared_per_block and tile.rows < 2 * max(rows, 64) for tile in others)
    assert max(t.shared for t in candidates(RTX_4090, 968)) <= 99 << 10 < max(t.shared for t in candidates(A100, 968))


def test_a_measured_tile_is_the_one_that_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with nothing computed: what is the quickest is said."""
    launched: list[Any] = []
    monkeypatch.setattr(configs, "_MEASURED", {})
    monkeypatch.setattr(Gpu, "of", lambda _: RTX_4090)
    monkeypatch.setattr(int8, "launch", lambda *words: launched.append(words[4]))
    layer = make_linear(torch.randn(64, 48), None, torch.bfloat16, 1.0, form=INT8)
    asked = []

    def quickest(what: str, ways: Any, device: torch.device, calls: int) -> Fastest:
        asked.append(what)
        return Fastest(sorted(ways)[-1])

    monkeypatch.setattr(configs, "remembered", quickest)
    x, out = torch.zeros(200, 48, dtype=torch.int8), torch.zeros(200, 32)
    geglu, swiglu = Epilogue(activation=Activation.GEGLU), Epilogue(activation=Activation.SWIGLU)
    with steered("triton"):
        gemm(x, layer, out, geglu)
        int8.tune(layer, Activation.GEGLU, 200)
        int8.tune(layer, Activation.GEGLU, 200)
        assert asked == ["INT8 geglu 200x64x48"]
        gemm(x, layer, out, geglu)
        gemm(x, layer, out, swiglu)
        gemm(x[:100], layer, out[:100], geglu)
        with replace(current(x), deterministic=True).open():
            int8.tune(layer, Activation.SWIGLU, 200)
            gemm(x, layer, out, geglu)
    assert asked == ["INT8 geglu 200x64x48"]
    best = max(candidates(RTX_4090, 200), key=str)
    assert best != default(200) and launched == [default(200), best, default(200), default(100), default(200)]
    # The ledger names it, and calls nothing of ours the library's.
    plain = make_linear(torch.randn(64, 48), None, torch.bfloat16)
    products = {"gate_up": (layer, Activation.GEGLU), "o": (layer, Activation.NONE), "qkv": (plain, Activation.NONE)}
    reason = f"it needs compute capability 9.0, {RTX_4090.name} has 8.9"
    with steered("cuda"):
        said, early = products_by(200, products)
    assert said == f", products in INT8 by Triton ({best}): gate_up, o; by cuBLAS (CUDA C++ out: {reason}): qkv"
    assert not early


# -- in a policy --------------------------------------------------------------------------------------------------


def test_the_ledger_says_which_products_are_integers(folder: Path) -> None:
    policy = policy_of(folder, INT8_VISION)
    details = {e["component"]: str(e["detail"]) for e in policy.metadata["engines"]}
    assert details["kv_cache"].startswith("fused ops, INT8") and "; INT8: o_proj, gate_up_proj" in details["kv_cache"]
    assert details["vision"].startswith("fused ops, INT8") and "; INT8: qkv_proj, out_proj" in details["vision"]
    assert "INT8" not in details["denoise"]
    plain = policy_of(folder, BF16).memory()["weights"]
    weights = policy.memory()["weights"]
    assert weights["vision"] < plain["vision"] and weights["kv_cache"] < plain["kv_cache"]
    horizon, dim = policy.action_shape
    noise = np.random.default_rng(0).standard_normal((horizon, dim)).astype(np.float32)
    first = policy.infer(tiny_observation(), noise=noise)["actions"]
    assert not np.array_equal(first, policy_of(folder, BF16).infer(tiny_observation(), noise=noise)["actions"])


def test_what_cannot_be_is_one_error_each(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"kv_cache: .*\(native: INT8 needs calibrated scales next to the checkpoint"):
        OptimizedPolicy.from_pretrained(folder, INT8_PREFIX)
    write_tiny_checkpoint(tmp_path, "pi05", seed=1)
    scales = replace(scales_of_any(), amax={"prefix.layers.0.o_proj": 1.0}, fingerprint="of others")
    scales.save(tmp_path)
    with pytest.raises(CheckpointError, match="they were measured on other weights"):
        OptimizedPolicy.from_pretrained(tmp_path, INT8_PREFIX)
    with pytest.raises(ConfigError, match=r"precision: .*int8.*, got tensorrt"):
        EngineSpec("tensorrt", precision="int8")
    policy = policy_of(folder, replace(BF16, kv_cache=EngineSpec("tensorrt", ("native",), precision="int8")))
    entry = policy.ledger.entries["kv_cache"]
    assert entry.used == "native" and entry.reason.startswith("tensorrt: ") and "int8" in entry.reason
    with pytest.raises(
        EngineError,
        match=r"kv_cache: .*\(native: the native engine of a fp32 policy has fp32, got int8",
    ):
        OptimizedPolicy(load(folder, whole=False), replace(INT8_PREFIX, precision="fp32")).warm_up()


def test_gpus_with_and_without_the_type() -> None:
    assert all(why_not(gpu, "int8") is None for gpu in (A100, ORIN, RTX_4090, H200))
    assert "needs compute capability 8.0 or newer" in str(why_not(replace(A100, capability=(7, 0)), "int8"))
    assert why_not(A100, "fp8") is not None


def test_the_shipped_configuration() -> None:
    config = load_config("native_int8")
    assert config.kv_cache == EngineSpec("native", ("eager",), "int8") and config.vision.precision == "auto"


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [INT8_EXPERT, INT8_PREFIX, INT8_VISION], ids=["expert's weights", "prefix", "prefix and vision"]
)
def test_the_demo_agrees_in_integers(config: PolicyConfig) -> None:
    """The reference ops on the CPU compute what the kernels do. The scales are of random observations, which these are:
    the bundled ones are of camera frames, whose ranges noise does not keep to."""
    checkpoint = load("demo", dtype=torch.float32)
    scales = calibrate_on_noise(checkpoint.family, checkpoint.model, checkpoint.processor)
    policy = OptimizedPolicy(replace(checkpoint, calibrated=scales), replace(config, num_steps=3, strict=True))
    reference = reference_of(policy.config, load("demo", policy.config, dtype=torch.float32, whole=False))
    # Standard normal states, most of them outside the demo's range: noise, as the images are.
    rng, preset = np.random.default_rng(0), policy.processor.preset
    states = [preset.split(rng.standard_normal(preset.state_dim)) for _ in range(3)]
    observations = [{**one, **state} for one, state in zip(random_observations(policy, 3), states, strict=True)]
    report = compare(policy, reference, observations, name="int8")
    assert report.passed and report.flipped == 0 and report.threshold == 0.998
    assert {e["used"] for e in report.engines} == {"native"}
    print(f"cosine {report.actions.cosine:.6f}")
