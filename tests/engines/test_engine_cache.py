"""The engine cache: whole entries or none, a size limit, private files, and every kind of damage named."""

from __future__ import annotations

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


@pytest.fixture
def store(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "cache")


def put(store: EngineCache, name: str, size: int = 100, age: int = 0) -> Path:
    entry = store.put(name, key(name), bytes(size), ABOUT)
    stamp = 1_000_000 - age
    os.utime(entry.path.with_suffix(".json"), (stamp, stamp))
    return entry.path


def test_an_engine_is_found_by_its_whole_key(store: EngineCache) -> None:
    assert store.get("a", "k" * 64) is None and store.entries() == [] and store.verify() == []
    written = store.put("a", "k" * 64, memoryview(b"engine"), ABOUT)
    found = store.get("a", "k" * 64)
    assert found is not None and not found.problem and found.path.read_bytes() == b"engine"
    assert found.about["target"] == "sm89" and found.about["bytes"] == 6 and written.path == found.path
    assert {p.suffix for p in found.path.parent.iterdir()} == {".engine", ".json"}
    assert store.get("a", "l" * 64) is None and store.get("b", "k" * 64) is None
    found = store.get("a", "k" * 40 + "x" * 24)
    assert found is not None and "was built from something else" in found.problem


def test_the_least_recently_used_engines_go_and_the_newest_stays(tmp_path: Path) -> None:
    store = EngineCache(tmp_path, limit_gb=350 / 2**30)
    paths = [put(store, name, age=age) for name, age in (("old", 3), ("mid", 2), ("new", 1))]
    assert store.get("old", key("old")) is not None, "a use counts"
    last = put(store, "last")
    assert [p.exists() for p in (*paths, last)] == [True, False, True, True]
    assert not paths[1].with_suffix(".json").exists()
    larger = put(store, "larger", size=500)
    assert [e.path for e in store.entries()] == [larger]


def test_an_interrupted_rewrite_is_not_used(store: EngineCache, monkeypatch: Any) -> None:
    path, real = put(store, "a"), cache.replacing_privately

    def dies(target: Path) -> Any:
        if target.suffix == ".json":
            raise OSError("power cut")
        return real(target)

    monkeypatch.setattr(cache, "replacing_privately", dies)
    with pytest.raises(EngineError, match=r"engine .*: cannot write 100 bytes: power cut"):
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
def test_damage_is_named_by_verify_and_removed_by_get(store: EngineCache, damage: Any, problem: str) -> None:
    whole, path = put(store, "whole"), put(store, "hurt")
    damage(path)
    problems = {e.path.name.split("-")[0]: e.problem for e in store.verify()}
    assert problem in problems["hurt"] and problems["whole"] == ""
    found = store.get("hurt", key("hurt"))
    assert found is not None and problem in found.problem
    assert not path.exists() and not path.with_suffix(".json").exists() and whole.exists()


