"""Warm-up: no prompt of an episode builds engines, or the policy says which ones will."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import NATIVE, PARTS, tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy
from vla_accel.engines import ENGINES
from vla_accel.engines.eager import EagerEngine
from vla_accel.engines.native import NativeEngine
from vla_accel.errors import ObservationError
from vla_accel.families.loading import load
from vla_accel.measure.random_policy import random_observations
from vla_accel.policy.optimized import MOST_BUILT

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


def test_many_buckets_are_built_by_name_and_the_rest_is_said(
    tmp_path: Path, built: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_checkpoint(tmp_path, max_token_len=200)
    policy = OptimizedPolicy.from_pretrained(tmp_path, NATIVE)
    fewest, most = policy.processor.token_counts(policy.processor.example()["prompt"])
    assert 32 < fewest <= most <= 64 and built.count("build denoise") == 1
    (said,) = caplog.messages
    left_out = [32, 96, 128, 160, 192, 224]
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


class Digits:
    """A token for each word or punctuation mark, and one for each digit, as PaliGemma's tokenizer has."""

    vocab_size = 64

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        ids = [3 + zlib.crc32(piece.encode()) % 60 for piece in re.findall(r"\d|[^\W\d]+|[^\w ]", text)]
        return [2, *ids] if add_bos else ids

    def finish(self, ids: list[int]) -> list[int]:
        return ids


def with_digits(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A tiny π0.5 with a state of eight numbers, of one to three digits each, in its prompt."""
    write_tiny_checkpoint(folder, **changes)
    content = json.loads((folder / "config.json").read_text())
    assert content["vocab_size"] >= Digits.vocab_size
    monkeypatch.setattr("vla_accel.families.pi0.checkpoint.load_tokenizer", lambda *_, **__: Digits())


def state_of(policy: OptimizedPolicy, value: float) -> np.ndarray:
    """The robot's state whose normalised numbers are all `value`."""
    return policy.processor.state.restore(np.full(8, value))


@pytest.mark.parametrize("prompt", ["pick up the bowl", "put it on the plate " * 6 + "now please"])
def test_no_state_of_a_known_prompt_builds_an_engine(
    prompt: str, tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_digits(tmp_path, monkeypatch, max_token_len=200)
    policy = OptimizedPolicy.from_pretrained(tmp_path, replace(NATIVE, default_prompt=prompt))
    lengths = set()
    built.clear()
    for value in (-0.99, 0.0, 0.99, -3.0, 3.0):
        given = {**tiny_observation(0, prompt), "observation/state": state_of(policy, value)}
        lengths.add(len(policy.processor.prepare(given).tokens))
        policy.infer(given)
    assert max(lengths) - min(lengths) == 16, "eight numbers of one and of three digits"
    assert {-(-n // 32) for n in lengths} != {-(-max(lengths) // 32)}, "in two buckets"
    assert not [b for b in built if b.startswith("build")]
    assert policy.processor.token_counts(prompt) == (min(lengths), max(lengths))


def test_states_of_any_mixture_lie_between_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_digits(tmp_path, monkeypatch, max_token_len=200)
    processor = load(tmp_path).processor
    fewest, most = processor.token_counts("pick up the bowl")
    rng = np.random.default_rng(0)
    for _ in range(50):
        given = {**tiny_observation(), "observation/state": processor.state.restore(rng.uniform(-1.3, 1.3, 8))}
        assert fewest <= len(processor.prepare(given).tokens) <= most
    plain = dataclasses.replace(processor, discrete_state=False)
    first, last = plain.token_counts("pick up the bowl")
    assert first == last == len(plain.prepare(tiny_observation()).tokens)


def test_a_long_state_gets_no_more_shapes_than_are_built_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, built: list[str]
) -> None:
    with_digits(tmp_path, monkeypatch, max_token_len=250)
    monkeypatch.setattr("vla_accel.transforms.processing.Processor.token_counts", lambda *_: (33, 240))
    OptimizedPolicy.from_pretrained(tmp_path, NATIVE)
    assert built.count("build denoise") == MOST_BUILT
    (said,) = caplog.messages
    assert sum(f"and {n} prompt tokens" in said for n in range(32, 257, 32)) == 8 - MOST_BUILT


def test_a_prompt_of_a_command_fits_a_model_with_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    with_digits(tmp_path, monkeypatch, max_token_len=48)
    policy = OptimizedPolicy.from_pretrained(tmp_path, NATIVE)
    for one in (policy.processor.example(), *random_observations(policy, 3)):
        for value in (-0.99, 0.99):
            policy.infer({**one, "observation/state": state_of(policy, value)})
    with pytest.raises(ObservationError, match=r"prompt: expected at most 48 tokens \(max_token_len\), got"):
        OptimizedPolicy.from_pretrained(tmp_path, replace(NATIVE, default_prompt=FAR))
