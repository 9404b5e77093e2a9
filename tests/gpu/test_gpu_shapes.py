"""Every kernel on a GPU at row counts from 1 to 1024 and at the models' widths (kernel_shapes.py); attention has a file
of its own."""

from __future__ import annotations

import pytest
import torch

from tests.support import kernel_calls as calls
from tests.support import kernel_shapes as shapes

pytestmark = pytest.mark.gpu

NAMES = [n for n in shapes.WIDE if not n.startswith(("attention", "self-attention"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    call = shapes.call_of(name, torch.bfloat16)
    for pdl in (False, True) if call.op in calls.TAKES_PDL else (False,):
        repeat = 3 if call.op == "suffix_attention" else 1
        got = calls.outputs_of(call, torch.device("cuda"), kernel=True, pdl=pdl, repeat=repeat)
        calls.check(call, got, 0.02, 0.003, 0.006)
