"""Time products of few BF16 rows with weights of one byte, at the sizes of the models, by every kernel that runs them.

    python -m benchmarks.time_widened --output runs/widened.json [--only TEXT] [--seconds 80]

The Hopper GEMM widens FP8 and INT8 weights in registers. Next to it: cuBLAS and the same GEMM with BF16 weights, and
Triton's product with FP8 weights. A call multiplies by copies of the weights in turn, more than the L2 cache holds, in
a CUDA graph of dependent launches. The JSON has microseconds of one product for every config, the fastest of each
kernel, and the relative error against float32. Triton's configs are measured last, in the time that is left. The exit
status is 1 if a result is wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import options_parser, reason, report_head
from eval.script import concluded
from vla_accel.files import write_json
from vla_accel.fp8 import E4M3, INT8, Format
from vla_accel.kernels.autotune import compile_all, milliseconds, unfit
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import config as gemm_config
from vla_accel.kernels.gemm.config import GemmConfig, GemmSizes
from vla_accel.kernels.gemm.hopper import config as hopper_config
from vla_accel.kernels.gemm.ops import gemm, gemm_workspace
from vla_accel.kernels.gemm.weights import make_linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.machine import resolve_device
from vla_accel.runtime import Runtime

DEVICE = torch.device("cuda")
BYTES, COPIES = 128 << 20, 64
"""Bytes of all copies of a weight at least, and the most copies."""
BOUND = 0.006
PRODUCTS = {
    "GR00T q/k/v": (51, 4608, 1536), "GR00T out": (51, 1536, 1536), "GR00T up": (51, 6144, 1536),
    "GR00T down": (51, 1536, 6144), "Evo-1 up": (50, 3584, 896), "Evo-1 down": (50, 896, 3584),
    "FastWAM q/k/v": (98, 9216, 3072), "FastWAM out": (98, 3072, 3072), "FastWAM up": (98, 14_336, 3072),
    "FastWAM down": (120, 3072, 14_336), "X-VLA up": (262, 4096, 1024), "X-VLA down": (262, 1024, 4096),
    "FastWAM out, batch of 6": (588, 3072, 3072), "FastWAM actions up": (32, 4096, 1024),
    "MolmoAct2 up": (10, 4096, 768),
}  # fmt: skip
"""Rows by a weight (n, k)."""


class Product:
    """A product of random rows with copies of a random weight, in BF16 or, with a format, in one byte."""

    def __init__(self, rows: int, n: int, k: int, form: Format | None) -> None:
        draw = torch.Generator(DEVICE).manual_seed(0)
        weight = torch.randn(n, k, device=DEVICE, generator=draw) * k**-0.5
        amax = None if form is None else form.largest
        first = make_linear(weight, None, torch.bfloat16, amax, form=form or E4M3)
        copies = min(COPIES, -(-BYTES // first.bytes))
        self.layers = [first, *(replace(first, weight=first.weight.clone()) for _ in range(copies - 1))]
        self.x = torch.randn(rows, k, device=DEVICE, generator=draw).bfloat16()
        self.out = self.x.new_empty(rows, n)

    @property
    def sizes(self) -> GemmSizes:
        return gemm_config.gemm_sizes(self.x, self.layers[0])

    @property
    def want(self) -> Tensor:
        """The product in float32, with the weight as stored."""
        return self.x.float() @ self.layers[0].true_weight(torch.float32).T


def library(product: Product) -> None:
    for layer in product.layers:
        torch.mm(product.x, layer.weight.t(), out=product.out)


def by_config(product: Product, config: GemmConfig, gpu: Gpu) -> None:
    workspace = gemm_workspace(product.sizes, DEVICE, config)
    with Chain(gpu).resumed():
        for layer in product.layers:
            gemm(product.x, layer, product.out, config=config, workspace=workspace)


def timed(product: Product, runs: Mapping[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Microseconds of a product by config, the fastest of them, the largest error, and why others did not run."""
    compile_all(list(runs.values()), runtime)
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    error, want = 0.0, product.want
    for name, run in runs.items():
        try:
            product.out.fill_(float("nan"))
            found[name] = 1e3 * milliseconds(run, DEVICE, 1) / len(product.layers)
            mine = float((product.out.float() - want).norm() / want.norm())
            error = max(error, mine if mine == mine else float("inf"))
        except unfit() as problem:
            failed[name] = reason(problem)
    best = min(found, key=lambda name: found[name], default=None)
    fastest = {} if best is None else {"us": found[best], "config": best}
    gigabytes = {} if best is None else {"gb_per_s": product.layers[0].bytes / found[best] / 1e3}
    ran = bool(found) and not failed and error < BOUND
    return {**fastest, **gigabytes, "error": error, "right": ran, "all_us": found, "failed": failed}


