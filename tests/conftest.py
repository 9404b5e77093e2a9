"""Options, and markers that skip loudly what this machine cannot run."""

from __future__ import annotations

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
        "--round-otherwise", action="store_true", help="matrix products on the CPU sum and round in another order"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--round-otherwise"):
        round_otherwise()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="NOT RUN: needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
