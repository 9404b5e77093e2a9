"""Time promising tilings of Hopper's GEMM in the vision and prefix of π0.5 at full width.

    python -m benchmarks.time_gemm --output runs/gemm.json [--only TEXT] [--views 2] [--seconds 100] [--each 3]

A chain is the program itself (`NativeVision`, `NativePrefix`) with some layers of random weights in a CUDA graph, so
the products run between the other kernels, with weights from memory. Every candidate of a product is timed in turns
with the current choice, while the other products keep theirs; its result must be as close to float32. At the end the
best of all products are tried together.

The JSON is written again after each product: microseconds of a layer with the candidate and with the current choice,
and the saving in a whole call, the best first; and the time of each product alone with the library, the current choice
and the best. The exit status is 1 if a tiling is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.script import options_parser, report_head
from eval.script import concluded
from tests.gpu import chains
from tests.gpu.chains import CHAINS, DEVICE, DTYPE, FP8, Chain, Product
from vla_accel.files import write_json
from vla_accel.fp8 import E4M3
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import milliseconds, unfit
from vla_accel.kernels.chain import Chain as LaunchChain
from vla_accel.kernels.gemm import config, hopper
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.hopper import HopperTile, launch
from vla_accel.kernels.gemm.moments import Moments, write
from vla_accel.kernels.gemm.ops import by_library
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.nvrtc import compiled
from vla_accel.machine import resolve_device
from vla_accel.numeric import round_up

ROUNDS, REPLAYS = 5, 3
APART = 0.1
"""Largest relative difference of a chain's output: sums in another order, rounded in FP8."""
CYCLES_FETCHED, START, EXCHANGE = 48, 2500, 900
"""Estimates: bytes per cycle of a multiprocessor, cycles of a wave of blocks and of an exchange of sums."""
WORTH, MOST = 1.45, 80
"""Largest estimate relative to the best, and largest number of tilings that are tried."""
TOGETHER, GAIN = 6, 0.998
"""Tilings of each product that are tried together; largest remaining share of the chain's time."""


