"""What README, CONTRIBUTING, docs/ and the plugins' READMEs say in code: fenced blocks, and the commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OTHERS = (*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md")))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *_OTHERS]
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"(<!-- table: \w+ -->\n).*?(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One line to type. `page`: file name of the page that shows it."""

    page: str
    line: str


def text_of(page: Path) -> str:
    """A page without its generated tables: what a stored run was started with is history, not advice."""
    return _GENERATED.sub(r"\1", page.read_text())


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in some languages, without their indentation."""
    found = []
    for indent, language, body in _FENCE.findall(text_of(page)):
        if language in languages:
            found.append("\n".join(line.removeprefix(indent) for line in body.splitlines()))
    return found


def commands(page: Path) -> list[Command]:
    """Every line of a page's `sh` blocks, and those after `$ ` in its `console` blocks; remarks are cut off, and a
    backslash joins lines."""
    lines: list[str] = []
    for block in blocks(page, "sh"):
        lines += re.sub(r"\\\n *", "", block).splitlines()
    for block in blocks(page, "console"):
        lines += [line[2:] for line in re.sub(r"\\\n *", "", block).splitlines() if line.startswith("$ ")]
    stripped = [re.split(r"(?:^|\s+)#\s", line)[0].strip() for line in lines]
    name = page.relative_to(ROOT).as_posix()
    return [Command(name, line) for line in stripped if line]


def inline_commands(page: Path) -> list[Command]:
    """Commands of ours that stand in running text: `vla-accel …`, `python …`."""
    outside = _FENCE.sub("", text_of(page))
    name = page.relative_to(ROOT).as_posix()
    return [Command(name, found) for found in re.findall(r"`((?:vla-accel|python) [^`]+)`", outside)]


def unfenced(page: Path) -> list[str]:
    """Indented lines that look like commands but stand in no fenced block, where no test would find them."""
    outside = _FENCE.sub("", text_of(page))
    return re.findall(r"^ {4,}((?:vla-accel|python|make|pip|git|\.\./|export) .*)$", outside, re.MULTILINE)
