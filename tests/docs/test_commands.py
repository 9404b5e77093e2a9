"""Every command that a page shows is run here, in a folder of its own, or, where that cannot be, looked up.

A command that runs may be given fewer calls and smaller files (`SMALLER`); one that does not run stands in `LOOKED_UP`
with the reason. What is looked up must exist: the command, its options with their values, the files of this repository.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import toy_command
from tests.support.pages import PAGES, ROOT, Command, commands, inline_commands, text_of, unfenced
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.cli import COMMANDS, main, options
from vla_accel.config import load_config
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.measure.recording import save_observations
from vla_accel.measure.systems import configs
from vla_accel.policy import OptimizedPolicy

SHOWN = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
"""Every command of every page, once for each page."""

INSTALLS, MINUTES, SERVES = "it installs packages", "it takes minutes", "it runs until it is stopped"
OTHERS, FILES = "it needs another project's environment", "it needs weights or engines that are not here"
LEROBOT = "it needs lerobot; tests/plugins/test_lerobot_commands.py runs it there"
VLA_EVAL = "it needs vla-eval; tests/plugins/test_vla_eval_server.py runs it there"
XPOLICYLAB = "it needs XPolicyLab; tests/plugins/test_xpolicylab.py runs its server and client"
ROS = "it needs ROS 2; tests/plugins/ros_environment.py builds the packages, tests/plugins/test_ros_node.py runs them"
LOOKED_UP: dict[str, str] = {
    "make": "tests/docs/test_commands.py looks the targets up; CI runs them",
    "python3 -m venv": INSTALLS,
    "python3.11 -m venv": INSTALLS,
    "python3.12 -m venv": INSTALLS,
    "../": OTHERS,
    "pip install": INSTALLS,
    "lerobot-": LEROBOT,
    "export VLA_ACCEL_ATTACH": LEROBOT,
    "python -m lerobot": LEROBOT,
    "vla-eval ": VLA_EVAL,
    "python -m vla_eval": VLA_EVAL,
    "cp -r plugins/xpolicylab_vla_accel": XPOLICYLAB,
    "cd ../XPolicyLab": XPOLICYLAB,
    "python3 -m colcon": ROS,
    "ros2 ": "it needs ROS 2, of which the package index has no launch files and no command line",
    "python -m pytest": "it would run the tests within a test",
    "python -m tests.": MINUTES,
    "vla-accel serve": f"{SERVES}; tests/cli/test_cli_serve.py starts it",
    "vla-accel bench-server": f"{MINUTES}; tests/cli/test_bench_server.py runs it",
    "openssl ": "it makes keys; tests/remote/test_security.py serves with one",
    "docker build": "it needs docker and a network; tests/docs/test_deploy.py reads the recipe",
    "docker run": "it needs docker and a GPU",
    "docker compose": "it needs docker and a network; tests/docs/test_deploy.py reads its files",
    "vla-accel convert": f"{FILES}; tests/checkpoints/test_convert.py runs it",
    "uv ": "it installs packages; tests/core/test_lock.py and tests/docs/test_example_scripts.py check its files",
    "vla-accel prompts": f"{FILES}; tests/policy/test_fastwam_policy.py runs it",
    "vla-accel export": f"{MINUTES}; tests/policy/test_export.py runs it",
    "vla-accel inspect": f"{FILES}; tests/engines runs it",
    "vla-accel parity path/to/checkpoint --lora": f"{FILES}; tests/checkpoints/test_lora.py folds adapters",
    "vla-accel bench --model": f"{MINUTES}: models of the published size",
    "vla-accel build-vae": f"{FILES}; tests/diffusion runs it",
    "vla-accel build-unet": f"{FILES}; tests/diffusion runs it",
    "python -m eval.libero --": f"{MINUTES}; tests/eval plays episodes",
    "python -m eval.libero.tune ": f"{MINUTES}; tests/tune and tests/eval/test_tuning.py run its parts",
    "python -m eval.libero.late --": f"{MINUTES}; tests/eval/test_stress.py plays a grid",
    "python -m eval.throughput --": f"{MINUTES}; tests/eval/test_throughput.py plays a case",
    "python -m benchmarks.time_": MINUTES,
    "python -m benchmarks.accumulation": MINUTES,
    "python -m benchmarks.measure ": f"{MINUTES}; tests/benchmarks/test_measure.py parses its jobs",
    "python -m benchmarks.pictures": "it writes into this repository; tests/benchmarks/test_tables.py draws them",
    "python -m eval.demo.states ": f"{MINUTES}; tests/eval/test_demo.py samples a few",
    "python -m eval.lerobot.record ": f"{MINUTES}, with a simulator that renders",
    "python -m eval.lerobot.train ": "it needs lerobot; tests/eval/test_lerobot_training.py reads its demonstrations",
    "python -m eval.lerobot.compare ": f"{MINUTES}; tests/eval/test_lerobot_training.py makes its choice",
    "python -m eval.demo.observations ": f"{MINUTES}; tests/eval/test_demo.py records of a toy's tasks",
}
"""Beginnings of commands that are not run, and why."""

SMALLER: dict[str, str] = {
    "vla-accel build ": "--dry-run",
    "vla-accel doctor": "--device cpu",
    "vla-accel bench demo ": "--calls 1 --device cpu --report report.html",
    "vla-accel flow ": "--count 8 --steps 2,1 --calls 1 --device cpu",
    "vla-accel tune ": "--calls 1 --count 1 --num-steps 1 --device cpu",
    "vla-accel parity ": "--count 2 --draws 1 --num-steps 2 --device cpu --report report.html",
    "vla-accel calibrate ": "--count 2 --device cpu",
    "vla-accel txt2img ": "--steps 2 --height 64 --width 64 --device cpu",
    "vla-accel img2img ": "--steps 2 --height 64 --width 64 --device cpu",
    "vla-accel bench-vae ": "--sizes 64x64 --rounds 1 --device cpu",
    "vla-accel bench-unet ": "--sd-dir tiny-random --systems eager-fp32,native --size 64 --steps 2 --rounds 1 "
    "--unet-rounds 1 --dtype fp32 --device cpu",
    "vla-accel bench-qwen ": "--tiny --size 64 --steps 1 --layers 1 --rounds 1 --transformer native --device cpu",
    "vla-accel precision ": "--calls 1 --size 64 --device cpu",
    "python -m benchmarks.memory ": "--families smolvla",
}
"""Beginnings of commands that are run with these words, too; on a CPU, so that the same is run everywhere."""

INSTEAD = {
    "path/to/checkpoint": "checkpoint",
    "configs/": f"{ROOT / 'configs'}/",
    "stable-diffusion-v1-4": "tiny-random",
    " qwen-vae": " tiny-qwen-vae",
    " sd-unet": " tiny-sd-unet",
}
"""What stands for a reader's own files or for large models, and what a test has in their place."""


