"""The native engine's kernels through their compilers, without a GPU: Triton's for every compute capability, at every
shape that the full-size models (on Hopper the demo, too) launch there; the CUDA C++ for Hopper, through NVRTC."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.test_gemm import TABLE, TILINGS
from tests.support.cubin import local_between, registers_of, stack_of
from tests.support.gpus import ARCHITECTURES, H200
from tests.support.streamed_support import EXPERTS, LOOPS, recorded_loop
from vla_accel.errors import EngineError
from vla_accel.families.smolvla import native_loop as smolvla_expert
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.hopper import Tiling, launch, searched, suffix
from vla_accel.kernels.gemm.hopper.few import few
from vla_accel.kernels.gemm.suffix_tilings import Product, Skinny
from vla_accel.kernels.loop.schedule import THREADS, Schedule

ROOT = Path(__file__).parents[2]
FITTING = {"_filtered", "_sampled"}
ROWS = {"_patchify", "_add_norm", "_embed_norm", "_geglu", "_rope_cache", "_attention", "_step"} | FITTING
# What takes the denoise loop's products and attention: of up to 16 rows, and of more.
FEW = {"_qkv_rope", "_gate_up_geglu", "_project"}
MANY = {"_measure", "_qkv_rope_pipelined", "_gate_up_pipelined", "_project_pipelined"}
AROUND = {"_heads_around", "_geglu_around", "_residual_around"}
INT8 = {"_int8_linear", "_int8_gated"}
BY_MODEL = {
    "pi05": ROWS | FEW | {"_suffix_attention"},
    "pi05 fp8": ROWS | FEW | {"_suffix_attention", "_gelu"},  # BF16 vision has its GELU in cuBLAS
    "pi05 int8": ROWS - {"_geglu"} | FEW | INT8 | {"_suffix_attention"},
    "pi0": ROWS | MANY | {"_suffix_attention_split"},
    "pi0 int8": ROWS - {"_geglu"} | MANY | INT8 | {"_suffix_attention_split"},
    "demo": ROWS | FEW | {"_suffix_attention"},
    "demo x 8": ROWS | MANY | {"_suffix_attention"},
}
PRODUCTS = {"_attention", "_suffix_attention", "_suffix_attention_split"} | INT8 | FEW | MANY - {"_measure"}
# All but the first of each program's chain.
CHAINED = set().union(*BY_MODEL.values()) - {"_patchify", "_embed_norm"} - FITTING
SPILLED = 256
"""Bytes a thread may keep in local memory: some around a loop, of sums that fill all 255 registers."""


def compiled_for(
    version: str, folder: Path, *options: str, script: str = "compile_kernels.py"
) -> list[dict[str, Any]]:  # fmt: skip
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT RUN: needs triton: pip install 'triton>=3.6' (Linux)")
    # The same Triton as here, which may lie beside the installed one (`make test-triton`).
    cache, path = str(folder), os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / script), version, *options],
        cwd=ROOT,
        env={"PYTHONPATH": path, "PATH": "", "TRITON_CACHE_DIR": cache, "HOME": cache, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What all models launch on Hopper."""
    return compiled_for("9.0", tmp_path_factory.mktemp("triton"))


def check_it_fits(row: dict[str, Any]) -> None:
    """Within what a block can have there."""
    gpu = ARCHITECTURES[row["gpu"]]
    assert row["bytes"] > 1000 and row["shared"] <= gpu.shared_per_block, row
    threads = 32 * row["options"].get("num_warps", 4)
    assert row["registers"] * threads <= gpu.registers and row["spilled"] <= SPILLED, row
    check_its_cut(row)


def check_its_cut(row: dict[str, Any]) -> None:
    """Within what its cut says that it has at most, by which cuts are chosen."""
    if row["kernel"] in FEW:
        c = row["constants"]
        cut = Skinny(c["BLOCK_N"], c["PARTS"], c["PARTS"] * c["PIECE"], c["BLOCK_M"], c["AHEAD"])
        sides, weight = 1 if row["kernel"] == "_project" else 2, 1 if row["int8"] else 2
        assert row["shared"] <= cut.shared(Product(1, c["K"], cut.columns, sides=sides, weight=weight)), row


