"""Engines built by TensorRT-RTX are found again by everything that they were built from, and rebuilt otherwise."""

from __future__ import annotations

import dataclasses
import json
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
from vla_accel.engines.tensorrt_plan import Exports, Obtained, content_key, obtain

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


def found(
    folder: Path, library: Library, component: Component | None = None, target: Any = (8, 9), **more: Any
) -> Obtained:
    return obtain(component or small(), spec(folder), library, [target], device=CPU, **more)


@pytest.mark.slow
def test_an_engine_is_built_once_and_described(library: Library, tmp_path: Path, monkeypatch: Any) -> None:
    first = found(tmp_path, library)
    stored = json.loads(next(tmp_path.glob("small-*.json")).read_text())
    assert stored == json.loads(json.dumps(first.entry.about))
    assert stored["coverage"]["operators"] == stored["coverage"]["in_engine"] > 0
    assert set(stored["seconds"]) == {"export", "verify", "parse", "build"} and stored["similarity"] > 0.99999
    assert stored["profiles"] == [{"x": [[1, 4], [4, 4], [4, 4]]}]
    assert stored["weight_bytes"] >= 80 and stored["layers"]
    monkeypatch.setattr(onnx, "export", lambda *a, **k: pytest.fail("exported again"))
    again = found(tmp_path, library)
    assert (first.built, again.built) == (True, False)
    assert first.entry.path == again.entry.path and again.profiles == first.profiles
    assert "sm89" in again.detail and "from the cache" in again.detail and library.version in again.detail
    # Another example of the same range is the same engine.
    assert not found(tmp_path, library, small(rows=3)).built


def test_an_engines_key_covers_what_it_is_built_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(component: Component | None = None, **options: Any) -> str:
        component = component or small()
        return content_key(component, component.module, spec(tmp_path, **options), "onnx")

    base, changed = key(), small()
    next(changed.module.parameters()).data[0] += 1
    assert base == key() == key(small(rows=3)) == key(cache_gb=3.0) == key(targets=("sm89",))
    others = {
        "weights": key(small(factor=1.5)),
        "a write through .data": key(changed),
        "ranges": key(small(most=8)),
        "options": key(refit=True),
        "profiles": key(profiles=("x.0=1:1:4",)),
        "structure": key(dataclasses.replace(small(), module=nn.Sequential(small().module))),
        "precision": content_key(
            small(), small().module, dataclasses.replace(spec(tmp_path), precision="fp16"), "onnx"
        ),
    }
    assert len({base, *others.values()}) == len(others) + 1, others
    read = Path.read_bytes
    for name in ("pictures.py", "onnx.py", "resize.py", "small_components.py"):
        monkeypatch.setattr(Path, "read_bytes", lambda p, n=name: read(p) + b"#" * (p.name == n))
        assert (key() != base) == (name != "small_components.py"), name


@pytest.mark.slow
def test_a_stale_engine_is_not_used(library: Library, tmp_path: Path, exports: Exports) -> None:
    first = found(tmp_path, library, exports=exports)
    newer = Library(library.name, library.trt, "1.7.2")
    assert found(tmp_path, newer, exports=exports).built, "another library version"
    for changed, target in ((small(), (12, 0)), (small(factor=2.0), (8, 9))):
        other = found(tmp_path, library, changed, target, exports=exports)
        assert other.built and other.entry.path != first.entry.path


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"!"), "recorded hash"),
        (lambda p: p.with_suffix(".json").unlink(), "no description"),
    ],
    ids=["damaged", "foreign"],
)
def test_an_unusable_engine_is_rebuilt_with_the_reason(
    library: Library, tmp_path: Path, exports: Exports, damage: Any, reason: str
) -> None:
    damage(found(tmp_path, library, exports=exports).entry.path)
    again = found(tmp_path, library, exports=exports)
    assert again.built and reason in again.note and reason in again.detail and "rebuilt" in again.detail
    assert not found(tmp_path, library).built


@pytest.mark.slow
def test_one_export_serves_all_targets(library: Library, tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[str] = []
    real = onnx.export
    monkeypatch.setattr(onnx, "export", lambda c, *a, **k: calls.append(c.name) or real(c, *a, **k))
    with Exports() as exports:
        assert all(found(tmp_path, library, None, target, exports=exports).built for target in ((8, 9), (12, 0)))
    assert calls == ["small"]
