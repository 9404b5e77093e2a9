"""Measure the error of sums in FP8 products, and its effect on the final actions with vision in FP8.

    python -m benchmarks.accumulation --output runs/accumulation.json [--observations observations.npz]
    python -m benchmarks.accumulation --tiny --output runs/accumulation.json    # without a GPU: does it run?

Hopper's FP8 wgmma keeps about 14 bits of a sum. cuBLAS with fast accumulation, and our GEMM (one sum over a block's
whole share of K), use it over all of K; without fast accumulation cuBLAS regularly adds its sums to float32.

Products: SigLIP's four at full size, 512 rows, with random operands and with those of the bundled checkpoint: the rms
error of each method relative to the exact sum, and microseconds of one call in a CUDA graph. Actions: prefix and vision
in FP8, alone and together, compared with FP32 eager: as shipped, and with every FP8 product by cuBLAS with fast
accumulation, without it, and summed in float32. Without a recording, images are noise; the JSON says which. It is
written again after each part. The exit status is 1 if a product is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.script import options_parser, reason, report_head
from eval.script import concluded
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import NativeOptions
from vla_accel.families.loading import load
from vla_accel.files import user_path, write_json
from vla_accel.fp8 import E4M3
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import milliseconds, unfit
from vla_accel.kernels.gemm import hopper
from vla_accel.kernels.gemm.epilogue import PLAIN
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.machine import resolve_device
from vla_accel.measure.parity import Remembered, compare, reference_of
from vla_accel.measure.random_policy import random_observations
from vla_accel.measure.recording import load_observations

WORST = 0.05
"""Largest error relative to the exact sum; a larger one is a bug."""
CALLS = 20
"""Consecutive calls that are timed together."""
ROWS, WIDTH, HIDDEN, PADDED = 512, 1152, 4304, 4352
PRODUCTS = {
    "qkv": (3 * WIDTH, WIDTH, WIDTH), "out": (WIDTH, WIDTH, WIDTH), "fc1": (PADDED, WIDTH, WIDTH),
    "fc2": (WIDTH, HIDDEN, PADDED),
}  # fmt: skip
"""N, K, and K padded with zeros, of the products of a SigLIP block."""
TINY = {"out": (64, 48, 48), "fc2": (64, 40, 64)}
DEPTHS = (128, 512)
"""Depths of K that are summed at a time before they are added in float32."""
PARTS = ("vision", "kv_cache", "denoise")
SCALED = torch._scaled_mm
SHIPPED, FAST, SLOW, EXACT = "as shipped", "cuBLAS, fast accumulation", "cuBLAS, without it", "summed in float32"


# -- products ---------------------------------------------------------------------------------------------------------


def operands(n: int, k: int, padded: int, kind: str, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and weights in E4M3. `kind`: "normal" (as after a norm) or "gelu" (as before fc2); with "outliers" one
    column of 256 is 30 times as large."""
    draw = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(size, k, generator=draw, device=device) for size in (rows, n))
    if "gelu" in kind:
        x = F.gelu(x, approximate="tanh")
    if "outliers" in kind:
        x[:, ::256] *= 30
    quantised = (
        F.pad(E4M3.saturated(y / E4M3.scale(float(y.abs().amax()))).float(), (0, padded - k)) for y in (x, weight)
    )
    x, weight = (y.to(E4M3.dtype).contiguous() for y in quantised)
    return x, weight


def library(x: Tensor, weight: Tensor, fast: bool, out_dtype: torch.dtype) -> Tensor:
    """x weightᵀ by cuBLAS."""
    one = torch.ones((), device=x.device)
    return SCALED(x, weight.t(), scale_a=one, scale_b=one, out_dtype=out_dtype, use_fast_accum=fast)


def promoted(x: Tensor, weight: Tensor, depth: int) -> Tensor:
    """Fast sums over parts of `depth`, added in float32, as a kernel with such a promotion interval would compute."""
    total = torch.zeros(len(x), len(weight), device=x.device)
    for a, b in zip(x.split(depth, 1), weight.split(depth, 1), strict=True):
        total += library(a.contiguous(), b.contiguous(), True, torch.float32)
    return total