@pytest.mark.slow
def test_every_models_kernels_compile_and_fit(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        check_it_fits(row)
    for model, kernels in BY_MODEL.items():
        assert {row["kernel"] for row in compiled if model in row["models"]} == kernels, model
    products = [row for row in compiled if row["models"] == ["pi05 int8"] and row["kernel"] in FEW]
    assert {row["kernel"] for row in products} == FEW and all(row["int8"] for row in products)


@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in ARCHITECTURES if v != "9.0"])
def test_every_kernel_compiles_and_fits_elsewhere(version: str, tmp_path: Path) -> None:
    """On the GPU with the least, what a build would measure, too."""
    gpu = ARCHITECTURES[version]
    rows = compiled_for(version, tmp_path, *(["--tried"] if version == "8.6" else []))
    for row in rows:
        assert row["gpu"] == version
        check_it_fits(row)
        assert (row["waits"] > 0) == bool(row["constants"].get("PDL"))
        assert not row["constants"].get("PDL") or gpu.dependent_launch
        assert (row["products"] > 0) == (row["kernel"] in PRODUCTS), row
    for model in ("pi05", "pi05 int8", "pi0", "pi0 int8", *(["pi05 fp8"] if gpu.fp8 else [])):
        assert {row["kernel"] for row in rows if model in row["models"]} >= BY_MODEL[model], model
    if version == "8.6":
        assert {row["kernel"] for row in rows if "pi0" in row["models"]} >= AROUND


