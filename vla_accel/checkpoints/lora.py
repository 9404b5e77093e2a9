"""LoRA adapters as peft saves them, folded into the weights that they adapt: W + s·B·A, where s is alpha / rank, or
alpha / √rank if rank-stabilised.

Source of the layout and of s: peft (Hugging Face, Apache-2.0). Knows no model: each family says which stored names
make up a weight, and which no action depends on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_accel.checkpoints.checkpoint import shapes_of
from vla_accel.checkpoints.hub import HubName
from vla_accel.checkpoints.settings import fixed, neutral, read, refused
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, listing, read_json, some
from vla_accel.errors import CheckpointError
from vla_accel.files import user_path
from vla_accel.nn.network import Network, Origin

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRAPPED = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
N = TypeVar("N", bound=Network)
_log = logging.getLogger("vla_accel.checkpoints")

_SETTINGS = (
    read("peft_type base_model_name_or_path revision r lora_alpha rank_pattern alpha_pattern use_rslora"),
    neutral(
        "auto_mapping corda_config eva_config exclude_modules inference_mode layers_pattern layers_to_transform "
        "loftq_config lora_dropout lora_ga_config megatron_core modules_to_save peft_version qalora_group_size "
        "runtime_config target_modules task_type",
        "training, or shown by the file: it lists the adapted modules",
    ),
    fixed("bias", "biases are not adapted", None, "none"),
    # Other values change the base's weights: PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA.
    fixed("init_lora_weights", "it changes the base", None, True, False, "gaussian", "orthogonal", "eva"),
)
"""The fields of adapter_config.json, peft's LoraConfig."""


@dataclass(frozen=True)
class Change:
    """`scale`·`b`·`a` is added to a weight: `b` (out, rank), `a` (rank, in). Without `b`, `a` replaces the weight."""

    a: Tensor
    b: Tensor | None = None
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that it fits."""
        return tuple(self.a.shape) if self.b is None else (self.b.shape[0], self.a.shape[1])

    def applied(self, weight: Tensor) -> Tensor:
        """Return the changed weight, in float32."""
        a = self.a.to(weight.device, torch.float32)
        return a if self.b is None else weight.float() + self.scale * (self.b.to(weight.device, torch.float32) @ a)


@dataclass(frozen=True)
class Lora:
    """An adapter: the base that it was trained on, if it names one, and its changes by the base's tensor names."""

    folder: Path
    base: str | None
    changes: Mapping[str, Change]


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter and no whole weights."""
    return (folder / CONFIG).is_file() and not any(folder.glob("model*.safetensors"))


def read_lora(folder: Path) -> Lora:
    """Read peft's folder. Raises CheckpointError for other adapters than LoRA on linear layers, and for files that are
    missing or contradict each other."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise CheckpointError(f"lora {folder}: expected {file}, found {listing(folder)}")
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"lora {folder}: expected peft_type LORA in {CONFIG}, got {config.get('peft_type')!r}")
    if refusals := [*refused(config, _SETTINGS, "peft's LoRA")]:
        raise CheckpointError(
            f"lora {folder}: expected only factors of linear layers (W + s·B·A) in {CONFIG}: {'; '.join(refusals)}; "
            "merge the adapter with peft (merge_and_unload) and save the whole policy"
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
            changes[_unwrapped(plain)] = Change(weights.read(name).clone())
    for module, pair in factors.items():
        changes[_unwrapped(f"{module}.weight")] = _change(module, pair, config, folder)
    if not changes:
        raise CheckpointError(f"lora {folder}: expected at least one adapted weight, found none")
    return Lora(folder, _base_of(config), changes)


def fold(model: N, lora: Lora | None, pieces: Callable[[str], tuple[Piece, ...]], dead: Collection[str] = ()) -> N:
    """Fold an adapter, if there is one, into a model's weights, which are read later. Returns the same model.

    Args:
        model: A model whose weights have an origin.
        lora: The adapter.
        pieces: Returns the stored tensors that make up a canonical weight, in order along its first axis, by the names
            that the adapter's modules have.
        dead: Stored names that no action depends on. What an adapter changes there is left out.

    Raises:
        CheckpointError: The adapter changes a weight that the model lacks, or that has another shape.
    """
    if lora is None:
        return model
    assert model.origin is not None
    shapes = shapes_of(model)
    places: dict[str, tuple[str, int, Piece]] = {}
    for name in shapes:
        start = 0
        for piece in pieces(name):
            places[_unwrapped(piece.name)] = name, start, piece
            start += piece.rows or 0
        places.setdefault(name, (name, 0, Piece(name)))
    others = lora.changes.keys() - places.keys()
    dropped = others & {_unwrapped(name) for name in dead}
    if dropped:
        _log.info(
            "lora %s: skipped the adapters of %s: no action depends on these weights",
            lora.folder,
            some(sorted(dropped)),
        )
    changes: dict[str, list[tuple[slice, Change]]] = {}
    wrong = []
    for stored in lora.changes.keys() & places.keys():
        change, (name, start, piece) = lora.changes[stored], places[stored]
        reason = piece.why_not(change.shape, shapes[name])
        if change.b is not None and piece.entry is not None:
            reason = "expected a whole tensor, got factors"
        if reason:
            wrong.append(f"{stored} ({reason})")
        rows = slice(None) if piece.rows is None else slice(start, start + piece.rows)
        taken = change if change.b is not None else Change(piece.taken(change.a))
        changes.setdefault(name, []).append((rows, taken))
    if unknown := sorted(others - dropped):
        wrong = [f"this one lacks {some(unknown)}"]
    if wrong:
        raise CheckpointError(f"lora {lora.folder}: it adapts another model: {some(sorted(wrong))}")
    model.origin = Folded(model.origin, changes)
    return model


class Folded:
    """An origin of weights (`nn.network.Origin`) with an adapter folded in: changes of the rows of each weight."""

    def __init__(self, origin: Origin, changes: Mapping[str, list[tuple[slice, Change]]]) -> None:
        self._origin, self._changes = origin, changes

    def __deepcopy__(self, memo: object) -> Folded:
        return self  # shared by copies of a network

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        if name not in self._changes:
            return self._origin.read(name, dtype, device)
        stored = self._origin.read(name, None, device)
        value = stored.float()
        for rows, change in self._changes[name]:
            value[rows] = change.applied(value[rows])
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"lora: non-finite values in {name}")
        return value.to(dtype or stored.dtype)

    def sample(self, name: str, stride: int) -> Tensor:
        if name not in self._changes:
            return self._origin.sample(name, stride)
        return self.read(name, None, torch.device("cpu")).reshape(-1)[::stride].clone()

    def progress(self) -> AbstractContextManager[None]:
        return self._origin.progress()


