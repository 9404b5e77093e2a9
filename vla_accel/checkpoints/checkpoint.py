"""Stored tensors as the weights of a network, and this package's own checkpoint format.

Every key is accounted for: loading raises CheckpointError that lists missing, left-over and misshaped tensors. Weights
are read tensor by tensor, directly to their device and dtype, by a recipe from canonical names to stored ones. Only
safetensors files are opened; no pickle is ever loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, listing, some
from vla_accel.checkpoints.writer import save_weights
from vla_accel.config import LARGEST
from vla_accel.config.mapping import from_mapping, read_mapping
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.files import write_json
from vla_accel.nn.network import Network
from vla_accel.progress import shown

FORMAT = "vla_accel.checkpoint/1"
Recipe = Mapping[str, tuple[Piece, ...]]
"""The stored tensors that make up each canonical one."""
T = TypeVar("T")
N = TypeVar("N", bound=Network)
# Values checked or cast at a time: for a whole embedding table, half a gigabyte would be allocated.
_CHECKED = 1 << 22
_SHOWN_BYTES = 256 << 20


class Stored:
    """A checkpoint's weights as a network's `Origin`.

    Reading a weight needs host memory for one stored tensor, which is mapped without a copy, and device memory for the
    weight and a few megabytes for the cast.
    """

    def __init__(self, weights: Weights, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        self.weights, self.recipe, self.shapes, self.where = weights, recipe, shapes, where
        self._advance: Callable[[int], None] = lambda count: None

    def __deepcopy__(self, memo: object) -> Stored:
        return self  # shared by copies of a network

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Return one canonical tensor; each piece is read, copied and cast before the next one."""
        value, row = torch.empty(0), 0
        for index, piece in enumerate(self.recipe[name]):
            source = piece.taken(self.weights.read(piece.name))
            if index == 0:
                value = torch.empty(self.shapes[name], dtype=dtype or source.dtype, device=device)
            elif dtype is None:
                # Pieces of one matrix with different dtypes: the wider dtype represents both exactly.
                value = value.to(torch.promote_types(value.dtype, source.dtype))
            place = value[row : row + len(source)] if len(self.recipe[name]) > 1 else value
            _upload(source.reshape(place.shape), place)
            row += len(source) if source.ndim else 0
            del source  # releases the mapped pages before the next tensor is read
            self._advance(self.weights.sizes[piece.name])
        if not all(bool(torch.isfinite(part).all()) for part in value.flatten().split(_CHECKED)):
            raise CheckpointError(f"checkpoint {self.where}: non-finite values in {name}")
        return value

    def sample(self, name: str, stride: int) -> Tensor:
        found, begin = [], 0
        for piece in self.recipe[name]:
            values = piece.taken(self.weights.read(piece.name)).reshape(-1)
            found.append(values[-begin % stride :: stride].clone())
            begin += len(values)
        return torch.cat(found)

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        total = sum(self.weights.sizes[p.name] for parts in self.recipe.values() for p in parts)
        quick = contextlib.nullcontext(lambda count, total: None)
        with quick if total < _SHOWN_BYTES else shown(f"loading {Path(self.where).name}", size=True) as advance:
            self._advance = lambda count: advance(count, total)
            yield
        self._advance = lambda count: None


def _upload(source: Tensor, target: Tensor) -> None:
    """Copy from the host. The dtype is changed on the target's device, a few megabytes at a time."""
    if source.dtype == target.dtype or target.device.type == "cpu":
        target.copy_(source)
        return
    for values, place in zip(source.reshape(-1).split(_CHECKED), target.view(-1).split(_CHECKED), strict=True):
        place.copy_(values.to(target.device))


def shapes_of(network: Network) -> dict[str, tuple[int, ...]]:
    """Return canonical names and shapes."""
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def fitted(network: N, weights: Weights, recipe: Recipe, where: str, what: str, dead: Iterable[str] = ()) -> N:
    """Check every key and set the origin of a network without weights (`Network.empty`), which reads them when they
    are needed.

    Args:
        network: The network.
        weights: The stored tensors.
        recipe: The stored tensors of each canonical one.
        where: The folder, for errors.
        what: The model or file that the tensors must fit, for errors.
        dead: Stored tensors that nothing reads.

    Raises:
        CheckpointError: Tensors are missing, left over, misshaped or not floats.
    """
    shapes, stored = shapes_of(network), weights.shapes
    needed = {p.name: (p, shapes[name]) for name, parts in recipe.items() for p in parts}
    present = sorted(needed.keys() & stored.keys())
    reasons = {name: needed[name][0].why_not(stored[name], needed[name][1]) for name in present}
    groups = {
        "missing": sorted(needed.keys() - stored.keys()),
        "left over": sorted(stored.keys() - needed.keys() - set(dead)),
        "misshaped": [f"{name} ({reason})" for name, reason in reasons.items() if reason],
        "not float": [f"{name} ({weights.integers[name]})" for name in present if name in weights.integers],
    }
    if problems := [f"{len(names)} {group}: {some(names)}" for group, names in groups.items() if names]:
        raise CheckpointError(f"checkpoint {where} does not fit {what}: {'; '.join(problems)}")
    network.origin = Stored(weights, recipe, shapes, where)
    return network


def compare_sizes(pairs: Iterable[tuple[str, object, object]], where: str) -> None:
    """Raise CheckpointError if config and weights contradict each other. `pairs`: name, the config's value (None if it
    has none) and the weights' value."""
    wrong = [f"{n}: config says {stated}, weights say {shown}" for n, stated, shown in pairs
             if stated not in (None, shown)]  # fmt: skip
    if wrong:
        raise CheckpointError(f"checkpoint {where}: config and weights contradict each other: {'; '.join(wrong)}")


# -- this package's own format ------------------------------------------------------------------------------------


def is_own(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json has this package's format. The first version only had a `kind`."""
    return "format" in content or "kind" in content


def read_config(folder: Path, kind: type[T]) -> T:
    """Return the sizes, a dataclass `kind`, in a folder's `config.json`. Raises CheckpointError."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"checkpoint {folder}: expected config.json, found {listing(folder)}")
    try:
        content = read_mapping(path)
        if content.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path}: expected format {FORMAT!r}")
        content.pop("family", None)
        if (wrong := _no_size(content)) is not None:
            raise ConfigError(wrong)
        return from_mapping(kind, content)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _no_size(content: Mapping[str, Any], where: str = "") -> str | None:
    """Return an error for the first number that cannot be a size; None if there is none."""
    for key, value in content.items():
        if isinstance(value, Mapping) and (wrong := _no_size(value, f"{where}{key}.")) is not None:
            return wrong
        most = 2**20 if key in ("vocab_size", "width", "mlp_dim") else LARGEST
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value <= most:
            return f"{where}{key}: expected {f'at most {most}' if value > most else 'more than 0'}, got {value}"
    return None


def fitted_own(network: N, folder: Path) -> N:
    """Set the origin of a network to a folder of this package's format. Raises CheckpointError."""
    recipe = {name: (Piece(name),) for name in shapes_of(network)}
    return fitted(network, SafetensorsWeights(folder), recipe, str(folder), "its config.json")


def save_checkpoint(state: Mapping[str, Tensor], config: Any, folder: Path, family: str | None = None) -> None:
    """Write canonical weights and sizes into a folder; each file appears whole or not at all. `family` may be None if
    the sizes have a `kind` with its name."""
    save_weights(state, folder / "model.safetensors")
    content = {"format": FORMAT, **({} if family is None else {"family": family}), **dataclasses.asdict(config)}
    write_json(folder / "config.json", content)
