"""openpi's JAX checkpoints to safetensors under openpi's PyTorch names, array by array, with a report of each.

The result is a folder that this package, and openpi's own PyTorch code, can load. Knows nothing of how the source is
stored: see `Parameters`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from vla_accel.checkpoints.jax_layout import Target, targets
from vla_accel.checkpoints.jax_lora import FoldedParameters
from vla_accel.checkpoints.paligemma import DEAD, EMBEDDINGS
from vla_accel.checkpoints.writer import SafetensorsWriter
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.pi0.checkpoint import Stated, check_weights, infer_config
from vla_accel.families.pi0.network import Pi0, Pi0Config
from vla_accel.files import replacing, write_json

StoredPrecision = Literal["mixed", "bfloat16", "float32"]
SCHEMA = "vla_accel.conversion/1"


class Parameters(Protocol):
    """JAX parameters by name (joined by slashes), read one at a time."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Row:
    """What became of one part of one JAX parameter. `rms`: root mean square of its values, as a check."""

    source: str
    source_dtype: str
    index: list[int]
    layout: str
    target: str
    shape: list[int]
    dtype: str
    rms: float


@dataclass(frozen=True)
class Report:
    """The conversion, as plain data. `adapters`: LoRA adapters that were folded in."""

    schema: str
    source: str
    output: str
    kind: str
    parameters: int
    adapters: int
    config: dict[str, Any]
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    parameters: Parameters,
    output: Path,
    *,
    action_horizon: int,
    precision: StoredPrecision = "mixed",
    source: str = "memory",
    assets: Path | None = None,
    discrete_state_input: bool | None = None,
    preset: str | None = None,
    unused_head: bool = False,
    lora_scale: float = 1.0,
    advance: Callable[[str], None] = lambda name: None,
) -> Report:
    """Write `model.safetensors`, `config.json`, `conversion.json` and `assets/` into `output`.

    Args: `action_horizon`: of the model, which no parameter shows; `precision`: "mixed" keeps in float32 what openpi
    computes in float32 and the rest in bfloat16, the others cast everything; `assets`: folder of statistics to copy;
    `discrete_state_input`, `preset`: written into config.json for loaders that ask; `unused_head`:
    also write the expert's output head, as zeros: nothing reads it, but openpi's own loader insists on it;
    `lora_scale`: alpha / rank of the attention's LoRA adapters, which are folded in (`jax_lora`); `advance`: called
    with each source's name.
    Raises CheckpointError if a parameter has no place, or the model lacks one, or values are not finite; ConfigError
    for a scale without adapters.
    """
    parameters = FoldedParameters(parameters, lora_scale, source)
    if lora_scale != 1.0 and not parameters.scaled:
        raise ConfigError(f"lora_scale: expected a checkpoint with LoRA adapters of attention, got {lora_scale}")
    places = targets(parameters.shapes, source)
    shapes = {t.name: t.shape for t in places}
    stated = Stated(action_horizon=action_horizon, discrete_state_input=discrete_state_input)
    config = infer_config(shapes, "", stated, source)
    recipe = check_weights(_Shapes(shapes), config, source)
    wide = {part.name for name, parts in recipe.items() if Pi0.kept_wide(name) for part in parts} | {DEAD[1]}
    dtypes = {name: _dtype(precision, name in wide) for name in shapes}

    entries = {name: (dtypes[name], shape) for name, shape in shapes.items()}
    if unused_head:
        entries[DEAD[0]] = (_dtype(precision, False), (config.vocab_size, config.expert.width))
    rows: list[Row] = []
    by_source: dict[str, list[Target]] = {}
    for target in places:
        by_source.setdefault(target.source, []).append(target)
    # The metadata says under which other name the table is known, as openpi's own writer has it.
    tied = {EMBEDDINGS[0]: EMBEDDINGS[1]}
    with replacing(output / "model.safetensors") as temporary, SafetensorsWriter(temporary, entries, tied) as writer:
        for name, cuts in by_source.items():
            array = parameters.read(name)
            for target in cuts:
                tensor = _cut(array, target)
                rows.append(_row(parameters, target, tensor, dtypes[target.name], source))
                writer.write(target.name, tensor)
            advance(name)
        if unused_head:
            dtype, shape = entries[DEAD[0]]
            writer.write(DEAD[0], torch.zeros(1, dtype=dtype).expand(shape))
    if assets is not None and assets.is_dir():
        for file in sorted(path for path in assets.rglob("*") if path.is_file()):
            with replacing(output / "assets" / file.relative_to(assets)) as temporary:
                shutil.copyfile(file, temporary)
    written = _config(config, precision, preset, discrete_state_input)
    report = Report(
        schema=SCHEMA,
        source=source,
        output=str(output),
        kind=config.kind,
        parameters=sum(int(np.prod(t.shape)) for t in places),
        adapters=parameters.adapters,
        config=written,
        rows=rows,
    )
    for file, content in (("config.json", written), ("conversion.json", report.as_dict())):
        write_json(output / file, content)
    return report


class _Shapes:
    """Weights of which only the shapes are known."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.sizes: dict[str, int] = dict.fromkeys(shapes, 0)
        self.integers: dict[str, str] = {}

    def read(self, name: str) -> Tensor:
        raise NotImplementedError(name)


def _dtype(precision: StoredPrecision, wide: bool) -> torch.dtype:
    return torch.float32 if precision == "float32" or (precision == "mixed" and wide) else torch.bfloat16


def _cut(array: np.ndarray, target: Target) -> Tensor:
    """A copy of the target's part alone: a whole parameter may be gigabytes."""
    # ml_dtypes' bfloat16 is none of torch's; its bits are.
    bf16 = array.dtype.name == "bfloat16"
    tensor = torch.from_numpy(np.array(target.cut(array.view(np.int16) if bf16 else array), order="C"))
    return tensor.view(torch.bfloat16) if bf16 else tensor


def _row(parameters: Parameters, target: Target, tensor: Tensor, dtype: torch.dtype, source: str) -> Row:
    # Without a copy of the tensor, which may be gigabytes.
    rms = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) / tensor.numel() ** 0.5
    if not np.isfinite(rms):
        raise CheckpointError(f"checkpoint {source}: non-finite values in {target.source}")
    return Row(
        source=target.source,
        source_dtype=parameters.dtypes[target.source],
        index=list(target.index),
        layout=target.layout,
        target=target.name,
        shape=list(target.shape),
        dtype=str(dtype).removeprefix("torch."),
        rms=rms,
    )


def _config(config: Pi0Config, precision: StoredPrecision, preset: str | None, discrete: bool | None) -> dict[str, Any]:
    """The fields openpi's converter writes, and those that its files leave to be guessed."""
    content: dict[str, Any] = {
        "action_dim": config.action_dim,
        "action_horizon": config.action_horizon,
        "precision": precision,
        "pi05": config.kind == "pi05",
        "max_token_len": config.max_token_len,
    }
    if discrete is not None:
        content["discrete_state_input"] = discrete
    if preset is not None:
        content["preset"] = preset
    return content
