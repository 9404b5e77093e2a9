"""What a type says of an option is checked before anything is loaded: one line, and nothing is begun or written."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from tests.support.pages import ROOT
from tests.support.tiny import write_tiny_checkpoint
from vla_accel import cli
from vla_accel.cli import build, main
from vla_accel.cli.options import (
    Count,
    Listed,
    Number,
    OutputFile,
    Picture,
    Seconds,
    Seed,
    Within,
    Words,
    Written,
    read,
)
from vla_accel.errors import ConfigError, OutputError, VlaAccelError


@dataclass(frozen=True)
class Options:
    """Some of each kind."""

    calls: Count = 1
    layers: Number = None
    wait: Seconds = 1.0
    seed: Seed = 0
    share: Annotated[float, Within(0, 1)] = 0.5
    sweep: Annotated[Listed[int], Within(1)] = ()
    sides: Listed[Literal["encoder", "decoder"]] = ("encoder", "decoder")
    files: Listed[Path] = ()
    note: Words = ""
    output: OutputFile = None
    picture: Picture = None
    runs: Annotated[Path, Written(folder=True)] = Path("runs")
    keep_all: bool = False


@dataclass(frozen=True)
class More(Options):
    """What a program does, in a sentence that is longer than a line of the source and than one of the narrow terminals
    that people have, too.

        a list of files,
        each in its line

    And a second paragraph.
    """

    depth: Number = None
    """Layers; a text whose lines break where the source is full,
    "before a sign", and in the middle of what it says."""


def help_of(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        read(More, ["--help"], "program")
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [None, "", "70"])
@pytest.mark.parametrize("words", [(), ("--help",), ("--lyers", "3")], ids=["read", "help", "wrong"])
def test_the_terminals_width_is_left_as_it_was(
    columns: str | None, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) if words else contextlib.nullcontext():
        read(Options, words, "program")
    assert os.environ.get("COLUMNS") == columns


def test_help_breaks_lines_where_the_terminal_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    wide = help_of(300, monkeypatch, capsys)
    text = (
        'Layers; a text whose lines break where the source is full, "before a sign", and in the middle of what it says.'
    )
    assert any("--depth N" in line and text in line for line in wide), "\n".join(wide)
    assert any("sentence that is longer than a line of the source and than one of the narrow" in line for line in wide)
    assert wide[3:9] == ["", "    a list of files,", "    each in its line", "", "And a second paragraph.", ""]
    narrow = help_of(60, monkeypatch, capsys)
    assert max(map(len, narrow)) <= 60 and narrow[2].startswith("What a program does, in a sentence")
    (flag,) = (line for line in wide if "--keep-all" in line)
    assert "default" not in flag, "nothing but off is meant by a switch that is not there"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--calls 0", "^calls: expected at least 1, got 0$"),
        ("--layers -2", "^layers: expected at least 1, got -2$"),
        ("--wait 0", "^wait: expected more than 0, got 0.0$"),
        ("--wait nan", "^wait: expected more than 0, got nan$"),
        ("--wait inf", "^wait: expected more than 0, got inf$"),
        ("--seed -1", "^seed: expected 0 to 9223372036854775807, got -1$"),
        ("--seed 99999999999999999999", "^seed: expected 0 to 9223372036854775807, got 9{20}$"),
        ("--share 1.01", "^share: expected 0 to 1, got 1.01$"),
        ("--sweep 3,0", "^sweep: expected at least 1, got 0$"),
        ("--picture a.txt", r"^picture: expected a file name ending in \.png, got 'a\.txt'$"),
        ("--output /proc/a.json", "^output: /proc/a.json cannot be written: /proc: "),
        ("--runs /proc/a", "^runs: /proc/a cannot be written: /proc: "),
    ],
)
def test_a_value_that_cannot_be_is_refused(words: str, message: str) -> None:
    with pytest.raises(VlaAccelError, match=message) as caught:
        read(Options, words.split(), "program")
    assert isinstance(caught.value, OutputError if "cannot be written" in message else ConfigError)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--output a.png --picture a.png", "^output, picture: expected two files, got a.png for both$"),
        (
            "--note seen.png --picture {}/seen.png",
            "^picture: expected another file than those that are read, got seen.png of note$",
        ),
        (
            "--files other,seen.png --output seen.png",
            "^output: expected another file than those that are read, got seen.png of files$",
        ),
    ],
)
def test_a_file_is_not_written_twice_nor_over_what_is_read(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seen.png").touch()
    with pytest.raises(ConfigError, match=message):
        read(Options, words.format(tmp_path).split(), "program")


def test_what_can_be_is_taken(tmp_path: Path) -> None:
    words = f"--calls 1 --layers 1 --wait 0.1 --share 1 --output {tmp_path}/new/a.json --runs {tmp_path}"
    words += " --sweep 1,2 --sides decoder --files a,b"
    found = read(Options, [*words.split(), "--keep-all"], "program")
    assert found.sweep == (1, 2) and found.sides == ("decoder",) and found.files == (Path("a"), Path("b"))
    assert found.keep_all and found.picture is None
    assert not list(tmp_path.iterdir()), "looking leaves nothing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sweep 1,x", "--sweep: expected a whole number, got 'x'"),
        ("--sweep 1,", "--sweep: expected a whole number, got ''"),
        ("--sweep 3,3", "--sweep: expected each once, got '3,3'"),
        ("--sweep 3,03", "--sweep: expected each once, got '3,03'"),
        ("--sweep 3 2", "Unrecognized options: 2; a list is one word with commas;"),
        ("--sweep 3 2 1", "Unrecognized options: 2, 1; a list is one word with commas;"),
        ("--sides encoder,both", "--sides: expected some of encoder, decoder, got 'both'"),
        ("--layers 2.5", "Error parsing --layers: expected a whole number, got '2.5'"),
        ("--wait soon", "Error parsing --wait: expected a number, got 'soon'"),
        ("--lyers 3", "Unrecognized options: --lyers, 3: did you mean --layers?;"),
        ("--caslls=3", "Unrecognized options: --caslls=3: did you mean --calls?;"),
        ("--keepall", "Unrecognized options: --keepall: did you mean --keep-all?;"),
        ("--wait " + 200 * "x", f"Error parsing --wait: expected a number, got '{200 * 'x'}'"),
        (f"--{200 * 'x'} {300 * 'y'}", f"Unrecognized options: --{200 * 'x'}, {300 * 'y'};"),
        ("--layers", "Missing value for argument '--layers'. Expected 1 values"),
    ],
)
@pytest.mark.parametrize("coloured", [False, True], ids=["plain", "coloured"])
def test_what_cannot_be_read_is_wrong_usage_in_one_line(
    words: str, message: str, coloured: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where standard output is a terminal, tyro colours the box of an error: it ended in a traceback there."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout.isatty", lambda: coloured)
    with pytest.raises(SystemExit) as stopped:
        read(Options, words.split(), "program")
    (said,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and message in said
    assert said.startswith("program: ") and said.endswith("; program --help says more")


def test_what_is_missing_is_said_without_the_program_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect"])
    assert capsys.readouterr().err == "vla-accel inspect: Missing: ENGINE; vla-accel inspect --help says more\n"


def test_lists_are_shown_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(Options, ["--help"], "program")
    said = " ".join(capsys.readouterr().out.split())
    for shown in ("--sweep N,...", "--sides {encoder,decoder},... (default: encoder,decoder)", "--files FILE,..."):
        assert shown in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench demo --calls 0", "calls: expected at least 1, got 0"),
        ("bench demo --hz 0", "hz: expected more than 0, got 0.0"),
        ("bench demo --prompt-tokens 0", "prompt-tokens: expected at least 1"),
        ("bench --model pi05 --views 0", "views: expected at least 1"),
        ("bench --model pi05 --config native", "config: expected a checkpoint beside it"),
        ("bench demo --config native,", "config: expected a file or one of"),
        ("bench demo --output /proc/a.json", "output: /proc/a.json cannot be written"),
        ("parity demo --seed -1", "seed: expected 0 to"),
        ("parity demo --threshold nan", "threshold: expected -1 to 1, got nan"),
        ("parity demo --report /proc/a.html", "report: /proc/a.html cannot be written"),
        ("calibrate demo --count -1", "count: expected at least 1"),
        ("tune demo --quick --margin -1", "margin: expected more than 0, at most 99, got -1.0"),
        ("tune demo --quick --confidence 200", "confidence: expected 50 to 99.99, got 200.0"),
        ("tune demo --quick --tasks 0", "suite, tasks: expected --benchmark beside them, got 0 alone"),
        ("tune demo --quick --benchmark libero --allow-steps 0", "allow-steps: expected at least 1"),
        ("tune demo --quick --output /proc/a", "output: /proc/a cannot be written"),
        ("build --model pi05_demo --depth 0", "depth: expected at least 1"),
        ("build demo --depth 3", "depth: expected --model beside it"),
        ("build demo --model pi05_demo", "model: expected no checkpoint beside it, got demo"),
        ("build demo --cache /proc/a", "cache: /proc/a cannot be written"),
        ("cache list --cache nowhere", "cache: expected a folder of engines, got nowhere"),
        ("convert here there --action-horizon -1", "action-horizon: expected at least 1"),
        ("serve demo --max-payload-mib nan", "max-payload-mib: expected more than 0, got nan"),
        ("serve demo --port 99999", "port: expected 0 to 65535, got 99999"),
        ("serve demo --timeout-s 0", "timeout-s: expected more than 0, got 0.0"),
        ("serve demo --grace-s -1", "grace-s: expected at least 0, got -1.0"),
        ("serve demo --max-wait-ms -1", "max-wait-ms: expected at least 0, got -1.0"),
        ("serve demo --memory-budget-gib 3", r"memory-budget-gib: expected several policies \(--policy\)"),
        ("serve demo --host 999.1.1.1 --insecure", "cannot listen on 999.1.1.1:8000: "),
        ("bench-vae --rounds 0", "rounds: expected at least 1"),
        ("bench-unet --size 63", "size: expected a multiple of 8, got 63"),
        ("bench-qwen --tiny --vae foo", "vae_type: expected one of eager, native, .*, got 'foo'"),
        ("txt2img --sd-dir random --guidance nan", "guidance: expected at least 0, got nan"),
        ("build-vae --vae tiny-sd-vae --output-dir /proc/a", "output-dir: /proc/a cannot be written"),
        ("precision tiny-sd-vae --size 0", "size: expected at least 1"),
    ],
)
def test_a_command_says_it_in_one_line_before_it_loads(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vla_accel.policy.OptimizedPolicy.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(build, "_checkpoint", lambda *_: pytest.fail("loaded"))
    assert main(words.split()) == 1
    out, err = capsys.readouterr()
    said = [line for line in err.strip().splitlines() if "WARNING" not in line]
    assert re.match(f"vla-accel {words.split()[0]}: {message}", said[0]) and len(said) == 1 and not out
    assert not list(tmp_path.iterdir())


def test_help_is_the_same_behind_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["--help"], ["list", "-h"]):
        with pytest.raises(SystemExit):
            main(["cache", *words])
        shown.append(capsys.readouterr().out)
    assert "{list,clear,verify}" in shown[0] and shown[0] == shown[1]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_help_shows_how_types_are_spelt(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert not [shown for shown in ("{None}", "PATH PATH", "(default: )", "(default: '')", "...]") if shown in said]


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