def looked_up(command: Command) -> str | None:
    """Why a command is not run; None where it is."""
    return next((why for start, why in LOOKED_UP.items() if command.line.startswith(start)), None)


RUN = list({command.line: command for command in SHOWN if looked_up(command) is None}.values())
"""Each once, however many pages show it."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small files that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    policy = OptimizedPolicy.from_pretrained("demo", device="cpu", num_steps=1)
    rng = np.random.default_rng(0)
    observations = [{**policy.processor.example(), "observation/state": rng.normal(size=8) * 0.1} for _ in range(8)]
    for place in (folder, folder / "runs" / "demo"):
        save_observations(observations, place / "observations.npz")
    shutil.copytree(NAMED["demo"], folder / "checkpoint")
    write_png(folder / "sketch.png")
    run = json.loads((ROOT / "benchmarks/results/libero_spatial_quick_cpu.json").read_text())
    for name in ("eager", "native", "native_fp8"):
        for place in (folder, folder / "runs"):
            (place / f"{name}.json").write_text(json.dumps(run))
    for number in (1, 2):
        part = ["--expert", "--shard", f"{number}/2", "--output", str(folder / f"part{number}.json")]
        assert toy_command.main(part) == 0
    return folder


def write_png(path: Path) -> None:
    with contextlib.suppress(ImportError):  # without pillow, the commands that read it are skipped
        from PIL import Image

        Image.new("RGB", (64, 64), "teal").save(path)


NEEDS = {
    "calibrate": ["modelopt"],
    "build": ["tensorrt_rtx", "onnx"],
    **{name: ["diffusers", "PIL"] for name in ("txt2img", "img2img", "bench-vae", "bench-unet", "bench-qwen")},
    "precision": ["diffusers"],
}
"""Command to the optional packages that it cannot do without."""


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=lambda c: f"{c.page}: {c.line}")
def test_a_command_runs(command: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "cache"))
    line = command.line
    for theirs, ours in INSTEAD.items():
        line = line.replace(theirs, ours)
    words = shlex.split(line)
    words += next((more.split() for start, more in SMALLER.items() if command.line.startswith(start)), [])
    for package in NEEDS.get(words[1], []):
        pytest.importorskip(package, exc_type=ImportError)
    assert run(words) == 0


def run(words: list[str]) -> int:
    """A command of ours within this process: `vla-accel …` or `python -m …`; its exit status."""
    assert words[0] == "vla-accel" or words[:2] == ["python", "-m"], f"neither run nor in LOOKED_UP: {' '.join(words)}"
    before = sys.argv
    try:
        if words[0] == "vla-accel":
            return main(words[1:])
        sys.argv = words[2:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module was imported before: it is run anew
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.mark.parametrize("command", [c for c in SHOWN if looked_up(c)], ids=lambda c: f"{c.page}: {c.line}")
def test_a_command_that_is_not_run_exists(command: Command, reader: None) -> None:
    check(command.line)


@pytest.mark.parametrize(
    "command", [c for page in PAGES for c in inline_commands(page)], ids=lambda c: f"{c.page}: {c.line}"
)
def test_a_command_in_the_text_exists(command: Command, reader: None) -> None:
    check(command.line)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our commands end when their options are read, in a folder of their own."""
    monkeypatch.chdir(tmp_path)

    def last(real: Callable[..., object]) -> Callable[..., None]:
        def read(*given: object) -> None:
            real(*given)
            sys.exit(0)

        return read

    for place, name in ((options, "check"), (argparse.ArgumentParser, "parse_args")):
        monkeypatch.setattr(place, name, last(getattr(place, name)))