def launched() -> set[str]:
    """Every Triton kernel of the package: what is compiled, and called by no other kernel."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "vla_accel" / "kernels").rglob("triton_*.py")))
    names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)\(", text, re.MULTILINE)
    return {name for name in names if len(re.findall(rf"\b{name}\(", text)) == 1}


@pytest.mark.slow
@pytest.mark.parametrize("version", ARCHITECTURES)
def test_each_kernel_compiles_for_each_capability(version: str, tmp_path: Path) -> None:
    """SmolVLA's, GR00T's, π0-FAST's, the image models' and loops with INT8 weights, where the models above do not
    have them: once each, in an ordinary tile."""
    gpu = ARCHITECTURES[version]
    rows = compiled_for(version, tmp_path, script="compile_each.py")
    # Of the ways to attend with very wide heads this one is out where a block has 99 KB.
    tight = {"_wide_attention"} if gpu.shared_per_block < 100 << 10 else set()
    for row in rows:
        assert row["bytes"] > 1000 and row["fits"] == (row["kernel"] not in tight), row
        assert row["spilled"] <= SPILLED, row
        check_its_cut(row)
    everywhere = set().union(*(BY_MODEL[model] for model in ("pi05", "pi05 int8", "pi0", "pi0 int8")))
    # A GELU of its own comes before a product in FP8 alone.
    everywhere |= {"_gelu"}
    assert {row["kernel"] for row in rows} | everywhere == launched()
    # Where the models above have BF16 loops alone, all products of a loop are here with INT8 weights.
    loops = {"_cross_attention"} | (set() if version in ("8.7", "9.0") else FEW | MANY - {"_measure"})
    assert {row["kernel"] for row in rows if row["int8"]} >= loops


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
        assert found - {"_suffix_attention", "_suffix_attention_split"} == kernels - inside | more, model
    for row in rows:
        check_it_fits(row)
        assert (row["products"] > 0) == (row["kernel"] in {*PRODUCTS, "_cross_attention"}), row
        assert (row["waits"] > 0) == (row["releases"] > 0) == bool(row["constants"].get("PDL")), row


@pytest.mark.slow
def test_products_run_on_the_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        assert (row["products"] > 0) == (row["kernel"] in PRODUCTS), row


@pytest.mark.slow
def test_heads_of_72_are_loaded_sixteen_bytes_at_once(compiled: list[dict[str, Any]]) -> None:
    """They begin at a multiple of 8 values, not of 16, which is all that Triton asks of a number that it is given."""
    heads = {row["constants"]["HEAD_DIM"]: row["single"] for row in compiled if row["kernel"] == "_attention"}
    assert heads.keys() >= {72, 256} and not any(heads.values())


@pytest.mark.slow
def test_dependent_launches_wait_and_release(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        pdl = bool(row["constants"].get("PDL"))
        assert pdl == bool(row["options"].get("launch_pdl")), row
        assert (row["waits"] > 0) == (row["releases"] > 0) == pdl, row
    # A chain's first kernel waits for all before it: the prefix may then be read ahead of any wait.
    firsts = [row for row in compiled if row["kernel"] == "_step" and row["constants"]["FIRST"]]
    assert firsts and not any(row["constants"]["PDL"] for row in firsts)
    chained = {row["kernel"] for row in compiled if row["constants"].get("PDL")}
    assert chained == CHAINED


@pytest.mark.slow
def test_fp8_models_convert_to_fp8_and_others_do_not(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        quantises = bool(row["constants"].get("QUANT"))
        if quantises:
            assert row["fp8"] or all("int8" in model for model in row["models"]), row
        assert not row["fp8"] or row["models"] == ["pi05 fp8"], row
    narrow = {row["kernel"] for row in compiled if row["fp8"]}
    assert {"_qkv_rope", "_gate_up_geglu", "_project", "_add_norm", "_geglu", "_gelu", "_attention"} <= narrow


@pytest.mark.slow
def test_int8_weights_reach_every_product_of_the_loop(compiled: list[dict[str, Any]]) -> None:
    products = MANY - {"_measure"}
    own = [row for row in compiled if row["models"] == ["pi0 int8"] and row["kernel"] in products]
    assert {row["kernel"] for row in own} == products and all(row["int8"] for row in own)
    assert not any(row["int8"] for row in compiled if not any("int8" in model for model in row["models"]))


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
@pytest.mark.parametrize("name", LOOPS)
def test_the_streamed_kernels_compile(name: str, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = recorded_loop(LOOPS[name], monkeypatch)
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    code = nvrtc.compile_source(module.source, module.architecture)
    assert code.startswith(b"\x7fELF")
    for kernel in module.shared:
        assert b".text." + kernel.encode() + b"\0" in code, kernel
    assert max(registers_of(code)) * THREADS <= H200.registers and max(module.shared.values()) <= H200.shared_per_block
    assert max(stack_of(code)) <= SPILLED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "17 actions", "three sequences"])
def test_smolvla_s_streamed_kernels_compile(
    name: str, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = EXPERTS[name]
    schedule = Schedule.of(smolvla_expert.expert_spec(case.config), len(case.lengths), case.prefix_tokens, H200)
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    code = nvrtc.compile_source(schedule.source, "sm_90a")
    for kernel in schedule.blocks:
        assert b".text." + kernel.encode() + b"\0" in code, kernel
    assert max(schedule.shared.values()) <= H200.shared_per_block and max(stack_of(code)) <= SPILLED
    assert max(registers_of(code)) * THREADS <= H200.registers


def check_it_fits_a_hopper(code: bytes, tiling: Tiling) -> None:
    """No sum leaves the registers while there are products to add. Behind them, where a tile fills all registers, a
    compiler (NVRTC 13.0) may set values aside: an eighth of what a thread's sums take, 64 x width of four warps."""
    assert code.startswith(b"\x7fELF") and max(stack_of(code)) <= 64 * tiling.width * 4 // 128 // 8
    assert stack_of(code) == {0} or not local_between(code, "HGMMA")
    assert max(registers_of(code)) * tiling.threads * tiling.resident <= H200.registers


@pytest.mark.parametrize(
    "tiling", [TILINGS[0], *(pytest.param(tiling, marks=pytest.mark.slow) for tiling in TILINGS[1:])]
)
def test_the_products_compile(tiling: Tiling, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    cases = [
        (torch.bfloat16, False, Activation.NONE),
        (torch.float8_e4m3fn, True, Activation.GEGLU),
        (torch.float16, True, Activation.GELU),
    ]
    for kind, narrow, activation in cases:
        text = launch.source(kind, narrow, activation, tiling)
        check_it_fits_a_hopper(nvrtc.compile_source(text, launch.ARCHITECTURE), tiling)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "least", "most", "tiling"), TABLE)
