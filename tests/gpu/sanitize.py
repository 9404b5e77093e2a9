"""A script: every own CUDA C++ and Triton kernel at small sizes against its reference, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize [GROUP ...] [--only TEXT] [--list]
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize gemm
    python -m tests.gpu.sanitize --delays 20

Groups: gemm, suffix, attention, denoise (CUDA C++), triton, image; all without one. Prints a JSON object on its last
line and ends with 1 where a case failed. `--delays`: each warp waits up to so many microseconds between letting the
successor start and what it writes, and before it makes what others wait for: an order that only luck keeps shows as a
wrong result.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.script import concluded
from tests.kernels.test_gemm import TILES
from tests.support import kernel_calls as calls
from tests.support import kernel_cases as cases
from tests.support.kernel_cases import _attention, _self_attention
from tests.support.kernel_shapes import CUTS, check_on_gpu
from tests.support.streamed_support import LoopCase, streamable
from vla_accel.families.pi0.network import Pi0
from vla_accel.fp8 import E4M3
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.config import GemmSizes, without_triton
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.gpu import Gpu
from vla_accel.machine import resolve_device
from vla_accel.nn.random_weights import random_model

DEVICE = torch.device("cuda")
Cases = dict[str, Callable[[], None]]


def gemm() -> Cases:
    """Every kind of tiling once, every epilogue with a plain, a split, a clustered and a persistent one."""
    from tests.gpu import test_gpu_gemm as gpu

    found: Cases = {}
    for i, tiling in enumerate(TILES):
        kind = (torch.bfloat16, torch.float16, E4M3.dtype)[i % 3]
        found[f"tiling {i}"] = lambda t=tiling, k=kind: gpu.check(t, k, 100, 320, 1536, Activation.NONE, False)
    for i, tiling in [(i, TILES[i]) for i in (0, 6, 4, 10)]:
        found[f"gelu {i}"] = lambda t=tiling: gpu.check(t, torch.bfloat16, 100, 320, 1536, Activation.GELU, False)
        found[f"geglu fp8 {i}"] = lambda t=tiling: gpu.check(t, E4M3.dtype, 100, 320, 1536, Activation.GEGLU, True)
        found[f"norms {i}"] = lambda t=tiling: gpu.check_norms_inside(t, torch.bfloat16, 100, 320, 1536)
    found["chain"] = gpu.test_a_chain_of_dependent_launches_is_ordered
    return found


def both_ways(name: str, make: Callable[[calls.Draw], calls.Call]) -> None:
    """A call of an op, launched after its predecessor has ended and before."""
    call = make(calls.Draw(name, torch.bfloat16))
    for early in (False, True):
        calls.check(call, calls.outputs_of(call, DEVICE, kernel=True, early=early), 0.02, 0.003, 0.006)


def suffix() -> Cases:
    """What the GEMM does for a suffix's rows, at a third of their widths: every tiling of 33 and 80 rows that a build
    measures."""
    found: Cases = {}

    for batch, tokens in ((1, 33), (2, 40)):
        rows = batch * tokens
        made = {
            "qkv_rope": (GemmSizes(rows, 512, 128, 6, 2), lambda c, b=batch, t=tokens: cases._qkv_rope(
                b, t, 512, 4, 1, 256, True, "", c, moments=64)),
            "gate_up_geglu": (GemmSizes(rows, 512, 1024, 1, 2), lambda c, r=rows: cases._gate_up(
                r, 512, 1024, True, "", c, moments=64)),
            "project": (GemmSizes(rows, 1024, 512), lambda c, r=rows, t=tokens: cases._project(
                r, 512, 1024, t, "grmn", c)),
        }  # fmt: skip
        for op, (product, make) in made.items():
            for cut in without_triton(Gpu.of(DEVICE), product):
                if isinstance(cut, HopperTile):
                    name = f"{op} {rows} {cut}"
                    found[name] = lambda n=name, m=make, c=cut: both_ways(n, m(c))
    return found


def attention() -> Cases:
    """Towers and prefixes: whole tiles and parts of one, lengths, clusters of one to three blocks, FP8."""

    shapes = {
        "tower 72": _self_attention(1, 256, 2, 72), "tower 72 fp8": _self_attention(2, 200, 1, 72, 200.0),
        "tower 64": _self_attention(1, 100, 2, 64), "tower 80": _self_attention(1, 129, 1, 80),
        "prefix": _attention(100, 100, 8, 1, 256, [97]), "prefix fp8": _attention(40, 200, 8, 1, 256, [130], 200.0),
        "prefix of two": _attention(800, 200, 8, 1, 256, [190]),
        "prefix of one": _attention(600, 130, 8, 1, 256, [130, 65]),
        "prefix grouped": _attention(70, 70, 8, 2, 256, [16]), "prefix unpadded": _attention(64, 65, 8, 1, 256, None),
    }  # fmt: skip
    return {name: lambda n=name, m=make: both_ways(n, m) for name, make in shapes.items()}


def denoise() -> Cases:
    """Every kernel of the streamed loop, with one to four tiles of rows, one sequence and several, for all families."""
    from tests.gpu import test_gpu_smolvla as smolvla
    from tests.support.gpu_policies import BF16_COSINE, cosines, on_gpu
    from tests.support.streamed_support import loop_of, loops_inputs, run_loop
    from vla_accel.families.pi0.native_loop import expert_spec, expert_weights
    from vla_accel.families.pi0.step_tables import step_tables
    from vla_accel.nn.loop import SuffixLoop

    def run(case: LoopCase) -> None:
        model = random_model(Pi0, case.config)
        inputs, state, noise = loops_inputs(case)
        sizes = (case.batch, case.prefix_tokens)
        with torch.inference_mode():
            exact = expert_weights(model, "fp32")
            tables = step_tables(model, exact.normed_products(), case.steps)
            wide = {n: v.float() if n != "lengths" else v for n, v in inputs.items()}
            want = run_loop(SuffixLoop(exact, expert_spec(case.config), tables, *sizes), wide, state, noise, "cpu")
            weights = expert_weights(on_gpu(model), "bf16", streamed=True)
            tables = step_tables(model, weights.normed_products(), case.steps)
            loop = loop_of(case, weights, tables)
        got = run_loop(loop, inputs, state, noise, "cuda")
        start = noise.numpy()
        assert cosines(got - start, want - start).min() >= BF16_COSINE
        np.testing.assert_array_equal(run_loop(loop, inputs, state, noise, "cuda"), got)

    one = LoopCase(streamable("pi05", width=128, mlp=2048, heads=4, head_dim=128, depth=1), steps=2)
    found = {
        "attend": one,
        "attend π0": replace(one, config=streamable("pi0", width=256, mlp=256, heads=2, head_dim=128, depth=1)),
        "attend many rows": replace(
            one, config=streamable("pi05", width=128, mlp=512, heads=4, head_dim=128, depth=1, horizon=50)
        ),
        "attend rows in batches": replace(
            one, config=streamable("pi05", width=512, mlp=512, heads=2, head_dim=128, depth=1, horizon=50)
        ),
        "attend one key": replace(one, prefix_tokens=1),
        "group": LoopCase(streamable("pi05", width=128, mlp=512, heads=4, depth=1), steps=2),
        "group π0": LoopCase(streamable("pi0", width=128, mlp=512, heads=4, depth=1), steps=2),
        "split": LoopCase(streamable("pi05", width=128, mlp=512, heads=4, depth=1), batch=2, steps=2),
        "split x 4": LoopCase(streamable("pi05", width=128, mlp=512, heads=4, depth=1), batch=4, steps=2),
        "split π0 grouped": LoopCase(
            streamable("pi0", width=256, mlp=1024, heads=4, kv_heads=2, depth=1, horizon=15), batch=2, steps=2
        ),
        "split of sixteen": LoopCase(
            streamable("pi05", width=64, mlp=256, heads=4, head_dim=192, depth=1), steps=2, prefix_tokens=600
        ),
        "narrow": LoopCase(
            streamable("pi05", width=32, mlp=96, heads=1, depth=1, horizon=1, action_dim=7), prefix_tokens=1, steps=1
        ),
    }
    in_order = ("16 actions", "50 actions", "all cross", "three sequences")
    return {name: lambda c=case: run(c) for name, case in found.items()} | {
        f"causal {name}": lambda n=name: smolvla.test_the_streamed_loop_is_as_near_as_the_fused(n) for name in in_order
    }


def triton() -> Cases:
    """The smallest cases of every op, three of more than one tile, and every kind of cut."""
    kept: dict[str, int] = {}
    found: Cases = {}
    for name in cases.CASES:
        op = name.split()[0]
        kept[op] = kept.get(op, 0) + 1
        if kept[op] <= 6:
            found[name] = lambda n=name: check_on_gpu(n)
    return found | {name: lambda n=name: check_on_gpu(n) for name in CUTS}


def image() -> Cases:
    """The kernels of the autoencoders and UNets, against their references on the CPU."""
    from vla_accel.kernels.image import ops
    from vla_accel.kernels.image.ops import GroupNorm, Sum

    def draw(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(DEVICE)
        if isinstance(value, (Sum, GroupNorm)):
            return replace(value, **{f.name: placed(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    def check(op: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        want = op(*arguments, **options)
        got = op(*map(placed, arguments), **{name: placed(value) for name, value in options.items()})
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (want, got)), strict=True):
            found = float((a.float() - b.float().cpu()).abs().max() / a.float().abs().max())
            assert found <= 0.01, found

    generator, wide = torch.Generator().manual_seed(0), torch.float32
    summed = Sum(draw(2, 6, 4, 24), draw(2, 6, 4, 24), draw(2, 24, dtype=wide))
    phased = Sum(draw(2, 4, 3, 96), None, draw(24, dtype=wide), True)
    norm = GroupNorm(8, 1 + draw(24, dtype=wide), draw(24, dtype=wide), 1e-5)
    large = Sum(draw(2, 10, 14, 320), draw(2, 10, 14, 320), draw(2, 320, dtype=wide))
    groups, skip = GroupNorm(8, 1 + draw(336, dtype=wide), draw(336, dtype=wide), 1e-5), draw(2, 10, 14, 16)
    gamma, rows, columns = draw(24, dtype=wide), draw(10, 40), [draw(40, dtype=wide) for _ in range(3)]
    found: Cases = {
        "group_act large": lambda: check(
            ops.group_act, large, groups, activation=Activation.SILU, keep=True, skip=skip
        ),
        "add_layer_norm": lambda: check(ops.add_layer_norm, rows, rows, *columns, 1e-5),
        "geglu_erf": lambda: check(ops.geglu_erf, rows),
        "softmax": lambda: check(ops.softmax, draw(6, 500, dtype=wide), torch.float16),
    }  # fmt: skip
    for name, x in (("summed", summed), ("phased", phased)):
        found |= {
            f"add_up {name}": lambda x=x: check(ops.add_up, x),
            f"rms_act {name}": lambda x=x: check(ops.rms_act, x, gamma, activation=Activation.SILU, keep=True),
            f"group_act {name}": lambda x=x: check(ops.group_act, x, norm, activation=Activation.SILU, keep=True),
        }
    for width, how in ((48, "products"), (384, "flash"), (512, "flash-64")):
        parts = tuple(draw(1, 150, width) for _ in range(3))

        def attend(q: Tensor, k: Tensor, v: Tensor, how: str = how) -> Tensor:
            return ops.attend(q, k, v, how=how) if q.is_cuda else ops.attend(q.float(), k.float(), v.float())

        found[f"attend {how}"] = lambda p=parts, f=attend: check(f, *p)
    return found


GROUPS: dict[str, Callable[[], Cases]] = {
    "gemm": gemm, "suffix": suffix, "attention": attention, "denoise": denoise, "triton": triton, "image": image,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)}; all without one")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--delays", type=int, default=0, metavar="US", help="the longest wait, in microseconds")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    options = parser.parse_args()
    resolve_device(DEVICE.type)
    nvrtc.MACROS["WAIT_TICKS"] = 32  # 2 minutes: under a sanitizer everything takes longer
    if options.delays:
        nvrtc.MACROS["INJECT_DELAY"] = options.delays
    chosen = itertools.chain.from_iterable(
        ((f"{group} {name}", run) for name, run in GROUPS[group]().items()) for group in options.groups or GROUPS
    )
    chosen = [(name, run) for name, run in chosen if options.only in name]
    if options.list:
        print(*(name for name, _ in chosen), sep="\n")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(4)
    failed: dict[str, str] = {}
    began = time.perf_counter()
    for name, run in chosen:
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            traceback.print_exc()
        print(f"{'FAILED' if name in failed else 'ok'} {name}", file=sys.stderr, flush=True)
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"cases": len(chosen), "failed": failed, "delays_us": options.delays, "seconds": seconds}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(concluded(main))
