"""A script: compile, without a GPU, every Triton kernel that the native programs launch, just as they launch it there.

    python -m tests.support.compile_kernels [--smolvla] [--trained] [--tma] [VERSION …]

for these capabilities, or 9.0. The programs of the full-size models and of the demo run on tensors without data, told
of a GPU of that capability; what they launch is recorded and then compiled, in `TRIED` also what a build would measure
before it chooses; with --smolvla SmolVLA's instead, with --trained what pins actions in the loops of those in
`MEASURED`, with --tma what takes tiles by TMA of all that a build would measure. Prints a JSON object a launch:
capability, kernel, models, options, registers, bytes spilled, shared memory, and what its assembly uses. A launch of
several capabilities of a generation is compiled once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support.gpus import ARCHITECTURES, GENERATIONS
from tests.support.runtimes import steered
from tests.support.scales import scales_of_any
from vla_accel.config import EngineSpec
from vla_accel.families.pi0 import native as pi0_programs
from vla_accel.families.pi0.native import Pi0Store
from vla_accel.families.pi0.network import Pi0, Pi0Config, pi0, pi05, pi05_demo
from vla_accel.families.smolvla import native as smolvla_programs
from vla_accel.families.smolvla.native import SmolVlaStore
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, smolvla, smolvla_demo
from vla_accel.kernels.attention import config as attention_config
from vla_accel.kernels.attention.suffix import suffix_workspace
from vla_accel.kernels.gemm.config import Library, candidates, moments_columns, variants, without_triton
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm_workspace
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.image import resize
from vla_accel.nn.flow import Schedule
from vla_accel.nn.kernel_choices import Choice
from vla_accel.nn.loop import SuffixLoop
from vla_accel.pictures import MAP_WIDTH

META = torch.device("meta")
KINDS = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
# Name: configuration, views, prompt tokens, precision. The benchmark's shapes, and a batch of eight; the demo's are
# compiled for Hopper alone.
MODELS: dict[str, tuple[Pi0Config | SmolVlaConfig, int, int, int, str]] = {
    "pi05": (pi05(action_horizon=10), 1, 2, 32, "auto"),
    "pi05 fp8": (pi05(action_horizon=10), 1, 2, 32, "fp8"),
    "pi05 int8": (pi05(action_horizon=10), 1, 2, 32, "int8"),
    "pi0": (pi0(), 1, 3, 32, "auto"),
    "pi0 int8": (pi0(), 1, 3, 32, "int8"),
    "demo": (pi05_demo(), 1, 2, 32, "auto"),
    "demo x 8": (pi05_demo(), 8, 2, 64, "auto"),
    "smolvla": (smolvla(), 1, 2, 32, "auto"),
    "smolvla int8": (smolvla(), 1, 2, 32, "int8"),
    "smolvla x 4 fp8": (smolvla(), 4, 3, 64, "fp8"),
    "smolvla demo fp8": (smolvla_demo(), 1, 2, 32, "fp8"),
}
MEASURED = ("pi05", "pi0")
TRIED = "8.6"
"""The capability with the least memory and registers: there all that a build would measure is compiled."""
INT8_LOOPS = ("8.7", "9.0")
"""Where loops are compiled with INT8 weights: a GPU without FP8, and the one with most. Elsewhere a model in INT8 has
them in BF16, which other models compile already."""


Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def launches_of(
    gpu: Gpu, config: Any, batch: int, views: int, length: int, precision: Any, *, loop_precision: Any = "auto",
    tried: bool = False, trained: bool = False,
) -> list[Launch]:  # fmt: skip
    """What one call of a policy launches on a GPU; `precision`: of vision and prefix; `tried`: with what its build
    would try there, too."""
    two = {name: dataclasses.replace(getattr(config, name), depth=2) for name in ("vision", "prefix", "expert")}
    config = dataclasses.replace(config, **two)
    with META:
        model: Any = SmolVla(config) if isinstance(config, SmolVlaConfig) else Pi0(config)
    model = model.to_compute_dtype(torch.bfloat16).requires_grad_(False).eval()
    store: Any = (SmolVlaStore if isinstance(config, SmolVlaConfig) else Pi0Store)(model, scales_of_any(1.0))
    spec, of_loop = EngineSpec("native", precision=precision), EngineSpec("native", precision=loop_precision)
    images, total = views * config.image_tokens, config.prefix_tokens(views, length)
    with steered("triton", META):
        programs = (
            store.vision(batch, views, spec), store.kv_cache(batch, images, length, spec),
            store.denoise(batch, total, Schedule.uniform(2), of_loop, trained=trained),
        )  # fmt: skip
    loop: Any = getattr(programs[2], "loop", programs[2])
    assert isinstance(loop, SuffixLoop)
    # Where all products of a chain are the library's, its launches are not dependent; a Hopper's products are its own.
    for program in programs[:2]:
        program.chain.early = gpu.dependent_launch  # type: ignore[attr-defined]

    def buffer(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    cache = (config.prefix.depth, batch, total, config.prefix.kv_heads, config.prefix.head_dim)
    actions = (batch, config.action_horizon, config.action_dim)
    tensors = {
        "images": buffer(batch, views, *[config.vision.image_size] * 2, 3, dtype=torch.uint8),
        "image_tokens": buffer(batch, images, config.prefix.width), "keys": buffer(*cache), "values": buffer(*cache),
        "tokens": buffer(batch, length, dtype=torch.int64), "lengths": buffer(batch, dtype=torch.int32),
        "state": buffer(batch, getattr(config, "state_dim", config.action_dim), dtype=torch.float32),
        "noise": buffer(*actions, dtype=torch.float32),
        "actions": buffer(*actions, dtype=torch.float32), "target": buffer(*actions, dtype=torch.float32),
        "weights": buffer(*actions[:2], dtype=torch.float32),
    }  # fmt: skip

    def run() -> None:
        resize.rehearse(META)
        for program in programs:
            program(tensors, tensors)
        programs[0]({**tensors, "pixel_maps": buffer(batch, views, MAP_WIDTH, dtype=torch.float32)}, tensors)
        if tried:
            try_configs(gpu, loop, tensors)  # pyright: ignore[reportArgumentType]

    return recorded(run)


def recorded(call: Callable[[], None]) -> list[Launch]:
    """What a call launches on tensors without data."""
    found: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = tuple(options.pop(name) for name in kernel.arg_names[len(args) :])
        found.append((kernel, (*args, *named), options))

    run, JITFunction.run = JITFunction.run, record  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with steered("triton", META):
            call()
    finally:
        JITFunction.run = run
    return found


def try_configs(gpu: Gpu, loop: SuffixLoop, tensors: dict[str, Tensor]) -> None:
    """Launch every product and attention of a layer in every config that is worth measuring, and what stands around the
    library's products."""
    products = loop.products()
    for name, found in products.items():
        first, *others = candidates(gpu, found.sizes)
        for config in (*variants(gpu, found.sizes, first), *others):
            loop.choices.chosen[name] = Choice(config, gemm_workspace(found.sizes, META, config))
            found.run(tensors)
    if loop.pinned is None and all(Library() in without_triton(gpu, p.sizes) for p in products.values()):
        for name, sizes in ((name, found.sizes) for name, found in products.items()):
            of = loop.x if name in ("out", "down") else None
            columns = moments_columns(sizes, Library())
            moments = None if of is None else Moments.like(of, columns, loop.tables.adaptive)
            loop.choices.chosen[name] = Choice(Library(), gemm_workspace(sizes, META, Library()), moments)
        for found in products.values():
            found.run(tensors)
    # The configs of a batch, which the models here do not have.
    several = attention_config.key_splits(gpu, dataclasses.replace(loop.attention, batch=8))
    for config in dict.fromkeys((*attention_config.key_splits(gpu, loop.attention), *(c for c in several if c.joined))):
        loop.choices.chosen["attention"] = Choice(config, suffix_workspace(loop.attention, META, config))
        loop._attention(0, 0, tensors)


