"""What tests on a GPU share: neither cuts nor ways of attention are measured, which would compile some thirty kernels a
model, and let two policies that are compared bit for bit choose differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_policies import NATIVE, SMALL, save
from vla_accel import OptimizedPolicy
from vla_accel.kernels.attention import choice
from vla_accel.kernels.autotune import Fastest
from vla_accel.nn import kernel_choices as cuts


@pytest.fixture(scope="session", autouse=True)
def untuned() -> Iterator[None]:
    """The first cut is taken; `time_cuts.py` runs all of them."""

    def first(what: str, ways: Mapping[str, Any], device: object, repeats: int) -> Fastest:
        return Fastest(next(iter(ways)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "remembered", first)
        patch.setattr(choice, "remembered", first)
        yield


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
