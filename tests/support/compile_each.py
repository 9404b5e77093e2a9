"""A script: compile kernels that compile_kernels.py does not, without a GPU, in shapes of the full-size models.

    python -m tests.support.compile_each KIND … [VERSION …] [--count]

for these compute capabilities, or 9.0. KIND: `groot`, `groot_n16`, `groot_n15`, `fastwam`, `evo1`, `molmoact2`,
`multi_task_dit`, `xvla` and `decode`, what the programs of GR00T, FastWAM, Evo-1, MolmoAct2, Multi-task DiT and X-VLA
and π0-FAST's decode launch; `int8`, products by every tile that a build would measure; `each`, once each kernel and
type of operands that compile_kernels.py does not compile for every capability. Prints its rows; with `--count` the
number of launches, of Triton's kernels alone.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support import compile_kernels
from tests.support.compile_kernels import META, MODELS, Launch, compile_on, print_row, recorded, source_of, types_of
from tests.support.gpus import ARCHITECTURES
from tests.support.runtimes import steered
from tests.support.scales import scales_of_any
from vla_accel.config import EngineSpec
from vla_accel.families.act.family import ACT
from vla_accel.families.act.network import act
from vla_accel.families.bench import bench_card
from vla_accel.families.diffusion_policy.bench import ddpm
from vla_accel.families.diffusion_policy.family import DIFFUSION_POLICY
from vla_accel.families.evo1.family import EVO1, Evo1Shape
from vla_accel.families.evo1.network import evo1
from vla_accel.families.family import Family, Shape
from vla_accel.families.fastwam.components import FastWamShape
from vla_accel.families.fastwam.components import components as wam_components
from vla_accel.families.fastwam.native import FastWamStore
from vla_accel.families.fastwam.network import FastWam, fastwam
from vla_accel.families.groot.components import groot_components
from vla_accel.families.groot.family import GROOT
from vla_accel.families.groot.native import GrootStore
from vla_accel.families.groot.network import Groot, GrootConfig, groot_n15, groot_n16, groot_n17
from vla_accel.families.molmoact2.family import MOLMOACT2
from vla_accel.families.molmoact2.network import molmoact2
from vla_accel.families.multi_task_dit.bench import multi_task_dit
from vla_accel.families.multi_task_dit.family import MULTI_TASK_DIT
from vla_accel.families.openvla_oft.family import OPENVLA_OFT, OftShape
from vla_accel.families.openvla_oft.native import OftStore
from vla_accel.families.openvla_oft.network import OpenVlaOft, openvla_oft
from vla_accel.families.pi0.native import Pi0FastStore
from vla_accel.families.pi0_fast.native_decode import NativeDecode
from vla_accel.families.pi0_fast.network import Pi0Fast, pi0_fast
from vla_accel.families.prompted import PromptShape
from vla_accel.families.xvla.family import XVLA, XvlaShape
from vla_accel.families.xvla.network import xvla
from vla_accel.fp8 import INT8
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm import int8, triton_library
from vla_accel.kernels.gemm.config import OneRow, candidates, gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.image import triton_image as image
from vla_accel.kernels.image.convolution import ConvPlan, ConvSizes, ConvTile, convolve, workspace
from vla_accel.kernels.image.depthwise import Depthwise
from vla_accel.kernels.image.ops import GroupNorm, Sum
from vla_accel.kernels.image.triton_depthwise import depthwise_norm
from vla_accel.kernels.image.triton_pool import max_pool
from vla_accel.nn.flow import Schedule
from vla_accel.nn.kernel_choices import Choice

EVERYWHERE = ("pi05", "pi05 fp8", "pi05 int8", "pi0", "pi0 int8")
"""Models that compile_kernels.py compiles for every capability."""


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def wide(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=META)


def empty_model(kind: Any, config: Any) -> Any:
    with META:
        return kind(config).to_compute_dtype(torch.bfloat16).requires_grad_(False).eval()


def groot(
    gpu: Gpu, precision: str, batch: int, size: Callable[[], GrootConfig] = groot_n17, side: int = 256,
    few: bool = False,
) -> dict[str, list[Launch]]:  # fmt: skip
    """A call's, by component: two views of `side` pixels a side and a prompt of the first bucket. `few`: with one layer
    of each kind."""
    model, found = empty_model(Groot, bench_card(GROOT).shallow(size(), 1) if few else size()), {}
    layout = model.layout(2, model.config.vision.grid(side, side), 32)
    with steered("triton", META):
        guided, schedule = size is groot_n17, Schedule.uniform(4)
        for component in groot_components(model, layout, batch, schedule, True, GrootStore(model), guided=guided):
            assert component.native is not None
            precise = precision if component.name == "denoise" else "auto"
            program = component.native(EngineSpec("native", precision=precise))  # type: ignore[arg-type]
            for part in (program, getattr(program, "stack", None)):
                if hasattr(part, "chain"):
                    part.chain.early = gpu.dependent_launch  # type: ignore[union-attr]
            tensors = {s.name: s.empty(META) for s in (*component.inputs, *component.outputs)}
            found[component.name] = recorded(partial(program, tensors, tensors))
    return found


def wam(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A call's, by component, of FastWAM with three blocks of the published size, two steps and two views; without the
    image encoder, which is Qwen-Image's."""
    sizes = fastwam()
    model = empty_model(
        FastWam, replace(sizes, video=replace(sizes.video, depth=3), action=replace(sizes.action, depth=3))
    )
    found, low = {}, EngineSpec("native", precision=precision)  # type: ignore[arg-type]
    with steered("triton", META):
        shape = FastWamShape(batch, Schedule.uniform(2), 2, sizes.image_size, sizes.context_rows(40))
        for component in wam_components(model, shape, FastWamStore(model))[1:]:
            assert component.native is not None
            program: Any = component.native(low)
            loop = getattr(program, "video", program)
            loop.chain.early = gpu.dependent_launch
            tensors = {s.name: s.empty(META) for s in (*component.inputs, *component.outputs)}
            found[component.name] = recorded(partial(program, tensors, tensors))
    return found


