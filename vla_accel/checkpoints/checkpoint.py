"""Checkpoints to models: every key is accounted for, or loading raises and lists what is wrong.

Weights of this package (canonical names, config in `config.json`), of openpi's PyTorch model and of lerobot's are
read, tensor by tensor, straight to where and what they are to be. Only safetensors files are opened; no pickle is
ever loaded. Knows nothing of robots, statistics or tokenizers: see `vla_accel.checkpoints.loading`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_accel.checkpoints.dialects import DEAD, EMBEDDINGS, Piece, dialect_of, pieces
from vla_accel.checkpoints.weights import MemoryWeights, SafetensorsWeights, Weights, listing, some
from vla_accel.config import from_mapping, read_mapping
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.files import replacing
from vla_accel.models.pi0 import Pi0, Pi0Config, _kept_wide

FORMAT = "vla_accel.checkpoint/1"
# Values checked at a time: a check of a whole embedding table would need half a gigabyte.
_CHECKED = 1 << 22
_SHOWN_BYTES = 256 << 20


def read_config(folder: Path) -> Pi0Config:
    """The architecture in a checkpoint folder's own `config.json`. Raises CheckpointError."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"checkpoint {folder}: expected config.json, found {listing(folder)}")
    try:
        content = read_mapping(path)
        if content.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path}: expected format {FORMAT!r}")
        return from_mapping(Pi0Config, content)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the `model*.safetensors` in a folder, on the CPU.

    Raises CheckpointError for a missing, damaged or doubled file or key.
    """
    weights = SafetensorsWeights(path)
    return {name: weights.read(name) for name in weights.shapes}


def load_checkpoint(
    path: str | Path,
    config: Pi0Config | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Pi0:
    """A model with the checkpoint's weights, in eval mode.

    Args: `path`: a folder or one safetensors file; `config`: needed where the folder has no config of ours; `dtype`:
    of the large products, what openpi keeps in float32 stays so (`Pi0.to_compute_dtype`), None keeps what is stored.
    Host memory needed: the model's bytes, if `device` is the CPU, and one tensor more.
    Raises CheckpointError that lists keys missing, left over or misshaped, and non-finite weights.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"checkpoint {path}: no such file or folder")
    config = config or read_config(path if path.is_dir() else path.parent)
    return load_weights(SafetensorsWeights(path), config, str(path), device=device, dtype=dtype)


def load_tensors(tensors: Mapping[str, Tensor], config: Pi0Config, where: str) -> Pi0:
    """As `load_checkpoint`, from tensors already read, of any dialect; the mapping is not changed."""
    return load_weights(MemoryWeights(tensors), config, where)


