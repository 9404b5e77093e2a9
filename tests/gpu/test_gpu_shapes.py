"""Every kernel on a GPU at row counts from 1 to 1024 and at the models' widths (kernel_shapes.py). Products and
attention have files of their own: a test file stays in one process, and these have the most to compile."""

from __future__ import annotations

import pytest

from tests.support import kernel_shapes as shapes

pytestmark = pytest.mark.gpu

ELSEWHERE = ("attention", "self-attention", "project", "product", "qkv_rope", "gate_up_geglu")
NAMES = [name for name in shapes.WIDE if name.split()[0] not in ELSEWHERE]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    shapes.check_on_gpu(name)