@pytest.fixture
def group_umask() -> Iterator[None]:
    """Group members may write to new files, as on many Linux systems."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("group_umask")
def test_only_the_owner_may_write_to_new_files(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    store = EngineCache(tmp_path / "theirs" / "a" / "b")
    path = store.put("a", "k", b"engine", ABOUT).path
    paths = (store.folder, store.folder.parent, path, path.with_suffix(".json"), tmp_path / "theirs")
    assert [p.stat().st_mode & 0o777 for p in paths] == [0o700, 0o700, 0o644, 0o644, 0o775]
    found = store.get("a", "k")
    assert found is not None and not found.problem


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(store: EngineCache, mode: int) -> None:
    path = put(store, "a")
    store.folder.chmod(mode)
    message = rf"{store.folder} may be written to by others \(mode \d+\).*chmod -R go-w {store.folder}$"
    for use in (lambda: store.get("a", key("a")), lambda: store.put("b", "k", b"1", ABOUT), store.verify):
        with pytest.raises(EngineError, match=message):
            use()
    assert path.exists() and len(store.entries()) == 1, "nothing is removed, and listing loads nothing"


@pytest.mark.parametrize("suffix", [".engine", ".json"])
@pytest.mark.parametrize("mode", [0o664, 0o606])
def test_a_file_that_others_may_write_to_is_refused(store: EngineCache, suffix: str, mode: int) -> None:
    file = put(store, "a").with_suffix(suffix)
    file.chmod(mode)
    with pytest.raises(EngineError, match=rf"{file} may be written to by others .*chmod -R go-w {file}$"):
        store.get("a", key("a"))
    assert file.exists(), "it is not replaced"
    assert [e.problem.split(" (")[0] for e in store.verify()] == [f"{file} may be written to by others"]


def test_a_folder_of_another_user_is_refused(store: EngineCache, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    if mine == 0:  # root may do anything anyway
        assert store.get("a", key("a")) is not None
        os.chown(store.folder, 12345, -1)
        mine = 12345
    with pytest.raises(EngineError, match=rf"{store.folder} belongs to user {mine}, .*sudo chown -R \d+"):
        store.get("a", key("a"))


def test_any_engine_file_must_be_private_to_be_loaded(tmp_path: Path) -> None:
    from vla_accel.engines.tensorrt_session import shared_engine

    path = tmp_path / "decoder.trt"
    path.write_bytes(b"1")
    path.chmod(0o666)
    library: Any = None
    with pytest.raises(EngineError, match=r"decoder\.trt may be written to by others"):
        shared_engine(library, path, torch.device("cpu"), False)


def test_listing_does_not_read_the_engines(store: EngineCache, monkeypatch: Any) -> None:
    put(store, "a")
    monkeypatch.setattr(cache, "content_hash", lambda path: pytest.fail("read"))
    assert [e.problem for e in store.entries()] == [""]


def test_clear_removes_the_files_of_the_cache_alone(tmp_path: Path) -> None:
    store = EngineCache(tmp_path)
    for number, target in (("1", "sm89"), ("2", "sm120")):
        store.put("a", number, b"123", {**ABOUT, "target": target})
    store.put("a", "3", b"123", {**ABOUT, "content": "other", "target": "sm80"})
    (tmp_path / "tensorrt_rtx-sm89.timing").write_bytes(b"t")
    others = {"notes.txt", "config.json", "model.engine", "model.json"}
    for name in others:
        (tmp_path / name).write_text("{}")
    assert store.targets("a", "c") == ["sm120", "sm89"] and store.targets("b", "c") == []
    assert store.clear() == (3, 9)
    assert {p.name for p in tmp_path.iterdir()} == others


def test_clearing_the_default_cache_removes_compiled_kernels_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert EngineCache().folder == default_folder() == tmp_path / "vla_accel" / "engines"
    kernel = nvrtc.compiled_folder() / "a.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    (tmp_path / "mine").mkdir()
    assert main(["cache", "clear", "--cache", str(tmp_path / "mine")]) == 0 and kernel.exists()
    assert main(["cache", "clear", "--cache", str(tmp_path / "misspelt")]) == 1 and kernel.exists()
    assert main(["cache", "clear"]) == 0 and not kernel.exists()


def test_hashes_cover_weights_and_code(tmp_path: Path) -> None:
    def module(name: str, tensor: torch.Tensor, buffer: bool = False) -> nn.Module:
        made = nn.Module()
        if buffer:
            made.register_buffer(name, tensor, persistent=False)
        else:
            made.register_parameter(name, nn.Parameter(tensor))
        return made

    ones = torch.ones(3)
    modules = [module("w", ones), module("w", 2 * ones), module("w", ones.double()), module("v", ones)]
    modules += [module("w", 3 * ones, buffer=True), module("s", torch.tensor(1.0), buffer=True)]
    modules += [module("t", torch.arange(6).view(2, 3).t(), buffer=True)]
    hashes = list(map(weights_hash, modules))
    assert len(set(hashes)) == 7 and hashes == list(map(weights_hash, modules))
    code = tmp_path / "a.py"
    code.write_text("x = 1")
    before = code_hash(nn.Linear(1, 1), code)
    code.write_text("x = 2")
    assert code_hash(nn.Linear(1, 1), code) != before