class MergedWeights:
    """The tensors of a model that was saved with its LoRA adapter (`Weights`): merged, and named as without one.

    Args:
        weights: The tensors as peft names them: `START.base_model.model.MODULE.base_layer.weight` next to
            `….MODULE.lora_A.default.weight` and `lora_B`.
        start: Precedes `base_model.model.` in their names, such as "model.".
        rank, alpha: Those of every adapted layer.
        where: The file that says so, for errors.

    Raises:
        CheckpointError: There is no adapter, or another one than LoRA of this rank on linear layers.
    """

    def __init__(self, weights: Weights, start: str, rank: int, alpha: int, where: Path) -> None:
        self._weights, self._scale = weights, alpha / rank
        self._stored: dict[str, str] = {}
        self._factors: dict[str, dict[str, str]] = {}
        for name in weights.shapes:
            inner = name.removeprefix(start)
            plain = start + inner.removeprefix(_WRAPPED)
            if match := _FACTOR.fullmatch(plain):
                self._factors.setdefault(f"{match[1]}.weight", {})[match[2]] = name
            else:
                self._stored[plain.replace(".base_layer.", ".")] = name
        self.shapes = {plain: weights.shapes[name] for plain, name in self._stored.items()}
        self.sizes = {plain: weights.sizes[name] for plain, name in self._stored.items()}
        self.integers = {p: weights.integers[name] for p, name in self._stored.items() if name in weights.integers}
        if not self._factors or (others := [name for name in self._stored if "lora_" in name]):
            got = some(sorted(others)) if self._factors else "none"
            raise CheckpointError(f"{where}: expected weights with lora_A and lora_B of linear layers, got {got}")
        for name, pair in self._factors.items():
            shapes = {side: weights.shapes[factor] for side, factor in pair.items()}
            whole = self.shapes.get(name, ())
            if len(whole) != 2 or shapes != {"A": (rank, whole[1]), "B": (whole[0], rank)}:
                got = ", ".join(f"lora_{side} {shape}" for side, shape in sorted(shapes.items()))
                raise CheckpointError(f"{where}: {name}: expected factors of rank {rank} for {whole}, got {got}")

    def read(self, name: str) -> Tensor:
        """Return a tensor in its stored dtype, an adapted one in float32."""
        stored, pair = self._weights.read(self._stored[name]), self._factors.get(name)
        if pair is None:
            return stored
        a, b = (self._weights.read(pair[side]) for side in "AB")
        return Change(a, b, self._scale).applied(stored)


def _unwrapped(name: str) -> str:
    """Return a name without the prefix of lerobot's policies."""
    return name.removeprefix("model.").removeprefix("_groot_model.")


def _base_of(config: Mapping[str, Any]) -> str | None:
    """Return the base's name, with the revision that the adapter was trained on."""
    base, revision = config.get("base_model_name_or_path") or None, config.get("revision")
    named = None if base is None or user_path(base).exists() else HubName.parse(base)
    if named is None or not revision or named.revision is not None:
        return base
    return str(dataclasses.replace(named, revision=str(revision)))


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
    """Return a module's own rank or alpha if a pattern names it, else the adapter's."""
    own = (value for key, value in (config.get(pattern) or {}).items() if re.fullmatch(rf"(.*\.)?({key})", module))
    value = next(own, config.get(name))
    if not isinstance(value, (int, float)):
        raise CheckpointError(f"lora {folder}: expected a number as {name} of {module} in {CONFIG}, got {value!r}")
    return value