def cycles(gpu: Gpu, product: Product, tiling: HopperTile) -> float:
    """What a product takes by estimate; good enough to leave out what cannot win."""
    blocks = -(-product.n // (tiling.weight_rows * tiling.across)) * tiling.across
    blocks *= -(-product.rows // (tiling.tokens * tiling.along)) * tiling.along * tiling.split
    at_once = min(tiling.resident, -(-blocks // gpu.multiprocessors))
    waves = -(-blocks // (gpu.multiprocessors * at_once))
    chunks = at_once * -(-product.chunks // tiling.split)
    # A wgmma reads its weights and its tokens from shared memory.
    one = max(tiling.width / 2, 16 + tiling.width / 4)
    multiplied = chunks * 4 * tiling.groups * tiling.blocks * tiling.parts * one
    fetched = chunks * 128 * (tiling.weight_rows / tiling.along**0.5 + tiling.tokens / tiling.across**0.5)
    starts = 1 if tiling.persistent else waves
    return waves * max(multiplied, fetched / CYCLES_FETCHED) + START * starts + EXCHANGE * (tiling.split - 1)


def candidates(gpu: Gpu, product: Product, each: int) -> list[HopperTile]:
    """Tilings of every kind, `each` of a kind: those that the estimate likes best. A kind is: blocks a multiprocessor,
    parts of K, blocks that share weights and tokens, persistence."""
    kinds: dict[tuple[Any, ...], dict[HopperTile, float]] = {}
    shapes = itertools.product(
        (1, 2, 3), (1, 2), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)),
        (False, True),
    )  # fmt: skip
    for groups, blocks, parts, resident, split, (across, along), persistent in shapes:
        least = -(-product.rows // (256 * parts * along))
        for tiles in range(least, least + 12):
            width = round_up(-(-product.rows // (tiles * parts * along)), 8)
            if width < 32 or width * tiles * parts * along > 1.13 * product.rows:
                continue
            if parts > 1 and resident == 1 and width * parts <= 256:
                continue  # One wgmma of twice the width does the same.
            if persistent and tiles * along * -(-product.n // (64 * groups * blocks)) <= gpu.multiprocessors * resident:
                continue  # Each block has one tile in any case.
            for stages in range(8, 2, -1):
                tiling = HopperTile(groups, blocks, parts, width, stages, across, along, split, resident, persistent)
                if product.fits(tiling):
                    kind = (resident, split, across, along, persistent)
                    kinds.setdefault(kind, {})[tiling] = cycles(gpu, product, tiling)
                    break
    best = min(cost for found in kinds.values() for cost in found.values())
    kept = []
    for found in kinds.values():
        kept += [(found[tiling], tiling) for tiling in sorted(found, key=lambda t: found[t])[:each]]
    order = [tiling for cost, tiling in sorted(kept, key=lambda pair: pair[0]) if cost <= WORTH * best]
    today = hopper.planned(gpu, product.kind, product.activation, product.rows, product.n, product.k)
    first = [today] if today is not None else []
    # Fewer stages leave memory for the next kernel's block on the same multiprocessor.
    lean = [replace(tiling, stages=3) for tiling in (*first, *order[:2]) if tiling.stages > 3]
    return list(dict.fromkeys([*first, *order[:MOST], *lean]))


# -- right and quick --------------------------------------------------------------------------------------------------


def error_of(product: Product, layer: Linear, tiling: HopperTile, gpu: Gpu) -> float:
    """Relative error against float32, as the chain launches it."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(product.rows, product.k, device=DEVICE, generator=draw)
    x = (x if product.norm == "none" else 2 * x + 1).to(product.kind)
    columns = product.n // 2 if product.activation.gated else product.n
    out = torch.zeros(product.rows, columns, dtype=FP8 if product.narrow else DTYPE, device=DEVICE)
    wide, moments, norm = x.float(), Moments.like(out) if product.residual else None, None
    if product.norm != "none":
        norm = Norm(1e-6, Moments.like(x), sums=layer.sums if product.norm == "layer" else None)
        assert norm.moments is not None
        write(x, None, norm.moments)
        wide = (F.layer_norm if product.norm == "layer" else F.rms_norm)(wide, (product.k,), eps=1e-6)
    quantize = 20.0 if product.narrow else None
    epilogue = Epilogue(activation=product.activation, residual=product.residual, moments=moments, quantize=quantize)
    with LaunchChain(gpu).resumed():
        hopper.gemm(x, replace(layer, input_scale_value=1.0), out, epilogue, norm, tiling, gpu)
    want = wide @ layer.weight.float().T * layer.weight_scale_value
    if layer.bias is not None:
        want = want + layer.bias.float()
    if product.activation is Activation.GELU:
        want = F.gelu(want, approximate="tanh")
    elif product.activation is Activation.GEGLU:
        gate, up = want.unflatten(1, (-1, 2, 8)).unbind(2)
        want = (F.gelu(gate, approximate="tanh") * up).flatten(1)
    if product.narrow:
        want = (want * 20.0).clamp(-E4M3.largest, E4M3.largest)
    if moments is not None:
        written = Moments.like(out)
        write(out, None, written)
        if not torch.allclose(moments.sums, written.sums, atol=1e-2):
            return float("inf")
    return float((out.float() - want).norm() / want.norm())


def bound(product: Product) -> float:
    """Of `error_of`: as the tests of the kernel have it."""
    return 0.04 if product.narrow else 0.006


def in_turns(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of a replay of each, the median of `rounds` turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) / REPLAYS)
    return {name: median(found) for name, found in times.items()}


def alone(chain: Chain, product: Product, tiling: HopperTile | None, gpu: Gpu) -> float:
    """Microseconds of one product without its chain, every layer's weight in turn; by the library for None, with what
    it needs in addition for the activation, but no norm and no residual."""
    x = chains.normal(product.rows, product.k).to(product.kind)
    columns = product.n // 2 if product.activation.gated else product.n
    whole = torch.empty(product.rows, product.n, dtype=DTYPE, device=DEVICE)
    out = torch.empty(product.rows, columns, dtype=FP8 if product.narrow else DTYPE, device=DEVICE)
    epilogue = Epilogue(activation=product.activation, quantize=1.0 if product.narrow else None)

    def call() -> None:
        for layer in chain.weights[product.name]:
            if tiling is None:
                by_library(x, layer, out, epilogue, (whole,))
            else:
                with LaunchChain(gpu).resumed():
                    hopper.gemm(x, layer, out, epilogue, None, tiling, gpu)

    return 1e3 * milliseconds(call, DEVICE, 3) / chain.layers


def sweep(
    chain: Chain, product: Product, tried: Iterator[HopperTile], gpu: Gpu, until: float
) -> tuple[dict[str, Any], list[HopperTile]]:  # fmt: skip
    """Every candidate of one product in the chain, the others as today: what was found, and the best first."""
    kept = chain.graph({})
    kept.replay()
    want, layer = chain.out.float().clone(), chain.weights[product.name][0]
    today = config.known(want.device, product.kind, product.activation, product.rows, product.n, product.k)
    rows: dict[HopperTile, dict[str, Any]] = {}
    wrong, out = [], []
    for tiling in tried:
        try:
            error = error_of(product, layer, tiling, gpu)
            mine = chain.graph({product.key: tiling})
        except unfit() as problem:
            out.append({"tiling": config_text(tiling), "why": str(problem).splitlines()[0][:200]})
            continue
        mine.replay()
        apart = float((chain.out.float() - want).norm() / want.norm())
        judged = {"tiling": config_text(tiling), "error": error, "apart": apart}
        if error < bound(product) and apart < APART:
            rows[tiling] = {**judged, **saving(in_turns({"mine": mine, "kept": kept}), chain)}
        else:
            wrong.append(judged)
        if time.monotonic() > until:
            break
    best = sorted(rows, key=lambda tiling: -rows[tiling]["saved_us"])
    found = {"library": alone(chain, product, None, gpu)}
    found |= {"today": alone(chain, product, today, gpu)} if today else {}
    found |= {"best": alone(chain, product, best[0], gpu)} if best else {}
    return {
        "product": product.name, "rows": product.rows, "n": product.n, "k": product.k, "residual": product.residual,
        "norm": product.norm, "today": config_text(today) if today else "library",
        "tried": len(rows) + len(wrong) + len(out),
        "alone_us": found, "best_first": [rows[tiling] for tiling in best], "wrong": wrong, "cannot_run": out,
    }, best  # fmt: skip


def saving(ms: Mapping[str, float], chain: Chain) -> dict[str, float]:
    layer = {name: 1e3 * ms[name] / chain.layers for name in ("mine", "kept")}
    return {
        "layer_us": layer["mine"], "today_us": layer["kept"], "saved_us": (layer["kept"] - layer["mine"]) * chain.depth
    }  # fmt: skip


def together(chain: Chain, best: list[list[HopperTile]], until: float) -> dict[str, Any]:
    """The best of every product, one product after the other, with what was chosen for the others; twice over."""
    taken: dict[tuple[torch.dtype, str, int, int], HopperTile] = {}
    graph = kept = chain.graph({})
    for _, (product, tilings) in itertools.product(range(2), zip(chain.products, best, strict=True)):
        for tiling in tilings[:TOGETHER]:
            if time.monotonic() > until or taken.get(product.key) == tiling:
                continue
            trial = {**taken, product.key: tiling}
            mine = chain.graph(trial)
            ms = in_turns({"mine": mine, "kept": graph})
            if ms["mine"] < GAIN * ms["kept"]:
                taken, graph = trial, mine
    names = {p.name: config_text(taken[p.key]) for p in chain.products if p.key in taken}
    return {"taken": names, **saving(in_turns({"mine": graph, "kept": kept}, 4 * ROUNDS), chain)}


def config_text(tiling: HopperTile) -> str:
    """As the table has it."""
    words = []
    for name, value in asdict(tiling).items():
        if name in ("groups", "blocks", "parts", "width", "stages"):
            words.append(str(value))
        elif value != getattr(HopperTile, name):
            words.append(f"{name}={value}")
    return f"HopperTile({', '.join(words)})"


# -- compiling --------------------------------------------------------------------------------------------------------


def compile_one(source: str) -> None:
    """Into the cache on disk, in a process of its own."""
    compiled(source, launch.ARCHITECTURE)


def as_compiled(tilings: list[HopperTile], jobs: list[Future[None]], until: float) -> Iterator[HopperTile]:
    """Those that are compiled in time, in their order; one that does not compile says so where it is launched."""
    for tiling, job in zip(tilings, jobs, strict=True):
        wait([job], max(0.0, until - time.monotonic()))
        if job.done():
            yield tiling


def measure(options: argparse.Namespace, report: dict[str, Any], pool: ProcessPoolExecutor) -> None:
    """Fill `report["chains"]`. The remaining time is shared equally by chains, and by the products of a chain."""
    end, gpu = time.monotonic() + options.seconds, Gpu.of(DEVICE)
    assert gpu is not None
    names = [name for name in CHAINS if options.only in name]
    at_hand: list[Chain] = []
    chains.steer(at_hand)
    for index, name in enumerate(names):
        begin = time.monotonic()
        until = begin + (end - begin) / (len(names) - index)
        at_hand[:] = []
        torch.cuda.empty_cache()
        chain = CHAINS[name](options.views)
        at_hand.append(chain)
        tried = [candidates(gpu, product, options.each) for product in chain.products]
        jobs = [
            [pool.submit(compile_one, product.source(tiling)) for tiling in tilings]
            for product, tilings in zip(chain.products, tried, strict=True)
        ]
        row: dict[str, Any] = {"chain": name, "program": chain.program.detail, "products": []}
        report["chains"].append(row)
        best: list[list[HopperTile]] = []
        for place, product in enumerate(chain.products):
            now = time.monotonic()
            mine = now + (until - now) / (len(chain.products) + 1 - place)
            found, order = sweep(chain, product, as_compiled(tried[place], jobs[place], mine), gpu, mine)
            best.append(order)
            row["products"].append({**found, "of": len(tried[place])})
            write_json(options.output, report)
            short = {k: found[k] for k in ("product", "today", "tried", "alone_us")}
            first = {row["tiling"]: round(row["saved_us"], 1) for row in found["best_first"][:3]}
            print(json.dumps({"chain": name, **short, "saved_us": first, "wrong": len(found["wrong"])}), flush=True)
        row["together"] = together(chain, best, until)
        write_json(options.output, report)
        print(json.dumps({"chain": name, **row["together"]}), flush=True)
        for left in itertools.chain.from_iterable(jobs):
            left.cancel()


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--only", default="", help=f"chains whose name contains this text: {', '.join(CHAINS)}")
    parser.add_argument("--views", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0, help="time limit; the rest is left out")
    parser.add_argument("--each", type=int, default=2, help="tilings of a kind")
    options = parser.parse_args()
    resolve_device(DEVICE.type)
    report: dict[str, Any] = {**report_head("time_gemm", DEVICE), "chains": []}
    processes = max(1, (os.cpu_count() or 2) - 1)
    with torch.inference_mode(), ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        # Importing takes them longer than compiling.
        wait([pool.submit(compile_one, f'extern "C" __global__ void f{i}() {{}}') for i in range(2 * processes)])
        measure(options, report, pool)
        pool.shutdown(cancel_futures=True)
    products = [(chain["chain"], product) for chain in report["chains"] for product in chain["products"]]
    wrong = [f"{chain} {product['product']}: {w['tiling']}" for chain, product in products for w in product["wrong"]]
    print(json.dumps({"chains": len(report["chains"]), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(concluded(main))
