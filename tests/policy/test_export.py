"""`vla-accel export`: files that give a policy's actions without this package, for every family."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support import (
    fastwam_folders,
    groot_folders,
    tiny_act,
    tiny_diffusion_policy,
    tiny_multi_task_dit,
    tiny_pi0_fast,
    tiny_smolvla,
    vla_jepa_folders,
)
from tests.support.tiny import write_tiny_checkpoint
from vla_accel.cli import main


def fastwam(folder: Path) -> None:
    """With its encoded prompts."""
    fastwam_folders.write(folder)
    assert main(["prompts", str(folder), fastwam_folders.TASKS[0]]) == 0


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "act": tiny_act.write_lerobot,
    "pi05": lambda folder: write_tiny_checkpoint(folder, "pi05"),
    "smolvla": tiny_smolvla.write_lerobot,
    "groot_n17": groot_folders.write_isaac,
    "diffusion_policy": tiny_diffusion_policy.write_lerobot,
    "multi_task_dit": lambda folder: tiny_multi_task_dit.write_lerobot(folder, tokens=40),
    "fastwam": fastwam,
    "vla_jepa": lambda folder: vla_jepa_folders.write(folder, "plain"),
}
WORDS = {"act": ("--batch", "2")}
"""Of a family without steps; others take two."""
# tests/engines/test_onnx_export.py has the graphs of the other families.
CASES = [*(("torch-export", name) for name in FOLDERS), ("onnx", "act"), ("onnx", "diffusion_policy")]


def written(folder: Path, write: Callable[[Path], Any]) -> Path:
    """The folder of a small checkpoint; some writers make it themselves."""
    (folder / "checkpoint").mkdir(parents=True)
    made = write(folder / "checkpoint")
    return made if isinstance(made, Path) else folder / "checkpoint"


def exported(folder: Path, form: str, write: Callable[[Path], Any], *words: str) -> Path:
    arguments = ["export", str(written(folder, write)), "--format", form, "--output", str(folder / "out"), *words]
    assert main(arguments) == 0
    return folder / "out"


def runner_of(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_policy", folder / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Exported(folder)


@pytest.fixture(scope="module")
def export_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The files of a family in a form, made once."""

    @functools.cache
    def made(form: str, family: str) -> Path:
        words = WORDS.get(family, ("--num-steps", "2"))
        return exported(tmp_path_factory.mktemp(family), form, FOLDERS[family], *words)

    return made


@pytest.mark.slow
@pytest.mark.parametrize(("form", "family"), CASES)
def test_the_files_give_the_policys_actions(form: str, family: str, export_of: Callable[[str, str], Path]) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="NOT RUN: needs pip install 'vla_accel[onnx]'")
        pytest.importorskip("onnxruntime", reason="NOT RUN: needs pip install 'vla_accel[onnx]'")
    folder = export_of(form, family)
    manifest = json.loads((folder / "manifest.json").read_text())
    with np.load(folder / "example.npz") as example:
        arrays = dict(example)
    expected = arrays.pop("expected")
    assert list(arrays) == manifest["inputs"] and manifest["format"] == form
    runner = runner_of(folder)
    scale = np.abs(expected).max()
    assert scale > 0 and np.abs(runner.run(arrays) - expected).max() < 1e-4 * max(scale, 1)
    # Each input counts, but for the guidance of a plain call, which is zero.
    for name, values in arrays.items():
        other = values[..., ::-1].copy() if values.dtype != bool else ~values
        if values.any() and values.dtype.kind == "f" and not np.array_equal(other, values):
            assert np.abs(runner.run({**arrays, name: other}) - expected).max() > 1e-4 * scale, name


@pytest.mark.slow
def test_the_script_runs_without_this_package(tmp_path: Path, export_of: Callable[[str, str], Path]) -> None:
    folder = shutil.copytree(export_of("torch-export", "act"), tmp_path / "out")
    hidden = "import sys; sys.modules['vla_accel'] = None; sys.argv = sys.argv[1:]; import runpy; "
    hidden += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", hidden, str(folder / "run.py")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("largest difference of the actions: "), done.stderr
    with np.load(folder / "example.npz") as example:
        changed = {**example, "expected": example["expected"] + 0.01}
    np.savez(folder / "example.npz", **changed)
    assert subprocess.run(words, capture_output=True, cwd=tmp_path).returncode == 1
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["batch"] == 2 and changed["expected"].shape[0] == 2


@pytest.mark.slow
def test_a_file_holds_the_weights_of_its_component_alone(export_of: Callable[[str, str], Path]) -> None:
    folder = export_of("torch-export", "pi05")
    weights = (folder.parent / "checkpoint" / "model.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in folder.glob("*.pt2")) < 1.5 * weights + 2e6


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], write: Callable[[Path], Any], *words: str) -> str:
    output = tmp_path / "out"
    assert main(["export", str(written(tmp_path, write)), "--output", str(output), *words]) == 1
    assert not list(tmp_path.glob(".out-*")), "nothing half written"
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--format", "torch-export")
    found = refused(tmp_path / "tokens", capsys, tiny_pi0_fast.write_lerobot, *words)
    assert "decode: cannot be exported" in found and "a token that ends a sequence" in found
    found = refused(tmp_path / "engines", capsys, FOLDERS["act"], *words, "--config", "native")
    assert "config: expected none with engines" in found and found.endswith("native")
    (tmp_path / "full" / "out").mkdir(parents=True)
    (tmp_path / "full" / "out" / "kept").write_text("mine")
    found = refused(tmp_path / "full", capsys, FOLDERS["act"], *words)
    assert "output: expected a new or an empty folder" in found
    assert (tmp_path / "full" / "out" / "kept").read_text() == "mine"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_reported_before_the_checkpoint_loads(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None if name == package else ModuleType(name))
    words = ["export", str(tmp_path / "absent"), "--output", str(tmp_path / "out")]
    assert main(words) == 1
    assert f"needs the package {package} " in capsys.readouterr().err
    assert main([*words, "--format", "torch-export"]) == 1
    assert "checkpoint: expected a folder" in capsys.readouterr().err