def own(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Our GEMM with its planned tiling, and with K split among one to three blocks, whose parts add in float32."""
    gpu = Gpu.of(x.device)
    if gpu is None:
        return {}
    sizes = len(x), len(weight), x.shape[1]
    planned = hopper.planned(gpu, E4M3.dtype, Activation.NONE, *sizes)
    first = planned or next(iter(hopper.searched(gpu, E4M3.dtype, Activation.NONE, *sizes)), None)
    if first is None:
        return {}
    tilings = [first, *(replace(first, split=split, persistent=False) for split in (1, 2, 3))]
    out = torch.empty(sizes[0], sizes[1], dtype=torch.bfloat16, device=x.device)

    def call(tiling: hopper.HopperTile) -> Tensor:
        hopper.gemm(x, Linear(weight), out, PLAIN, None, tiling, gpu)
        return out

    return {f"own, {tiling}, bfloat16 out": functools.partial(call, tiling) for tiling in dict.fromkeys(tilings)}


def error_of(got: Tensor, want: Tensor) -> float:
    """Rms of the error relative to the rms of `want`."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def product(name: str, sizes: tuple[int, int, int], kind: str, rows: int, device: torch.device) -> dict[str, Any]:
    """Errors and times of one product with every method."""
    n, k, padded = sizes
    x, weight = operands(n, k, padded, kind, rows, device)
    want = x.double() @ weight.double().T
    ways: dict[str, Callable[[], Tensor]] = {
        "exact, rounded to BF16": lambda: want.bfloat16(),
        **{
            f"cuBLAS, {how}, {str(dtype).removeprefix('torch.')} out": functools.partial(
                library, x, weight, fast, dtype
            )
            for fast, how in ((True, "fast accumulation"), (False, "without it"))
            for dtype in (torch.float32, torch.bfloat16)
        },
        **{f"promoted every {depth}, float32 out": functools.partial(promoted, x, weight, depth) for depth in DEPTHS},
        **own(x, weight),
    }
    found = []
    for way, run in ways.items():
        row: dict[str, Any] = {"way": way}
        try:
            row["error"] = error_of(run(), want)
            if device.type == "cuda" and way.startswith(("cuBLAS", "own")):
                row["us"] = 1e3 * milliseconds(run, device, CALLS)
        except unfit() as error:
            row["cannot"] = reason(error)
        found.append(row)
    return {"product": name, "rows": rows, "n": n, "k": k, "operands": kind, "ways": found}


# -- a policy ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_library(way: str, watch: Callable[[Tensor, Tensor], None] = lambda x, weight: None) -> Iterator[list[int]]:
    """Sum cuBLAS's FP8 products in this block with a method; `watch` receives their operands. Yields their count."""
    count = [0]

    def scaled(
        x: Tensor, weight: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor, **more: Any
    ) -> Tensor:  # fmt: skip
        count[0] += 1
        watch(x, weight.t())
        if way != EXACT:
            more["use_fast_accum"] = way != SLOW
            return SCALED(x, weight, scale_a=scale_a, scale_b=scale_b, bias=bias, out=out, **more)
        exact = (x.float() @ weight.float()) * (scale_a * scale_b)
        return out.copy_(exact if bias is None else exact + bias.float())

    with patch.object(torch, "_scaled_mm", scaled):
        yield count


def config_of(fp8: Sequence[str], way: str, device: torch.device) -> PolicyConfig:
    """A configuration with these components in FP8; other methods than `SHIPPED` use portable kernels, not our GEMM."""
    specs = {part: EngineSpec("native", precision="fp8" if part in fp8 else "auto") for part in PARTS}
    kernels = NativeOptions() if way == SHIPPED else NativeOptions(kernels="portable")
    return replace(
        PolicyConfig(device=str(device), precision="bf16", native=kernels).with_specs(specs), deterministic=True
    )


def own_operands(observations: Sequence[Any], device: torch.device) -> list[dict[str, Any]]:
    """The errors of the bundled checkpoint's products in vision and prefix, on the operands of its calls."""
    errors: dict[tuple[int, int, int], dict[str, list[float]]] = {}

    def watch(x: Tensor, weight: Tensor) -> None:
        want = x.double() @ weight.double().T
        found = errors.setdefault((len(x), len(weight), x.shape[1]), {FAST: [], SLOW: []})
        for way, fast in ((FAST, True), (SLOW, False)):
            found[way].append(error_of(library(x, weight, fast, torch.float32), want))

    config = replace(config_of(PARTS[:2], FAST, device), cuda_graph=False)
    policy = OptimizedPolicy.from_pretrained("demo", config)
    with by_library(FAST, watch):
        for observation in observations:
            policy.infer(observation)
    return [
        {"rows": rows, "n": n, "k": k, "ways": [
            {"way": way, "calls": len(values), "mean_error": sum(values) / len(values), "worst_error": max(values)}
            for way, values in listed.items()
        ]}
        for (rows, n, k), listed in errors.items()
    ]  # fmt: skip


def actions(
    fp8: Sequence[str], way: str, reference: Any, observations: Sequence[Any], draws: int,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Agreement of one configuration's final actions with FP32 eager."""
    with by_library(way) as count:
        policy = OptimizedPolicy.from_pretrained("demo", config_of(fp8, way, device))
        report = compare(policy, reference, observations, name=way, draws=draws)
    return {
        "fp8": list(fp8), "way": way, "products_by_cublas": count[0], "cosine": report.actions.cosine,
        "judged_cosine": report.rest_cosine, "needed": report.threshold, "worst_cosine": report.actions.worst_cosine,
        "flipped": report.flipped, "chunks": report.observations * report.draws, "passed": report.passed,
        "relative_error": report.relative_error, "engines": report.engines,
        "components": {name: asdict(agreement) for name, agreement in report.components.items()},
    }  # fmt: skip


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--observations", type=user_path, help="recorded observations (.npz); default: noise")
    parser.add_argument("--count", type=int, default=120, help="largest number of observations")
    parser.add_argument("--draws", type=int, default=8, help="noise draws of each")
    parser.add_argument("--tiny", action="store_true", help="small, on a CPU")
    options = parser.parse_args()
    device = resolve_device("cpu" if options.tiny else "cuda")
    report: dict[str, Any] = {
        **report_head("accumulation", device),
        "images": "noise" if options.observations is None else f"recorded, {options.observations.name}",
        "products": [], "own_operands": [], "actions": [],
    }  # fmt: skip

    def keep() -> None:
        write_json(options.output, report)

    with torch.inference_mode():
        for name, sizes in (TINY if options.tiny else PRODUCTS).items():
            like = "gelu" if name == "fc2" else "normal"
            for kind in (like, f"{like}, outliers"):
                report["products"].append(product(name, sizes, kind, 32 if options.tiny else ROWS, device))
                keep()
    first = OptimizedPolicy.from_pretrained("demo", config_of((), SHIPPED, device))
    reference = Remembered(reference_of(first.config, load("demo", first.config, device=device, dtype=torch.float32)))
    count, draws = (2, 1) if options.tiny else (options.count, options.draws)
    recorded = options.observations and load_observations(options.observations, count)
    observations = recorded or random_observations(first, count)
    report["own_operands"] = own_operands(observations[:4], device)
    keep()
    for fp8 in (("kv_cache",), ("vision",), ("vision", "kv_cache")):
        for way in (SHIPPED, FAST, SLOW, EXACT):
            report["actions"].append(actions(fp8, way, reference, observations, draws, device))
            keep()
    wrong = [
        f"{one['product']}, {one['operands']}: {way['way']}"
        for one in report["products"] for way in one["ways"] if way.get("error", 0.0) > WORST
    ]  # fmt: skip
    print(json.dumps({"products": len(report["products"]), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(concluded(main))
