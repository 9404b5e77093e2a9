"""What commands print: tables that fit the terminal, and JSON for scripts alone."""

from __future__ import annotations

import re

import pytest

from vla_accel.cli.common import print_json, print_table

COLUMNS = ("system", "steps", "median ms", "floor")
ROWS = [["eager", "3", "66.04", "-"], ["native", "3", "8.66", "-"]]


def words(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of what was printed, line by line."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_a_column_of_dashes_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("calls", COLUMNS, ROWS)
    assert words(capsys) == [list(COLUMNS[:3]), *(row[:3] for row in ROWS)]
    print_table("short rows", ("", "ms", "cosine"), [["fp32", "2.0"], ["fp16", "1.0", "0.9"]])
    assert words(capsys) == [["", "ms", "cosine"], ["fp32", "2.0", ""], ["fp16", "1.0", "0.9"]]
    print_table("nothing yet", COLUMNS, [])
    assert words(capsys) == [list(COLUMNS)]


def test_words_in_brackets_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    """What a user was to type, `pip install 'vla_accel[flash]'`, lost its end; `[/]` ended in a traceback."""
    rows = [["bf16, flash_attn", "pip install 'vla_accel[flash]'"], ["a[/b", ":tiger: [/]"]]
    print_table("tried in [/here]", ("configuration", "verdict"), rows)
    assert words(capsys)[1:] == rows


def test_a_table_too_wide_for_the_terminal_lies_on_its_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    columns, row = [f"column {i}" for i in range(6)], [f"{i}.00" for i in range(6)]
    monkeypatch.setenv("COLUMNS", "80")
    print_table("wide", columns, [row])
    assert words(capsys) == [columns, row]
    monkeypatch.setenv("COLUMNS", "40")
    print_table("wide", columns, [row])
    assert words(capsys) == [list(pair) for pair in zip(columns, row, strict=True)]
    print_table("long", ("a name", "count"), [["a kernel of a name of forty characters", "1"]] * 6)
    assert words(capsys)[0] == ["a name", "count"], "on its side it would be wider still"


def test_a_narrow_terminal_folds_heads_before_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On its side this one would be wider still. The names were in pieces: "transfor", "mer only"."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("system", "median ms", "speed-up", "saved ms", "peak GiB", "max error")
    names = [f"transformer only ({way})" for way in ("compile", "native", "a third", "a fourth")]
    print_table("wide", columns, [[name, "3204.0", "1.00x", "1681.9", "12.0", "0.0391"] for name in names])
    shown = words(capsys)
    assert shown[0] == ["", "median", "", "saved", "peak", "max"], "below them the rest"
    assert [row[0] for row in shown if row[1].startswith("3204")] == names


def test_a_name_that_does_not_fit_has_a_line_to_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was cut into pieces of twelve letters."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    names = [f"up_blocks.{i}.attentions.1.transformer_blocks.0.ff.net.1" for i in range(4)]
    print_table("[the largest]", ("module", "kind", "largest, fp32"), [[name, "Dropout", "9.41"] for name in names])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert shown[0] == "[the largest]" and shown[1::2] == ["module", *names]
    files = [[f"kv_cache-{i:020d}.engine", "tensorrt_rtx 1.7.1.116", "sm89", "2026-11-26T10:17:30"] for i in range(2)]
    print_table("on its side it would not fit either", ("file", "library", "target", "last used"), files)
    assert {row[0] for row in files} < set(capsys.readouterr().out.splitlines())
    assert shown[2] == "     kind  largest, fp32" and set(shown[4::2]) == {"  Dropout           9.41"}


def test_a_terminal_gets_no_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_json({"passed": True})
    assert not capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    print_json({"passed": True})
    assert capsys.readouterr().out == '{"passed": true}\n'
