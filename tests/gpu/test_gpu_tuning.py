"""Tile configs of the denoise loop as a build measures them: the loop agrees, and the next build finds them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_policies import BF16_COSINE, DEVICE, cosines
from tests.support.gpus import assumed
from tests.support.streamed_support import LOOPS, Loops
from vla_accel.kernels import autotune
from vla_accel.kernels import config as configs
from vla_accel.kernels.gpu import Gpu
from vla_accel.nn import kernel_choices
from vla_accel.runtime import current

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("name", ["full", "full pi0", "grouped"])
def test_a_measured_loop_agrees_and_is_found_again(
    name: str, portable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choices, "measure", configs.measure)
    knobs = pytest.importorskip("triton").knobs
    late: list[str] = []
    milliseconds = autotune.milliseconds

    def watched(*arguments: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(knobs.compilation, "listener", lambda *, metadata, **_: late.append(metadata["name"]))
            return milliseconds(*arguments)

    monkeypatch.setattr(autotune, "milliseconds", watched)
    here = Gpu.of(torch.device(DEVICE))
    assert here is not None
    loops = Loops(LOOPS[name], beyond=1e3)
    want = loops.moved(loops.fused("fp32"), loops.placed("cpu", torch.float32))
    with assumed(here.portable if portable else here):
        loop = loops.fused("bf16", DEVICE)
        assert all(f"; {product} " in loop.choices.detail for product in ("qkv", "out", "up", "down", "attention"))
        assert not late, "all was compiled in parallel before it was measured"
        got = loops.moved(loop, loops.placed(DEVICE))
        monkeypatch.setattr(autotune, "fastest", lambda *_: pytest.fail("measured again"))
        again = loops.fused("bf16", DEVICE)
    cut_of = [{kind: taken.config for kind, taken in made.choices.chosen.items()} for made in (loop, again)]
    assert again.choices.detail == loop.choices.detail and cut_of[0] == cut_of[1]
    assert cosines(got.numpy(), want.numpy()).min() >= BF16_COSINE


def test_random_numbers_can_be_drawn_after_a_candidate_that_cannot_be_recorded() -> None:
    """PyTorch's generator stays in capture mode after a failed recording."""
    device = torch.device(DEVICE)
    value = torch.ones(4, device=device)
    candidates = {"waits": lambda: value.sum().item(), "runs": lambda: value.mul_(1.0)}
    found = autotune.fastest(candidates, current(device))
    assert found.candidate == "runs" and set(found.rejected) == {"waits"}
    assert torch.randn(4, device=device).isfinite().all()
