"""GR00T's native engine on a GPU: one graph for a call, as near to FP32 as eager is in BF16, guided and in batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.agreement import assert_as_near
from tests.support.groot_folders import observation
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import EnginePrecision
from vla_accel.families.groot.family import GROOT
from vla_accel.measure.parity import LIMITS, compare
from vla_accel.measure.random_policy import random_observations, random_policy
from vla_accel.numeric import cosine

pytestmark = pytest.mark.gpu
PARTS = ("vision", "kv_cache", "denoise")
PROMPTS = ("open it", "pick up the black bowl", "put it on the task " * 6)


def policy_of(folder: Path, engine: str, precision: str, **changes: EngineSpec) -> OptimizedPolicy:
    specs = {**dict.fromkeys(PARTS, EngineSpec(engine)), **changes}  # type: ignore[arg-type]
    config = PolicyConfig(device="cuda", precision=precision).with_specs(specs)  # type: ignore[arg-type]
    return OptimizedPolicy.from_pretrained(folder, config)


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 8, 132)).astype(np.float32)


@pytest.mark.parametrize("denoise", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("batch", [1, 3])
def test_native_is_as_near_as_eager(groot_folder: Path, batch: int, denoise: EnginePrecision) -> None:
    narrow = {} if denoise == "auto" else {"denoise": EngineSpec("native", precision=denoise)}
    policies = (
        policy_of(groot_folder, "native", "bf16", **narrow), policy_of(groot_folder, "eager", "bf16"),
        policy_of(groot_folder, "eager", "fp32"),
    )  # fmt: skip
    assert policies[0].pipelines.newest.captured is not None, "a whole call in graphs"
    given = [observation(i, PROMPTS[i]) for i in range(batch)]
    rows = []
    for policy in policies:
        policy.infer_batch(given, noise=noise(batch))
        rows.append(policy.pipelines.newest.outputs["actions"].cpu().clone())
    if denoise == "auto":
        assert_as_near(*rows)
    else:
        assert cosine(rows[0].numpy(), rows[2].numpy()) >= LIMITS[denoise].cosine


@pytest.mark.parametrize("denoise", ["auto", "fp8", "int8"])
def test_published_size(denoise: EnginePrecision) -> None:
    """Random weights: within the limits of `parity`. The small model's actions hardly depend on what it sees, so that
    there the error cannot be told beside what another observation changes."""
    config = PolicyConfig(device="cuda", precision="bf16")
    specs = {name: EngineSpec("native") for name in PARTS} | {"denoise": EngineSpec("native", precision=denoise)}
    policy, exact = random_policy(GROOT, config.with_specs(specs), with_reference=True)
    assert exact is not None
    report = compare(policy, exact, random_observations(policy, 4), name=denoise)
    assert {e["used"] for e in policy.ledger.as_list()} == {"native", "cuda_graph"}
    assert report.passed, report.reasons


def test_guided_and_plain_calls_share_a_graph(groot_folder: Path) -> None:
    native, eager = (policy_of(groot_folder, engine, "bf16") for engine in ("native", "eager"))
    plain = native.infer(observation(), noise=noise(1)[0])["actions"]
    chunk = plain[2:]
    guided = [p.infer(observation(1), noise=noise(1)[0], prev_chunk=chunk, inference_delay=2) for p in (native, eager)]
    np.testing.assert_allclose(guided[0]["actions"][:2, :6], chunk[:2, :6], atol=1e-5)
    np.testing.assert_allclose(guided[0]["actions"][:, :6], guided[1]["actions"][:, :6], atol=0.1)
    again = native.infer(observation(), noise=noise(1)[0])["actions"]
    np.testing.assert_array_equal(again, plain)