def oft(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A call's, by component, of OpenVLA-OFT with two blocks of each stack of the published size, two views and a
    prompt of the first bucket but one."""
    sizes = openvla_oft()
    stacks = {name: replace(getattr(sizes, name), depth=2) for name in ("dino", "siglip", "language")}
    model, found = empty_model(OpenVlaOft, replace(sizes, **stacks)), {}
    with steered("triton", META):
        shape, store = OftShape(batch, Schedule.uniform(1), 2, 64, True), OftStore(model, scales_of_any())
        for component in OPENVLA_OFT.components(model, shape, store=store):
            assert component.native is not None
            precise = precision if component.name == "decode" else "auto"
            program: Any = component.native(EngineSpec("native", precision=precise))  # type: ignore[arg-type]
            for part in getattr(program, "towers", (program,)):
                part.stack.chain.early = gpu.dependent_launch
            tensors = {s.name: s.empty(META) for s in (*component.inputs, *component.outputs)}
            found[component.name] = recorded(partial(program, tensors, tensors))
    return found


def molmo(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A call's, by component, of MolmoAct2 with three blocks of each kind of the published size, two steps and two
    views."""
    sizes = molmoact2()
    model = empty_model(
        MOLMOACT2.network_class,
        replace(
            sizes, vision=replace(sizes.vision, depth=3, levels=(2, 0)), prefix=replace(sizes.prefix, depth=3),
            expert=replace(sizes.expert, depth=3), hidden=(0, -1),
        ),
    )  # fmt: skip
    found = {}
    with steered("triton", META):
        shape = PromptShape(batch, Schedule.uniform(2), 2, 96, True)
        for component in MOLMOACT2.components(model, shape, store=MOLMOACT2.store_class(model, scales_of_any())):
            assert component.native is not None
            program: Any = component.native(EngineSpec("native", precision=precision))  # type: ignore[arg-type]
            getattr(program, "stack", program).chain.early = gpu.dependent_launch
            tensors = {s.name: s.empty(META) for s in (*component.inputs, *component.outputs)}
            found[component.name] = recorded(partial(program, tensors, tensors))
    return found


def decode(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A token's, behind two views and a prompt of the first bucket but two; of one row also as a build tries them."""
    model = empty_model(Pi0Fast, pi0_fast())
    with steered("triton", META):
        spec = EngineSpec("native", precision=precision)  # type: ignore[arg-type]
        program = Pi0FastStore(model).decode(batch, model.config.prefix_tokens(2, 96), 64, spec)
        assert isinstance(program, NativeDecode)
        found = {"token": recorded(program.decode_next)}
        if batch == 1:
            sizes = {name: product.sizes for name, product in program.products().items()}
            for name, product in {**sizes, "head": gemm_sizes(program.h, program.weights.head)}.items():
                config = next(config for config in candidates(gpu, product) if isinstance(config, OneRow))
                program.choices.chosen[name] = Choice(config)
            found["one row"] = recorded(program.decode_next)
        return found


def integers(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A plain and a gated product by each tile, and GELU by the first; of INT8 alone."""
    rows, width, hidden, found = 544, 2048, 4096, []
    layer = make_linear(torch.empty(hidden, width, dtype=torch.int8, device=META), None, torch.bfloat16, 1.0, form=INT8)
    x = torch.empty(rows, width, dtype=torch.int8, device=META)
    for i, tile in enumerate(int8.candidates(gpu, rows) if precision == "int8" else ()):
        for activation in (Activation.NONE, Activation.GEGLU, *([Activation.GELU] if i == 0 else [])):
            plain, columns = activation is Activation.NONE, hidden // 2 if activation.gated else hidden
            out = torch.empty(rows, columns, dtype=torch.bfloat16 if plain else torch.int8, device=META)
            epilogue = Epilogue(activation=activation, quantize=None if plain else 1.0)
            found += recorded(partial(int8.launch, x, layer, out, epilogue, tile))
    return {"products": found}


def each(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """Each kernel and type of operands that `EVERYWHERE` does not have, for all precisions together."""
    found: dict[tuple[str, ...], Launch] = {}
    if (precision, batch) == ("auto", 1):
        met = {kind(launch) for name in EVERYWHERE for launch in of_model(gpu, name, everywhere=True)}
        for launch in others(gpu):
            if kind(launch) not in met:
                found.setdefault(kind(launch), launch)
    return {"each": list(found.values())}


def kind(launch: Launch) -> tuple[str, ...]:
    """A kernel's name, and the types of what it reads and writes."""
    return (launch[0].__name__, *sorted({word for word in types_of(launch) if word.startswith(("*", "tensordesc"))}))


def of_model(gpu: Gpu, name: str, *, everywhere: bool = False) -> list[Launch]:
    """A model's of compile_kernels.py; but for `everywhere`, its loop has INT8 weights where the model is in INT8."""
    *shape, precision = MODELS[name]
    if precision == "fp8" and not gpu.fp8:
        return []
    low = precision == "fp8" or gpu.version in compile_kernels.INT8_LOOPS or not everywhere
    return compile_kernels.launches_of(gpu, *shape, precision, loop_precision=precision if low else "auto")  # type: ignore[arg-type]


def others(gpu: Gpu) -> Iterator[Launch]:
    """All other launches, the ordinary ones first."""
    for name in MODELS:
        yield from of_model(gpu, name)
    for precision in ("auto", "int8", *(["fp8"] if gpu.fp8 else [])):
        for launches in (partial(groot, few=True), wam, evo, oft, molmo, tasks, decode, integers):
            yield from itertools.chain(*launches(gpu, precision, 1).values())
    yield from itertools.chain(*xvla_parts(gpu, "auto", 1).values())
    for family, config in ((ACT, act()), (DIFFUSION_POLICY, ddpm())):
        yield from itertools.chain(*frames(family, config, early=gpu.dependent_launch).values())
    for call in (*around_products(), *images()):
        yield from recorded(call)


def around_products() -> Iterator[Callable[[], Any]]:
    """Calls of what stands around the library's products, of a batch of eight of π0.5."""
    width, hidden, heads, head_dim, rows, tokens = 1024, 4096, 8, 256, 80, 10

    x, q, k = half(rows, width), half(8, tokens, heads, head_dim), half(8, tokens, 1, head_dim)
    norm, angles = Norm(1e-6, Moments.like(x, width, True)), wide(600, head_dim // 2)
    lengths = torch.empty(8, dtype=torch.int32, device=META)

    def finish(out: Tensor | Heads, columns: int, norm: Norm | None, **epilogue: Any) -> Callable[[], Any]:
        weights, y = Linear(half(columns, width)), half(rows, columns)
        return lambda: triton_library.finish(y, weights, out, Epilogue(**epilogue), norm)

    columns = (heads + 2) * head_dim
    yield finish(Heads(q, k, k), columns, norm, shift=wide(columns), rope=Rotation(angles, angles, lengths))
    yield finish(half(rows, hidden), 2 * hidden, norm, shift=wide(2 * hidden), activation=Activation.GEGLU)
    residual = {"gate": wide(width), "residual": True, "moments": norm.moments, "next_scale": wide(width)}
    yield finish(x, width, None, **residual)


def evo(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A call's, by component, of Evo-1 with two layers of the published size each, two steps and two views."""
    config = evo1()
    few = {name: replace(getattr(config, name), depth=2) for name in ("vision", "language", "head")}
    shape = Evo1Shape(batch, Schedule.uniform(2), 2, 64, True, (16, 16), config.arrangement)
    return frames(EVO1, replace(config, **few), shape, precision, early=gpu.dependent_launch)


def tasks(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A call's, by component, of Multi-task DiT with two layers of the published size each, and two steps."""
    config = multi_task_dit(depth=2)
    few = {name: replace(getattr(config, name), depth=2) for name in ("vision", "text")}
    shape = Shape(batch, Schedule.uniform(2))
    return frames(MULTI_TASK_DIT, replace(config, **few), shape, precision, early=gpu.dependent_launch)


def xvla_parts(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """A call's, by component, of X-VLA with two layers of the published size each, two steps and two views. Its FP8 has
    calibrated scales, and the same kernels."""
    del precision
    config = xvla(depth=2)
    config = replace(config, encoder=replace(config.encoder, depth=2))
    shape = XvlaShape(batch, Schedule.uniform(2), ((224, 224), (224, 224)))
    return frames(XVLA, config, shape, early=gpu.dependent_launch)


def frames(
    family: Family, config: Any, shape: Shape | None = None, precision: str = "auto", *, early: bool = False
) -> dict[str, list[Launch]]:
    """A call's of a family, by component, with two denoising steps. `early`: whether dependent launches start early."""
    model, found = empty_model(family.network_class, config), {}
    with steered("triton", META):
        store = family.store_class(model, None)
        for component in family.components(model, shape or Shape(1, Schedule.uniform(2)), store=store):
            assert component.native is not None
            precise = precision if component.quantised else "auto"
            program: Any = component.native(EngineSpec("native", precision=precise))  # type: ignore[arg-type]
            owned = (getattr(program, name, None) for name in ("stack", "language", "bart"))
            for part in (program, *owned, *getattr(program, "stages", ())):
                if hasattr(part, "chain"):
                    part.chain.early = early  # type: ignore[union-attr]
            tensors = {s.name: s.empty(META) for s in (*component.inputs, *component.outputs)}
            found[component.name] = recorded(partial(program, tensors, tensors))
    return found


def images() -> Iterator[Callable[[], Any]]:
    """Calls of the image models' kernels, at sizes of Stable Diffusion and of Qwen-Image's autoencoder."""

    added = Sum(half(2, 64, 64, 96), half(2, 64, 64, 96), wide(2, 96))
    grouped = Sum(half(2, 64, 64, 320), half(2, 64, 64, 320), wide(2, 320))
    norm = GroupNorm(32, wide(320), wide(320), 1e-5)
    rows = half(2, 4096, 320)
    yield lambda: image._launch_rows(added, wide(96), Activation.SILU, keep=True, pad=True)
    yield lambda: image.group_act(grouped, norm, activation=Activation.SILU, keep=True, skip=None, after=None)
    yield lambda: image.add_layer_norm(rows, rows, wide(320), wide(320), wide(320), 1e-5)
    yield lambda: image.geglu_erf(half(2, 4096, 2560))
    pixels, layer = half(2, 7, 7, 2048), Depthwise(wide(9, 2048), *(wide(2048) for _ in range(4)))
    yield lambda: depthwise_norm(pixels, layer, pixels, pixels, eps=1e-5)
    yield lambda: max_pool(half(2, 240, 320, 64), wide(64), activation=Activation.RELU)
    last = half(512, 512, 3, 3).contiguous(memory_format=torch.channels_last)
    sizes, tile = ConvSizes(600, 512, 512, 3, 1), ConvTile(64, 64, 2, split=4)
    plan = ConvPlan(tile, workspace(sizes, tile, META))
    yield lambda: convolve(half(2, 15, 20, 512), last, shift=wide(512), activation=Activation.RELU, plan=plan)
    yield lambda: image.softmax(wide(4096, 4096), torch.bfloat16)
    # The narrower of its two tiles, which a GPU with little shared memory takes.
    heads = half(1, 4096, 384)
    yield lambda: image.wide_attention(heads, heads, heads, 64)


KINDS: dict[str, Callable[[Gpu, str, int], dict[str, list[Launch]]]] = {
    "groot": groot, "groot_n16": partial(groot, size=groot_n16, side=252), "decode": decode, "int8": integers,
    "groot_n15": partial(groot, size=groot_n15, side=224), "fastwam": wam, "evo1": evo, "openvla_oft": oft,
    "molmoact2": molmo, "multi_task_dit": tasks, "xvla": xvla_parts, "each": each,
}  # fmt: skip


def main(*words: str) -> None:
    gpus = [ARCHITECTURES[word] for word in words if word in ARCHITECTURES] or [ARCHITECTURES["9.0"]]
    for gpu, name in itertools.product(gpus, [word for word in words if word in KINDS]):
        compile_on(gpu)
        if "--count" in words:
            print(json.dumps({part: len(found) for part, found in KINDS[name](gpu, "auto", 1).items()}))
            continue
        seen = set()
        for precision, batch in (("auto", 1), ("fp8", 1), ("int8", 1), ("auto", 3)):
            if precision == "fp8" and not gpu.fp8:
                continue
            for launch in itertools.chain(*KINDS[name](gpu, precision, batch).values()):
                _, key = source_of(launch)
                if key not in seen:
                    seen.add(key)
                    print_row(gpu, launch, [name])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main(*sys.argv[1:])
