"""Which launches of a chain are dependent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.gpus import ARCHITECTURES, H200
from vla_accel.kernels.chain import Chain, launch, launch_cuda


class Kernel:
    """Records the options of its launches, as a Triton kernel with these parameters."""

    def __init__(self, *arg_names: str) -> None:
        self.arg_names, self.options = list(arg_names), []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.options.append(options)


def dependent(kernel: Kernel) -> bool:
    """Launch a kernel that waits. Whether its launch was dependent."""
    launch(kernel, (1,), num_warps=4)
    options = kernel.options[-1]
    assert options["num_warps"] == 4 and options["PDL"] == options.get("launch_pdl", False)
    return options["PDL"]


@pytest.fixture
def kernel() -> Kernel:
    return Kernel("x", "PDL")


def test_the_first_launch_of_a_chain_waits_for_everything_before_it(kernel: Kernel) -> None:
    chain = Chain(H200)
    for _ in range(2):
        with chain:
            assert [dependent(kernel) for _ in range(3)] == [False, True, True]


def test_launches_outside_a_chain_are_not_dependent(kernel: Kernel) -> None:
    with Chain(H200):
        dependent(kernel)
    assert not dependent(kernel) and not dependent(kernel)


def test_the_launch_after_a_restart_waits_for_everything_before_it(kernel: Kernel) -> None:
    with Chain(H200) as chain:
        dependent(kernel)
        chain.restart()
        assert [dependent(kernel) for _ in range(2)] == [False, True]


def test_a_chain_that_is_resumed_goes_on_after_an_earlier_launch(kernel: Kernel) -> None:
    with Chain(H200).resumed():
        assert dependent(kernel)


@pytest.mark.parametrize(
    ("gpu", "early"), [(None, True), (ARCHITECTURES["8.0"], True), (H200.portable, True), (H200, False)]
)
def test_a_chain_without_dependent_launches_has_none(gpu: Any, early: bool, kernel: Kernel) -> None:
    with Chain(gpu, early).resumed():
        assert not dependent(kernel) and not dependent(kernel)


def test_a_chain_inside_another_has_a_setting_of_its_own(kernel: Kernel) -> None:
    with Chain(H200, early=False):
        dependent(kernel)
        with Chain(H200).resumed():
            assert dependent(kernel)
        assert not dependent(kernel)


def test_a_kernel_that_cannot_wait_is_never_dependent_and_begins_a_chain(kernel: Kernel) -> None:
    plain = Kernel("x")
    with Chain(H200):
        launch(plain, (1,))
        assert dependent(kernel)
        launch(plain, (1,))
    assert plain.options == [{}, {}]


def test_kernels_in_cuda_and_in_triton_are_of_one_chain(kernel: Kernel) -> None:
    launches: list[tuple[Any, ...]] = []
    module: Any = SimpleNamespace(launch=lambda *given, **options: launches.append((*given, options)))
    with Chain(H200):
        launch_cuda(module, "gemm", 8, 128, (), cluster=2)
        assert dependent(kernel)
        launch_cuda(module, "gemm", 8, 128, ())
    assert launches == [
        ("gemm", 8, 128, (), {"cluster": 2, "dependent": False}),
        ("gemm", 8, 128, (), {"cluster": 1, "dependent": True}),
    ]


def test_a_failure_inside_a_chain_closes_it(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match="lost"), Chain(H200).resumed():
        raise ValueError("lost")
    assert not dependent(kernel)


def test_the_chain_of_one_thread_is_not_another_s(kernel: Kernel) -> None:
    with Chain(H200).resumed(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(dependent, kernel).result()
        assert dependent(kernel)