def without_triton(name: str, gpu: Gpu, runtime: Runtime) -> dict[str, Any]:
    """Times of cuBLAS, and of the Hopper GEMM by the dtype of the weights."""
    rows, n, k = PRODUCTS[name]
    row: dict[str, Any] = {}
    for form in (None, E4M3, INT8):
        product = Product(rows, n, k, form)
        if form is None:
            row["cublas_bf16"] = timed(product, {"cuBLAS": partial(library, product)}, runtime)
        tiles = hopper_config.few_rows(gpu, rows, n, k, widened=form is not None)
        runs = {str(tile): partial(by_config, product, tile, gpu) for tile in tiles}
        row[f"hopper_{'bf16' if form is None else form.name}"] = timed(product, runs, runtime)
    return row


def joined(found: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`timed` of two sets of configs as of one: the fastest of all, and what is wrong with any."""
    fastest = min((found, more), key=lambda times: times.get("us", float("inf")))
    return {
        **fastest,
        "error": max(found["error"], more["error"]),
        "right": found["right"] and more["right"],
        "all_us": {**found["all_us"], **more["all_us"]},
        "failed": {**found["failed"], **more["failed"]},
    }


def by_triton(name: str, gpu: Gpu, runtime: Runtime) -> dict[str, Any]:
    """Times of Triton's product with FP8 weights: its candidates, then the variants of the best."""
    product = Product(*PRODUCTS[name], E4M3)
    first = gemm_config.candidates(gpu, product.sizes)
    found = timed(product, {str(c): partial(by_config, product, c, gpu) for c in first}, runtime)
    best = next((config for config in first if str(config) == found.get("config")), first[0])
    more = [other for other in gemm_config.variants(gpu, product.sizes, best) if other not in first]
    if not more:
        return found
    return joined(found, timed(product, {str(c): partial(by_config, product, c, gpu) for c in more}, runtime))


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--only", default="", help="products whose name contains this text")
    parser.add_argument("--seconds", type=float, default=80.0, help="time limit of Triton's configs")
    options = parser.parse_args()
    resolve_device(DEVICE.type)
    until, gpu, runtime = time.monotonic() + options.seconds, Gpu.of(DEVICE), Runtime.of(DEVICE)
    assert gpu is not None
    hopper_config.FEW_LEAST = 1  # Are its configs good for fewer rows, too?
    names = [name for name in PRODUCTS if options.only in name]
    report: dict[str, Any] = {**report_head("time_widened", DEVICE), "products": {}}
    with torch.inference_mode(), runtime.open():
        for name in names:
            rows, n, k = PRODUCTS[name]
            report["products"][name] = {"rows": rows, "n": n, "k": k, **without_triton(name, gpu, runtime)}
            write_json(options.output, report)
        for name in names:
            if time.monotonic() < until:
                report["products"][name]["triton_fp8"] = by_triton(name, gpu, runtime)
                write_json(options.output, report)
    wrong = []
    for name, row in report["products"].items():
        kernels = {kernel: found for kernel, found in row.items() if isinstance(found, dict)}
        wrong += [f"{name} {kernel}" for kernel, found in kernels.items() if not found["right"]]
        print(name, {kernel: round(found.get("us", 0.0), 2) for kernel, found in kernels.items()}, flush=True)
    print(json.dumps({"products": len(report["products"]), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(concluded(main))
