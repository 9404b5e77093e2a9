"""Time denoising steps at full size with every kind of loop.

    python -m benchmarks.time_loops --output runs/loops.jsonl [--only TEXT]
    python -m benchmarks.time_loops --many --output runs/many.jsonl [--only TEXT] [--ways WAY ...]
    TRITON_INTERPRET=1 python -m benchmarks.time_loops --tiny --output runs/loops.jsonl    # without a GPU

Loops: all layers of the expert, one step, with streamed kernels (Hopper's CUDA C++), in the persistent kernel, in
Triton as built here, and in Triton as a portable GPU would build it: microseconds a layer, and the cosine with the
float32 reference, judged by that of plain BF16. With --many: loops of many rows, ten steps, with products in Triton, by
the library, by the own GEMM, and as chosen, and every time that the choice was based on. A JSON line for each; the exit
status is 1 if one is wrong. `benchmarks.time_gemm` times the GEMMs of prefix and vision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import options_parser, reason, write_rows
from eval.script import concluded
from tests.support import kernel_calls as calls
from tests.support.gpus import assumed
from tests.support.runtimes import steered
from tests.support.streamed_support import FULL, SMOLVLA_FULL, LoopCase, Loops, smolvla_case, streamable
from vla_accel.errors import EngineError
from vla_accel.families.pi0.native_loop import expert_spec, expert_weights, steps_of, why_not_streamed
from vla_accel.families.pi0.network import Pi0
from vla_accel.families.smolvla import native_loop as smolvla_expert
from vla_accel.kernels import autotune
from vla_accel.kernels import config as configs
from vla_accel.kernels.autotune import milliseconds, unfit
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import why_not
from vla_accel.kernels.persistent import why_not as why_not_persistent
from vla_accel.machine import resolve_device
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import SuffixLoop, persistent_loop, streamed_loop
from vla_accel.nn.random_weights import random_model
from vla_accel.runtime import Runtime

COSINE = 0.9995
"""Lowest cosine of the velocity with float32, where plain BF16 reaches it."""
DEEP = {**FULL, "depth": 18}
LOOPS = {
    **{f"pi05 H=10 batch {n}": LoopCase(streamable("pi05", **DEEP), n, 544) for n in (1, 4, 8, 16, 32)},
    "pi05 H=50": LoopCase(streamable("pi05", **DEEP, horizon=50), 1, 800),
    "pi0 H=50": LoopCase(streamable("pi0", **DEEP, horizon=50), 1, 800),
    "pi05 H=50 batch 8": LoopCase(streamable("pi05", **DEEP, horizon=50), 8, 800),
}
SMOLVLA = {
    f"smolvla {keys} keys": smolvla_case(keys, keys - 12, steps=1, **SMOLVLA_FULL, depth=16) for keys in (177, 145)
}
MANY = {
    **{f"pi05 H=10 batch {n}": LoopCase(streamable("pi05", **DEEP), n, 554, steps=10) for n in (16, 32, 8)},
    **{f"pi05 H=50 batch {n}": LoopCase(streamable("pi05", **DEEP, horizon=50), n, 554, steps=10) for n in (4, 1)},
    "pi05 H=10 batch 4": LoopCase(streamable("pi05", **DEEP), 4, 554, steps=10),
}
"""Those of up to 64 rows have streamed kernels on Hopper, too."""
PREFERRED = {"triton": "pipelined", "library": "cuBLAS", "own": "Hopper GEMM", "chosen": ""}
"""How the names begin of what is taken of a product in each way to build a loop, where any is among its choices."""
TINY_MANY = {"pi05": LoopCase(streamable("pi05", width=64, mlp=128, heads=2, horizon=17), 2, 40, steps=1)}
TINY = {
    "pi05": LoopCase(streamable("pi05", width=64, mlp=128, heads=2, horizon=18), 1, 40),
    "pi0": LoopCase(streamable("pi0", width=64, mlp=128, heads=2), 2, 40),
}


def inputs_of(case: LoopCase, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None]:
    """Keys, values, lengths, guidance and noise, and the token of the state."""
    config, draw = case.config, calls.Draw("loops", dtype)
    expert, actions = config.expert, (case.batch, config.action_horizon, config.action_dim)
    cache = (expert.depth, case.batch, case.prefix_tokens, expert.kv_heads, expert.head_dim)
    tensors = {
        "keys": draw(*cache), "values": draw(*cache), "noise": draw.wide(*actions), "target": draw.wide(*actions),
        "weights": torch.zeros(actions[:2]),
        "lengths": torch.full((case.batch,), case.prefix_tokens - 12, dtype=torch.int32),
    }  # fmt: skip
    state = draw.wide(case.batch, expert.width).to(device) if config.kind == "pi0" else None
    return {name: value.to(device) for name, value in tensors.items()}, state


def velocity(loop: Any, inputs: dict[str, Tensor], state: Tensor | None) -> Tensor:
    """The change of the noise by one step."""
    actions = inputs["noise"].clone()
    loop.run(inputs, state, actions)
    return (actions - inputs["noise"]).flatten().double()


@dataclasses.dataclass
class Judged:
    """A loop's inputs, its result in float32, and the lowest cosine with it. `layers`: of a run."""

    name: str
    rows: int
    layers: int
    inputs: dict[str, Tensor]
    state: Tensor | None
    want: Tensor
    least: float = COSINE


