"""Read dataclasses from YAML, JSON and mappings, with a check of every key and type."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from vla_accel.errors import ConfigError, nearest, unknown
from vla_accel.files import user_path

T = typing.TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Within:
    """Marks a number, or several: `least` to `most`; `above` refuses `least` itself, `below` refuses `most`."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ConfigError for a number outside the range, and for NaN."""
        refused = [bound for bound, own in ((self.least, self.above), (self.most, self.below)) if own]
        if self.least <= value <= self.most and math.isfinite(value) and value not in refused:
            return
        if self.most < math.inf and not refused:
            expected = f"{self.least} to {self.most}"
        else:
            expected = f"more than {self.least}" if self.above else f"at least {self.least}"
            if self.most < math.inf:
                expected += f", less than {self.most}" if self.below else f", at most {self.most}"
        raise ConfigError(f"{name}: expected {expected}, got {value}")


class Checked:
    """Base of dataclasses that check the types and ranges (`Within`) of their fields, also when made in Python."""

    where = ""
    """Prefix of the fields in errors."""
    alone = ""
    """The field that a string instead of a mapping sets, if any."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            # In Python, `engines.ENGINES` may hold engines that a file cannot name.
            hint = {"engine": str, "fallback": tuple[str, ...]}.get(name, hint)
            value = _convert(hint, getattr(self, name), f"{self.where}{name}")
            object.__setattr__(self, name, value)
            for mark in getattr(hint, "__metadata__", ()) if value is not None else ():
                mark.check(f"{self.where}{name}", value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML or JSON file. Raises ConfigError, also for a key that occurs twice."""
    import yaml

    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        twice = None if path.suffix == ".json" else _duplicate_key(yaml.compose(text))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"config {path}: expected a readable YAML or JSON file, got: {reason}") from error
    if not isinstance(content, dict):
        found = "nothing in it" if content is None else type(content).__name__
        raise ConfigError(f"config {path}: expected a mapping, got {found}")
    if twice is not None:
        raise ConfigError(f"config {path}: {twice}: this key appears twice")
    return content


def _duplicate_key(node: Any) -> str | None:
    """Return the first duplicate key of a YAML document, whose parser would silently keep the last."""
    seen: set[str] = set()
    for child in node.value if isinstance(getattr(node, "value", None), list) else ():
        key, inner = child if isinstance(child, tuple) else (None, child)
        if key is not None and isinstance(key.value, str):
            if key.value in seen:
                return key.value
            seen.add(key.value)
        if (found := _duplicate_key(inner)) is not None:
            return found if key is None else f"{key.value}.{found}"
    return None


def from_mapping(kind: type[T], content: Mapping[str, Any], where: str = "") -> T:
    """Make a dataclass from a mapping, recursively; lists become tuples. `where`: prefix of the keys in errors. Raises
    ConfigError for an unknown or missing key, and for a value of the wrong type."""
    hints = _hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [f.name for f in fields]
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in names:
            hint = nearest(key, names, where) or f": expected one of {', '.join(names)}"
            raise ConfigError(f"unknown key {where}{key!s}{hint}")
        values[key] = _convert(hints[key], value, f"{where}{key}")
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    if lacking := [f"{where}{name}" for name in needed if name not in values]:
        raise ConfigError(f"expected {', '.join(lacking)}, found {', '.join(content) or 'nothing'}")
    try:
        return kind(**values)
    except ConfigError as error:
        if not where:
            raise
        # The dataclass's error names its field; add the component.
        raise ConfigError(f"{where}{str(error).removeprefix(getattr(kind, 'where', ''))}") from error


def as_mapping(content: Any) -> dict[str, Any]:
    """The inverse of `from_mapping` for a dataclass with defaults: the fields that differ from them, as JSON types."""
    usual, values = vars(type(content)()), vars(content)
    return {name: _plain(value) for name, value in values.items() if value != usual[name]}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_mapping(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _convert(arguments[0], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        alone = getattr(hint, "alone", "")
        if isinstance(value, str) and alone:
            value = {alone: value}
        if not isinstance(value, Mapping):
            expected = f"an {alone}'s name or a mapping" if alone else "a mapping"
            raise ConfigError(f"{where}: expected {expected}, got {value!r}")
        return from_mapping(hint, value, f"{where}.")
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise ConfigError(unknown(where, value, map(str, arguments)))
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [a for a in arguments if a is not type(None)]
        several = [a for a in inner if typing.get_origin(a) is tuple] if isinstance(value, (list, tuple)) else []
        return _convert((several or inner)[0], value, where)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a mapping, got {value!r}")
        return {str(k): _convert(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {value!r}")
        return tuple(_convert(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    # NumPy's numbers, too.
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if hint is Path and isinstance(value, (str, Path)):
        return user_path(value)
    assert isinstance(hint, type)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
