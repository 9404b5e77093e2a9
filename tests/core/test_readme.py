"""What the README names exists: commands, options, files, modules; and its first example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_accel.cli import COMMANDS, main
from vla_accel.config import load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# `    command --option …   # remark`, from a block of commands; a backslash joins lines.
JOINED = re.sub(r"\\\n *", "", README + CONTRIBUTING)
LINES = [line.split("  #")[0].strip() for line in JOINED.splitlines() if line.startswith("    ")]


def test_every_command_has_its_line() -> None:
    table = README.split("## Command line\n")[1].split("\n## ")[0]
    named = [name for line in table.splitlines() if line.startswith("| `") for name in re.findall("`([^`]+)`", line)]
    assert sorted(named) == sorted(COMMANDS)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("vla-accel ")])
def test_commands_take_the_options_shown(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, name, *words = shlex.split(line)
    assert name in COMMANDS
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for option in (w for w in words if w.startswith("--")):
        assert re.search(rf"{option}\b", text), f"{name} has no {option}"


def test_files_and_modules_exist() -> None:
    text = README + CONTRIBUTING
    for config in set(re.findall(r"configs/(\w+\.yaml)", text)) | set(re.findall(r"`(\w+\.yaml)`", text)):
        load_config(ROOT / "configs" / config)
    assert {f"`{p.name}`" for p in (ROOT / "configs").iterdir()} <= set(re.findall(r"`\w+\.yaml`", README))
    for module in re.findall(r"python -m (eval[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for path in re.findall(r"`((?:vla_accel|eval|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)(?:`|   )", text)) <= set(targets)
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(re.findall(r"pip install '\.\[([\w-]+)\]'", text)) <= set(extras)


def test_the_examples_are_python_and_the_first_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "README.md", "exec")
    monkeypatch.chdir(ROOT)
    image = np.zeros((224, 224, 3), np.uint8)
    names: dict[str, Any] = {"image": image, "wrist_image": image, "state": np.zeros(8)}
    exec(blocks[0], names)
    assert names["result"]["actions"].shape == (10, 7)
    assert "denoise_ms" in names["result"]["policy_timing"]


@pytest.mark.parametrize("block", [1, 2])
def test_the_other_examples_import_what_there_is(block: int) -> None:
    text = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[block]
    exec("\n".join(line for line in text.splitlines() if line.startswith("from ")), {})
