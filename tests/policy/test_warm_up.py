"""Warm-up: no prompt of an episode builds engines, or the policy says which ones will."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.engines import ENGINES
from vla_accel.engines.eager import EagerEngine
from vla_accel.engines.native import NativeEngine

PARTS = ("vision", "kv_cache", "denoise")
FP32 = PolicyConfig(num_steps=1, precision="fp32", device="cpu")
NATIVE = FP32.with_specs(dict.fromkeys(PARTS, EngineSpec("native")))
SHORT, LONG = "pick up the bowl", "bowl " * 24
FAR = "bowl " * 90


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Components whose engines were built, and those that ran after it."""
    made: list[str] = []

    def counting(kind: Any) -> Any:
        class Counting(kind):
            def __init__(self, component: Any, device: Any, spec: EngineSpec) -> None:
                super().__init__(component, device, spec)
                made.append(f"build {component.name}")

            def run(self) -> None:
                made.append(f"run {self.component.name}")
                super().run()

        return Counting

    for name, kind in (("native", NativeEngine), ("eager", EagerEngine)):
        monkeypatch.setitem(ENGINES, name, counting(kind))
    return made


def tokens(policy: OptimizedPolicy, prompt: str) -> int:
    return len(policy.processor.prepare(tiny_observation(0, prompt)).tokens)


def test_every_bucket_of_a_small_model_is_built_and_run(tmp_path: Path, built: list[str]) -> None:
    write_tiny_checkpoint(tmp_path)  # 48 tokens: buckets of 32 and 64
    policy = OptimizedPolicy.from_pretrained(tmp_path, NATIVE)
    assert built.count("build denoise") == 2 and built.count("run denoise") == 2
    assert policy.latency_report()["samples"] == 0
    assert tokens(policy, SHORT) <= 32 < tokens(policy, LONG)
    built.clear()
    noise = np.zeros((5, 8), np.float32)
    for prompt in (SHORT, LONG, SHORT):
        policy.infer(tiny_observation(0, prompt), noise=noise)
    assert set(built) == {f"run {part}" for part in PARTS}
    policy.reset()
    fresh = OptimizedPolicy.from_pretrained(tmp_path, NATIVE)
    np.testing.assert_array_equal(*(p.infer(tiny_observation())["actions"] for p in (policy, fresh)))


def test_eager_has_nothing_to_build(tmp_path: Path, built: list[str], caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_checkpoint(tmp_path, max_token_len=200)
    OptimizedPolicy.from_pretrained(tmp_path, FP32.with_specs(dict.fromkeys(PARTS, EngineSpec("eager"))))
    assert built.count("build denoise") == 1 and not caplog.messages


def test_many_buckets_are_built_by_name_and_the_rest_is_said(
    tmp_path: Path, built: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_checkpoint(tmp_path, max_token_len=200)
    policy = OptimizedPolicy.from_pretrained(tmp_path, NATIVE)
    assert built.count("build denoise") == 1
    (said,) = caplog.messages
    left_out = [32, 96, 128, 160, 192, 224]  # an ordinary prompt, with the state in it, has more than 32
    listed = ", ".join(f"2 views and {n} prompt tokens" for n in left_out)
    assert f"engines are not built in advance for {listed}: the first such call builds them" in said
    policy.with_steps(2).warm_up()
    assert caplog.messages == [said], "said once, whatever the number of steps"
    caplog.clear()
    built.clear()
    assert 96 < tokens(policy, FAR) <= 128
    named = OptimizedPolicy.from_pretrained(tmp_path, replace(NATIVE, warm_up=(FAR, SHORT)))
    assert built.count("build denoise") == 3, "an ordinary prompt's, and one for each of the two"
    (said,) = caplog.messages
    assert [n for n in range(32, 225, 32) if f"and {n} prompt" in said] == [96, 160, 192, 224]
    built.clear()
    named.infer(tiny_observation(0, FAR))
    assert not [b for b in built if b.startswith("build")]
