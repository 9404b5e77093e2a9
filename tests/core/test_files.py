"""A file is replaced whole, a line is added whole, or nothing changes."""

from __future__ import annotations

import json
import os
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.full_disk import full_disk
from tests.support.waiting import PATIENCE_S
from vla_accel.errors import ConfigError, OutputError
from vla_accel.files import (
    LineFile,
    replacing,
    require_writable,
    require_writable_folder,
    without_folders,
    write_json,
)


def test_a_file_is_replaced_when_the_block_ends_without_error(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    with replacing(path) as temporary:
        temporary.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.suffix == ".json"
    assert [(p.name, p.read_text()) for p in path.parent.iterdir()] == [("a.json", "new")]
    with pytest.raises(RuntimeError, match="half way"), replacing(path) as temporary:
        temporary.write_text("ha")
        raise RuntimeError("half way")
    assert [(p.name, p.read_text()) for p in path.parent.iterdir()] == [("a.json", "new")]


def write_there(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("new")


def test_a_path_that_cannot_be_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.json", tmp_path / "file" / "b" / "a.json", tmp_path / "folder"):
        with pytest.raises(OutputError, match=f"{path}: cannot be written: "):
            write_there(path)
    assert (tmp_path / "file").read_text() == "old" and not list((tmp_path / "folder").iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """`--output /dev/null` by root would remove the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link", Path("/dev/null")):
        with pytest.raises(OutputError, match=f"{path}: cannot be written: not a regular file"):
            write_there(path)
        with pytest.raises(OutputError, match=f"output: expected a regular file to write, got {path}, a device"):
            require_writable(path, "output")
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_full_disk_is_named_and_other_files_errors_stay_theirs(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OutputError, match=r"a\.json: cannot be written: No space left on device"), replacing(path) as t:
        t.write_text("half")
        with open("/dev/full", "w") as full:
            full.write("x")
    with pytest.raises(FileNotFoundError) as caught, replacing(path):
        open(tmp_path / "other.json").close()
    assert not isinstance(caught.value, OutputError)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]


def test_whether_a_file_can_be_written_is_known_before_and_leaves_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "deep" / "a.json", "output")
    require_writable_folder(tmp_path / "new", "output")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "nothing" / "there")
    with pytest.raises(OutputError, match=r"output: expected a file to write, got the folder "):
        require_writable(tmp_path, "output")
    for path in (tmp_path / "file" / "a", tmp_path / "link" / "a", Path("/proc/a/b")):
        with pytest.raises(OutputError, match=f"output: {path} cannot be written: "):
            require_writable(path, "output")
    with pytest.raises(OutputError, match=r"output: .*file cannot be written: .*: Not a directory"):
        require_writable_folder(tmp_path / "file", "output")


def test_a_folder_without_rights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stat = tmp_path / "a.json", os.stat

    def refused(name: Any, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr(os, "stat", lambda name, **options: (refused if name == path else stat)(name, **options))
    monkeypatch.setattr("vla_accel.files.tempfile.TemporaryFile", lambda dir: refused(dir))
    with pytest.raises(OutputError, match=f"^output: {path} cannot be written: {tmp_path}: Permission denied"):
        require_writable(path, "output")


def test_a_line_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines"
    file = LineFile(path)
    file.append(b"first")
    message = r"lines: cannot be written: File too large; the same command goes on"
    with full_disk(room=8), pytest.raises(OutputError, match=message):
        file.append(b"second")
    assert path.read_bytes() == b"first\n"
    file.append(b"second")
    assert path.read_bytes() == b"first\nsecond\n"
    # A write may take fewer bytes, without an error.
    raw = cast(Any, file)._file
    short: Any = lambda data: raw.write(data[:3])  # noqa: E731
    calls = {"seek": raw.seek, "fileno": raw.fileno, "truncate": raw.truncate, "write": short}
    cast(Any, file)._file = types.SimpleNamespace(**calls)
    file.append(b"in pieces")
    cast(Any, file)._file = raw
    assert file.read() == ([b"first", b"second", b"in pieces"], 0)
    with open(path, "ab") as other:
        other.write(b"cut sho")
    assert file.read() == ([b"first", b"second", b"in pieces"], 7)
    file.append(b"next")
    assert file.read() == ([b"first", b"second", b"in pieces", b"next"], 0)
    file.close()


def test_lines_have_one_writer_who_may_drop_some(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    with pytest.raises(ConfigError, match="lines: another process is writing it"):
        LineFile(path)
    for line in (b"first", b"second", b"third"):
        file.append(line)
    file.keep(line for line in file.read()[0] if line != b"second")
    assert path.read_bytes() == b"first\nthird\n" and [p.name for p in tmp_path.iterdir()] == ["lines"]
    # The new file is locked as well.
    with pytest.raises(ConfigError, match="lines: another process is writing it"):
        LineFile(path)
    file.append(b"fourth")
    file.close()
    again = LineFile(path)
    assert again.read() == ([b"first", b"third", b"fourth"], 0)
    again.close()


def test_a_record_names_files_without_the_folders_of_one_machine() -> None:
    words = ["bench", "/anywhere/demo", "--config", "runs/a.yaml,native,/anywhere/b.yaml", "--output=/anywhere/x.json"]
    words += ["--stress=noise=0.1,latency=2", "--policy", "ws://host:8000", "lerobot/smolvla_base"]
    stored = ["bench", "demo", "--config", "runs/a.yaml,native,b.yaml", "--output=x.json", *words[5:]]
    assert without_folders(words) == stored


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    path, both = tmp_path / "file.txt", threading.Barrier(2)

    def write(text: str) -> Path:
        with replacing(path) as temporary:
            temporary.write_text(text)
            both.wait(PATIENCE_S)
        return temporary

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(write, ("one", "two"))
    assert first != second and path.read_text() in ("one", "two") and [*tmp_path.iterdir()] == [path]


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    write_json(path, {"a": 1})
    for bad in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"padding": "x" * 100_000, **bad}, allow_nan=False)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    with path.open() as reader:  # an open file keeps the old content
        write_json(path, {"a": 2})
        assert json.load(reader) == {"a": 1}
    assert json.loads(path.read_text()) == {"a": 2}
