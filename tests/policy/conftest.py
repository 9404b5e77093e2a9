"""Tiny checkpoints, written once for all tests of a run, which must not change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import write_tiny_checkpoints
from vla_accel.families.pi0.network import Kind


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    return write_tiny_checkpoints(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def folder(folders: dict[Kind, Path]) -> Path:
    return folders["pi05"]
