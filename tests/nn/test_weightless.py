"""Networks whose weights are not there: made without numbers, and without torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.support.pages import ROOT
from vla_accel.nn.network import weightless


def test_nothing_is_drawn_inside_and_all_outside() -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Conv2d(3, 2, 2))

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with weightless():
        empty = made()
    assert all(p.is_meta for p in empty.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    there = made()
    assert [p.shape for p in empty.parameters()] == [p.shape for p in there.parameters()]
    assert all(bool(p.detach().ne(0).any()) for name, p in there.named_parameters() if not name.startswith("2."))
    assert torch.equal(there.get_parameter("2.weight"), torch.ones(3)) and not torch.equal(
        torch.get_rng_state(), before
    )


@pytest.mark.slow
def test_a_start_does_not_import_torch_s_compiler() -> None:
    """It would take as long as everything else together."""
    code = """
import sys
from vla_accel.config import load_config
from vla_accel.policy import OptimizedPolicy
for settings in (None, load_config("configs/native.yaml")):
    policy = OptimizedPolicy.from_pretrained("demo", settings, device="cpu", num_steps=1)
    policy.infer(policy.processor.example())
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["False"], done.stderr
