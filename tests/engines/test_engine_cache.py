"""The engine cache: whole entries or none, a size limit, and every kind of damage named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vla_accel.cli import main
from vla_accel.engines import cache
from vla_accel.engines.cache import EngineCache, code_hash, default_folder, key_of, weights_hash
from vla_accel.errors import EngineError
from vla_accel.kernels import nvrtc

ABOUT = {"target": "sm89", "content": "c", "library": "tensorrt_rtx", "version": "1.7", "precision": "auto"}


def key(name: str) -> str:
    return key_of({"name": name})


def put(store: EngineCache, name: str, size: int = 100, age: int = 0) -> Path:
    entry = store.put(name, key(name), bytes(size), ABOUT)
    stamp = 1_000_000 - age
    os.utime(entry.path.with_suffix(".json"), (stamp, stamp))
    return entry.path


def test_what_was_put_is_found(tmp_path: Path) -> None:
    store = EngineCache(tmp_path / "new")
    assert store.get("a", "k" * 64) is None and store.entries() == [] and store.verify() == []
    written = store.put("a", "k" * 64, memoryview(b"engine"), ABOUT)
    found = store.get("a", "k" * 64)
    assert found is not None and not found.problem and found.path.read_bytes() == b"engine"
    assert found.about["target"] == "sm89" and found.about["bytes"] == 6 and written.path == found.path
    assert {p.suffix for p in found.path.parent.iterdir()} == {".engine", ".json"}
    assert store.get("a", "l" * 64) is None and store.get("b", "k" * 64) is None


def test_a_key_that_only_begins_alike_is_another_engine(tmp_path: Path) -> None:
    store = EngineCache(tmp_path)
    store.put("a", "k" * 64, b"engine", ABOUT)
    found = store.get("a", "k" * 40 + "x" * 24)
    assert found is not None and "was built from something else" in found.problem


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = EngineCache(tmp_path, limit_gb=350 / 2**30)
    paths = [put(store, name, age=age) for name, age in (("old", 3), ("mid", 2), ("new", 1))]
    assert store.get("old", key("old")) is not None, "using it makes it young"
    last = put(store, "last")
    assert [p.exists() for p in (*paths, last)] == [True, False, True, True]
    assert not paths[1].with_suffix(".json").exists()


def test_a_new_engine_larger_than_the_limit_stays(tmp_path: Path) -> None:
    store = EngineCache(tmp_path, limit_gb=50 / 2**30)
    first, second = put(store, "first", age=5), put(store, "second", size=500)
    assert (first.exists(), second.exists()) == (False, True)


def test_a_rewrite_cut_off_half_way_is_not_trusted(tmp_path: Path, monkeypatch: Any) -> None:
    store = EngineCache(tmp_path)
    path = put(store, "a")
    real = cache.replacing_privately

    def dies(target: Path) -> Any:
        if target.suffix == ".json":
            raise OSError("power cut")
        return real(target)

    monkeypatch.setattr(cache, "replacing_privately", dies)
    with pytest.raises(EngineError, match=r"engine cache .*: cannot write 100 bytes: power cut"):
        store.put("a", key("a"), b"x" * 100, ABOUT)
    monkeypatch.undo()
    found = store.get("a", key("a"))
    assert found is not None and "no description" in found.problem and not path.exists()
    assert store.get("a", key("a")) is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda p: p.write_bytes(bytes(40)), "truncated: 40 of 100 bytes"),
        (lambda p: p.write_bytes(bytes(140)), "longer than it was: 140 of 100 bytes"),
        (lambda p: p.write_bytes(bytes(99) + b"1"), "does not have the recorded hash"),
        (lambda p: p.unlink(), "is missing"),
        (lambda p: p.with_suffix(".json").unlink(), "has no description"),
        (lambda p: p.with_suffix(".json").write_text("no"), "is damaged"),
        (lambda p: p.with_suffix(".json").write_text("{}"), "is not a description of an engine"),
        (lambda p: p.with_suffix(".json").write_text("[]"), "is not a description of an engine"),
    ],
)
def test_damage_is_named_by_verify_and_removed_by_get(tmp_path: Path, damage: Any, problem: str) -> None:
    store = EngineCache(tmp_path)
    whole, path = put(store, "whole"), put(store, "hurt")
    damage(path)
    problems = {e.path.name.split("-")[0]: e.problem for e in store.verify()}
    assert problem in problems["hurt"] and problems["whole"] == ""
    found = store.get("hurt", key("hurt"))
    assert found is not None and problem in found.problem
    assert not path.exists() and not path.with_suffix(".json").exists() and whole.exists()


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """Group members may write to what is made, as on many Linux systems."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("usual_umask")
def test_what_is_new_is_the_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    store = EngineCache(tmp_path / "theirs" / "a" / "b")
    path = store.put("a", "k", b"engine", ABOUT).path
    assert [mode_of(p) for p in (store.folder, store.folder.parent)] == [0o700, 0o700]
    assert mode_of(path) == mode_of(path.with_suffix(".json")) == 0o644
    assert mode_of(tmp_path / "theirs") == 0o775, "what was there is as it was"
    found = store.get("a", "k")
    assert found is not None and not found.problem


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    store = EngineCache(tmp_path / "cache")
    path = put(store, "a")
    store.folder.chmod(mode)
    said = rf"{store.folder} may be written to by others \(mode \d+\).*chmod -R go-w {store.folder}$"
    for use in (lambda: store.get("a", key("a")), lambda: store.put("b", "k", b"1", ABOUT), store.verify):
        with pytest.raises(EngineError, match=said):
            use()
    assert path.exists() and len(store.entries()) == 1, "nothing is removed; listing looks, it does not load"
    store.folder.chmod(0o755)
    assert store.get("a", key("a")) is not None


