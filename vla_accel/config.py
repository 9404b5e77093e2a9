"""Policy configuration: frozen dataclasses, read from YAML or JSON. An unknown key is an error that names the nearest.

Knows nothing about what the engines do with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vla_accel.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16"]
EngineName = Literal["eager", "native", "torch_tensorrt", "tensorrt", "tensorrt_rtx"]
EnginePrecision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
T = typing.TypeVar("T")


@dataclass(frozen=True)
class EngineSpec:
    """Which engine a component gets.

    `engine`: the engine asked for. `fallback`: engines to try, in order, if it cannot be built; empty means that
    failing to build is an error. `precision`: of the large products inside the engine; "auto" is the policy's.
    """

    engine: EngineName = "eager"
    fallback: tuple[EngineName, ...] = ()
    precision: EnginePrecision = "auto"


@dataclass(frozen=True)
class PolicyConfig:
    """How a policy runs. What it computes is decided by the checkpoint and by `num_steps`.

    `num_steps`: denoising steps. `precision`: dtype of the large products; "auto" is BF16 on a GPU and FP32 on a CPU.
    `device`: "auto", "cpu", "cuda" or "cuda:N". `strict`: a fallback raises instead of being recorded. `seed`: of the
    noise, where the caller gives none. `default_prompt`: used when an observation carries none.
    """

    num_steps: int = 10
    precision: Precision = "auto"
    device: str = "auto"
    strict: bool = False
    seed: int = 0
    default_prompt: str | None = None
    vision: EngineSpec = field(default_factory=EngineSpec)
    kv_cache: EngineSpec = field(default_factory=EngineSpec)
    denoise: EngineSpec = field(default_factory=EngineSpec)

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or isinstance(self.num_steps, bool):
            raise ConfigError(f"num_steps: expected int, got {self.num_steps!r}")
        if self.num_steps < 1:
            raise ConfigError(f"num_steps: expected at least 1, got {self.num_steps}")


def load_config(source: str | Path | Mapping[str, Any] | PolicyConfig | None) -> PolicyConfig:
    """A `PolicyConfig` from a YAML or JSON file, a mapping, or as it is; None gives the defaults.

    Raises ConfigError for an unreadable file, an unknown key or a value of the wrong kind.
    """
    if source is None:
        return PolicyConfig()
    if isinstance(source, PolicyConfig):
        return source
    if isinstance(source, Mapping):
        return from_mapping(PolicyConfig, source)
    return from_mapping(PolicyConfig, read_mapping(Path(source)))


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    import yaml

    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config {path}: expected a readable YAML or JSON file, got: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config {path}: expected a mapping, got {type(content).__name__}")
    return content


def from_mapping(kind: type[T], content: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from a mapping, recursively. Every key must be a field; tuples come from lists."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {where}{key!s}: did you mean {where}{nearest[0]}?")
        values[key] = _convert(hints[key], value, f"{where}{key}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{where or kind.__name__}: {error}") from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        # A component may be given as just its engine's name.
        if isinstance(value, str) and hint is EngineSpec:
            value = {"engine": value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a mapping, got {value!r}")
        return from_mapping(hint, value, f"{where}.")
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where}: expected one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [a for a in arguments if a is not type(None)]
        return _convert(inner[0], value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {value!r}")
        return tuple(_convert(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    assert isinstance(hint, type)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
