"""What tests on a GPU share: the loop's cuts are not measured, which would compile some thirty kernels a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from vla_accel.native import cuts
from vla_accel.ops.autotune import Fastest


@pytest.fixture(scope="session", autouse=True)
def untuned() -> Iterator[None]:
    """The first cut is taken; `time_cuts.py` runs all of them."""

    def first(what: str, ways: Mapping[str, Any], device: object, repeats: int) -> Fastest:
        return Fastest(next(iter(ways)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "remembered", first)
        yield