def load_weights(
    weights: Weights,
    config: Pi0Config,
    where: str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Pi0:
    """As `load_checkpoint`, from weights that are read one at a time. Shows progress for large models."""
    model, expected = _empty(config)
    recipe = check_weights(weights, config, where)
    state: dict[str, Tensor] = {}
    broken: list[str] = []
    # Largest first: while it is copied, its source is in memory too, and the rest is not there yet.
    order = sorted(recipe, key=lambda n: -sum(weights.sizes[p.name] for p in recipe[n]))
    with _progress(sum(weights.sizes[p.name] for parts in recipe.values() for p in parts), where) as advance:
        for name in order:
            state[name] = _assemble(weights, recipe[name], expected[name], device, _target(name, dtype), advance)
            if not all(bool(torch.isfinite(part).all()) for part in state[name].flatten().split(_CHECKED)):
                broken.append(name)
    if broken:
        raise CheckpointError(f"checkpoint {where}: non-finite values in {some(sorted(broken))}")
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def _empty(config: Pi0Config) -> tuple[Pi0, dict[str, tuple[int, ...]]]:
    """The model without any memory for its weights, and their shapes."""
    with torch.device("meta"):
        model = Pi0(config)
    return model, {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _target(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is None or not _kept_wide(name):
        return dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def _assemble(
    weights: Weights,
    parts: tuple[Piece, ...],
    shape: tuple[int, ...],
    device: str | torch.device,
    dtype: torch.dtype | None,
    advance: Callable[[int], None],
) -> Tensor:
    """One canonical tensor from its pieces, each read, cast and copied to its place before the next."""
    result = torch.empty(0)
    row = 0
    for index, part in enumerate(parts):
        source = weights.read(part.name)
        if index == 0:
            result = torch.empty(shape, dtype=dtype or source.dtype, device=device)
        elif dtype is None and source.dtype != result.dtype:
            # Pieces of one matrix in different dtypes: the wider holds both exactly.
            result = result.to(torch.promote_types(result.dtype, source.dtype))
        rows = result[row : row + source.shape[0]] if len(parts) > 1 else result
        rows.copy_(source)
        row += source.shape[0] if source.ndim else 0
        del source  # and with it the pages of its file, before the next is read
        advance(weights.sizes[part.name])
    return result


@contextlib.contextmanager
def _progress(total: int, where: str) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal's error stream, for models that take a while."""
    if total < _SHOWN_BYTES:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"loading {Path(where).name}", total=total)
        yield lambda count: progress.advance(task, count)


# -- every key is accounted for -----------------------------------------------------------------------------------


def check_weights(weights: Weights, config: Pi0Config, where: str) -> dict[str, tuple[Piece, ...]]:
    """The stored tensors behind each canonical one. Raises CheckpointError if anything is missing, left over,
    misshaped or no float."""
    _, expected = _empty(config)
    names = weights.shapes.keys()
    dialect, prefix = dialect_of(names)
    if dialect == "vla_accel":
        recipe: dict[str, tuple[Piece, ...]] = {name: (Piece(name),) for name in expected}
        known = set(expected)
    else:
        recipe = {name: pieces(name, config, prefix) for name in expected}
        tables = [prefix + e for e in EMBEDDINGS if prefix + e in names]
        if len(tables) == 2 and not torch.equal(weights.read(tables[0]), weights.read(tables[1])):
            raise CheckpointError(f"checkpoint {where}: {' and '.join(tables)} are tied, but differ")
        if tables:
            recipe["embed.weight"] = (Piece(tables[0]),)
        known = {p.name for parts in recipe.values() for p in parts} | set(tables) | {prefix + d for d in DEAD}
    problems = _differences(weights, recipe, expected, known)
    if problems:
        raise CheckpointError(f"checkpoint {where} does not fit {config.kind}: " + "; ".join(problems))
    return recipe


def _differences(
    weights: Weights,
    recipe: Mapping[str, tuple[Piece, ...]],
    expected: Mapping[str, tuple[int, ...]],
    known: set[str],
) -> list[str]:
    needed = {p.name: (p, expected[name]) for name, parts in recipe.items() for p in parts}
    missing = sorted(needed.keys() - weights.shapes.keys())
    extra = sorted(weights.shapes.keys() - known)
    misshaped, integers = [], []
    for name, (piece, whole) in sorted(needed.items()):
        if name not in weights.shapes:
            continue
        shape = whole if piece.rows is None else (piece.rows, *whole[1:])
        if weights.shapes[name] != shape:
            misshaped.append(f"{name} (expected {shape}, got {weights.shapes[name]})")
        if name in weights.integers:
            integers.append(f"{name} ({weights.integers[name]})")
    groups = (("missing", missing), ("left over", extra), ("misshaped", misshaped), ("not float", integers))
    return [f"{len(keys)} {what}: {some(keys)}" for what, keys in groups if keys]


# -- writing ------------------------------------------------------------------------------------------------------


def save_checkpoint(state: Mapping[str, Tensor], config: Pi0Config, folder: Path) -> None:
    """Write canonical weights and config into a folder; each file appears whole or not at all, readable by all."""
    from safetensors.torch import save_file

    with replacing(folder / "model.safetensors") as temporary:
        save_file({k: v.contiguous() for k, v in state.items()}, str(temporary))
        temporary.chmod(0o644)  # safetensors leaves it readable by its owner alone
    content = {"format": FORMAT, **dataclasses.asdict(config)}
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def describe(config: Pi0Config, model: Pi0) -> dict[str, Any]:
    """What a breakdown or metadata says of a model."""
    return {
        "kind": config.kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "action_horizon": config.action_horizon,
        "action_dim": config.action_dim,
    }