@pytest.mark.parametrize("suffix", [".engine", ".json"])
@pytest.mark.parametrize("mode", [0o664, 0o606])
def test_a_file_that_others_may_write_to_is_refused_by_name(tmp_path: Path, suffix: str, mode: int) -> None:
    store = EngineCache(tmp_path / "cache")
    file = put(store, "a").with_suffix(suffix)
    file.chmod(mode)
    with pytest.raises(EngineError, match=rf"{file} may be written to by others .*chmod -R go-w {file}$"):
        store.get("a", key("a"))
    assert file.exists(), "it is not built again over the top of it"
    assert [e.problem.split(" (")[0] for e in store.verify()] == [f"{file} may be written to by others"]


def test_what_belongs_to_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EngineCache(tmp_path / "cache")
    put(store, "a")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    if mine == 0:  # root may do anything anyway
        assert store.get("a", key("a")) is not None
        os.chown(store.folder, 12345, -1)
        mine = 12345
    with pytest.raises(
        EngineError, match=rf"{store.folder} belongs to user {mine}, .*sudo chown -R \d+ {store.folder}"
    ):
        store.get("a", key("a"))


def test_an_engine_file_is_looked_at_before_it_is_loaded(tmp_path: Path) -> None:
    """Whatever folder it comes from."""
    from vla_accel.engines.tensorrt_session import shared_engine

    path = tmp_path / "decoder.trt"
    path.write_bytes(b"1")
    path.chmod(0o666)
    library: Any = None
    with pytest.raises(EngineError, match=r"decoder\.trt may be written to by others"):
        shared_engine(library, path, torch.device("cpu"), False)


def test_listing_does_not_read_the_engines(tmp_path: Path, monkeypatch: Any) -> None:
    store = EngineCache(tmp_path)
    put(store, "a")
    monkeypatch.setattr(cache, "content_hash", lambda path: pytest.fail("read"))
    assert [e.problem for e in store.entries()] == [""]


def test_clear_and_targets(tmp_path: Path) -> None:
    store = EngineCache(tmp_path)
    for number, target in (("1", "sm89"), ("2", "sm120")):
        store.put("a", number, b"123", {**ABOUT, "target": target})
    store.put("a", "3", b"123", {**ABOUT, "content": "other", "target": "sm80"})
    (tmp_path / "tensorrt_rtx-sm89.timing").write_bytes(b"t")
    mine = {"notes.txt", "config.json", "model.engine", "model.json"}
    for name in mine:
        (tmp_path / name).write_text("{}")
    assert store.targets("a", "c") == ["sm120", "sm89"] and store.targets("b", "c") == []
    assert store.clear() == (3, 9)
    assert {p.name for p in tmp_path.iterdir()} == mine, "only what is the cache's"


def test_clear_removes_compiled_kernels_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = nvrtc.compiled_folder() / "a.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    (tmp_path / "mine").mkdir()
    assert main(["cache", "clear", "--cache", str(tmp_path / "mine")]) == 0 and kernel.exists()
    assert main(["cache", "clear", "--cache", str(tmp_path / "misspelt")]) == 1 and kernel.exists()
    assert main(["cache", "clear"]) == 0 and not kernel.exists()


def test_the_default_folder_is_the_users(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert EngineCache().folder == default_folder() == tmp_path / "vla_accel" / "engines"


def test_weights_are_hashed_by_content_name_and_dtype() -> None:
    def module(
        value: float = 1.0, dtype: torch.dtype = torch.float32, name: str = "w", buffer: bool = False
    ) -> nn.Module:
        made = nn.Module()
        tensor = torch.full((3,), value, dtype=dtype)
        if buffer:
            made.register_buffer(name, tensor, persistent=False)
        else:
            made.register_parameter(name, nn.Parameter(tensor))
        return made

    base = weights_hash(module())
    assert base == weights_hash(module())
    others = [module(2.0), module(dtype=torch.float64), module(name="v"), module(3.0, buffer=True)]
    assert len({base, *map(weights_hash, others)}) == 5
    # Zero and one hold different bytes, but not-contiguous and scalar tensors must hash at all.
    scalar = nn.Module()
    scalar.register_buffer("s", torch.tensor(1.0))
    scalar.register_buffer("t", torch.arange(6).view(2, 3).t())
    assert weights_hash(scalar) == weights_hash(scalar)


def test_other_code_is_another_hash(tmp_path: Path) -> None:
    first = tmp_path / "a.py"
    first.write_text("x = 1")
    before = code_hash(nn.Linear(1, 1), first)
    first.write_text("x = 2")
    assert code_hash(nn.Linear(1, 1), first) != before
    assert json.dumps(before)