def check(line: str) -> None:
    """The program, this repository's files and extras in a command are there, and it takes its options as they are."""
    words = shlex.split(line)
    for file in re.findall(r"(?<![\w/.])((?:configs|eval|benchmarks|tests)/[\w/.-]+\.(?:yaml|py))", line):
        assert (ROOT / file).exists(), file
    # The options of other modules are parsed only as they run.
    reads = ("eval", "benchmarks", "tests.gpu", "tests.remote")
    ours = words[0] == "vla-accel" or (words[:2] == ["python", "-m"] and words[2].startswith(reads))
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words == ["vla-accel", "COMMAND", "--help"]:
        return
    elif ours:
        # In running text a command alone is its name.
        alone = len(words) == (2 if words[0] == "vla-accel" else 3)
        assert run([*words, "--help"] if alone else words) == 0
    else:
        assert words[0] != "python" or words[1] in ("-m", "-c"), "a file that is run finds no packages next to it"
        if words[:2] == ["python", "-m"] and words[2].startswith("tests."):
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file(), words[2]
        extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert set(re.findall(r"(?:\.|vla_accel)\[([\w-]+)\]", line)) <= set(extras)


def test_options_in_the_text_are_some_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with contextlib.suppress(SystemExit):
            main([name, "--help"])
    run(["python", "-m", "eval.libero", "--help"])
    text = capsys.readouterr().out + (ROOT / "tests/conftest.py").read_text()
    # Options of other people's programs, which the plugins' tests use there.
    text += "".join(path.read_text() for path in (ROOT / "tests/plugins").glob("test_*.py"))
    there = {*re.findall(r"--[a-z][\w-]*", text), "--help"}
    shown = {page.name: set(re.findall(r"`(--[a-z][\w-]*)[^`]*`", text_of(page))) for page in PAGES}
    assert {name: left for name, options in shown.items() if (left := options - there)} == {}


def test_every_reason_is_needed() -> None:
    for start in (*LOOKED_UP, *SMALLER):
        assert any(command.line.startswith(start) for command in SHOWN), f"no page shows {start!r}"


def test_shown_benches_name_systems_that_there_are() -> None:
    benches = [shlex.split(command.line) for command in SHOWN if command.line.startswith("vla-accel bench --model ")]
    named = [(words[3], words[words.index("--systems") + 1]) for words in benches if "--systems" in words]
    assert len(named) > 2
    for model, systems in named:
        family = family_named(model)
        assert {*systems.split(",")} <= {*configs(family), *bench_card(family).baselines}, systems


def test_recipes_sample_start_states_into_folders_of_their_own() -> None:
    """Those of other seeds are refused where some are, and a policy must not be calibrated on what it will play."""
    sampled = {command.line for command in SHOWN if command.line.startswith("python -m eval.demo.states ")}
    assert len(sampled) > 1 and len({line.partition("--output ")[2] for line in sampled}) == len(sampled)


def test_no_command_stands_outside_a_fence() -> None:
    assert {page.name: found for page in PAGES if (found := unfenced(page))} == {}


def test_every_command_has_its_line() -> None:
    lines = (ROOT / "docs/commands.md").read_text().splitlines()
    told = [line for line in lines if line.startswith("| `") and "`python" not in line]
    assert told == [f"| `{name}` | {said} |" for name, (*_, said) in COMMANDS.items()]


MODULES = re.findall(r"^\| `python -m ([\w.]+)`", (ROOT / "docs/commands.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_its_own_name_and_what_it_does(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["python", "-m", module, "--help"]) == 0
    usage, _, about, *_ = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: python -m {module} ") and about.strip()


def test_every_configuration_is_described() -> None:
    text = (ROOT / "docs/engines.md").read_text()
    for path in (ROOT / "configs").iterdir():
        load_config(path)
        assert f"`{path.stem}`" in text or f"`{path.name}`" in text, path.name
