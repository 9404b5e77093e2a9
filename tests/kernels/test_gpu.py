"""`Gpu`: what follows from a capability, what is asked of torch, and how another is handed in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.gpus import GPUS, H20, H200, MIG_SLICE, RTX_4090, RTX_5090
from vla_accel.kernels import gpu
from vla_accel.kernels.gpu import Gpu

CUDA = torch.device("cuda", 3)


def test_a_cpu_is_no_gpu() -> None:
    assert Gpu.of(torch.device("cpu")) is None


def test_torch_is_asked_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(
            name="X", major=9, minor=0, multi_processor_count=78, shared_memory_per_block_optin=232_448,
            shared_memory_per_multiprocessor=233_472, total_memory=8, regs_per_multiprocessor=9,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    gpu._properties.cache_clear()
    try:
        want = Gpu("X", (9, 0), 78, 232_448, 233_472, 8, 9)
        assert Gpu.of(CUDA) == Gpu.of(CUDA) == want and Gpu.of(torch.device("cuda")) == want
        assert asked == [3, 1]
    finally:
        gpu._properties.cache_clear()


@pytest.mark.parametrize("name", GPUS)
def test_what_follows_from_the_capability(name: str) -> None:
    it = GPUS[name]
    assert it.bf16 and it.int8
    assert it.fp8 == (name not in ("A100", "Orin", "RTX 3090"))
    assert it.dependent_launch == it.clusters == (name not in ("A100", "Orin", "RTX 3090", "RTX 4090"))
    assert it.architecture == {
        "A100": "sm_80", "RTX 3090": "sm_86", "Orin": "sm_87", "RTX 4090": "sm_89", "B200": "sm_100a",
        "Thor": "sm_110a", "RTX 5090": "sm_120a",
    }.get(name, "sm_90a")  # fmt: skip
    portable = it.portable
    assert not portable.dependent_launch and not portable.clusters and portable.fp8 == it.fp8
    assert portable.multiprocessors == it.multiprocessors and portable.shared_per_block == 99 << 10


def test_clusters_lie_within_groups_of_multiprocessors() -> None:
    assert [H200.clusters_at_once(n) for n in (2, 3, 8, 16)] == [64, 40, 16, 8]
    assert [H20.clusters_at_once(n) for n in (8, 16)] == [8, 4]
    assert [MIG_SLICE.clusters_at_once(n) for n in (8, 16)] == [2, 1]
    assert RTX_4090.clusters_at_once(2) == 0 and RTX_5090.clusters_at_once(8) > 0
