"""Fixtures of the tests on a GPU. The configs of loops and attention are not measured: that would compile some thirty
kernels a model, and two policies that are compared bit for bit could differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_memory import Reserve, free, reserved
from tests.support.gpu_policies import NATIVE, SMALL, save
from vla_accel import OptimizedPolicy
from vla_accel.kernels.attention import choice
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.config import Choice
from vla_accel.nn import kernel_choices


@pytest.fixture(scope="session", autouse=True)
def untuned() -> Iterator[None]:
    """Choose the first config."""

    def first(what: str, ways: Mapping[str, Any], device: object, repeats: int) -> Fastest:
        return Fastest(next(iter(ways)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choices, "measure", lambda what, configs, *_: Choice(configs[0], {}))
        patch.setattr(choice, "remembered", first)
        yield


@pytest.fixture(scope="module", autouse=True)
def freed_after_module() -> Iterator[None]:
    yield
    free()


@pytest.fixture(autouse=True)
def freed(freed_after_module: None) -> Iterator[None]:
    yield
    free()


@pytest.fixture
def reserve() -> Iterator[Reserve]:
    """Reserve gigabytes of the GPU until the test ends, and wait while tests of other processes hold them. For a test
    that needs more than two."""
    with ExitStack() as held:
        yield lambda gigabytes: held.enter_context(reserved(gigabytes))
        free()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with random weights, by name."""
    made = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in SMALL}
    for name, folder in made.items():
        save(SMALL[name], folder)
    return made


@pytest.fixture(scope="module", params=["pi05", "pi0"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module")
def demo() -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained("demo", NATIVE)
