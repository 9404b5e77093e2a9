"""`deterministic: true`: a policy is built, and runs, where no measurement counts; what measures by itself is refused.
That the bits repeat on a GPU is for tests/gpu/test_gpu_deterministic.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import NATIVE, tiny_observation
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.engines.native import NativeEngine
from vla_accel.errors import ConfigError
from vla_accel.runtime import current

CPU = torch.device("cpu")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_policy_is_built_and_runs_pinned(deterministic: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[bool]] = {"built": set(), "ran": set()}
    make, run = NativeEngine.__init__, NativeEngine.run

    def made(engine: NativeEngine, *arguments: Any) -> None:
        seen["built"].add(current(CPU).deterministic)
        make(engine, *arguments)

    def ran(engine: NativeEngine) -> None:
        seen["ran"].add(current(CPU).deterministic)
        run(engine)

    monkeypatch.setattr(NativeEngine, "__init__", made)
    monkeypatch.setattr(NativeEngine, "run", ran)
    policy = OptimizedPolicy.from_pretrained(folder, replace(NATIVE, deterministic=deterministic))
    noise = np.ones(policy.action_shape, np.float32)
    again = policy.with_steps(1)
    for one in (policy, again):
        first, second = (one.infer(tiny_observation(0), noise=noise)["actions"] for _ in range(2))
        np.testing.assert_array_equal(first, second)
    assert seen == {"built": {deterministic}, "ran": {deterministic}} and not current(CPU).deterministic
    told = [entry["detail"] for entry in again.metadata["engines"]]
    assert [("no kernel chosen by measurement" in detail) for detail in told] == [deterministic] * 3


@pytest.mark.parametrize("engine", ["tensorrt", "tensorrt_rtx", "torch_tensorrt"])
@pytest.mark.parametrize("as_fallback", [False, True])
def test_engines_that_measure_by_themselves_are_refused(engine: str, as_fallback: bool, folder: Path) -> None:
    spec = {"engine": "eager", "fallback": [engine]} if as_fallback else engine
    config = {"device": "cpu", "deterministic": True, "kv_cache": spec}
    with pytest.raises(ConfigError, match=f"deterministic: kv_cache: .* got {engine}$"):
        OptimizedPolicy.from_pretrained(folder, config)


def test_an_attention_that_is_measured_is_refused() -> None:
    spec = {"engine": "native", "attention": "fastest"}
    for given in ({"vision": spec}, {"engines": {"vision": spec}}):
        assert not load_config(given).deterministic
        with pytest.raises(ConfigError, match="deterministic: expected an attention of vision that is not measured"):
            load_config({**given, "deterministic": True})
    assert PolicyConfig(deterministic=True) == load_config({"deterministic": True})
