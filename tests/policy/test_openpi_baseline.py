"""openpi's code as a baseline, with a stand-in for openpi: what it does to the process stays its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vla_accel.families.pi0 import bench as pi0_bench
from vla_accel.numeric import matmul_precision

SEEN: list[str] = []
"""The precision of FP32 products in each of its calls."""


class PI0Pytorch(torch.nn.Module):
    """Does to the process what openpi's constructor does."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.set_float32_matmul_precision("high")
        self.horizon = config.action_horizon

    def sample_actions(self, device: str, observation: Any, num_steps: int) -> torch.Tensor:
        SEEN.append(torch.get_float32_matmul_precision())
        return torch.zeros(1, self.horizon, 32)


@pytest.fixture
def openpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    model = SimpleNamespace(Observation=SimpleNamespace(from_dict=lambda content: content))
    config = SimpleNamespace(Pi0Config=SimpleNamespace)
    modules = {
        "openpi.models": SimpleNamespace(model=model, pi0_config=config),
        "openpi.models_pytorch.pi0_pytorch": SimpleNamespace(PI0Pytorch=PI0Pytorch),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    before = torch.get_float32_matmul_precision()
    pi0_bench._openpi.cache_clear()
    SEEN.clear()
    yield
    pi0_bench._openpi.cache_clear()
    torch.set_float32_matmul_precision(before)


def test_tf32_is_for_openpis_own_calls_alone(openpi: None) -> None:
    torch.set_float32_matmul_precision("highest")
    infer = pi0_bench.CARDS["pi05"].baseline("openpi-eager", horizon=10, steps=3, device="cpu")
    assert torch.get_float32_matmul_precision() == "highest", "after its constructor"
    found = infer({"observation/image": np.zeros((224, 224, 3), np.uint8), "observation/state": np.zeros(8)})
    assert found["actions"].shape == (1, 10, 32)
    assert (SEEN, torch.get_float32_matmul_precision()) == (["high"], "highest")


def test_the_setting_is_put_back_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ValueError, match="out"), matmul_precision("high"):
        torch.set_float32_matmul_precision("medium")
        raise ValueError("out")
    assert torch.get_float32_matmul_precision() == before
