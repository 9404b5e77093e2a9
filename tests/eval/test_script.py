"""What scripts write appears whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eval.script import replacing_files
from tests.support.full_disk import full_disk
from vla_accel.errors import OutputError


@pytest.mark.parametrize("there", [False, True])
def test_a_folders_files_are_replaced_all_or_none(there: bool, tmp_path: Path) -> None:
    folder, source = tmp_path / "new" / "folder", tmp_path / "source"
    source.write_bytes(b"123456789")
    if there:
        folder.mkdir(parents=True)
        for name in ("a", "kept"):
            (folder / name).write_text("old")
    before = {"a": "old", "kept": "old"} if there else {}

    def found() -> dict[str, str | None]:
        return {p.name: p.read_text() if p.is_file() else None for p in folder.iterdir()}

    def write() -> None:
        with replacing_files(folder) as temporary:
            (temporary / "a").write_text("new")
            shutil.copy(source, temporary / "b")
            assert found() == before | {temporary.name: None}

    # A copy's error has two names, and the first is that of what was read.
    with full_disk(room=8), pytest.raises(OutputError, match=f"^{folder}: cannot be written: File too large"):
        write()
    with pytest.raises(FileNotFoundError) as caught, replacing_files(folder):
        (tmp_path / "other").read_text()
    assert not isinstance(caught.value, OutputError)
    assert folder.exists() == there and (not there or found() == before)
    write()
    assert found() == before | {"a": "new", "b": "123456789"}
