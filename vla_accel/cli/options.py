"""Read a program's options into a dataclass, and check them before anything is loaded or run."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from vla_accel.config import PolicyConfig, load_config
from vla_accel.config.mapping import Within
from vla_accel.errors import ConfigError, nearest
from vla_accel.files import require_writable, require_writable_folder, user_path
from vla_accel.view import check_view

T = TypeVar("T")


@dataclass(frozen=True)
class Argument:
    """How `--help` shows an option, and how it is typed. `default`: the default that `--help` names (None: the
    field's); `repeat`: the option may be typed several times; `hidden`: a field that is not an option."""

    metavar: str | None = None
    default: str | None = None
    positional: bool = False
    repeat: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class Written:
    """Marks a file, or with `folder` a folder, that the program writes; `suffix`: the required file suffix."""

    folder: bool = False
    suffix: str = ""

    def check(self, name: str, value: Path) -> None:
        """Raise ConfigError for another suffix, OutputError if the path cannot be written."""
        if self.suffix and value.suffix.lower() != self.suffix:
            raise ConfigError(f"{name}: expected a file name ending in {self.suffix}, got {str(value)!r}")
        (require_writable_folder if self.folder else require_writable)(value, name)


@dataclass(frozen=True)
class ViewCheck:
    """Marks the target of a live view."""

    def check(self, name: str, value: str) -> None:
        """Raise ConfigError for another form, OutputError for a file that cannot be written."""
        check_view(value)


Folder = Annotated[Path | None, Argument("FOLDER")]
OutputFile = Annotated[Path | None, Written()]
Picture = Annotated[Path | None, Written(suffix=".png")]
OutputFolder = Annotated[Path | None, Argument("FOLDER"), Written(folder=True)]
ViewTarget = Annotated[str | None, Argument("rerun[:FILE.rrd]"), ViewCheck()]
Number = Annotated[int | None, Within(1)]
Count = Annotated[int, Within(1)]
Seconds = Annotated[float, Within(0, above=True)]
Seed = Annotated[int, Within(0, 2**63 - 1)]
"""The range of a random generator's seed."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        for old, new in (("argument ", ""), ("the following arguments are required", "missing")):
            message = message.replace(old, new, 1)
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the options\n")


def read(kind: type[T], words: Sequence[str] | None, program: str) -> T:
    """Read the options of a program, a dataclass, from its words (None: the process's own). Wrong usage ends the
    program with status 2 and one line. Raises ConfigError or OutputError for a value that the field's type refuses."""
    words = list(sys.argv[1:] if words is None else words)
    parser, names = _parser(kind, program)
    if {"-h", "--help"} & {*words}:
        print(parser.format_help(), end="")  # `print_help` hides a broken pipe
        parser.exit(0)
    for i, word in enumerate(itertools.takewhile(lambda word: word != "--", words)):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name[2:] not in names:
                hint = f": {REMOVED[name[2:]]}" if name[2:] in REMOVED else nearest(name[2:], names, "--")
                parser.error(f"unknown option {name}{hint}")
            words[i] = name + equals + value
    found, rest = parser.parse_known_args(words)
    if rest:
        parser.error(f"unexpected {' '.join(rest)}; a list is one word with commas")
    options = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()})
    check(options)
    return options


REMOVED = {
    "beside": "it is now --compare FILE",
    "checkpoint": "the checkpoint comes first, without an option",
    "limit": "it is now --count N",
    "random": "it is now --model NAME, such as --model pi05",
    "synthetic": "it is now --model NAME, such as --model pi05",
}
"""Options of earlier versions, and what to type instead."""


def _parser(kind: Any, program: str) -> tuple[_Parser, list[str]]:
    """The parser of an options class, and the names of its options."""
    hints, about = typing.get_type_hints(kind, include_extras=True), descriptions(kind)
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    text = "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs)
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=program, description=text, formatter_class=formatter, allow_abbrev=False)
    names, usage = [], ""
    for field in dataclasses.fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        argument = next((mark for mark in reversed(marks) if isinstance(mark, Argument)), Argument())
        if argument.hidden:
            continue
        required, name = field.default is dataclasses.MISSING, field.name.replace("_", "-")
        value = None if required or isinstance(field.default, bool) else field.default
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
        shown = shown if argument.default is None else argument.default
        note = " (required)" if required else f" (default: {shown})" if shown else ""
        more: dict[str, Any] = {"help": (about.get(field.name, "") + note).replace("%", "%%")}
        more["default"] = argparse.SUPPRESS if argument.repeat else field.default
        item, many = _item(hints[field.name])
        if item is bool:
            more["action"] = "store_true"
        else:
            several = many and (argument.positional or argument.repeat)
            more["type"], metavar = _reader(item, many and not several)
            more["metavar"] = argument.metavar or metavar
            if argument.repeat:
                more["action"] = "append"
            elif argument.positional and (many or not required):
                more["nargs"] = ("+" if required else "*") if many else "?"
        if argument.positional:
            usage += f" {more['metavar']}"
            parser.add_argument(field.name, **more)
        else:
            names.append(name)
            parser.add_argument(f"--{name}", dest=field.name, required=required, **more)
    parser.usage = f"%(prog)s [options]{usage}"
    return parser, names


