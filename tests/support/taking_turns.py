"""`python -m tests.support.taking_turns SEED ROUNDS`: Hopper's own kernels again and again, in an order that the seed
gives. What one computes must stay what it computed first: to the bit where sums have an order, closely where they have
none. Several such processes at once take turns on the GPU, in the middle of kernels."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels.test_gemm import TILES
from tests.support import kernel_calls as calls
from tests.support import kernel_shapes as shapes
from tests.support.streamed_support import EXPERTS, LOOPS, LoopCase, Loops, reason
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import hopper
from vla_accel.kernels.gemm.epilogue import PLAIN
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu

DEVICE = "cuda"
# Two views of the vision tower, and prefixes of two and of three.
ATTENTION = ("self-attention (2, 256, 16, 72) fp8=False", "attention 544 of 256", "attention 800 of 256")
Run = Callable[[], Tensor]


def streamed() -> dict[str, Run]:
    """The denoise loops of all families. Behind each prefix there is rubbish."""
    gpu = Gpu.of(torch.device(DEVICE))
    assert gpu is not None

    def run(case: LoopCase) -> Run:
        loops = Loops(case)
        loop, inputs = loops.streamed(gpu, DEVICE), loops.placed(DEVICE)
        return lambda: loops.moved(loop, inputs)

    cases = {f"SmolVLA, {name}": case for name, case in EXPERTS.items()} | {f"π0, {n}": c for n, c in LOOPS.items()}
    return {name: run(case) for name, case in cases.items() if reason(case) is None}


def attention() -> dict[str, Run]:
    def run(name: str) -> Run:
        call = shapes.call_of(name, torch.bfloat16)
        return lambda: calls.outputs_of(call, torch.device(DEVICE), kernel=True, early=True)[0].float().cpu()

    return {name: run(name) for name in ATTENTION}


def products() -> dict[str, Run]:
    """One of a prefix, in tilings of every kind."""
    gpu = Gpu.of(torch.device(DEVICE))
    assert gpu is not None
    draw = torch.Generator(device=DEVICE).manual_seed(0)
    x, weight = (torch.randn(n, 2048, device=DEVICE, generator=draw).bfloat16() for n in (544, 2560))
    weights = Linear(weight, weight_scale_value=2048**-0.5)
    out = torch.empty(544, 2560, dtype=torch.bfloat16, device=DEVICE)

    def run(tile: hopper.HopperTile) -> Run:
        def call() -> Tensor:
            with Chain(gpu).resumed():
                hopper.gemm(x, weights, out.fill_(float("nan")), PLAIN, None, tile, gpu)
            return out.float().cpu()

        return call

    return {f"product, {tile}": run(tile) for tile in TILES}


def main(seed: int, rounds: int) -> None:
    """Fails at the first result that is another than it was."""
    order, loops = random.Random(seed), streamed()
    runs = {**loops, **attention(), **products()}
    first = {name: run() for name, run in runs.items()}
    for name, value in first.items():
        assert bool(torch.isfinite(value).all()), f"{name}: not finite at first"
    for done in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            got, want = runs[name](), first[name]
            assert bool(torch.isfinite(got).all()), f"{name}: not finite in round {done}"
            bound = 0.0 if name in loops else 0.02 * float(want.abs().max())
            away = float((got - want).abs().max())
            assert away <= bound, f"{name}: {away:.3g} away from its first result in round {done}"
    print(f"{rounds} rounds of {len(runs)}: the same")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
