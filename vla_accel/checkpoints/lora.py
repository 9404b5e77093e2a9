"""LoRA adapters as peft saves them, folded into the weights that they adapt: W + s·B·A, where s is alpha / rank, or
alpha / √rank if rank-stabilised.

Source of the layout and of s: peft (Hugging Face, Apache-2.0). Knows no model: who folds says which rows of which
weight a stored name means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_json, some
from vla_accel.errors import CheckpointError
from vla_accel.models.network import Origin

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRAPPED = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
# What would make an adapter more than W + s·B·A.
_OTHERS = ("use_dora", "use_qalora", "lora_bias", "layer_replication", "alora_invocation_tokens")


@dataclass(frozen=True)
class Change:
    """What becomes of a weight: `scale`·`b`·`a` is added, (out, rank) and (rank, in), or it is `whole`, another one."""

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    whole: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it fits."""
        if self.whole is not None:
            return tuple(self.whole.shape)
        assert self.a is not None and self.b is not None
        return (self.b.shape[0], self.a.shape[1])

    def of(self, weight: Tensor) -> Tensor:
        """The changed weight, in float32."""
        if self.whole is not None:
            return self.whole.to(weight.device, torch.float32)
        assert self.a is not None and self.b is not None
        a, b = (factor.to(weight.device, torch.float32) for factor in (self.a, self.b))
        return weight.float() + self.scale * (b @ a)


@dataclass(frozen=True)
class Place:
    """Where a stored tensor lies: `rows` rows of a canonical weight, from row `start`; None: all of it."""

    name: str
    start: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Lora:
    """An adapter. `changes`: by the weight's name, as the base checkpoint has it; `base`: what it was trained on, if it
    says so."""

    folder: Path
    base: str | None
    changes: Mapping[str, Change]


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole weights."""
    return (folder / CONFIG).is_file() and not any(folder.glob("model*.safetensors"))


def read_lora(folder: Path) -> Lora:
    """peft's folder: `adapter_config.json` and `adapter_model.safetensors`.

    Raises CheckpointError for other adapters than LoRA on linear layers, and for files that are missing or contradict
    each other.
    """
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise CheckpointError(f"lora {folder}: expected {file}, found {listing(folder)}")
    config = read_json(folder / CONFIG)
    more = [f"{name} {config[name]}" for name in _OTHERS if config.get(name)]
    if config.get("peft_type") != "LORA" or more:
        raise CheckpointError(
            f"lora {folder}: expected peft_type LORA and nothing beside it, got {config.get('peft_type')}"
            f"{''.join(f', {one}' for one in more)}"
        )
    weights = SafetensorsWeights(folder / WEIGHTS)
    factors: dict[str, dict[str, Tensor]] = {}
    changes: dict[str, Change] = {}
    for name in weights.shapes:
        plain = name.removeprefix(_WRAPPED)
        if match := _FACTOR.fullmatch(plain):
            factors.setdefault(match[1], {})[match[2]] = weights.read(name).clone()
        elif "lora" in plain:
            raise CheckpointError(f"lora {folder}: expected lora_A and lora_B of linear layers, got {name}")
        else:
            changes[_unwrapped(plain)] = Change(whole=weights.read(name).clone())
    for module, pair in factors.items():
        changes[_unwrapped(f"{module}.weight")] = _change(module, pair, config, folder)
    if not changes:
        raise CheckpointError(f"lora {folder}: expected at least one adapted weight, found none")
    return Lora(folder, config.get("base_model_name_or_path") or None, changes)


class Folded:
    """An origin of weights (`models.network.Origin`) with an adapter folded in.

    Args: `places`: where each of the base's stored names lies.
    Raises CheckpointError, which names what does not fit, for an adapter of another base.
    """

    def __init__(self, origin: Origin, lora: Lora, places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]]
                 ) -> None:  # fmt: skip
        self._origin = origin
        self._changes: dict[str, list[tuple[slice, Change]]] = {}
        unknown = sorted(lora.changes.keys() - places.keys())
        if unknown:
            raise CheckpointError(f"lora {lora.folder}: it adapts another model: this one lacks {some(unknown)}")
        wrong = []
        for name, change in lora.changes.items():
            place = places[name]
            whole = shapes[place.name]
            shape = whole if place.rows is None else (place.rows, *whole[1:])
            if change.shape != shape:
                wrong.append(f"{name} (expected {change.shape}, got {shape})")
            rows = slice(None) if place.rows is None else slice(place.start, place.start + place.rows)
            self._changes.setdefault(place.name, []).append((rows, change))
        if wrong:
            raise CheckpointError(f"lora {lora.folder}: it adapts another model: {some(wrong)}")

    def __deepcopy__(self, memo: object) -> Folded:
        return self  # of a copied network, too

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        if name not in self._changes:
            return self._origin.read(name, dtype, device)
        stored = self._origin.read(name, None, device)
        value = stored.float()
        for rows, change in self._changes[name]:
            value[rows] = change.of(value[rows])
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"lora: non-finite values in {name}")
        return value.to(dtype or stored.dtype)

    def sample(self, name: str, stride: int) -> Tensor:
        if name not in self._changes:
            return self._origin.sample(name, stride)
        return self.read(name, None, torch.device("cpu")).reshape(-1)[::stride].clone()

    def progress(self) -> AbstractContextManager[None]:
        return self._origin.progress()


def check_base(lora: Lora, base: str) -> None:
    """Raise CheckpointError if an adapter says that it was trained on another checkpoint than `base`, by the last part
    of their names."""
    if lora.base is not None and Path(lora.base).name.lower() != Path(base).name.lower():
        raise CheckpointError(
            f"lora {lora.folder}: expected on top of {lora.base}, as its {CONFIG} says, got {base}; if that is "
            "the same checkpoint under another name, change base_model_name_or_path there"
        )


def _unwrapped(name: str) -> str:
    """Without the `model.` that lerobot's policies have around the model."""
    return name.removeprefix("model.")


def _change(module: str, pair: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> Change:
    if set(pair) != {"A", "B"}:
        raise CheckpointError(f"lora {folder}: expected lora_A and lora_B of {module}, got only lora_{min(pair)}")
    a, b = pair["A"], pair["B"]
    rank = _of_module(config, "rank_pattern", "r", module, folder)
    alpha = _of_module(config, "alpha_pattern", "lora_alpha", module, folder)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise CheckpointError(f"lora {folder}: {module}: expected factors of rank {rank:g}, got {shapes}")
    return Change(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_module(config: Mapping[str, Any], pattern: str, name: str, module: str, folder: Path) -> float:
    """A module's own rank or alpha, where a pattern names it, else everybody's."""
    own = (value for key, value in (config.get(pattern) or {}).items() if re.fullmatch(rf"(.*\.)?({key})", module))
    value = next(own, config.get(name))
    if not isinstance(value, (int, float)):
        raise CheckpointError(f"lora {folder}: expected a number as {name} of {module} in {CONFIG}, got {value!r}")
    return value