def test_the_products_in_use_compile(
    key: tuple[str, Activation, int, int], least: int, most: int, tiling: Tiling, nvrtc_library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    for text in sources_in_use(key, tiling):
        check_it_fits_a_hopper(nvrtc.compile_source(text, launch.ARCHITECTURE), tiling)


def sources_in_use(key: tuple[str, Activation, int, int], tiling: Tiling) -> list[str]:
    """Of a product as the programs launch it: plain, onto a residual, after a norm."""
    dtype = torch.float8_e4m3fn if key[0] == "fp8" else torch.bfloat16
    narrow = key[0] == "fp8" and key[1] is not Activation.NONE
    texts = [launch.source(dtype, narrow, key[1], tiling)]
    if key[1] is Activation.NONE and tiling.why_not(residual=True) is None:
        texts.append(launch.source(dtype, False, Activation.NONE, tiling, residual=True))
    if key[0] == "half" and tiling.why_not(key[1], normed=True) is None:
        texts += [launch.source(dtype, False, key[1], tiling, norm=norm, k=key[3]) for norm in ("rms", "layer")]
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("rows", [288, 576, 2176])
def test_the_products_that_are_searched_for_compile(
    rows: int, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first choices for one view, a longer prompt and a batch."""
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    for key in sorted({key for key, *_ in TABLE}):
        tiling = searched(H200, torch.float8_e4m3fn if key[0] == "fp8" else torch.bfloat16, key[1], rows, *key[2:])[0]
        for text in sources_in_use(key, tiling)[:1]:
            check_it_fits_a_hopper(nvrtc.compile_source(text, launch.ARCHITECTURE), tiling)


@pytest.mark.slow
def test_a_batchs_products_compile(nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice for gate and up of 16 sequences."""
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        for tiling in searched(H200, kind, Activation.GEGLU, 8704, 32_768, 2048):
            text = launch.source(kind, kind != torch.bfloat16, Activation.GEGLU, tiling)
            check_it_fits_a_hopper(nvrtc.compile_source(text, launch.ARCHITECTURE), tiling)


@pytest.mark.slow
def test_gated_products_with_a_norm_compile(nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choices for SmolVLA's and GR00T's language models."""
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    for rows, n, k in ((177, 5120, 960), (151, 12_288, 2048)):
        tiling = searched(H200, torch.bfloat16, Activation.SWIGLU, rows, n, k)[0]
        assert tiling.why_not(Activation.SWIGLU, normed=True) is None
        text = launch.source(torch.bfloat16, False, Activation.SWIGLU, tiling, norm="rms", k=k)
        check_it_fits_a_hopper(nvrtc.compile_source(text, launch.ARCHITECTURE), tiling)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [80, 160, 200, 320])
def test_products_of_a_suffix_compile(rows: int, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    kinds = (
        (suffix.HEADS, 2560, 1024, 256, Activation.NONE), (suffix.ONTO, 1024, 2048, 0, Activation.NONE),
        (suffix.GATED, 8192, 1024, 8192, Activation.GEGLU), (suffix.GATED, 8192, 1024, 8192, Activation.SWIGLU),
        (suffix.ONTO, 1024, 4096, 0, Activation.NONE),
    )  # fmt: skip
    for kind, n, k, paired, activation in kinds:
        for tiling in few(H200, rows, n, k, paired):
            text = suffix.source(torch.bfloat16, kind, activation, tiling)
            check_it_fits_a_hopper(nvrtc.compile_source(text, launch.ARCHITECTURE), tiling)


def test_a_source_that_does_not_compile_says_where(nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    with pytest.raises(EngineError, match=r"(?s)does not compile for sm_90a:.*kernels\.cu\(2\).*nonsense"):
        nvrtc.compile_source('extern "C" __global__ void f() {\n  nonsense;\n}\n', "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["9.0", "12.0"])
def test_tiles_by_tma_compile(version: str, tmp_path: Path) -> None:
    """Where there is most shared memory, and least. No thread copies a tile then, and of one product's sums nothing is
    spilled."""
    rows = compiled_for(version, tmp_path, "--tried", "--tma")
    assert {row["kernel"] for row in rows} == MANY - {"_measure"}
    for row in rows:
        check_it_fits(row)
        assert row["tma"] > 0 and row["products"] > 0, row
        assert row["kernel"] != "_project_pipelined" or not row["spilled"], row


@pytest.mark.slow
def test_loops_that_pin_actions_compile(tmp_path: Path) -> None:
    """Per-row constants cost registers, but none is spilled."""
    pinned = [row for row in compiled_for("9.0", tmp_path, "--trained") if row["constants"].get("PINNED")]
    assert {row["kernel"] for row in pinned} == {"_step", *FEW} and max(row["spilled"] for row in pinned) == 0
