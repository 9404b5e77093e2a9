"""The native engine's kernels through their compilers, without a GPU: Triton's for every compute capability, at every
shape that the full-size models (on Hopper the demo, too) launch there; the CUDA C++ for Hopper, through NVRTC."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import json
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.test_gemm import BF16, FP8, GEGLU, GELU, NONE, NORMED, RESIDUAL, SWIGLU, TABLE, TILES, why_not
from tests.support.cubin import local_between, registers_of, stack_of
from tests.support.gpus import A100, ARCHITECTURES, B200, GENERATIONS, H200, RTX_3090, RTX_4090, RTX_5090
from tests.support.scripts import lines_of, needs_triton
from tests.support.streamed_support import EXPERTS, LOOPS, LoopCase, Loops, recorded_loop
from vla_accel.errors import EngineError
from vla_accel.families.diffusion_policy.bench import ddpm
from vla_accel.families.diffusion_policy.network import DiffusionPolicy
from vla_accel.families.diffusion_policy.persistent import PackedUnet, phases_of
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.conv1d import unet
from vla_accel.kernels.gemm.config import GemmSizes, Skinny
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm, Rotation
from vla_accel.kernels.gemm.hopper import HopperTile, launch, searched
from vla_accel.kernels.gemm.hopper.config import ARCHITECTURE, few_rows
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop.schedule import THREADS
from vla_accel.kernels.persistent import Plan
from vla_accel.kernels.persistent import plan as persistent
from vla_accel.numeric import round_up

ROOT = Path(__file__).parents[2]
FITTING = {"_filtered", "_sampled"}
ROWS = {"_patchify", "_add_norm", "_embed_norm", "_geglu", "_rotate", "_attention", "_step"} | FITTING
# What takes the denoise loop's products and attention: of up to 16 rows, and of more.
FEW = {"_skinny_pair", "_skinny_columns"}
MANY = {"_measure", "_pipelined_pair", "_pipelined_columns"}
AROUND = {"_library_pair", "_library_columns"}
INT8 = {"_int8_product"}
BY_MODEL = {
    "pi05": ROWS | FEW | {"_suffix_attention"},
    "pi05 fp8": ROWS | FEW | {"_suffix_attention", "_gelu"},  # BF16 vision has its GELU in cuBLAS
    "pi05 int8": ROWS - {"_geglu"} | FEW | INT8 | {"_suffix_attention"},
    "pi0": ROWS | MANY | {"_suffix_attention"},
    "pi0 int8": ROWS - {"_geglu"} | MANY | INT8 | {"_suffix_attention"},
    "demo": ROWS | FEW | {"_suffix_attention"},
    "demo x 8": ROWS | MANY | {"_suffix_attention"},
}
PRODUCTS = (
    {"_attention", "_cross_attention", "_suffix_attention", "_window_attention", "_channel_attention"}
    | INT8
    | FEW
    | MANY - {"_measure"}
)
# All but the first of each program's chain.
CHAINED = set().union(*BY_MODEL.values()) - {"_patchify", "_embed_norm"} - FITTING
SPILLED = 256
"""Bytes a thread may keep in local memory: some around a loop, of sums that fill all 255 registers."""


def compiled_for(versions: str | tuple[str, ...], folder: Path, *options: str) -> list[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT RUN: needs triton: pip install 'triton>=3.6' (Linux)")
    script = ("compile_each", "each") if "each" in options else ("compile_kernels", *options)
    versions = (versions,) if isinstance(versions, str) else versions
    return [json.loads(line) for line in lines_of(*script, *versions, cache=folder)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What all models launch on Hopper."""
    return compiled_for("9.0", tmp_path_factory.mktemp("triton"))


def check_it_fits(row: dict[str, Any]) -> None:
    """It needs no more than a block can have; products are on the tensor cores; dependent launches wait and release."""
    gpu = ARCHITECTURES[row["gpu"]]
    assert row["bytes"] > 1000 and row["shared"] <= gpu.shared_per_block, row
    threads = 32 * row["options"].get("num_warps", 4)
    assert row["registers"] * threads <= gpu.registers and row["spilled"] <= SPILLED, row
    assert (row["products"] > 0) == (row["kernel"] in PRODUCTS), row
    pdl = bool(row["constants"].get("PDL"))
    assert (row["waits"] > 0) == (row["releases"] > 0) == pdl == bool(row["options"].get("launch_pdl")), row
    assert not pdl or gpu.dependent_launch
    check_its_config(row)


