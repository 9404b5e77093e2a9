"""π0-FAST behind `OptimizedPolicy` on the CPU: from images, state and task to the robot's numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_pi0_fast import (
    ACTION_DIM,
    HORIZON,
    expected_tokens,
    observation,
    rounded,
    tiny_config,
    write_lerobot,
    written,
)
from tests.support.tiny_smolvla import statistics
from tests.support.waiting import PATIENCE_S
from vla_accel import EngineSpec, OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.errors import ActionError, ConfigError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.pi0_fast.family import PI0_FAST
from vla_accel.families.pi0_fast.network import Pi0Fast
from vla_accel.measure.random_policy import random_observations, random_policy

RELAXED = load_config({
    "precision": "fp32", "strict": True, "vision": "eager", "kv_cache": "eager", "denoise": "eager",
    "checkpoint": {"relaxed_actions": True},
})  # fmt: skip
PROMPTS = ("pick up the bowl", "pick it", "pick up the bowl : pick it up")


def unchecked(files: dict[str, Any]) -> None:
    """Tokens of random weights begin with anything."""
    files["config"]["validate_action_token_prefix"] = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pi0_fast")
    write_lerobot(made, change=unchecked)
    return made


@pytest.fixture(scope="module")
def policy(folder: Path) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(folder, RELAXED)


@pytest.mark.slow
def test_a_batch_is_its_rows_and_the_formulas(policy: OptimizedPolicy) -> None:
    given = [observation(i, p) for i, p in enumerate(PROMPTS)]
    together = policy.infer_batch(given)
    decoded = policy.pipelines.newest.outputs["action_tokens"].clone()
    config = policy.model.config
    assert decoded.shape == (3, config.max_steps)
    scale = statistics(ACTION_DIM)
    for row, (one, answer) in enumerate(zip(given, together, strict=True)):
        inputs = policy.processor.prepare(one)
        pixels = torch.from_numpy(np.stack(inputs.images)).permute(0, 3, 1, 2).double() / 255 * 2 - 1
        expected = expected_tokens(policy.model.state_dict(), config, pixels, inputs.tokens.tolist(), config.max_steps)
        assert decoded[row, : len(expected)].tolist() == expected
        chunk = policy.processor.detokeniser.chunk(np.array(expected))
        np.testing.assert_allclose(answer["actions"], chunk * scale["std"] + scale["mean"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(policy.infer(one)["actions"], answer["actions"])
        assert answer["actions"].shape == (HORIZON, ACTION_DIM)
    assert np.abs(together[0]["actions"] - together[1]["actions"]).max() > 1e-3
    assert {"vision_ms", "kv_cache_ms", "decode_ms"} <= together[0]["policy_timing"].keys()
    assert {"vision", "kv_cache", "decode"} <= policy.latency_report()["components"].keys()


def test_a_seed_changes_nothing_and_noise_of_another_shape_is_refused(folder: Path, policy: OptimizedPolicy) -> None:
    """The decoding is greedy."""
    plain = policy.infer(observation())["actions"]
    noise = np.zeros(policy.action_shape)
    other = OptimizedPolicy.from_pretrained(folder, RELAXED, seed=7)
    np.testing.assert_array_equal(other.infer(observation())["actions"], plain)
    np.testing.assert_array_equal(policy.infer(observation(), noise=noise)["actions"], plain)
    with pytest.raises(ObservationError, match="noise: expected shape"):
        policy.infer(observation(), noise=noise[1:])
    with pytest.raises(ConfigError, match="prev_chunk: this family has no real-time chunking"):
        policy.infer(observation(), prev_chunk=plain, inference_delay=1)


def test_written_actions_arrive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that writes a chunk; nothing is filled up."""
    actions = np.random.default_rng(3).uniform(-1, 1, (HORIZON, ACTION_DIM))
    tokens = written(actions, folder / "fast")

    def decode(self: Pi0Fast, first: torch.Tensor, lengths: Any, keys: Any, values: Any, steps: int) -> torch.Tensor:
        return torch.tensor([[*tokens, *[0] * (steps - len(tokens))]])

    monkeypatch.setattr(Pi0Fast, "decode", decode)
    exact = OptimizedPolicy.from_pretrained(folder, "eager_fp32", num_steps=20)
    assert exact.num_steps == 20 and exact.metadata["model"]["kind"] == "pi0_fast"
    scale = statistics(ACTION_DIM)
    found = exact.infer(observation())["actions"]
    np.testing.assert_allclose(found, rounded(actions) * scale["std"] + scale["mean"], rtol=0, atol=1e-5)


def test_tokens_that_are_no_chunk_are_an_error_of_that_call(folder: Path) -> None:
    """Not of the start, whose images are black."""
    strict = OptimizedPolicy.from_pretrained(folder, "eager_fp32")
    with pytest.raises(ActionError, match=r"actions: expected .*, got "):
        strict.infer(observation())