def _kind(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{KINDS[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, Tensor):
        return f"*{KINDS[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def source_of(launch: Launch) -> tuple[ASTSource, tuple[Any, ...]]:
    """The source with the specialisation that Triton's launcher would choose, and what tells it from others."""
    kernel, args, options = launch
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    divisible: dict[tuple[int, ...], Any] = {}

    def kind_of(place: tuple[int, ...], value: Any, constant: bool) -> Any:
        if isinstance(value, tuple) and not constant:
            kinds = [kind_of((*place, index), one, False) for index, one in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        if constant or value is None or (isinstance(value, int) and value == 1):
            constants[place] = value
            return "constexpr"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            divisible[place] = [["tt.divisibility", 16]]
        return _kind(value)

    for place, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        signature[parameter.name] = kind_of((place,), value, parameter.is_constexpr)
    key = (kernel, *signature.items(), *constants.items(), *divisible, *options.items())
    return ASTSource(kernel, signature, constants, divisible), key


def constants_of(launch: Launch) -> dict[str, Any]:
    """What a launch fixes at compile time. PINNED: rows have constants of their own; TMA: tiles come by TMA."""
    kernel, args, _ = launch
    named = dict(zip(kernel.arg_names, args, strict=True))
    found = {p.name: a for p, a in zip(kernel.params, args, strict=True) if p.is_constexpr}
    found["PINNED"] = getattr(found.get("S"), "pinned", getattr(named.get("e"), "pinned", None) is not None)
    return {**found, "TMA": getattr(found.get("TILE"), "tma", False)}


def types_of(launch: Launch) -> list[str]:
    """The types of all arguments, those in tuples, too."""

    def flat(kind: Any) -> list[str]:
        return [one for part in kind for one in flat(part)] if isinstance(kind, tuple) else [kind]

    return flat(tuple(source_of(launch)[0].signature.values()))


@functools.cache
def number_of(version: str) -> int:
    """What the assembler that is Triton's own calls a compute capability: before CUDA 13 that of Thor, 11.0, was
    10.1. A launch on a Thor always asks for 110, for which Triton 3.6 needs the assembler of a newer CUDA."""
    number = int(version.replace(".", ""))
    known = subprocess.run([get_ptxas(number).path, "--help"], capture_output=True, text=True, check=True).stdout
    return number if f"sm_{number}" in known else {110: 101}[number]


def compile_on(gpu: Gpu) -> None:
    """From now on, all tensors without data lie on this GPU, and loops are Triton's, on Hopper, too."""
    setattr(Gpu, "of", classmethod(lambda cls, device: gpu))  # noqa: B010
    for programs in (pi0_programs, smolvla_programs):
        setattr(programs, "why_not_streamed", lambda *_: "this script compiles Triton's kernels")  # noqa: B010
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # what is found in the cache has no log
    knobs.compilation.disable_line_info = True  # a quarter of the time


COMPILED: dict[tuple[Any, ...], dict[str, Any]] = {}
"""What the compilers made, by generation and code."""


def print_row(gpu: Gpu, launch: Launch, models: Iterable[str] = ()) -> None:
    """Print a JSON line about a launch; code that another GPU of the generation has, too, is compiled once."""
    key = (next(index for index, found in enumerate(GENERATIONS) if gpu.version in found), source_of(launch)[1])
    made = COMPILED[key] = COMPILED.get(key) or compiled(gpu, launch)
    row = {
        **made, "gpu": gpu.version, "kernel": launch[0].__name__, "models": list(models),
        "constants": constants_of(launch), "options": launch[2], "fits": made["shared"] <= gpu.shared_per_block,
        "int8": "*i8" in types_of(launch),
    }  # fmt: skip
    print(json.dumps(row, default=vars), flush=True)


def compiled(gpu: Gpu, launch: Launch) -> dict[str, Any]:
    """What Triton and the assembler make of a launch."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        target = GPUTarget("cuda", number_of(gpu.version), 32)
        made = triton.compile(source_of(launch)[0], target=target, options=launch[2])
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
    ptx = made.asm["ptx"]
    return {
        "bytes": len(made.asm["cubin"]), "shared": made.metadata.shared, "registers": int(registers),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue()))),
        "waits": ptx.count("griddepcontrol.wait"), "releases": ptx.count("griddepcontrol.launch_dependents"),
        "products": ptx.count("mma"), "integers": sorted(set(re.findall(r"(?:wg)?mma[\w.:]*\.[su]8[\w.:]*", ptx))),
        "tma": ptx.count("cp.async.bulk.tensor"), "single": ptx.count("ld.global.b16"), "fp8": "e4m3" in ptx,
    }  # fmt: skip


def compile_for(gpu: Gpu, smolvla: bool, trained: bool, tma: bool) -> None:
    """Record and compile what is launched on a GPU, and print a line each."""
    compile_on(gpu)
    launches: dict[tuple[Any, ...], Launch] = {}
    users: dict[tuple[Any, ...], dict[str, None]] = collections.defaultdict(dict)
    for name, shape in MODELS.items():
        if (
            ("smolvla" in name) != smolvla
            or (trained and name not in MEASURED)
            or ("fp8" in name and not gpu.fp8)
            or ("demo" in name and gpu.capability != (9, 0))
        ):
            continue
        loop = shape[-1] if shape[-1] == "fp8" or gpu.version in INT8_LOOPS else "auto"
        tried = name in MEASURED and (tma or gpu.version == TRIED)
        found = launches_of(gpu, *shape, loop_precision=loop, tried=tried, trained=trained)
        for launch in found:
            _, key = source_of(launch)
            launches[key] = launch
            users[key][name] = None
    for key, launch in launches.items():
        constants = constants_of(launch)
        if (constants["TMA"] or not tma) and (constants["PINNED"] or not trained):
            print_row(gpu, launch, users[key])


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = ("--smolvla", "--trained", "--tma")
    if unknown := [word for word in sys.argv[1:] if word.startswith("--") and word not in options]:
        sys.exit(f"compile_kernels: expected {', '.join(options)}, got {' '.join(unknown)}")
    with torch.inference_mode():
        for version in [word for word in sys.argv[1:] if not word.startswith("--")] or ["9.0"]:
            compile_for(ARCHITECTURES[version], *(option in sys.argv for option in options))
