"""Every kernel but attention on a GPU, at row counts from 1 to 1024 and at the models' widths (kernel_shapes.py)."""

from __future__ import annotations

import pytest

from tests.support import kernel_shapes as shapes

pytestmark = pytest.mark.gpu

NAMES = [name for name in shapes.WIDE if name.split()[0] not in ("attention", "self-attention")]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    shapes.check_on_gpu(name)
