"""TensorRT's libraries without a GPU: what a machine runs, which versions, and what `vla-accel inspect` shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.small_components import component
from vla_accel.cli import main
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import build, tensorrt, tensorrt_inspect, tensorrt_library
from vla_accel.engines.cache import EngineCache
from vla_accel.engines.tensorrt import TensorrtRtxEngine
from vla_accel.engines.tensorrt_library import load_library, parse_target, runs_on
from vla_accel.engines.tensorrt_plan import content_key
from vla_accel.errors import ConfigError, DependencyError, EngineError
from vla_accel.ledger import Ledger

CPU = torch.device("cpu")


def rtx(folder: Path, **given: Any) -> EngineSpec:
    return EngineSpec("tensorrt_rtx", tensorrt=TensorrtOptions(cache=str(folder)), **given)


def test_a_gpu_that_the_library_does_not_run_on_is_in_the_ledger(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(EngineError, match=r"run on a CUDA GPU, the device is cpu; `vla-accel build --targets sm89`"):
        TensorrtRtxEngine(component(), CPU, rtx(tmp_path))
    monkeypatch.setattr(tensorrt_library, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(tensorrt, "load_library", lambda name: pytest.fail("must be known beforehand"))
    spec = rtx(tmp_path, fallback=("eager",))
    ledger = Ledger()
    assert build(component(), spec, device=CPU, ledger=ledger).name == "eager"
    assert ledger.entries["double"].reason.startswith("tensorrt_rtx: not built; not runnable on 9.0")
    store = EngineCache(tmp_path)
    content = content_key(component(), component().module, spec, "onnx")
    for key, target in (("1", "sm89"), ("2", "sm120")):
        store.put("double", key, b"plan", {"target": target, "content": content})
    store.put("double", "3", b"plan", {"target": "sm80", "content": "of other weights"})
    build(component(), spec, device=CPU, ledger=ledger)
    entry = ledger.entries["double"]
    assert entry.reason.startswith("tensorrt_rtx: built for 8.9, 12.0; not runnable on 9.0 (TensorRT-RTX runs on 7.5,")


def test_a_missing_library_may_fall_back_too(monkeypatch: Any) -> None:
    monkeypatch.setattr(tensorrt_library, "capability_of", lambda device: (8, 9))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    ledger = Ledger()
    used = build(component(), EngineSpec("tensorrt", ("eager",)), device=CPU, ledger=ledger)
    assert used.name == "eager" and "pip install" in ledger.entries["double"].reason


def test_the_librarys_version_is_checked(monkeypatch: Any) -> None:
    module: Any = ModuleType("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    # The package index has a stub without a library.
    with pytest.raises(DependencyError, match=r"no usable TensorRT .*; install it: pip install 'vla_accel\[tensorrt"):
        load_library("tensorrt")
    for module.__version__ in ("10.0.1", "11.4.0"):
        assert load_library("tensorrt").title == f"TensorRT {module.__version__}"
    for module.__version__ in ("9.3.0", "12.0.0"):
        with pytest.raises(DependencyError, match=rf"at least 10\.0 and below 12\.0, got {module.__version__}"):
            load_library("tensorrt")


def test_capabilities() -> None:
    assert parse_target("sm89") == parse_target("8.9") == parse_target(" SM_89 ") == (8, 9)
    assert parse_target("sm120") == parse_target("12.0") == (12, 0)
    for text in ("ada", "sm", "89.x", "", "4090"):
        with pytest.raises(ConfigError, match="target: expected a compute capability like sm89"):
            parse_target(text)
    assert runs_on("tensorrt", (9, 0)) and not runs_on("tensorrt_rtx", (9, 0))
    assert runs_on("tensorrt_rtx", (8, 9)) and not runs_on("tensorrt", (7, 0))


def test_inspecting_reads_the_description_where_nothing_can_load(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    layers = [["matrix_multiply", "mm", "half"], ["softmax", "s", "half"], ["cast", "c", "bf16"]]
    about = {"target": "sm89", "library": "tensorrt_rtx", "version": "1.7", "layers": layers, "profiles": [{"x": []}]}
    path = EngineCache(tmp_path).put("double", "k", b"plan", about).path
    found = tensorrt_inspect.inspect(path)
    assert found["source"] == "description" and found["bytes"] == 4 and found["profiles"] == [{"x": []}]
    assert found["dtypes"] == {"half": 2, "bf16": 1} and found["types"]["softmax"] == 1
    assert found["layers"][0] == {"name": "mm", "type": "matrix_multiply", "dtype": "half"}
    json.dumps(found)
    path.write_bytes(b"pl")
    with pytest.raises(EngineError, match="truncated: 2 of 4"):
        tensorrt_inspect.inspect(path)
    alone = tmp_path / "alone.engine"
    alone.write_bytes(b"x")
    with pytest.raises(EngineError, match=r"no description .* no GPU"):
        tensorrt_inspect.inspect(alone)
    with pytest.raises(EngineError, match="expected a file, there is none"):
        tensorrt_inspect.inspect(tmp_path / "none.engine")
    with pytest.raises(EngineError, match="expected a file, got a folder"):
        tensorrt_inspect.inspect(tmp_path)


def test_a_name_of_the_cache_is_enough_to_inspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    about = {"target": "sm89", "library": "tensorrt_rtx", "version": "1.7", "layers": []}
    name = EngineCache().put("double", "k", b"plan", about).path.name
    EngineCache().put("dot", "k", b"plan", about)
    for begins in (name, "double-"):
        assert main(["inspect", begins]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: ")
    assert main(["inspect", "do"]) == 1, "two begin with it"
    (tmp_path / name).write_bytes(b"x")
    assert main(["inspect", name]) == 1, "a file that is here goes first"
    assert main(["inspect", "none.engine"]) == 1
    assert "engine none.engine: expected a file, there is none" in capsys.readouterr().err


def test_the_inspectors_json_of_both_major_versions() -> None:
    for item, dtype in (
        ({"LayerType": "Gemm", "Outputs": [{"Format/Datatype": "Row major linear FP16 format"}]}, "half"),
        ({"LayerType": "gemm", "Outputs": [{"DataType": "BF16"}]}, "bf16"),
    ):
        assert tensorrt_inspect.layer_of({"Name": "mm", **item}) == {"name": "mm", "type": "gemm", "dtype": dtype}
    assert tensorrt_inspect.layer_of("only a name") == {"name": "only a name", "type": "", "dtype": ""}
