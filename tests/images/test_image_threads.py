"""Image models under several threads: each caller gets the answer to its own input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.errors import EngineError  # noqa: E402
from vla_accel.images import AcceleratedVae, plug_in  # noqa: E402
from vla_accel.images.models import random_model, random_stable_diffusion  # noqa: E402
from vla_accel.images.stable import Engines, Request, StableDiffusion  # noqa: E402

CPU = torch.device("cpu")
THREADS, CALLS = 4, 25


def answers_of_others(call: Callable[[int], Tensor], expected: Sequence[Tensor], calls: int) -> int:
    """How often a thread, each of which asks for its own index again and again, gets something else."""
    wrong: list[int] = []
    errors: list[BaseException] = []
    start = threading.Barrier(len(expected))

    def ask(index: int) -> None:
        try:
            start.wait()
            for _ in range(calls):
                got = call(index)
                if not torch.allclose(got, expected[index], rtol=1e-3, atol=1e-4):
                    wrong.append(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(expected))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return len(wrong)


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("name", ["tiny-sd-vae", "tiny-qwen-vae"])
@pytest.mark.parametrize("side", ["encode", "decode"])
def test_each_thread_gets_its_own_picture(name: str, engine: Any, side: str) -> None:
    vae = random_model(name, dtype=torch.float32, device=CPU)
    accelerated = AcceleratedVae(vae, {"vae_type": engine})
    shape = (3,) if side == "encode" else (4,)
    frames = (1,) if name == "tiny-qwen-vae" else ()
    size = (64, 64) if side == "encode" else (8, 8)
    values = [
        torch.randn(1, *shape, *frames, *size, generator=torch.Generator().manual_seed(i)) for i in range(THREADS)
    ]
    run = getattr(accelerated, side)
    expected = [run(value) for value in values]
    assert not torch.allclose(expected[0], expected[1], atol=0.1), "equal answers would prove nothing"
    assert answers_of_others(lambda i: run(values[i]), expected, CALLS) == 0


def test_threads_with_different_sizes_and_tiles_share_a_plugged_in_autoencoder() -> None:
    vae = random_model("tiny-qwen-vae", dtype=torch.float32, device=CPU)
    # Engines of one size only are kept, so that threads take them from each other.
    plug_in(vae, AcceleratedVae(vae, {"memory_budget_gib": 1e-9}))
    vae.enable_tiling(64, 64, 48, 48)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, 4, 1, 8 + 2 * i, 17, generator=generator) for i in range(3)]
    expected = [vae.decode(value).sample for value in values]
    assert answers_of_others(lambda i: vae.decode(values[i]).sample, expected, 4) == 0


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_each_thread_gets_the_picture_of_its_own_prompt(engine: Any) -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec(engine)))
    requests = [Request("abcdef"[i], height=64, width=64, steps=2, seed=i) for i in range(3)]

    def pixels(index: int) -> Tensor:
        return torch.from_numpy(pipeline.generate(requests[index]).pixels / 255.0)

    expected = [pixels(i) for i in range(len(requests))]
    assert answers_of_others(pixels, [e + 0.0 for e in expected], 4) == 0


def test_a_picture_cannot_be_requested_from_within_a_step() -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    pipeline = StableDiffusion(parts)
    request = Request("x", height=64, width=64, steps=1)

    def again(*_: Any) -> None:
        pipeline.generate(request)

    with pytest.raises(EngineError, match="generate: expected a call after the one in progress"):
        pipeline.generate(request, on_step=again)
    assert pipeline.generate(request).pixels.shape == (64, 64, 3), "it works again afterwards"
