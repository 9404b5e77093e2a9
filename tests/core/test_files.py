"""A file is replaced whole, or stays as it was and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_accel.files import replacing


def test_the_old_content_stands_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    with replacing(path) as temporary:
        temporary.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.suffix == ".json"
    assert [(p.name, p.read_text()) for p in path.parent.iterdir()] == [("a.json", "new")]


def test_a_failed_block_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"), replacing(path) as temporary:
        temporary.write_text("ha")
        raise RuntimeError("half way")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]
