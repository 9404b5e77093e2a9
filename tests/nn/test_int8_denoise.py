"""The action expert's weights in INT8 with BF16 activations, on the CPU through the ops' references: what is
computed, what the ledger says, what is refused. The kernels are in test_kernels.py and test_kernels_compile.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import tiny_smolvla
from tests.support.agreement import assert_as_near
from tests.support.groot_folders import observation as groot_observation
from tests.support.tiny import random_state, tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.config import EnginePrecision
from vla_accel.errors import EngineError
from vla_accel.families.bench import bench_card
from vla_accel.families.pi0 import native_loop as expert
from vla_accel.kernels.gemm.config import gemm_sizes
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.nn import native_dit
from vla_accel.nn.weights import plain_input

PARTS = ("vision", "kv_cache", "denoise")
PRODUCTS = {"pi0": 4 * 3, "pi05": 4 * 3, "smolvla": 4 * 3, "groot": 4 * 8}
"""Of each tiny expert's layers."""
OBSERVATIONS: dict[str, Any] = {"smolvla": tiny_smolvla.observation, "groot": groot_observation}


def policy_of(
    folder: Path, denoise: EnginePrecision = "int8", precision: str = "bf16", engine: str = "native", **options: Any
) -> OptimizedPolicy:
    specs = {name: EngineSpec(engine) for name in PARTS}  # type: ignore[arg-type]
    specs["denoise"] = EngineSpec(engine, precision=denoise, **options)  # type: ignore[arg-type]
    config = PolicyConfig(num_steps=3, precision=precision, device="cpu", strict=True)  # type: ignore[arg-type]
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(specs))


def actions(policy: OptimizedPolicy, seed: int = 0) -> torch.Tensor:
    shape = policy.action_shape
    noise = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    given = OBSERVATIONS.get(policy.family.name, tiny_observation)(seed)
    return torch.from_numpy(np.array(policy.infer(given, noise=noise)["actions"]))


def dequantised(value: Any) -> Any:
    """Weights of which those in INT8 are float32: each row's integers times the row's scale."""
    if isinstance(value, Linear):
        if value.weight.dtype != torch.int8:
            return value
        assert value.weight_scale is not None and value.weight_scale.shape == value.weight.shape[:1]
        return Linear(value.weight.float() * value.weight_scale[:, None], value.bias)
    if isinstance(value, tuple):
        return tuple(map(dequantised, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{n: dequantised(v) for n, v in vars(value).items()})
    return value


def test_no_calibration_enters() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 6)[:, None]
    bias = torch.arange(6.0)
    layer = plain_input("int8", weight, bias)
    assert layer.weight.dtype == torch.int8 and layer.input_scale_value == 1.0
    assert layer.bias is not None and torch.equal(layer.bias, bias.to(torch.bfloat16))
    step = (weight.abs().amax(1) / 127)[:, None]
    assert bool(((layer.true_weight(torch.float32) - weight).abs() <= step * 0.5001).all())


def test_a_measured_cut_is_of_one_kind_of_weights() -> None:
    """FP8 and INT8 take as many bytes, and other instructions."""
    x, weight = torch.empty(10, 64, dtype=torch.bfloat16), torch.randn(32, 64)
    names = {str(gemm_sizes(x, plain_input(kind, weight))) for kind in ("bf16", "fp8", "int8")}
    assert len(names) == 3


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_loop_is_that_of_the_dequantised_weights(name: str, flow_folders: dict[str, Path]) -> None:
    """Bit for bit, with everything that is made of the weights beforehand: shifts of norms, sums of rows."""
    policy = policy_of(flow_folders[name])
    found = actions(policy)
    program: Any = policy.pipelines.newest.engine("denoise").program  # type: ignore[attr-defined]
    weights = dequantised(program.weights)
    for holder in {id(p): p for p in (program, getattr(program, "loop", program))}.values():
        holder.weights = weights
        if name.startswith("pi"):
            holder.tables = expert.steps_of(policy.model, weights, policy.schedule)  # type: ignore[arg-type]
        elif name == "groot":
            holder.tables = native_dit.step_tables(policy.model, weights, policy.schedule)  # type: ignore[arg-type]
    assert torch.equal(actions(policy), found)
    assert not torch.equal(actions(policy_of(flow_folders[name], "auto")), found)


def test_it_is_as_near_as_eager_to_the_dequantised_network(flow_folders: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint whose expert has the integers' values, in eager; the scales are this test's own."""
    config = write_tiny_checkpoint(tmp_path, "pi05")
    state = random_state(config)
    for name, weight in state.items():
        if name.startswith("expert.layers.") and name.endswith("_proj.weight"):
            wide = weight.to(torch.bfloat16).double()
            scale = wide.abs().amax(1, keepdim=True) / 127
            state[name] = ((wide / scale).round() * scale).float()
    save_checkpoint(state, config, tmp_path)
    policies = (
        policy_of(flow_folders["pi05"]), policy_of(tmp_path, "auto", engine="eager"),
        policy_of(tmp_path, "auto", "fp32", "eager"),
    )  # fmt: skip
    got, plain, exact = (torch.stack([actions(policy, seed) for seed in range(4)]) for policy in policies)
    assert_as_near(got, plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_ledger_and_the_memory_say_so(name: str, flow_folders: dict[str, Path]) -> None:
    narrow, plain = policy_of(flow_folders[name]), policy_of(flow_folders[name], "auto")
    assert narrow.scales is None, "weights alone need no calibration"
    for policy in (narrow, plain):
        actions(policy)
    details = {e["component"]: str(e["detail"]) for e in narrow.ledger.as_list()}
    assert details["denoise"].startswith("fused ops, INT8 weights") and "; INT8 weights only: " in details["denoise"]
    assert not any("INT8" in details[part] for part in PARTS[:2])
    stored = [t for t in narrow.store.tensors()["denoise"] if t.dtype == torch.int8]
    assert len(stored) == PRODUCTS[name]
    saved = plain.memory()["weights"]["denoise"] - narrow.memory()["weights"]["denoise"]
    # A byte less each, and a float32 more a row and for the input.
    assert saved == sum(t.numel() - 4 * (len(t) + 1) for t in stored)
    read = [bench_card(policy.family).work(policy.model.config, policy.processor.prepare(policy.processor.example()), 3,
                               policy.specs)["denoise"].bytes for policy in (plain, narrow)]  # fmt: skip
    assert read[0] - read[1] == 3 * sum(t.numel() for t in stored), "the floor of three steps"


def test_what_cannot_be_is_one_error_each(flow_folders: dict[str, Path]) -> None:
    for name in PRODUCTS:
        with pytest.raises(
            EngineError,
            match=r"denoise: .*\(native: the native engine of a fp32 policy has fp32, got int8",
        ):
            actions(policy_of(flow_folders[name], precision="fp32"))
    with pytest.raises(
        EngineError,
        match=r"denoise: .*\(native: the native engine of a bf16 policy has bf16, fp8, int8, got fp16",
    ):
        actions(policy_of(flow_folders["pi05"], "fp16"))
    with pytest.raises(EngineError, match=r"denoise: .*\(native: keep: its weights are stored in one byte all or none"):
        actions(policy_of(flow_folders["pi05"], keep=("o_proj",)))
