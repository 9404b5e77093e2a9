"""A program's options from its words: tyro reads them, and what a type says of them is checked before anything is
loaded or run, so that a number or a file that cannot be is an error at once and not after the work."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import math
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from vla_accel.errors import ConfigError, nearest
from vla_accel.files import require_writable, require_writable_folder

T = TypeVar("T")


@dataclass(frozen=True)
class Within:
    """Marks a number, or several: `least` to `most`; with `above`, `least` itself is refused."""

    least: float
    most: float = math.inf
    above: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ConfigError for a number outside, or for none at all (NaN)."""
        if self.least <= value <= self.most and math.isfinite(value) and not (self.above and value == self.least):
            return
        if self.most < math.inf and not self.above:
            expected = f"{self.least} to {self.most}"
        else:
            expected = f"more than {self.least}" if self.above else f"at least {self.least}"
            expected += f", at most {self.most}" if self.most < math.inf else ""
        raise ConfigError(f"{name}: expected {expected}, got {value}")


@dataclass(frozen=True)
class Written:
    """Marks a file, or with `folder` a folder, that the program writes; `suffix`: what its name must end in."""

    folder: bool = False
    suffix: str = ""

    def check(self, name: str, value: Path) -> None:
        """Raise ConfigError for another suffix, OutputError where it cannot be written."""
        if self.suffix and value.suffix.lower() != self.suffix:
            raise ConfigError(f"{name}: expected a file name ending in {self.suffix}, got {str(value)!r}")
        (require_writable_folder if self.folder else require_writable)(value, name)


# Options that may be left out, as `--help` shows them.
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
OutputFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint=""), Written()]
Picture = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint=""), Written(suffix=".png")]
OutputFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint=""), Written(folder=True)]
Number = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=""), Within(1)]
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
Text = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


def _default(text: str) -> str:
    return f"(default: {text})" if text.strip("'") else ""


Words = Annotated[str, tyro.conf.arg(help_behavior_hint=_default)]
Listed = Annotated[tuple[T, ...], tyro.conf.arg(help_behavior_hint=_default)]
"""Several in one word, with commas between them."""

Count = Annotated[int, Within(1)]
Seconds = Annotated[float, Within(0, above=True)]
Seed = Annotated[int, Within(0, 2**63 - 1)]
"""What every generator of random numbers takes."""


