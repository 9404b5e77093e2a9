"""What pages refer to exists: links, files, sections of code, error messages; what is generated is generated."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.support.pages import PAGES, ROOT, text_of
from vla_accel.errors import unknown
from vla_accel.families.family import Family

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]*)(?:#([^)]*))?\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    for target, anchor in _LINK.findall(text_of(page)):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in a link."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_extra_is_described() -> None:
    settings = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^([\w-]+) = \[", settings.partition("\n[")[0], re.MULTILINE)
    rows = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs/getting_started.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == set(extras)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_and_names_exist(page: Path) -> None:
    text = text_of(page)
    for path in re.findall(r"`((?:vla_accel|eval|benchmarks|tests|docs|configs)/[\w/.-]*)`", text):
        assert (ROOT / path).exists(), path
    for dotted in re.findall(r"`(vla_accel(?:\.\w+)+)`", text):
        assert resolves(dotted), dotted


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name that a module of this package defines or imports."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            return count == len(parts) or all(re.search(rf"\b{p}\b", file.read_text()) for p in parts[count:])
    return False


def test_the_page_on_models_names_what_a_family_must_say_and_nothing_else() -> None:
    page = (ROOT / "docs/adding/model.md").read_text()
    table = page.partition("| what you declare | members |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table)) - {"vla_accel", "families", "family", "Chunking"}
    assert Family.__abstractmethods__ | {"name", "parts"} <= named <= {*dir(Family), *Family.__annotations__}


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


# -- messages --------------------------------------------------------------------------------------------------------

HOLE = "…"
"""Stands in a page for what differs from one message to the next, as `{}` does in the code."""


@functools.cache
def messages() -> list[str]:
    """Every text of the code, with HOLE for what is put in."""
    found = []
    for path in [
        path for part in ("vla_accel", "eval", "benchmarks", "plugins") for path in sorted((ROOT / part).rglob("*.py"))
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values]
                found.append(re.sub(rf"{HOLE}(?: {HOLE})+", HOLE, "".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdg]", HOLE, node.value))  # as logging has it
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "unknown":
                words = [str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.args]
                found.append(unknown(words[0], HOLE, [HOLE], *words[3:]).replace(repr(HOLE), HOLE))
    return found


def documented() -> list[str]:
    """The symptoms of the troubleshooting page: its headings in backticks."""
    return re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("symptom", documented())
def test_a_documented_message_is_one_of_ours(symptom: str) -> None:
    assert any(symptom in message for message in messages()), f"no code says {symptom!r}"


# -- the site --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_are_rewritten_for_the_site(hooks: ModuleType) -> None:
    assert hooks.linked("[a](docs/engines.md) [b](docs/adding/gpu.md#x)", "index.md") == (
        "[a](engines.md) [b](adding/gpu.md#x)"
    )
    assert hooks.linked("![p](benchmarks/results/p.svg)", "index.md") == "![p](pictures/p.svg)"
    assert hooks.linked("[c](../CONTRIBUTING.md) ![p](../benchmarks/results/p.png)", "results.md") == (
        "[c](contributing.md) ![p](pictures/p.png)"
    )
    assert hooks.linked("[c](../../README.md) [e](../engines.md)", "adding/gpu.md") == (
        "[c](../index.md) [e](../engines.md)"
    )


def test_the_layout_names_every_module_with_its_docstring(hooks: ModuleType) -> None:
    text = hooks.layout()
    for path in (ROOT / "vla_accel").rglob("*.py"):
        if path.name != "__init__.py":
            assert f"| `{path.name}` | {hooks.first_line(path)} |" in text, path
    assert "### vla_accel/engines/" in text and "### eval/" in text and "### tests/docs/" in text
    for path in (path for part in hooks.PARTS for path in (ROOT / part).rglob("*.py")):
        assert hooks.first_line(path), f"{path}: what is it?"


def test_every_page_is_in_the_navigation() -> None:
    def leaves(node: object) -> list[str]:
        if isinstance(node, dict):
            return [leaf for value in node.values() for leaf in leaves(value)]
        if isinstance(node, list):
            return [leaf for value in node for leaf in leaves(value)]
        return [str(node)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert set(leaves(config["nav"])) == pages | {"index.md", "contributing.md", "changelog.md"}


def test_every_name_of_the_reference_is_where_the_page_says() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert len(names) > 10
    for name in names:
        if ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file():
            continue
        module, _, member = name.rpartition(".")
        path = ROOT.joinpath(*module.split("."))
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        tree = ast.parse(source.read_text())
        defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        # mkdocstrings follows what a package re-exports by `__all__`, not what a module imports for its own use.
        exported = {one.value for node in tree.body if isinstance(node, ast.Assign) for one in ast.walk(node.value)
                    if getattr(node.targets[0], "id", "") == "__all__" and isinstance(one, ast.Constant)}  # fmt: skip
        assert member in defined | exported, f"docs/api.md: {name} is not there"