def timed(loop: Judged, ways: Mapping[str, Callable[[], Any]], repeats: int = 4) -> Iterator[dict[str, Any]]:
    """A row for each of `ways` to build a loop."""
    device, inputs = loop.want.device, loop.inputs
    here = Gpu.of(device)
    gpus = {"triton": here, "portable": None if here is None else here.portable}
    for way, build in ways.items():
        row: dict[str, Any] = {"loop": loop.name, "rows": loop.rows, "way": way}
        try:
            with assumed(gpus.get(way)), steered("cuda" if here is not None else "triton", device):
                began = time.perf_counter()
                made = build()
                if isinstance(made, str):
                    raise EngineError(made)
                row["build_s"] = round(time.perf_counter() - began, 1)
                cosine = cosine_of(velocity(made, inputs, loop.state), loop.want)
                row |= {"cosine": cosine, "least": loop.least, "right": cosine >= loop.least}
                row["how"] = made.choices.detail if isinstance(made, SuffixLoop) else ""
                if here is not None:
                    actions = inputs["noise"].clone()
                    ms = milliseconds(functools.partial(made.run, inputs, loop.state, actions), device, repeats)
                    row |= {"us_a_layer": 1e3 * ms / loop.layers, "ms": ms}
        except unfit() as error:
            row["error"] = reason(error)
        yield row