def read(kind: type[T], words: Sequence[str] | None, program: str) -> T:
    """The options of a program, a dataclass, from its words (the process's own if None).

    Wrong usage ends the program with status 2 and one line. Raises ConfigError or OutputError for a value that its
    type refuses.
    """
    about, box = _wrapped(kind.__doc__ or ""), io.StringIO()
    words, columns = sys.argv[1:] if words is None else words, os.environ.get("COLUMNS")
    if {"-h", "--help"} & {*words}:
        words = ["--help"]  # beside a word that it has read tyro leaves that one's place out
    else:
        os.environ["COLUMNS"] = "1000000"  # of the box of an error tyro breaks no line then, and so no long word
    try:
        with _RULES, contextlib.redirect_stderr(box):
            given = tyro.cli(kind, args=words, prog=program, description=about, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit:
        if box.getvalue():
            hints = typing.get_type_hints(kind, include_extras=True).items()
            options = [n.replace("_", "-") for n, hint in hints if tyro.conf.Positional not in typing.get_args(hint)]
            said = _sentence(box.getvalue(), options).replace(f" from {program}", "")
            print(f"{program}: {said}; {program} --help says more", file=sys.stderr)
        raise
    finally:
        os.environ.pop("COLUMNS", None)
        if columns is not None:
            os.environ["COLUMNS"] = columns
    check(given)
    return given


REMOVED = {
    "checkpoint": "the checkpoint comes first, without an option",
    "limit": "it is now --count N",
    "random": "it is now --model NAME, such as --model pi05",
    "synthetic": "it is now --model NAME, such as --model pi05",
}
"""Options of earlier versions, and what to type instead."""


def _sentence(box: str, options: Sequence[str]) -> str:
    """What is wrong in the first paragraph of tyro's box, without helptexts, and which option was meant."""
    # On a terminal the box is coloured; where the output is not in UTF-8 its lines are blanks and hyphens.
    box = re.sub(r"\x1b\[[\d;]*m", "", box)
    _, first, *_ = re.split(r"(?m)^(?:╭|[│ ] ?[─-]{5}).*$", box)
    said = " ".join(line[1:].strip(" │") for line in first.splitlines() if not line[2:].startswith(" " * 8)).strip(" .")
    if said.startswith("Unrecognized") and " -" not in said:  # words that belong to nothing, as in --steps 10 3
        return f"{said}; a list is one word with commas"
    wrong = re.match(r"Unrecognized options: --([\w-]+)", said)
    if wrong and wrong[1] in REMOVED:
        return f"{said}: {REMOVED[wrong[1]]}"
    return said + (nearest(wrong[1], options, "--") if wrong else "")


_RULES = ConstructorRegistry()


class _Whole(str):
    """A text that tyro takes as one line, and so leaves as it is: it would join lines, and not wrap them."""

    def split(self, *_: Any) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [self]


def _wrapped(text: str) -> str:
    """Paragraphs as wide as the terminal; what is indented, such as a list of files, stays as it is."""
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return _Whole("\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs))


@_RULES.struct_rule
def _options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A dataclass with the text below each field as one paragraph: tyro breaks a line wherever the source does."""
    if not dataclasses.is_dataclass(info.type):
        return None
    hints: dict[str, Any] = typing.get_type_hints(info.type, include_extras=True)
    fields = [
        StructFieldSpec(
            field.name,
            cast(Any, Flag) if hints[field.name] is bool else hints[field.name],
            tyro.MISSING if field.default is dataclasses.MISSING else field.default,
            lambda name=field.name: told(info.type).get(name),
        )
        for field in dataclasses.fields(info.type)
    ]
    return StructConstructorSpec(info.type, tuple(fields))


@functools.cache
def told(kind: type) -> dict[str, str]:
    """What stands below each field in the source of a dataclass and of those that it derives from."""
    texts = {}
    for each in reversed([k for k in kind.__mro__ if dataclasses.is_dataclass(k)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


def _number(kind: type[int] | type[float], word: str) -> int | float:
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"expected a {'whole ' * (kind is int)}number, got {word!r}") from None


@_RULES.primitive_rule
def _numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A number that may be left out: tyro's own errors speak of Python's types and functions."""
    kind, *more = typing.get_args(info.type) or (info.type,)
    if kind not in (int, float) or more not in ([], [type(None)]):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda words: _number(kind, words[0]),
        is_instance=lambda value: value is None or isinstance(value, (int, kind)),
        str_from_instance=lambda value: [str(value)],
    )


@_RULES.primitive_rule
def _commas(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[Any, ...]] | None:
    """How every list is written: commas, no spaces; but for words without an option, and an option given repeatedly."""
    kind, *more = typing.get_args(info.type) or (str,)
    if (
        info.type_origin is not tuple
        or more != [...]
        or {tyro.conf.Positional, tyro.conf.UseAppendAction} & info.markers
    ):
        return None
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()

    def split(text: str) -> tuple[Any, ...]:
        words = text.split(",")
        if wrong := [word for word in words if choices and word not in choices]:
            raise ValueError(f"expected some of {', '.join(choices)}, got {wrong[0]!r}")
        values = tuple(words if choices else (_number(kind, w) if kind in (int, float) else kind(w) for w in words))
        if len(set(values)) < len(values):
            raise ValueError(f"expected each once, got {text!r}")
        return values

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=("{" + ",".join(choices) + "}" if choices else {int: "N", Path: "FILE"}.get(kind, "NAME")) + ",...",
        instance_from_str=lambda words: split(words[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))] if value else [],
    )


def check(given: Any) -> None:
    """Raise ConfigError or OutputError for a field that its type (`Within`, `Written`) refuses, for a file that two
    would write, or one read and another write, and for what its own `check` refuses; None is none given."""
    hints, written, others = typing.get_type_hints(type(given), include_extras=True), {}, []
    for field, hint in hints.items():
        name, value = field.replace("_", "-"), getattr(given, field)
        values = [one for one in (value if isinstance(value, tuple) else (value,)) if one is not None]
        marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, (Within, Written))]
        for mark, one in itertools.product(marks, values):
            mark.check(name, one)
            if isinstance(mark, Written) and (other := written.setdefault(one.resolve(), name)) != name:
                raise ConfigError(f"{other}, {name}: expected two files, got {one} for both")
        others += [(name, Path(one)) for one in values if not marks and isinstance(one, (str, Path))]
    for name, path in others:
        if path.is_file() and (other := written.get(path.resolve())) is not None:
            raise ConfigError(f"{other}: expected another file than those that are read, got {path} of {name}")
    if callable(own := getattr(given, "check", None)):  # not an option of that name
        own()
