"""The checkpoint comes first, and the configuration is an option."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.pages import ROOT
from tests.support.tiny import tiny_observation, write_robot, write_tiny_checkpoint
from vla_accel.cli import COMMANDS, ended, main, options_of
from vla_accel.cli.options import descriptions
from vla_accel.errors import ObservationError
from vla_accel.fp8 import FILE, Scales
from vla_accel.measure import parity
from vla_accel.measure.recording import load_observations, save_observations


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("commands") / "tiny"
    write_tiny_checkpoint(folder, max_token_len=200)
    return str(folder)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    path = tmp_path / "observations.npz"
    save_observations([tiny_observation(seed) for seed in range(3)], path)
    return str(path)


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_parity_says_what_ran_instead_and_where_a_report_is_kept(
    checkpoint: str, recorded: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--config", "native_fp8", "--observations", recorded, "--device", "cpu", "--num-steps", "1", "--keep"]
    assert main(["parity", checkpoint, *words]) == 0
    out, err = capsys.readouterr()
    assert "3 observations, 1 step" in out
    assert "kv_cache ran eager) agrees with FP32 eager" in out
    kept = Path(checkpoint) / "parity_native_fp8.json"
    assert "3/3 calls of each" in err and f"kept: {kept}" in err
    assert "parity_native_fp8.json will not be used: other engines than native ran kv_cache" in caplog.text
    kept.unlink()


def test_parity_where_no_chunk_is_left_to_judge(
    checkpoint: str, recorded: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example if the gripper's command flips in every chunk."""
    compare = parity.compare

    def all_flipped(*given: Any, **options: Any) -> Any:
        found = compare(*given, **options)
        reason = f"{found.observations} chunks flipped"
        return dataclasses.replace(found, passed=False, flipped=found.observations, rest_cosine=None, reasons=(reason,))

    monkeypatch.setattr(parity, "compare", all_flipped)
    words = ["--observations", recorded, "--device", "cpu", "--num-steps", "1"]
    assert main(["parity", checkpoint, "--config", "native", *words]) == 1
    out = capsys.readouterr().out
    assert "does NOT agree" in out and "on 3 chunks" in out and "flipped in 3 of them" in out
    assert "Reasons: 3 chunks flipped" in out


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("matplotlib.figure", "parity no/such/folder --report report.html", "pictures need matplotlib"),
        ("matplotlib.figure", "bench no/such/folder --report report.html", "pictures need matplotlib"),
        ("matplotlib.figure", "tune no/such/folder --quick", "pictures need matplotlib"),
        ("websockets.asyncio.server", "serve no/such/folder", "the server needs websockets"),
        ("websockets.asyncio.server", "bench-server no/such/folder", "the server needs websockets"),
    ],
)
def test_what_is_not_installed_is_said_before_the_work(
    module: str, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(words.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("set_up", [False, True], ids=["plain", "a program's own logging"])
def test_what_auto_chose_is_said_once(
    set_up: bool, checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = logging.getLogger("vla_accel")
    before = (package.level, list(package.handlers))
    monkeypatch.setattr(logging.root, "handlers", [])
    if set_up:
        logging.basicConfig(format="%(levelname)s: %(message)s")
    assert main(["parity", checkpoint, "--device", "cpu", "--count", "1"]) == 0
    said = f"{checkpoint}: auto chose vision, kv_cache, denoise: eager (there is no GPU)"
    lines = [line for line in capsys.readouterr().err.splitlines() if "auto chose" in line]
    assert lines == ["INFO: " * set_up + said]
    assert (package.level, package.handlers) == before


@pytest.mark.slow
def test_bench_of_a_checkpoint(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "auto,native", "--steps", "2,1", "--calls", "2", "--device", "cpu", "--batch", "2"]
    words += ["--hz", "200", "--prompt-tokens", "31", "--camera", "48x64"]
    assert main(["bench", checkpoint, *words]) == 0
    report = last_line(capsys)
    timed = [(row["system"], row["steps"]) for row in report["rows"]]
    assert timed == [(name, steps) for steps in (2, 1) for name in ("auto", "native", "eager")]
    for row in report["rows"]:
        assert (
            row["calls"] == 2
            and row["memory"]["total"] > 0
            and row["paced"]["hz"] == 200
            and row["paced"]["calls"] == 2
        )
    assert report["prompt_tokens"] == 31 and report["camera"] == [48, 64]
    assert report["model"]["name"] == checkpoint and report["model"]["kind"] == "pi05"
    assert all(row["speedup"] == 1.0 for row in report["rows"] if row["system"] == "eager")
    assert {row["engines"][0]["used"] for row in report["rows"] if row["system"] == "native"} == {"native"}
    assert [(row["system"], row["batch"]) for row in report["throughput"]] == [("auto", 2), ("native", 2), ("eager", 2)]
    parts = {"preprocess", "vision", "kv_cache", "denoise", "transfer", "postprocess"}
    assert all({*row["parts_ms"]} == parts for row in report["throughput"])


@pytest.mark.slow
def test_bench_says_a_fallback_once_and_names_the_rows_by_what_ran(
    checkpoint: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--config", "native_fp8", "--steps", "2,1", "--calls", "1", "--device", "cpu", "--batch", "2"]
    assert main(["bench", checkpoint, *words, "--report", str(tmp_path / "report.html")]) == 0
    assert caplog.text.count("kv_cache: requested engine native, using eager") == 1
    for said in (capsys.readouterr().out.replace("\n", ""), (tmp_path / "report.html").read_text()):
        assert said.count("native_fp8 (kv_cache ran eager)") >= 3, "of each number of steps, and of a batch"


def test_bench_reports_the_times_of_placed_steps(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedule", "1,0.3,0", "--calls", "1", "--device", "cpu", "--batch", "2"]
    assert main(["bench", checkpoint, "--config", "eager", *words]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    rows = [*report["rows"], *report["throughput"]]
    assert {(row["steps"], tuple(row["schedule"])) for row in rows} == {(2, (1.0, 0.3, 0.0))}
    assert out.replace("\n", "").count("eager at 1, 0.3") >= len(rows)


@pytest.mark.slow
def test_bench_starts_policies_anew(checkpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--config", "native", "--steps", "1", "--calls", "1", "--device", "cpu", "--starts", "--hz", "100"]
    assert main(["bench", checkpoint, *words, "--report", str(tmp_path / "report.html")]) == 0
    rows, page = last_line(capsys)["rows"], (tmp_path / "report.html").read_text()
    assert "Other timings" in page and all(f">{row['paced']['p90_ms']:.2f}<" in page for row in rows)
    assert all(f">{row['start'][which]['first_action']:.2f}<" in page for row in rows for which in ("cold", "warm"))
    for row in rows:
        told = row["start"]
        assert told["file_read"] > 0 and told["cold"].keys() == told["warm"].keys()
        for one in (told["cold"], told["warm"]):
            assert one["first_action"] > one["import"] > 0 and one["read"] > 0
            assert (one["prepare"] > 0) == (row["system"] == "native")


def test_calibrate_says_where_its_file_is(
    monkeypatch: pytest.MonkeyPatch, recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = SimpleNamespace(calibrate=lambda *_: Scales({"prefix.layers.0.o_proj": 3.0}, 3, "test", "0", "01"))
    monkeypatch.setattr("vla_accel.families.bench.bench_card", lambda _: card)
    loaded = SimpleNamespace(model=None, processor=SimpleNamespace(prepare=lambda o: o), family=None, kept=tmp_path)
    monkeypatch.setattr("vla_accel.families.loading.load", lambda *_, **__: loaded)
    for folder, words in ((tmp_path, []), (tmp_path / "a/new", ["--output", str(tmp_path / "a/new")])):
        assert main(["calibrate", "demo", "--observations", recorded, "--device", "cpu", *words]) == 0
        path, said = folder / FILE, capsys.readouterr()
        assert path.is_file() and said.out.startswith(f"{path}: 1 products, 3 observations; largest ")
        assert said.err == "calibrating on 3 observations\n"


def test_calibrate_takes_what_the_checkpoint_does_not_say_of_its_robot(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = Scales({"prefix.layers.0.o_proj": 3.0}, 1, "test", "0", "01")
    monkeypatch.setattr("vla_accel.families.bench.bench_card", lambda _: SimpleNamespace(calibrate=lambda *_: scales))
    (tmp_path / "config.yaml").write_text(f"preset: {write_robot(tmp_path / 'robot.yaml')}\n")
    seen = tiny_observation()
    mine = {"front": seen["observation/image"], "wrist": seen["observation/wrist_image"],
            "joints": seen["observation/state"][:7], "gripper": seen["observation/state"][7:],
            "prompt": seen["prompt"]}  # fmt: skip
    save_observations([mine], tmp_path / "mine.npz")
    words = ["calibrate", checkpoint, "--observations", str(tmp_path / "mine.npz"), "--device", "cpu"]
    assert main([*words, "--output", str(tmp_path)]) == 1
    assert "missing observation/image" in capsys.readouterr().err
    assert main([*words, "--output", str(tmp_path), "--config", str(tmp_path / "config.yaml")]) == 0
    assert capsys.readouterr().err.startswith("state: 0.00 % of the values of 1 rows lie outside")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and f"vla-accel {name}" in said
    assert not [text for text in ("None", "(default: True)", "(default: )", "(default: '')") if text in said]


MODULES = sorted([*ROOT.glob("eval/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])
SCRIPTS = [path for path in MODULES if "class Arguments" in path.read_text()]


@pytest.mark.parametrize("name", [*COMMANDS, *(str(p.relative_to(ROOT).with_suffix("")) for p in SCRIPTS)])
def test_every_option_says_what_it_is(name: str) -> None:
    script = name.replace("/", ".")
    options = options_of(name) if name in COMMANDS else importlib.import_module(script).Arguments
    assert [field.name for field in dataclasses.fields(options) if not descriptions(options).get(field.name)] == []


def test_no_help_waits_for_torch() -> None:
    said = """
import contextlib, sys
from eval.libero.__main__ import main as libero
from vla_accel.cli import COMMANDS, main
for name in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
        raise AssertionError(name)
    assert "torch" not in sys.modules, name
with contextlib.suppress(SystemExit):
    libero(["--help"])
    raise AssertionError("eval.libero")
assert "torch" not in sys.modules, "eval.libero"
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_which_a_library_makes_an_error_is_an_interrupt(number: int) -> None:
    def imports_matplotlib() -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ValueError("too many values to unpack (expected 2)") from None
        return 0

    # Tests that a script runs in the background have Ctrl-C ignored, which `ended` would keep to.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        assert ended(imports_matplotlib) == (130, "interrupted")
        with pytest.raises(ValueError, match="ours"):
            ended(lambda: int("ours"))
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGINT, found)


@pytest.mark.parametrize("kind", ["cut off", "no archive", "pickle", "one array", "nothing", "unequal"])
def test_observations_of_no_use_are_one_line(kind: str, recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(recorded)
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "no archive":
        path.write_bytes(b"PK\x03\x04 nothing")
    elif kind == "pickle":
        np.savez(path, a=np.array([{"a": 1}], object))
    elif kind == "one array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        np.savez(path, a=np.zeros(3 if kind == "unequal" else 0), b=np.zeros(4 if kind == "unequal" else 0))
    assert main(["parity", "demo", "--observations", recorded, "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    found = {"nothing": "{'a': 0, 'b': 0}", "unequal": "{'a': 3, 'b': 4}"}.get(kind)
    expected = f"expected columns of one length, got {found}" if found else "expected a .npz of arrays, got another"
    assert f"vla-accel parity: recording {path}: {expected}" in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (8, None, r"wrist: expected shape (8, 8, 3), as in the first, got none"),
        (None, 8, r"wrist: expected shape none, as in the first, got (8, 8, 3)"),
        (8, 9, r"wrist: expected shape (8, 8, 3), as in the first, got (9, 9, 3)"),
    ],
)
def test_one_file_holds_observations_of_the_same_keys_and_shapes(
    first: int | None, second: int | None, said: str, tmp_path: Path
) -> None:
    sides = (first, first, second)
    seen = [{"prompt": "pick", **({"wrist": np.zeros((n, n, 3), np.uint8)} if n else {})} for n in sides]
    with pytest.raises(
        ObservationError, match=re.escape(f"a.npz: observation 3: {said}; what differs needs a file of its own")
    ):
        save_observations(seen, tmp_path / "a.npz")
    with pytest.raises(ObservationError, match="a list of at least one observation, got one that is in no list"):
        save_observations(seen[0], tmp_path / "a.npz")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    save_observations(seen[:1], str(tmp_path / "a.npz"))
    assert load_observations(tmp_path / "a.npz")[0]["prompt"] == "pick"


def test_a_recording_holds_what_a_policy_reads_and_refuses_the_rest(tmp_path: Path) -> None:
    seen = [{"images": {"high": np.full((8, 8, 3), n, np.uint8), "left": None}, "state": [0.5, n]} for n in (1, 2)]
    save_observations(seen, tmp_path / "a.npz")
    _, second = load_observations(tmp_path / "a.npz")
    assert second.keys() == {"images/high", "state"} and second["state"].tolist() == [0.5, 2.0]
    assert (second["images/high"] == 2).all()
    for wrong, kind in ((date(2026, 1, 1), "date"), ([[1.0], [1.0, 2.0]], "list"), (object(), "object")):
        said = rf"recording .*b\.npz: observation 1: at/it: expected numbers or a text, got {kind}$"
        with pytest.raises(ObservationError, match=said):
            save_observations([{"at": {"it": wrong}}], tmp_path / "b.npz")
    assert not (tmp_path / "b.npz").exists()


def test_a_folder_without_rights_is_named_and_how_to_see_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/a b/engines")

    monkeypatch.setattr("vla_accel.engines.cache.EngineCache.entries", refused)
    assert main(["cache", "list", "--cache", str(tmp_path)]) == 1
    said = "vla-accel cache: /a b/engines: Permission denied: namei -l '/a b/engines' shows whose it is\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("words", "name"), [("calibrate", "output"), ("parity --keep", "keep")])
def test_a_checkpoints_folder_that_cannot_be_written_to_is_said_before_the_work(
    words: str, name: str, checkpoint: str, recorded: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refused(dir: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("vla_accel.files.tempfile.TemporaryFile", refused)
    command, *more = words.split()
    assert main([command, checkpoint, "--observations", recorded, "--device", "cpu", *more]) == 1
    said = f"vla-accel {command}: {name}: {checkpoint} cannot be written: {checkpoint}: Permission denied\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", ["parity", "calibrate", "tune --calls 1 --output"])
def test_observations_of_another_robot_are_told_with_their_file(
    words: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (command, *more) = tmp_path / "other.npz", words.split()
    save_observations([{"observation/image": np.zeros((8, 8, 3), np.uint8), "prompt": "pick"}], path)
    more += [str(tmp_path / "runs")] if more else []
    assert main([command, checkpoint, "--observations", str(path), "--device", "cpu", *more]) == 1
    said = f"vla-accel {command}: recording {path}: observation: missing observation/wrist_image, observation/state; "
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_horizon": -5}, "action_horizon: expected more than 0, got -5"),
        ({"action_horizon": 1_000_000_000}, "action_horizon: expected at most 4096, got 1000000000"),
        ({"max_token_len": 1_000_000_000}, "max_token_len: expected at most 4096, got 1000000000"),
        ({"prefix": {"depth": 1_000_000_000}}, "prefix.depth: expected at most 4096, got 1000000000"),
        ({"vocab_size": 1_000_000_000}, "vocab_size: expected at most 1048576, got 1000000000"),
        ({"vision": {"width": 0}}, "vision.width: expected more than 0, got 0"),
        ({"vision": {"eps": float("nan")}}, "vision.eps: expected more than 0, got nan"),
    ],
)
def test_sizes_that_cannot_be_are_named(
    tmp_path: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    for name, value in change.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    assert main(["parity", str(tmp_path), "--device", "cpu"]) == 1
    assert capsys.readouterr().err == f"vla-accel parity: {path}: {message}\n"


def test_weights_that_are_a_link_to_nothing_or_a_folder_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_checkpoint(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "gone")
    assert main(["parity", str(tmp_path), "--device", "cpu"]) == 1
    assert "expected model.safetensors, found config.json, model.safetensors (a link to nothing), " in (
        capsys.readouterr().err
    )
    weights.unlink()
    weights.mkdir()
    assert main(["parity", str(tmp_path), "--device", "cpu"]) == 1
    assert "found config.json, model.safetensors/, " in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != weights)
    assert main(["parity", str(tmp_path), "--device", "cpu"]) == 1
    assert "found config.json, model.safetensors/ (no right to read it), " in capsys.readouterr().err


def test_a_file_in_place_of_a_checkpoint_is_named(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").touch()
    for file, hint in ((f"{checkpoint}/model.safetensors", f"; did you mean {checkpoint}?"), (f"{tmp_path}/notes", "")):
        assert main(["parity", file, "--device", "cpu"]) == 1
        error = f"checkpoint: expected a folder, got the file {file!r}{hint}"
        assert capsys.readouterr().err == f"vla-accel parity: {error}\n"
    assert main(["parity", checkpoint, "--lora", "nope", "--device", "cpu"]) == 1
    assert "lora: expected an adapter's folder, or its name on the hub, got 'nope'" in capsys.readouterr().err


def test_a_busy_port_is_known_before_a_policy_is_loaded(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_accel.policy.OptimizedPolicy.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", checkpoint, "--port", str(port), "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; --port 0 picks a free one" in said