def descriptions(kind: type) -> dict[str, str]:
    """The text below each field in the source of a dataclass and of its bases."""
    texts = {}
    for each in reversed([k for k in kind.__mro__ if dataclasses.is_dataclass(k)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


def _item(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether the option takes several."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
    several = typing.get_origin(hint) is tuple
    return (typing.get_args(hint)[0] if several else hint), several


def _reader(item: Any, commas: bool) -> tuple[Callable[[str], Any], str]:
    """The function that reads a word, and the metavar of its type."""
    choices = typing.get_args(item) if typing.get_origin(item) is Literal else ()
    usual = {int: "N", float: "NUMBER", Path: "FILE"}.get(item, "NAME")
    metavar = "{" + ",".join(choices) + "}" if choices else usual

    def one(word: str) -> Any:
        if choices:
            if word not in choices:
                expected = "some of" if commas else "one of"
                raise argparse.ArgumentTypeError(f"expected {expected} {', '.join(choices)}, got {word!r}")
            return word
        try:
            return user_path(word) if item is Path else item(word)
        except ValueError:
            expected = "a whole number" if item is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {word!r}") from None

    def several(word: str) -> tuple[Any, ...]:
        values = tuple(map(one, word.split(",")))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected each once, got {word!r}")
        return values

    return (several, f"{metavar},...") if commas else (one, metavar)


def check(options: Any) -> None:
    """Raise ConfigError or OutputError for what a field's marks refuse, for a file that two options would write or that
    one reads and another writes, and for a checkpoint that is empty or a file of another option."""
    hints, written, others = typing.get_type_hints(type(options), include_extras=True), {}, []
    for field, hint in hints.items():
        name, value = field.replace("_", "-"), getattr(options, field)
        values = [one for one in (value if isinstance(value, tuple) else (value,)) if one is not None]
        marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, (Within, Written, ViewCheck))]
        for mark, one in itertools.product(marks, values):
            mark.check(name, one)
            if isinstance(mark, Written) and (other := written.setdefault(one.resolve(), name)) != name:
                raise ConfigError(f"{other}, {name}: expected two files, got {one} for both")
        others += [(name, Path(one)) for one in values if not marks and isinstance(one, (str, Path))]
    for name, path in others:
        if path.is_file() and (other := written.get(path.resolve())) is not None:
            raise ConfigError(f"{other}: expected another file than those that are read, got {path} of {name}")
    checkpoint = getattr(options, "checkpoint", None)
    if checkpoint == "":  # an unset variable of the shell
        raise ConfigError("checkpoint: expected a folder or a name, got ''")
    option = {".yaml": "config", ".yml": "config", ".npz": "observations"}.get(Path(checkpoint or "").suffix)
    if option and hasattr(options, option):
        raise ConfigError(f"checkpoint: expected a folder or a name, got {checkpoint}: type --{option} {checkpoint}")


Checkpoint = Annotated[str | None, Argument("[CHECKPOINT]", positional=True)]
"""For a command that does something else without a checkpoint."""


@dataclass(frozen=True)
class StepOptions:
    """The denoising steps of the policy that a command works on."""

    num_steps: Number = None
    """Denoising steps instead of the configuration's."""
    schedule: Annotated[str | None, Argument("SCHEDULE")] = None
    """Flow times of the steps instead of the configuration's: uniform, cubic, or the times themselves from 1 to 0, such
    as 1,0.3,0.01,0 for three steps."""

    def __post_init__(self) -> None:
        if self.schedule is not None:
            self.with_steps(PolicyConfig())  # an error before anything is loaded

    @property
    def steps(self) -> StepOptions:
        """These options alone."""
        return StepOptions(self.num_steps, self.schedule)

    def with_steps(self, settings: PolicyConfig) -> PolicyConfig:
        """Return a configuration with these steps. Raises ConfigError if they contradict each other."""
        return settings.with_steps(self.num_steps, schedule_of(self.schedule))


def schedule_of(word: str | None) -> Any:
    """Read --schedule: a name, or times with commas. Raises ConfigError for a time that is no number."""
    if word is None or "," not in word:
        return word
    try:
        return tuple(map(float, word.split(",")))
    except ValueError:
        raise ConfigError(f"schedule: expected numbers with commas, such as 1,0.3,0.01,0, got {word!r}") from None


@dataclass(frozen=True)
class PolicySource:
    """The policy that a command works on."""

    checkpoint: Annotated[str | None, Argument("[CHECKPOINT]", default="demo", positional=True)] = None
    """A folder, a bundled checkpoint's name, or owner/name[@revision][/folder] on the hub."""
    config: Annotated[str | None, Argument("CONFIG", default="auto")] = None
    """Engines and precision: a shipped configuration's name (native_fp8), or a YAML or JSON file. auto selects the
    fastest engines that lose no accuracy on this machine."""
    lora: str | None = None
    """A LoRA adapter to merge into the checkpoint's weights: a folder, or owner/name[@revision][/folder] on the hub."""

    def settings(self) -> PolicyConfig:
        """Load the configuration, with the adapter of --lora."""
        settings = load_config(self.config)
        return settings if self.lora is None else settings.with_lora(self.lora)