def test_tokens_of_a_batch_that_are_no_chunk_name_their_observation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    tokens = written(np.zeros((HORIZON, ACTION_DIM)), folder / "fast")

    def decode(self: Pi0Fast, first: torch.Tensor, lengths: Any, keys: Any, values: Any, steps: int) -> torch.Tensor:
        whole = [*tokens, *[0] * (steps - len(tokens))]
        return torch.tensor([whole, [*tokens[:2], *whole[3:], 0]][: len(first)])

    monkeypatch.setattr(Pi0Fast, "decode", decode)
    exact = OptimizedPolicy.from_pretrained(folder, "eager_fp32", num_steps=20)
    exact.infer(observation())
    with pytest.raises(ActionError, match=r"^observations\[1\]: actions: expected .*checkpoint\.relaxed_actions"):
        exact.infer_batch([observation(), observation()])


def test_the_native_engine_writes_the_same(folder: Path, policy: OptimizedPolicy) -> None:
    """Prompts of several lengths, in their buckets and with the stop token, through the programs' references."""
    settings = load_config({
        "precision": "fp32", "strict": True, "vision": "native", "kv_cache": "native", "denoise": "native",
        "checkpoint": {"relaxed_actions": True},
    })  # fmt: skip
    native = OptimizedPolicy.from_pretrained(folder, settings)
    assert {e["component"]: e["used"] for e in native.ledger.as_list()} == dict.fromkeys(PI0_FAST.parts, "native")
    given = [observation(i, p) for i, p in enumerate(PROMPTS)]
    for ours, theirs in zip(native.infer_batch(given), policy.infer_batch(given), strict=True):
        np.testing.assert_allclose(ours["actions"], theirs["actions"], rtol=1e-6, atol=1e-6)
    assert native.memory()["unused"] == 0


@pytest.mark.slow
def test_bench_says_what_a_token_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_accel import cli

    small = tiny_config(stop_token=None, action_dim=7, max_token_len=201)
    monkeypatch.setattr(bench_card(PI0_FAST), "published", lambda horizon=None: small)
    output = tmp_path / "bench.json"
    words = f"bench --model pi0_fast --systems eager,native-bf16 --steps 6,3 --calls 2 --device cpu --output {output}"
    assert cli.main(words.split()) == 0
    report = json.loads(output.read_text())
    assert report["parts"] == ["vision", "kv_cache", "decode"]
    assert [(row["system"], row["steps"]) for row in report["rows"]] == [
        (name, steps) for steps in (6, 3) for name in ("eager", "native-bf16")
    ]
    for row in report["rows"]:
        assert row["step_ms"] == pytest.approx(row["parts_ms"]["decode"] / row["steps"])
        assert row["work"]["decode"]["bytes"] > 0


@pytest.mark.slow
def test_work_counts_what_a_token_must_read() -> None:
    """5 GB a token in BF16, of which the head is 1.05; the cache of 580 tokens is 11 MB (hand-counted)."""
    config = bench_card(PI0_FAST).published()
    processor = bench_card(PI0_FAST).dummy(config, 2)
    inputs = processor.prepare(bench_card(PI0_FAST).random_observation(processor, np.random.default_rng(0)))
    bf16 = load_config("eager").specs(PI0_FAST.parts)
    one, two = (bench_card(PI0_FAST).work(config, inputs, steps, bf16)["decode"] for steps in (1, 2))
    assert one.bytes == pytest.approx(5.02e9, rel=0.01) and two.bytes == pytest.approx(2 * one.bytes, rel=1e-3)
    assert one.flop == pytest.approx(5.0e9, rel=0.02)


def test_fp8_is_calibrated_as_of_every_prefix() -> None:
    pytest.importorskip("modelopt", reason="NOT RUN: needs pip install 'vla_accel[onnx]'")
    config = tiny_config(stop_token=None, action_dim=7, max_token_len=201)
    model = bench_card(PI0_FAST).random(config, seed=0, device="cpu", dtype=torch.bfloat16)
    settings = load_config({"precision": "bf16", "device": "cpu", "strict": True}).with_specs({
        name: EngineSpec("native", precision="fp8" if name != "vision" else "auto") for name in PI0_FAST.parts
    })  # fmt: skip
    policy, _ = random_policy(PI0_FAST, settings.with_steps(5), model=model)
    (given,) = random_observations(policy, 1)
    assert policy.infer(given)["actions"].shape == (HORIZON, 7)
    details = {e["component"]: str(e["detail"]) for e in policy.ledger.as_list()}
    assert "FP8" in details["kv_cache"] and "FP8 weights" in details["decode"]


def test_it_declares_no_real_time_chunking_and_a_runner_plans_without(policy: OptimizedPolicy) -> None:
    assert not policy.supports_prev_chunk and not policy.batches_prev_chunks
    with policy.async_runner(20.0, replan_ticks=1, max_wait_s=60.0) as runner:
        runner.start(observation(0))
        for tick in range(6):
            runner.step(observation(tick))
            assert not runner._inference.busy or runner._inference.wait_until(time.monotonic() + PATIENCE_S)
    report = runner.report()
    assert report.failures == 0 and report.chunks > 3
    with pytest.raises(ConfigError, match="real_time_chunking: expected"):
        policy.async_runner(20.0, real_time_chunking=True)
