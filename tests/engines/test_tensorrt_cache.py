"""What TensorRT-RTX built is found again, by what it was made of, and built anew where it is not that."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_components import small
from vla_accel.component import Component
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import onnx
from vla_accel.engines.tensorrt_library import Library, load_library
from vla_accel.engines.tensorrt_plan import Exports, content_key, obtain
from vla_accel.errors import EngineError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library("tensorrt_rtx")


def spec(folder: Path, **options: Any) -> EngineSpec:
    return EngineSpec("tensorrt_rtx", tensorrt=TensorrtOptions(cache=str(folder), **options))


@pytest.fixture(scope="module")
def exports() -> Iterator[Exports]:
    with Exports() as kept:
        yield kept


def test_an_engine_is_built_once(library: Library, tmp_path: Path, monkeypatch: Any) -> None:
    first = obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU)
    monkeypatch.setattr(onnx, "export", lambda *a, **k: pytest.fail("exported again"))
    again = obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU)
    assert (first.built, again.built) == (True, False)
    assert first.entry.path == again.entry.path and again.profiles == first.profiles
    assert "sm89" in again.detail and "from the cache" in again.detail and library.version in again.detail
    # Another example of the same range is the same engine.
    assert not obtain(small(rows=3), spec(tmp_path), library, [(8, 9)], device=CPU).built


def test_what_an_engine_is_made_of_decides_its_key(tmp_path: Path) -> None:
    def key(component: Component | None = None, **options: Any) -> str:
        component = component or small()
        return content_key(component, component.module, spec(tmp_path, **options), "onnx")

    base = key()
    assert base == key() == key(small(rows=3)) == key(cache_gb=3.0) == key(targets=("sm89",))
    assert base != key(small(factor=1.5)), "weights"
    assert base != key(small(most=8)), "ranges"
    assert base != key(refit=True), "options"
    assert base != key(profiles=("x.0=1:1:4",)), "profiles"
    assert base != key(dataclasses.replace(small(), module=nn.Sequential(small().module))), "structure"
    module = small().module
    fp16 = dataclasses.replace(spec(tmp_path), precision="fp16")
    assert base != content_key(small(), module, fp16, "onnx"), "precision"
    written = small()
    next(written.module.parameters()).data[0] += 1
    assert base != key(written), "a write through .data"


def test_code_that_a_graph_depends_on_decides_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return content_key(small(), small().module, spec(tmp_path), "onnx")

    base, read = key(), Path.read_bytes
    for name in ("pictures.py", "onnx.py", "resize.py", "small_components.py"):
        changed = [name]
        monkeypatch.setattr(Path, "read_bytes", lambda p, c=changed: read(p) + b"#" * (p.name in c))
        assert (key() != base) == (name != "small_components.py"), name


def test_a_stale_engine_is_not_used(library: Library, tmp_path: Path, exports: Exports) -> None:
    first = obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU, exports=exports)
    newer = Library(library.name, library.trt, "1.7.2")
    again = obtain(small(), spec(tmp_path), newer, [(8, 9)], device=CPU, exports=exports)
    assert again.built, "another library version"
    for changed, target in ((small(), (12, 0)), (small(factor=2.0), (8, 9))):
        other = obtain(changed, spec(tmp_path), library, [target], device=CPU, exports=exports)
        assert other.built and other.entry.path != first.entry.path


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"!"), "recorded hash"),
        (lambda p: p.with_suffix(".json").unlink(), "no description"),
    ],
    ids=["damaged", "foreign"],
)
def test_an_unusable_engine_is_rebuilt_and_the_reason_told(
    library: Library, tmp_path: Path, exports: Exports, damage: Any, reason: str
) -> None:
    first = obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU, exports=exports)
    content = first.entry.path.read_bytes()
    damage(first.entry.path)
    again = obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU, exports=exports)
    assert again.built and reason in again.note and reason in again.detail and "rebuilt" in again.detail
    assert len(again.entry.path.read_bytes()) == len(content)
    assert not obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU).built


def test_a_cancelled_build_leaves_nothing(library: Library, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(EngineError, match="cancelled"):
        obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU, cancel=stop)
    assert not list(tmp_path.glob("*.engine")) and not list(tmp_path.glob("*.json"))


def test_one_export_serves_all_targets(library: Library, tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[str] = []
    real = onnx.export
    monkeypatch.setattr(onnx, "export", lambda c, *a, **k: calls.append(c.name) or real(c, *a, **k))
    with Exports() as exports:
        for target in ((8, 9), (12, 0)):
            assert obtain(small(), spec(tmp_path), library, [target], device=CPU, exports=exports).built
    assert calls == ["small"]


def test_the_description_says_what_was_built(library: Library, tmp_path: Path) -> None:
    about = obtain(small(), spec(tmp_path), library, [(8, 9)], device=CPU).entry.about
    stored = json.loads(next(tmp_path.glob("small-*.json")).read_text())
    assert stored == json.loads(json.dumps(about))
    assert stored["coverage"] == {
        "operators": stored["coverage"]["operators"],
        "in_engine": stored["coverage"]["operators"],
    }
    assert set(stored["seconds"]) == {"export", "verify", "parse", "build"} and stored["similarity"] > 0.99999
    assert stored["profiles"] == [{"x": [[1, 4], [4, 4], [4, 4]]}]
    assert stored["weight_bytes"] >= 80 and stored["layers"]