def cosine_of(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def smolvla_loops(device: torch.device, only: str) -> Iterator[dict[str, Any]]:
    """A row for each kind of SmolVLA's loop."""
    here, place = Gpu.of(device), str(device)
    for name, case in SMOLVLA.items():
        if only not in name:
            continue
        loops, config = Loops(case), case.config
        inputs = loops.placed(place, beyond=0.0) | {"noise": loops.noise.to(device)}
        with steered("reference", device):
            exact = loops.placed(place, torch.float32, beyond=0.0) | {"noise": inputs["noise"]}
            want = velocity(loops.fused("fp32", place), exact, None)
        fused = functools.partial(loops.fused, "bf16" if here is not None else "fp32", place)
        ways: dict[str, Callable[[], Any]] = {"triton": fused}
        if here is not None:
            ways |= {"portable": fused, "triton int8": functools.partial(loops.fused, "int8", place)}
            if why_not(here, smolvla_expert.expert_spec(config), 1, "bf16") is None:
                ways["streamed"] = functools.partial(loops.streamed, here, place)
        yield from timed(Judged(name, config.action_horizon, config.expert.depth, inputs, None, want), ways)


def build_of(model: Pi0, case: LoopCase, precision: str, kernels: str = "fused") -> Callable[[], Any]:
    """Prepare the weights of a loop; the result builds it. `kernels`: fused, streamed or persistent."""
    weights = expert_weights(model, precision, streamed=kernels == "streamed")
    tables, sizes = steps_of(model, weights, Schedule.uniform(case.steps)), (case.batch, case.prefix_tokens)
    arguments = (weights, expert_spec(case.config), tables, *sizes)
    if kernels == "streamed":
        return functools.partial(streamed_loop, Gpu.of(next(model.parameters()).device), *arguments)
    return functools.partial({"fused": SuffixLoop, "persistent": persistent_loop}[kernels], *arguments)


def judged(name: str, case: LoopCase, model: Pi0, device: torch.device) -> tuple[Judged, Callable[[], Any]]:
    """The inputs and results of π0's or π0.5's loop, and what builds it in the device's precision."""
    dtype = torch.bfloat16 if Gpu.of(device) is not None else torch.float32
    inputs, state = inputs_of(case, device, dtype)
    build = build_of(model, case, "bf16" if dtype == torch.bfloat16 else "fp32")
    with steered("reference", device):
        wide = {n: v.float() if v.dtype == dtype else v for n, v in inputs.items()}
        want = velocity(build_of(model, case, "fp32")(), wide, state)
        # Plain BF16 only rounds: a loop may lose twice as much.
        lost = 1 - cosine_of(velocity(build(), inputs, state), want)
    rows, layers = case.batch * case.config.suffix_tokens, case.config.expert.depth * case.steps
    return Judged(name, rows, layers, inputs, state, want, min(COSINE, 1 - 2 * lost)), build


@contextlib.contextmanager
def preferring(name: str, seen: Callable[[str, autotune.Fastest], None]) -> Iterator[None]:
    """Choose the tile configs of loops in this block among those with this prefix. `seen` receives all times."""

    def among(what: str, ways: Mapping[str, Any], runtime: Runtime, repeats: int = 5) -> autotune.Fastest:
        wanted = {way: run for way, run in ways.items() if way.startswith(name)}
        found = autotune.remembered(what, wanted or ways, runtime, repeats)
        seen(what, found)
        return found

    before, configs.remembered = configs.remembered, among
    try:
        yield
    finally:
        configs.remembered = before


def many(device: torch.device, chosen: dict[str, LoopCase], ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows for each of `ways` to build a loop of many rows, and for all times that the choices were based on."""
    for name, case in chosen.items():
        loop, build = judged(name, case, random_model(Pi0, case.config).to(device), device)
        listed: list[dict[str, Any]] = []
        for way in ways:
            measured: dict[str, dict[str, Any]] = {}

            def note(what: str, found: autotune.Fastest, case: LoopCase = case, into: Any = measured) -> None:
                layers = 1 if what.startswith("attention") else case.config.expert.depth
                us = {n: round(1e3 * ms / layers, 2) for n, ms in sorted(found.times.items(), key=lambda w: w[1])}
                into[what] = {"us": us, "out": dict(found.rejected)}

            with preferring(PREFERRED[way], note):
                yield from timed(loop, {way: build}, 1)
            for what, row in measured.items():
                if row not in listed:
                    listed.append(row)
                    yield {"measured": what, "rows": loop.rows, **row}


def loops(device: torch.device, chosen: dict[str, LoopCase]) -> Iterator[dict[str, Any]]:
    """A row for each kind of loop that can run one step of a case."""
    for name, case in chosen.items():
        case, model = dataclasses.replace(case, steps=1), random_model(Pi0, case.config).to(device)
        loop, build = judged(name, case, model, device)
        ways = {"triton": build}
        here = Gpu.of(device)
        if here is not None:
            model = model.to_compute_dtype(torch.bfloat16)
            ways |= {"portable": build, "triton int8": build_of(model, case, "int8")}
            if why_not_streamed(model, "bf16", case.batch) is None:
                ways["streamed"] = build_of(model, case, "bf16", "streamed")
            if why_not_persistent(here, expert_spec(case.config), case.batch, "bf16") is None:
                ways["persistent"] = build_of(model, case, "bf16", "persistent")
        yield from timed(loop, ways)


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--only", default="", help="loops whose name contains this text")
    parser.add_argument("--many", action="store_true", help="only loops of many rows, built in every way")
    parser.add_argument(
        "--ways", nargs="+", choices=PREFERRED, default=list(PREFERRED), help="for --many; default: all"
    )
    parser.add_argument("--tiny", action="store_true", help="small loops on a CPU, in Triton's interpreter")
    options = parser.parse_args()
    device = resolve_device("cpu" if options.tiny else "cuda")
    here = Gpu.of(device)
    chosen = {n: c for n, c in (TINY if options.tiny else LOOPS).items() if options.only in n}
    rows = itertools.chain(
        loops(device, chosen),
        () if options.tiny else smolvla_loops(device, options.only),
    )
    if options.many:
        rows = many(
            device, {n: c for n, c in (TINY_MANY if options.tiny else MANY).items() if options.only in n}, options.ways
        )
    count, wrong = write_rows(options.output, rows, "none" if here is None else here.name)
    print(json.dumps({"rows": count, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(concluded(main))
