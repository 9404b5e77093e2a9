"""Options, and markers that skip loudly what this machine cannot run."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.rounding import round_otherwise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--openpi-python", default=None, help="interpreter of an environment with openpi (see CONTRIBUTING)"
    )
    parser.addoption(
        "--openpi-client-python",
        default=None,
        help="interpreter of an environment with openpi-client (see CONTRIBUTING)",
    )
    parser.addoption(
        "--lerobot-python", default=None, help="interpreter of an environment with lerobot (see CONTRIBUTING)"
    )
    parser.addoption(
        "--groot-python", default=None, help="interpreter of an environment with lerobot's GR00T (see CONTRIBUTING)"
    )
    parser.addoption(
        "--round-otherwise", action="store_true", help="matrix products on the CPU sum and round in another order"
    )


def pytest_configure(config: pytest.Config) -> None:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        threads = max(1, (os.cpu_count() or 1) // processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start
    if config.getoption("--round-otherwise"):
        round_otherwise()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="NOT RUN: needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
