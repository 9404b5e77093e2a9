"""Options, markers that skip what this machine cannot run, and fixtures of several folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import (
    evo1_folders,
    groot_folders,
    molmoact2_folders,
    starvla_folders,
    tiny_smolvla,
    vla_jepa_folders,
    xvla_folders,
)
from tests.support.cuda_emulator import compiler
from tests.support.rounding import round_otherwise
from tests.support.tiny import write_tiny_checkpoint
from vla_accel.families.groot import images as groot_images

LONGEST = ("test_kernels_compile.py", "test_export.py", "test_image_engine_files.py", "test_onnx_export.py",
           "test_emulated_gemm.py", "test_tensorrt_build.py", "test_ray_replicas.py", "test_libero_sim.py",
           "test_int8.py", "test_kernels.py", "test_groot_older.py")  # fmt: skip
"""Files of several minutes begin first: one process would be left with the last of them."""


INTERPRETERS = {
    "--openpi-python": "openpi", "--openpi-client-python": "openpi-client", "--lerobot-python": "lerobot",
    "--lerobot-033-python": "lerobot 0.3.3", "--lerobot-051-python": "lerobot 0.5.1",
    "--lerobot-main-python": "lerobot's main branch", "--groot-python": "lerobot's GR00T",
}  # fmt: skip


@pytest.fixture(scope="module")
def small_images() -> Iterator[None]:
    """Qwen enlarges images below 256 x 256; four tokens a view are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groot_images, "LEAST_PIXELS", 0)
        yield


@pytest.fixture(scope="module")
def groot_folder(small_images: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GR00T checkpoint, whose images are small, too."""
    return groot_folders.write_isaac(tmp_path_factory.mktemp("groot"))


@pytest.fixture(scope="module")
def flow_folders(groot_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small checkpoint of each family with a flow."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("pi0", "pi05", "smolvla")}
    write_tiny_checkpoint(made["pi0"], "pi0")
    write_tiny_checkpoint(made["pi05"], "pi05")
    tiny_smolvla.write_lerobot(made["smolvla"], libero=False)
    others: dict[str, Callable[[Path], Path]] = {
        "groot_n16": groot_folders.write_n16, "groot_n15": groot_folders.write_n15, "vla_jepa": vla_jepa_folders.write,
        "starvla_groot": starvla_folders.write, "evo1": evo1_folders.write, "xvla": xvla_folders.write,
        "molmoact2": molmoact2_folders.write,
    }  # fmt: skip
    made |= {name: write(tmp_path_factory.mktemp(name)) for name, write in others.items()}
    return {**made, "groot": groot_folder}


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the CUDA emulator's compiled code, kept from one run to the next if pytest has a cache."""
    if compiler() is None:
        pytest.skip("NOT RUN: needs a C++ compiler (g++ or clang++)")
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("cuda_emulator") if cache is None else cache.mkdir("cuda_emulator")


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, project in INTERPRETERS.items():
        parser.addoption(option, default=None, help=f"interpreter of an environment with {project} (see CONTRIBUTING)")
    parser.addoption("--xpolicylab", default=None, help="a clone of XPolicyLab (see CONTRIBUTING)")
    parser.addoption(
        "--full-size", action="store_true", help="also build image models at their published sizes, for minutes"
    )
    parser.addoption(
        "--round-otherwise", action="store_true", help="matrix products on the CPU sum and round in another order"
    )


def pytest_configure(config: pytest.Config) -> None:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        threads = max(1, (os.cpu_count() or 1) // processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start
    if config.getoption("--round-otherwise"):
        round_otherwise()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="NOT RUN: needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
