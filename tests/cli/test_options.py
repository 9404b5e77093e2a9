"""Options are read into a dataclass and checked before anything is loaded; an error is one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from tests.support.pages import ROOT
from tests.support.tiny import write_tiny_checkpoint
from vla_accel.cli import main
from vla_accel.cli.options import Count, Number, OutputFile, Picture, Seconds, Seed, Within, Written, read
from vla_accel.errors import ConfigError, OutputError


@dataclass(frozen=True)
class Options:
    """Some of each kind."""

    calls: Count = 1
    layers: Number = None
    wait: Seconds = 1.0
    seed: Seed = 0
    share: Annotated[float, Within(0, 1)] = 0.5
    sweep: Annotated[tuple[int, ...], Within(1)] = ()
    sides: tuple[Literal["encoder", "decoder"], ...] = ("encoder", "decoder")
    files: tuple[Path, ...] = ()
    note: str = ""
    output: OutputFile = None
    picture: Picture = None
    runs: Annotated[Path, Written(folder=True)] = Path("runs")
    keep_all: bool = False


def test_help_shows_defaults_and_lists_as_they_are_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        read(Options, ["--help"], "program")
    shown = capsys.readouterr().out
    for line in ("--sweep N,...", "--sides {encoder,decoder},...", "--files FILE,...", "(default: encoder,decoder)"):
        assert line in shown
    assert "--keep-all\n" in shown, "a flag shows no default"


@pytest.mark.parametrize(
    ("words", "thing", "expected", "got"),
    [
        ("--calls 0", "calls", "at least 1", "0"),
        ("--layers -2", "layers", "at least 1", "-2"),
        ("--wait 0", "wait", "more than 0", "0.0"),
        ("--wait nan", "wait", "more than 0", "nan"),
        ("--wait inf", "wait", "more than 0", "inf"),
        ("--seed -1", "seed", "0 to 9223372036854775807", "-1"),
        ("--seed 99999999999999999999", "seed", "0 to 9223372036854775807", "9" * 20),
        ("--share 1.01", "share", "0 to 1", "1.01"),
        ("--sweep 3,0", "sweep", "at least 1", "0"),
        ("--picture a.txt", "picture", ".png", "'a.txt'"),
        ("--output a.png --picture a.png", "output, picture", "two files", "a.png for both"),
        ("--note seen.png --picture {}/seen.png", "picture", "another file", "seen.png of note"),
        ("--files other,seen.png --output seen.png", "output", "another file", "seen.png of files"),
    ],
)
def test_an_unusable_value_is_refused(
    words: str, thing: str, expected: str, got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seen.png").touch()
    with pytest.raises(ConfigError) as caught:
        read(Options, words.format(tmp_path).split(), "program")
    assert re.match(f"{thing}: expected .*{re.escape(expected)}.*, got {re.escape(got)}$", str(caught.value))


@pytest.mark.parametrize("words", ["--output /proc/a.json", "--runs /proc/a"])
def test_an_unwritable_output_is_refused(words: str) -> None:
    with pytest.raises(OutputError, match=f"{words.split()[1]} cannot be written"):
        read(Options, words.split(), "program")


def test_valid_options_are_accepted_and_write_nothing(tmp_path: Path) -> None:
    words = f"--calls 1 --layers=1 --wait 0.1 --share 1 --output {tmp_path}/new/a.json --runs {tmp_path}"
    words += " --sweep 1,2 --sides decoder --files a,b"
    found = read(Options, [*words.split(), "--keep_all"], "program")
    assert found.sweep == (1, 2) and found.sides == ("decoder",) and found.files == (Path("a"), Path("b"))
    assert found.keep_all and found.picture is None and found.layers == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--sweep 1,x", ("--sweep", "a whole number", "'x'")),
        ("--sweep 1,", ("--sweep", "a whole number", "''")),
        ("--sweep 3,3", ("--sweep", "each once", "'3,3'")),
        ("--sweep 3,03", ("--sweep", "each once", "'3,03'")),
        ("--sweep 3 2 1", ("unexpected 2 1", "a list is one word with commas")),
        ("--sides encoder,both", ("--sides", "some of encoder, decoder", "'both'")),
        ("--layers 2.5", ("--layers", "a whole number", "'2.5'")),
        ("--wait soon", ("--wait", "a number", "'soon'")),
        ("--lyers 3", ("unknown option --lyers: did you mean --layers?",)),
        ("--caslls=3", ("unknown option --caslls: did you mean --calls?",)),
        ("--keepall", ("unknown option --keepall: did you mean --keep-all?",)),
        ("--lay 3", ("unknown option --lay",)),
        (f"--{200 * 'x'} {300 * 'y'}", (f"unknown option --{200 * 'x'};",)),
        ("--layers", ("--layers", "expected one argument")),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    words: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read(Options, words.split(), "program")
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and all(part in line for part in parts), line
    assert line.startswith("program: ") and line.endswith("; program --help lists the options")


def test_missing_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect"])
    assert capsys.readouterr().err == "vla-accel inspect: missing: ENGINE; vla-accel inspect --help lists the options\n"


def test_help_is_the_same_behind_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["--help"], ["list", "-h"]):
        with pytest.raises(SystemExit):
            main(["cache", *words])
        shown.append(capsys.readouterr().out)
    assert "{list,clear,verify}" in shown[0] and shown[0] == shown[1]


def test_what_was_not_foreseen_of_files_and_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(error: BaseException) -> None:
        def raising(*_: object) -> None:
            raise error

        monkeypatch.setattr("vla_accel.cli.doctor.main", raising)

    fail(FileNotFoundError(2, "No such file or directory", "there.json"))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "vla-accel doctor: there.json: No such file or directory\n"
    fail(KeyboardInterrupt())
    assert main(["doctor"]) == 130 and capsys.readouterr().err == "vla-accel doctor: interrupted\n"
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("vla_accel.cli.doctor.main", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert main(["doctor"]) == 130 and capsys.readouterr().err == "vla-accel doctor: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before
    fail(OSError("a mistake of ours"))
    with pytest.raises(OSError, match="a mistake of ours"):
        main(["doctor"])


def test_what_is_near_to_no_command_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--halp"]) == 2
    assert capsys.readouterr().err == "vla-accel: unknown command --halp; vla-accel --help lists them\n"
    assert main(["bnech"]) == 2
    assert capsys.readouterr().err == "vla-accel: unknown command bnech: did you mean bench?\n"


def test_a_cache_that_is_a_checkpoint_loses_nothing(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["cache", "clear", "--cache", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "program", [("vla_accel", "bench", "--help"), pytest.param(("benchmarks.tables", "--help"), marks=pytest.mark.slow)]
)
def test_output_that_nobody_reads_or_has_no_room_ends_without_a_traceback(
    program: tuple[str, ...], unbuffered: str
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    name = f"vla-accel {program[1]}" if program[1:2] == ("bench",) else "error"
    full_disk = f"{name}: No space left on device".encode()
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open("/dev/full", "w") as full, open(write_end, "w") as unread:
        for output, status, said in ((unread, 141, []), (full, 1, [full_disk])):
            done = subprocess.run(
                [sys.executable, "-m", *program], stdout=output, stderr=subprocess.PIPE, env=environment, cwd=ROOT
            )
            assert (done.returncode, done.stderr.splitlines(), program) == (status, [*said], program)
