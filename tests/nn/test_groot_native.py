"""GR00T's native programs against the eager network, through the ops' torch references on a CPU; their kernels through
Triton's compiler for Hopper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.groot_folders import observation
from tests.support.scripts import lines_of, needs_triton
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.errors import EngineError
from vla_accel.nn import plan

ROOT = Path(__file__).parents[2]
PARTS = ("vision", "kv_cache", "denoise")


def policy_of(folder: Path, precision: str = "fp32", **engines: EngineSpec) -> OptimizedPolicy:
    specs = {**dict.fromkeys(PARTS, EngineSpec("eager")), **engines}
    config = PolicyConfig(device="cpu", precision=precision).with_specs(specs)  # type: ignore[arg-type]
    return OptimizedPolicy.from_pretrained(folder, config)


NATIVE = dict.fromkeys(PARTS, EngineSpec("native"))


@pytest.fixture(scope="module")
def eager(groot_folder: Path) -> OptimizedPolicy:
    return policy_of(groot_folder)


@pytest.fixture(scope="module")
def native(groot_folder: Path) -> OptimizedPolicy:
    return policy_of(groot_folder, **NATIVE)


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((8, 132)).astype(np.float32)


def test_every_part_is_what_eager_computes(eager: OptimizedPolicy, native: OptimizedPolicy) -> None:
    assert {e["used"] for e in native.ledger.as_list()} == {"native"}
    _, want = eager.infer_with_internals(observation(), noise=noise())
    _, got = native.infer_with_internals(observation(), noise=noise())
    assert list(got) == [
        "actions",
        "image_tokens",
        "deepstack",
        *(f"{source}_{what}" for source in ("text", "image") for what in ("keys", "values")),
    ]
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("part", PARTS)
def test_parts_may_be_mixed(groot_folder: Path, eager: OptimizedPolicy, part: str) -> None:
    mixed = policy_of(groot_folder, "fp32", **{part: EngineSpec("native")})
    want, got = (p.infer(observation(1), noise=noise(1))["actions"] for p in (eager, mixed))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("part", ["vision", "kv_cache"])
def test_norms_inside_the_products_agree_with_eager(
    groot_folder: Path, eager: OptimizedPolicy, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does where all products are own kernels; images are added between the first blocks."""
    monkeypatch.setattr(plan, "is_inside", lambda *_: True)
    mixed = policy_of(groot_folder, "fp32", **{part: EngineSpec("native")})
    for seed in (1, 2):  # twice: what a call leaves behind must not matter to the next
        want, got = (p.infer(observation(seed), noise=noise(seed)) for p in (eager, mixed))
        np.testing.assert_allclose(got["actions"], want["actions"], atol=1e-5)
    details = {e["component"]: str(e["detail"]) for e in got["engines"]}
    assert "norms inside" in details[part]


def test_batches_and_chunks(eager: OptimizedPolicy, native: OptimizedPolicy) -> None:
    given = [observation(i, prompt) for i, prompt in enumerate(("open it", "pick up the black bowl", ""))]
    starts = np.stack([noise(i) for i in range(3)])
    want, got = (p.infer_batch(given, noise=starts) for p in (eager, native))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b["actions"], a["actions"], atol=1e-5)
    chunk = want[0]["actions"][2:]
    guided = [p.infer(given[0], noise=noise(), prev_chunk=chunk, inference_delay=2)["actions"] for p in (eager, native)]
    np.testing.assert_allclose(guided[1], guided[0], atol=1e-5)
    plain = native.infer(given[0], noise=noise())["actions"]
    np.testing.assert_allclose(plain, want[0]["actions"], atol=1e-5)


def test_lower_precisions_are_as_near_as_eagers(groot_folder: Path, eager: OptimizedPolicy) -> None:
    def error(policy: OptimizedPolicy) -> float:
        found = [p.infer_with_internals(observation(), noise=noise())[1]["actions"] for p in (eager, policy)]
        return float(np.abs(found[0] - found[1]).mean())

    plain = error(policy_of(groot_folder, "bf16"))
    fused = policy_of(groot_folder, "bf16", **NATIVE)
    assert 0 < error(fused) < 2 * plain
    narrow = policy_of(groot_folder, "bf16", **{**NATIVE, "denoise": EngineSpec("native", precision="fp8")})
    (entry,) = [e for e in narrow.ledger.as_list() if e["component"] == "denoise"]
    assert "FP8 weights" in str(entry["detail"]) and plain < error(narrow) < 20 * plain


def test_fp8_where_there_is_none(groot_folder: Path) -> None:
    fp8 = EngineSpec("native", precision="fp8")
    with pytest.raises(EngineError, match=r"vision: .*\(native: the native engine of a bf16 policy has bf16, got fp8"):
        policy_of(groot_folder, "bf16", vision=fp8)
    with pytest.raises(EngineError, match=r"denoise: .*\(native: the native engine of a fp32 policy has fp32, got fp8"):
        policy_of(groot_folder, denoise=fp8)
    with pytest.raises(EngineError, match=r"denoise: .*\(native: keep: its weights are stored in one byte all or none"):
        policy_of(groot_folder, "bf16", denoise=replace(fp8, keep=("fc1",)))


@pytest.mark.slow
@needs_triton
def test_a_call_launches_few_kernels() -> None:
    """At the published size, without the library's products: five a block in 4 steps of 32 blocks, and six a step."""
    found = json.loads(*lines_of("compile_each", "groot", "--count"))
    assert found["denoise"] == 4 * (5 * 32 + 6) + 1 and found["vision"] < 120 and found["kv_cache"] < 120


@pytest.mark.slow
@needs_triton
def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    """Those of every release in one process: they have many in common."""
    kinds = ("groot", "groot_n16", "groot_n15")
    rows = [json.loads(line) for line in lines_of("compile_each", *kinds, cache=tmp_path)]
    for kind in kinds:
        found = {row["kernel"] for row in rows if row["models"] == [kind]}
        assert found >= {"_pipelined_columns", "_flow_step", "_rotate"}, kind
    # A batch's tiles of 128 rows fill all registers, and keep some sums elsewhere around their loop.
    assert [row for row in rows if row["bytes"] <= 1000 or not row["fits"] or row["spilled"] > 128] == []
