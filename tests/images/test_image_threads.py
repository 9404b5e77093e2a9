"""Image models under several threads: each caller gets the answer to its own input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.images import ENGINES, ONE_EACH, accelerated, make_parts, make_vae, vae_inputs, wrong_answers
from vla_accel.errors import EngineError
from vla_accel.images import AcceleratedVae, plug_in
from vla_accel.images.stable import Request

THREADS, CALLS = 4, 25


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), ONE_EACH[:2])
@pytest.mark.parametrize("side", ["encode", "decode"])
def test_each_thread_gets_its_own_picture(name: str, engine: str, side: str) -> None:
    run = getattr(AcceleratedVae(make_vae(name), {"vae_type": engine}), side)
    like = vae_inputs(name)[side == "decode"]
    values = [torch.randn(like.shape, generator=torch.Generator().manual_seed(i)) for i in range(THREADS)]
    expected = [run(value) for value in values]
    assert not torch.allclose(expected[0], expected[1], atol=0.1), "equal answers would prove nothing"
    assert wrong_answers(lambda i: run(values[i]), expected, CALLS) == 0


def test_threads_with_different_sizes_and_tiles_share_a_plugged_in_autoencoder() -> None:
    vae = make_vae()
    # The budget keeps engines of one size only, so that threads evict each other's.
    plug_in(vae, AcceleratedVae(vae, {"memory_budget_gib": 1e-9}))
    vae.enable_tiling(64, 64, 48, 48)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, 4, 1, 8 + 2 * i, 17, generator=generator) for i in range(3)]
    expected = [vae.decode(value).sample for value in values]
    assert wrong_answers(lambda i: vae.decode(values[i]).sample, expected, 4) == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_each_thread_gets_the_picture_of_its_own_prompt(engine: str) -> None:
    pipeline = accelerated(make_parts(), engine)
    requests = [Request("abcdef"[i], height=64, width=64, steps=2, seed=i) for i in range(3)]

    def pixels(index: int) -> Tensor:
        return torch.from_numpy(pipeline.generate(requests[index]).pixels / 255.0)

    assert wrong_answers(pixels, [pixels(i) for i in range(len(requests))], 4) == 0


def test_a_picture_cannot_be_requested_from_within_a_step() -> None:
    pipeline = accelerated(make_parts(), "eager")
    request = Request("x", height=64, width=64, steps=1)

    def again(*_: Any) -> None:
        pipeline.generate(request)

    with pytest.raises(EngineError, match="generate: expected a call after the one in progress"):
        pipeline.generate(request, on_step=again)
    assert pipeline.generate(request).pixels.shape == (64, 64, 3), "it works again afterwards"
