"""Pages that mkdocs builds in addition to docs/: README, CONTRIBUTING and CHANGELOG, the pictures, the layout.

Links are rewritten from the location of the file to the location of its page.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PICTURES = ROOT / "benchmarks" / "results"
LAYOUT = "<!-- layout -->"
PARTS = ("vla_accel", "eval", "benchmarks", "plugins", "tests")
"""Folders in the layout, with their modules; tests without modules."""
_LINK = re.compile(r"(\]\()((?:\.\./)*)([\w./-]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that lie outside docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in sorted([*PICTURES.glob("*.png"), *PICTURES.glob("*.svg")]):
        files.append(File.generated(config, f"pictures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page with rewritten links and the layout inserted."""
    text = linked(markdown, page.file.src_uri)
    return text.replace(LAYOUT, layout()) if LAYOUT in text else text


def linked(markdown: str, page: str) -> str:
    """Rewrite relative links of the repository to links between pages of the site."""
    up = "../" * page.count("/")

    def target(match: re.Match[str]) -> str:
        path = match[3]
        if path in PAGES:
            return f"{match[1]}{up}{PAGES[path]}"
        if path.startswith("benchmarks/results/"):
            return f"{match[1]}{up}pictures/{path.removeprefix('benchmarks/results/')}"
        if page in PAGES.values():
            return match[1] + match[2] + path.removeprefix("docs/")
        return match[0]

    return _LINK.sub(target, markdown)


def layout() -> str:
    """Return a table per folder: its modules and the first line of their docstrings."""
    parts = []
    for part in PARTS:
        for folder in sorted(p.parent for p in (ROOT / part).rglob("__init__.py")):
            if folder.parent.name == "tests" or part != "tests":
                parts.append(_folder(folder, modules=part != "tests"))
    return "\n".join(parts)


def _folder(folder: Path, *, modules: bool) -> str:
    name = folder.relative_to(ROOT).as_posix()
    about = first_line(folder / "__init__.py")
    files = [p for p in sorted(folder.glob("*.py")) if p.name != "__init__.py"]
    if not modules:
        tested = ", ".join(f"`{p.stem}`" for p in files if p.stem != "conftest")
        return f"### {name}/\n\n{about}\n\n{tested}\n"
    rows = [f"| `{p.name}` | {first_line(p)} |" for p in files]
    table = "\n".join(["| module | what it is |", "| --- | --- |", *rows]) if rows else ""
    return f"### {name}/\n\n{about}\n\n{table}\n"


@functools.cache
def first_line(path: Path) -> str:
    """Return the first paragraph of a module's docstring as Markdown for a table; empty without a docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split())
    return line.replace("|", "\\|").replace("<", "&lt;")
