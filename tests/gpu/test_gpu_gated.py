"""Two products and GEGLU in one kernel, at the row counts and widths of kernel_shapes.py."""

from __future__ import annotations

import pytest

from tests.support import kernel_shapes as shapes

pytestmark = pytest.mark.gpu

NAMES = shapes.named("gate_up_geglu")


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    shapes.check_on_gpu(name)
