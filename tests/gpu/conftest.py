"""What tests on a GPU share: neither cuts nor ways of attention are measured, which would compile some thirty kernels a
model, and let two policies that are compared bit for bit choose differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from vla_accel.native import cuts
from vla_accel.ops import attending
from vla_accel.ops.autotune import Fastest


@pytest.fixture(scope="session", autouse=True)
def untuned() -> Iterator[None]:
    """The first cut is taken; `time_cuts.py` runs all of them."""

    def first(what: str, ways: Mapping[str, Any], device: object, repeats: int) -> Fastest:
        return Fastest(next(iter(ways)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "remembered", first)
        patch.setattr(attending, "remembered", first)
        yield
