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

import torch
from torch import Tensor

from eval.script import concluded
from tests.kernels.test_gemm import TILES
from tests.support import interpret_image
from tests.support import kernel_calls as calls
from tests.support import kernel_cases as cases
from tests.support.kernel_cases import _attention, _self_attention
from tests.support.kernel_shapes import CONFIGS, check_on_gpu
from tests.support.streamed_support import LoopCase, Loops, streamable
from vla_accel.families.pi0.network import Kind
from vla_accel.fp8 import E4M3
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.config import GemmSizes, without_triton
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.gpu import Gpu
from vla_accel.machine import resolve_device

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
            for config in without_triton(Gpu.of(DEVICE), product):
                if isinstance(config, HopperTile):
                    name = f"{op} {rows} {config}"
                    found[name] = lambda n=name, m=make, c=config: both_ways(n, m(c))
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
    from tests.gpu.test_gpu_streamed import CASES, check

    def case(kind: Kind, batch: int = 1, prefix_tokens: int = 100, steps: int = 2, **sizes: int) -> LoopCase:
        return LoopCase(streamable(kind, **{"heads": 4, "depth": 1, **sizes}), batch, prefix_tokens, steps)

    attend = {"width": 128, "mlp": 512, "heads": 4, "head_dim": 128}
    small = {"width": 128, "mlp": 512}
    found = {
        "attend": case("pi05", **attend | {"mlp": 2048}),
        "attend π0": case("pi0", **attend | {"width": 256, "mlp": 256, "heads": 2}),
        "attend many rows": case("pi05", **attend, horizon=50),
        "attend rows in batches": case("pi05", **attend | {"width": 512, "heads": 2}, horizon=50),
        "attend one key": case("pi05", prefix_tokens=1, **attend | {"mlp": 2048}),
        "group": case("pi05", **small), "group π0": case("pi0", **small),
        "split": case("pi05", 2, **small), "split x 4": case("pi05", 4, **small),
        "split π0 grouped": case("pi0", 2, width=256, mlp=1024, kv_heads=2, horizon=15),
        "split of sixteen": case("pi05", prefix_tokens=600, width=64, mlp=256, head_dim=192),
        "narrow": case("pi05", 1, 1, 1, width=32, mlp=96, heads=1, horizon=1, action_dim=7),
    }  # fmt: skip
    found |= {n: CASES[f"smolvla {n}"] for n in ("16 actions", "50 actions", "all cross", "three sequences")}
    gpu = Gpu.of(DEVICE)
    assert gpu is not None

    def run(case: LoopCase) -> None:
        loops = Loops(case)
        check(loops, loops.streamed(gpu, "cuda"))

    return {name: lambda c=case: run(c) for name, case in found.items()}


def persistent() -> Cases:
    """The loop kernel at the emulator's sizes, with the shared memory of this GPU and of a smaller one."""
    from tests.gpu.test_gpu_persistent import EMULATED, check, gpus

    return {
        f"{name}, {shared}": lambda c=case, g=gpu: check(c, g)
        for name, (case, _) in EMULATED.items()
        for shared, gpu in gpus().items()
    }


def triton() -> Cases:
    """The smallest cases of every op, three of more than one tile, and every kind of config."""
    kept: dict[str, int] = {}
    found: Cases = {}
    for name in cases.CASES:
        op = name.split()[0]
        kept[op] = kept.get(op, 0) + 1
        if kept[op] <= 6:
            found[name] = lambda n=name: check_on_gpu(n)
    return found | {name: lambda n=name: check_on_gpu(n) for name in CONFIGS}


def image() -> Cases:
    """The kernels of the autoencoders and UNets, against their references on the CPU."""

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(DEVICE)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: placed(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    def check(op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        found = interpret_image.difference(op(*map(placed, arguments)), op(*arguments))
        assert found <= 0.01, found

    return {name: lambda c=case: check(*c) for name, case in interpret_image.cases(few=True).items()}


GROUPS: dict[str, Callable[[], Cases]] = {
    "gemm": gemm, "suffix": suffix, "attention": attention, "denoise": denoise, "persistent": persistent,
    "triton": triton, "image": image,
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