def check_its_config(row: dict[str, Any]) -> None:
    """It needs no more shared memory than its config says."""
    if row["kernel"] in FEW:
        config, (_, k, *_) = Skinny(**row["constants"]["TILE"]), row["constants"]["SHAPE"]
        sides, weight = 1 if row["kernel"] == "_skinny_columns" else 2, 1 if row["int8"] else 2
        assert row["shared"] <= config.shared(GemmSizes(1, k, config.columns, 1, sides, weight)), row


@pytest.mark.slow
def test_every_models_kernels_compile_and_fit(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        check_it_fits(row)
    for model, kernels in BY_MODEL.items():
        assert {row["kernel"] for row in compiled if model in row["models"]} == kernels, model
    for model, products in (("pi05 int8", FEW), ("pi0 int8", MANY - {"_measure"})):
        own = [row for row in compiled if row["models"] == [model] and row["kernel"] in products]
        assert {row["kernel"] for row in own} == products and all(row["int8"] for row in own)
    assert not any(row["int8"] for row in compiled if not any("int8" in model for model in row["models"]))


@pytest.mark.slow
@needs_triton
def test_a_generation_has_the_same_code(tmp_path: Path) -> None:
    """So a launch of several of its GPUs is compiled once."""
    assert sorted(itertools.chain(*GENERATIONS)) == sorted(ARCHITECTURES)
    found = [json.loads(line) for line in lines_of("compile_generations", cache=tmp_path)]
    assert len(found) == 6 and all(codes == 1 for *_, codes in found), found


@pytest.mark.slow
@pytest.mark.parametrize("versions", [found for found in GENERATIONS if found != ("9.0",)], ids=" ".join)
def test_every_kernel_compiles_and_fits_elsewhere(versions: tuple[str, ...], tmp_path: Path) -> None:
    """On the GPU with the least, what a build would measure, too."""
    rows = compiled_for(versions, tmp_path)
    for row in rows:
        check_it_fits(row)
    for version in versions:
        own = [row for row in rows if row["gpu"] == version]
        for model in ("pi05", "pi05 int8", "pi0", "pi0 int8", *(["pi05 fp8"] if ARCHITECTURES[version].fp8 else [])):
            assert {row["kernel"] for row in own if model in row["models"]} >= BY_MODEL[model], (version, model)
    if "8.6" in versions:
        assert {row["kernel"] for row in rows if row["gpu"] == "8.6" and "pi0" in row["models"]} >= AROUND


def launched() -> set[str]:
    """Every Triton kernel of the package: what is compiled, and called by no other kernel."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "vla_accel" / "kernels").rglob("triton_*.py")))
    names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)\(", text, re.MULTILINE)
    return {name for name in names if len(re.findall(rf"\b{name}\(", text)) == 1}


@pytest.mark.slow
@pytest.mark.parametrize("versions", [found[:1] if "11.0" in found else found for found in GENERATIONS], ids=" ".join)
def test_each_kernel_compiles_for_each_capability(versions: tuple[str, ...], tmp_path: Path) -> None:
    """SmolVLA's, GR00T's, π0-FAST's, the image models' and loops with INT8 weights, where the models above do not
    have them: once each, in an ordinary tile. Triton makes the same code for 11.0 as for 10.0."""
    rows = compiled_for(versions, tmp_path, "each")
    for row in rows:
        # Of the ways to attend with very wide heads this one is out where a block has 99 KB.
        tight = {"_wide_attention"} if ARCHITECTURES[row["gpu"]].shared_per_block < 100 << 10 else set()
        assert row["bytes"] > 1000 and row["fits"] == (row["kernel"] not in tight), row
        assert row["spilled"] <= SPILLED, row
        check_its_config(row)
    everywhere = set().union(*(BY_MODEL[model] for model in ("pi05", "pi05 int8", "pi0", "pi0 int8")))
    # A GELU of its own comes before a product in FP8 alone.
    everywhere |= {"_gelu"}
    for version in versions:
        own = [row for row in rows if row["gpu"] == version]
        assert {row["kernel"] for row in own} | everywhere == launched(), version
        # Where the models above have BF16 loops alone, all products of a loop are here with INT8 weights.
        loops = {"_cross_attention"} | (set() if version in ("8.7", "9.0") else FEW | MANY - {"_measure"})
        assert {row["kernel"] for row in own if row["int8"]} >= loops, version


@pytest.mark.slow
def test_smolvlas_kernels_compile_and_fit(tmp_path: Path) -> None:
    """Heads of 64, fifteen of them on five, a width that is no power of two; in INT8, by four in FP8; the demo's."""
    kernels = ROWS | {"_cross_attention"}
    rows = compiled_for("9.0", tmp_path, "--smolvla")
    loops = {"smolvla": MANY, "smolvla x 4 fp8": MANY | {"_gelu"}, "smolvla demo fp8": FEW | {"_gelu"}}
    loops["smolvla int8"] = MANY | INT8
    for model, more in loops.items():
        found = {row["kernel"] for row in rows if model in row["models"]}
        inside = {"_geglu"} if model == "smolvla int8" else set()
        assert found - {"_suffix_attention"} == kernels - inside | more, model
    for row in rows:
        check_it_fits(row)


@pytest.mark.slow
def test_heads_of_72_are_loaded_sixteen_bytes_at_once(compiled: list[dict[str, Any]]) -> None:
    """They begin at a multiple of 8 values, not of 16, which is all that Triton asks of a number that it is given."""
    heads = {row["constants"]["H"][2]: row["single"] for row in compiled if row["kernel"] == "_attention"}
    assert heads.keys() >= {72, 256} and not any(heads.values())


@pytest.mark.slow
def test_launches_inside_a_chain_are_dependent(compiled: list[dict[str, Any]]) -> None:
    # A chain's first kernel waits for all before it: the prefix may then be read ahead of any wait.
    firsts = [row for row in compiled if row["kernel"] == "_step" and row["constants"]["S"][4]]
    assert firsts and not any(row["constants"]["PDL"] for row in firsts)
    chained = {row["kernel"] for row in compiled if row["constants"].get("PDL")}
    assert chained == CHAINED


@pytest.mark.slow
def test_fp8_models_convert_to_fp8_and_others_do_not(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        assert not row["fp8"] or row["models"] == ["pi05 fp8"], row
    narrow = {row["kernel"] for row in compiled if row["fp8"]}
    assert {"_skinny_pair", "_skinny_columns", "_add_norm", "_geglu", "_gelu", "_attention"} <= narrow


# -- CUDA C++ ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc_library() -> ctypes.CDLL:
    """Any NVRTC: the loader's, a wheel's (nvidia-cuda-nvrtc), a toolkit's."""
    roots = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    places = [f"libnvrtc.so.{major}" for major in (13, 12)]
    places += [str(p) for root in sorted(roots) for p in sorted(root.glob("nvidia/*/lib/libnvrtc.so.*"))]
    places += [str(p) for p in sorted(Path("/usr/local").glob("cuda*/lib64/libnvrtc.so.*"))]
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    pytest.skip("NOT RUN: needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*LOOPS.values(), *(EXPERTS[n] for n in ("full", "17 actions", "three sequences"))])
def test_the_streamed_kernels_compile(
    case: LoopCase, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = recorded_loop(case, monkeypatch)
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    code = nvrtc.compile_source(module.source, module.architecture)
    assert code.startswith(b"\x7fELF")
    for kernel in module.shared:
        assert b".text." + kernel.encode() + b"\0" in code, kernel
    assert max(registers_of(code)) * THREADS <= H200.registers and max(module.shared.values()) <= H200.shared_per_block
    assert max(stack_of(code)) <= SPILLED


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [A100, RTX_3090, RTX_4090, H200, B200, RTX_5090], ids=lambda gpu: gpu.architecture)
def test_the_persistent_kernel_compiles(gpu: Gpu, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    for name in ("full", "demo"):
        case = LOOPS[name]
        plan = Plan(Loops(case).spec, case.batch, case.steps, False, gpu)
        code = nvrtc.compile_source(plan.source, gpu.architecture)
        # Registers are allocated for four warps at a time.
        assert max(registers_of(code)) * round_up(persistent.THREADS, 128) <= gpu.registers
        assert max(stack_of(code)) <= SPILLED and plan.shared <= gpu.shared_per_block


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [A100, RTX_4090, H200], ids=lambda gpu: gpu.architecture)
def test_the_persistent_unet_compiles(gpu: Gpu, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    config = ddpm()
    with torch.device("meta"), torch.inference_mode():
        phases = phases_of(PackedUnet.of(DiffusionPolicy(config)), config)
    layout = unet.Layout(phases, config.action_horizon, config.action_dim, gpu)
    code = nvrtc.compile_source(layout.source, gpu.architecture)
    assert max(registers_of(code)) * round_up(unet.THREADS, 128) <= gpu.registers
    assert max(stack_of(code)) <= SPILLED
    assert layout.shared <= gpu.shared_per_block and layout.stages >= unet.LEAST_STAGES


@functools.cache
def compiled_once(source: str) -> bytes:
    """The code of a source for Hopper; several products share one."""
    return nvrtc.compile_source(source, ARCHITECTURE)


@pytest.fixture
def compile_and_check(nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compile a kernel of the GEMM, and check that it fits a Hopper GPU.

    No sum leaves the registers while there are products to add. Behind them, where a tile fills all registers, a
    compiler (NVRTC 13.0) may set values aside: an eighth of what a thread's sums take, 64 x width of four warps.
    """
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)

    def check(kind: torch.dtype, tile: HopperTile, epilogue: Epilogue, *norm: Norm, **options: Any) -> None:
        code = compiled_once(launch.source(kind, tile, epilogue, *norm, **options))
        assert code.startswith(b"\x7fELF") and max(stack_of(code)) <= 64 * tile.width * 4 // 128 // 8
        assert stack_of(code) == {0} or not local_between(code, "GMMA")
        assert max(registers_of(code)) * tile.threads * tile.resident <= H200.registers

    return check


RMS, LAYER = Norm(1e-6), Norm(1e-6, sums=torch.zeros(1))


@pytest.mark.parametrize("tile", [TILES[0], *(pytest.param(tile, marks=pytest.mark.slow) for tile in TILES[1:])])
def test_tiles_compile(tile: HopperTile, compile_and_check: Callable[..., None]) -> None:
    for kind, narrow, activation in ((BF16, False, NONE), (FP8, True, GEGLU), (torch.float16, True, GELU)):
        compile_and_check(kind, tile, Epilogue(activation=activation), fp8_out=narrow)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [41, 50, 98, 262])
def test_tiles_for_weights_of_one_byte_compile(rows: int, compile_and_check: Callable[..., None]) -> None:
    """The first choice for each product of a loop, with one and with two resident blocks: a residual, modulated norms,
    gate and up, rotated heads."""
    epilogues: list[tuple[int, int, int, Epilogue, list[Norm]]] = [
        (1536, 6144, 0, Epilogue(gate=torch.zeros(1), residual=True, next_scale=torch.zeros(1)), []),
        (6144, 1536, 0, Epilogue(torch.zeros(1), GELU), [LAYER]),
        (8192, 1024, 8192, Epilogue(torch.zeros(1), SWIGLU), [RMS]),
        (2560, 1024, 256, Epilogue(rope=Rotation(*[torch.zeros(1)] * 3)), [RMS]),
    ]
    for (n, k, paired, epilogue, norm), weight in itertools.product(epilogues, (FP8, torch.int8)):
        found = few_rows(H200, rows, n, k, paired, widened=True)
        for resident in (1, 2):
            tile = next(tile for tile in found if tile.resident == resident)
            compile_and_check(BF16, tile, epilogue, *norm, half=paired // 2, weight=weight)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "least", "most", "tile"), TABLE)
def test_the_tiles_of_the_table_compile(
    key: tuple[str, Activation, int, int], least: int, most: int, tile: HopperTile,
    compile_and_check: Callable[..., None],
) -> None:  # fmt: skip
    """Products as the programs launch them: plain, added to a residual, after a norm."""
    name, activation, _, k = key
    kind, epilogue = FP8 if name == "fp8" else BF16, Epilogue(activation=activation)
    compile_and_check(kind, tile, epilogue, fp8_out=name == "fp8" and activation is not NONE)
    if activation is NONE and why_not(tile, RESIDUAL, k=k) is None:
        compile_and_check(kind, tile, Epilogue(residual=True))
    if name == "half" and why_not(tile, NORMED._replace(gated=activation.gated), k=k) is None:
        for norm in (RMS, LAYER):
            compile_and_check(kind, tile, epilogue, norm)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [288, 576, 2176])
def test_searched_tiles_compile(rows: int, compile_and_check: Callable[..., None]) -> None:
    """The first choices for one view, a longer prompt and a batch."""
    for name, activation, n, k in sorted({key for key, *_ in TABLE}):
        kind = FP8 if name == "fp8" else BF16
        narrow = name == "fp8" and activation is not NONE
        tile = searched(H200, kind, activation, rows, n, k)[0]
        compile_and_check(kind, tile, Epilogue(activation=activation), fp8_out=narrow)


@pytest.mark.slow
def test_the_gate_and_up_of_batches_and_of_other_families_compile(compile_and_check: Callable[..., None]) -> None:
    """Every choice for 16 sequences; the first choices, with a norm, for SmolVLA's and GR00T's language models."""
    for kind in (BF16, FP8):
        for tile in searched(H200, kind, GEGLU, 8704, 32_768, 2048):
            compile_and_check(kind, tile, Epilogue(activation=GEGLU), fp8_out=kind == FP8)
    for rows, n, k in ((177, 5120, 960), (151, 12_288, 2048)):
        tile = searched(H200, BF16, SWIGLU, rows, n, k)[0]
        assert why_not(tile, NORMED._replace(gated=True), k=k) is None
        compile_and_check(BF16, tile, Epilogue(activation=SWIGLU), RMS)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [33, 80, 160, 320])
def test_the_products_of_a_suffix_compile(rows: int, compile_and_check: Callable[..., None]) -> None:
    """Every choice for the heads, the gate and up, and the residuals of π0's expert."""
    nothing = torch.zeros(1)
    rope, onto = Epilogue(rope=Rotation(nothing, nothing, nothing)), Epilogue(gate=nothing, residual=True)
    for epilogue, n, k, paired in (
        (rope, 2560, 1024, 256), (onto, 1024, 2048, 0), (Epilogue(activation=GEGLU), 8192, 1024, 8192),
        (Epilogue(activation=SWIGLU), 8192, 1024, 8192), (onto, 1024, 4096, 0),
    ):  # fmt: skip
        for tile in few_rows(H200, rows, n, k, paired):
            compile_and_check(BF16, tile, epilogue, *([RMS] if paired else []), half=paired // 2)


def test_a_source_that_does_not_compile_says_where(nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    with pytest.raises(EngineError, match=r"(?s)does not compile for sm_90a:.*kernels\.cu\(2\).*nonsense"):
        nvrtc.compile_source('extern "C" __global__ void f() {\n  nonsense;\n}\n', "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["9.0", "12.0"])
def test_tiles_by_tma_compile(version: str, tmp_path: Path) -> None:
    """Where there is most shared memory, and least. No thread copies a tile then, and of one product's sums nothing is
    spilled."""
    rows = compiled_for(version, tmp_path, "--tma")
    assert {row["kernel"] for row in rows} == MANY - {"_measure"}
    for row in rows:
        check_it_fits(row)
        assert row["tma"] > 0 and row["products"] > 0, row
        assert row["kernel"] != "_pipelined_columns" or not row["spilled"], row


@pytest.mark.slow
def test_loops_that_pin_actions_compile(tmp_path: Path) -> None:
    """Per-row constants cost registers, but none is spilled."""
    rows = compiled_for("9.0", tmp_path, "--trained")
    assert {row["kernel"] for row in rows} == {"_step", *FEW}
    assert all(row["constants"]["PINNED"] for row in rows) and max(row["spilled"] for row in rows) == 0
