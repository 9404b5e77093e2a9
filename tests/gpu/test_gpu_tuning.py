"""Cuts of the denoise loop as a build measures them on a GPU: the loop agrees, and the next build finds them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_policies import BF16_COSINE, DEVICE, cosines, on_gpu
from tests.support.gpus import assumed
from tests.support.streamed_support import LOOPS, loops_inputs, run_loop
from vla_accel.families.pi0.native_loop import expert_spec, expert_weights, steps_of
from vla_accel.families.pi0.network import Pi0
from vla_accel.kernels import autotune
from vla_accel.kernels import config as configs
from vla_accel.kernels.gpu import Gpu
from vla_accel.nn import kernel_choices
from vla_accel.nn.loop import SuffixLoop
from vla_accel.nn.random_weights import random_model

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
    case = LOOPS[name]
    model = random_model(Pi0, case.config)
    inputs, state, noise = loops_inputs(case)
    here = Gpu.of(torch.device(DEVICE))
    assert here is not None

    def loop_of(model: Pi0, precision: str) -> SuffixLoop:
        weights = expert_weights(model, precision)
        tables = steps_of(model, weights, case.steps)
        return SuffixLoop(weights, expert_spec(case.config), tables, case.batch, case.prefix_tokens)

    wide: dict[str, Any] = {n: v.float() if n != "lengths" else v for n, v in inputs.items()}
    with torch.inference_mode():
        want = run_loop(loop_of(model, "fp32"), wide, state, noise, "cpu")
        moved = on_gpu(model)
        with assumed(here.portable if portable else here):
            loop = loop_of(moved, "bf16")
            assert all(f"; {product} " in loop.choices.detail for product in ("qkv", "out", "up", "down", "attention"))
            assert not late, "all was compiled side by side before it was measured"
            got = run_loop(loop, inputs, state, noise, DEVICE)
            monkeypatch.setattr(autotune, "fastest", lambda *_: pytest.fail("measured again"))
            again = loop_of(moved, "bf16")
    cut_of = [{kind: taken.config for kind, taken in made.choices.chosen.items()} for made in (loop, again)]
    assert again.choices.detail == loop.choices.detail and cut_of[0] == cut_of[1]
    start = noise.numpy()
    assert cosines(got - start, want - start).min() >= BF16_COSINE
