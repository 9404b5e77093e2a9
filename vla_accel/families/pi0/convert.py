"""openpi's JAX checkpoints to safetensors under openpi's PyTorch names, array by array, with a report of each.

The result is a folder that this package, and openpi's own PyTorch code, can load.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vla_accel.checkpoints.jax_layout import Target, targets
from vla_accel.checkpoints.jax_lora import FoldedParameters, Parameters
from vla_accel.checkpoints.paligemma import DEAD, EMBEDDINGS
from vla_accel.checkpoints.writer import SafetensorsWriter
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.pi0.checkpoint import Stated, infer_config, load_weights
from vla_accel.families.pi0.network import Pi0
from vla_accel.files import replacing, write_json

StoredPrecision = Literal["mixed", "bfloat16", "float32"]
SCHEMA = "vla_accel.conversion/1"


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
) -> dict[str, Any]:
    """Write `model.safetensors`, `config.json`, `conversion.json` and `assets/` into `output`.

    Args:
        parameters: JAX parameters.
        output: The new folder.
        action_horizon: The model's, which no parameter shows.
        precision: "mixed" keeps in float32 what openpi computes in float32 and the rest in bfloat16; the others cast
            everything.
        source: The checkpoint, for errors and the report.
        assets: A folder of statistics to copy.
        discrete_state_input: Written into config.json.
        preset: Written into config.json.
        unused_head: Also write the expert's output head, as zeros: nothing reads it, but openpi's loader requires it.
        lora_scale: alpha / rank of the attention's LoRA adapters, which are folded in (`jax_lora`).
        advance: Called with each source's name.

    Returns:
        The content of `conversion.json`. Its rows have the root mean square of each tensor, as a check.

    Raises:
        CheckpointError: A parameter is unknown or missing, or values are not finite.
        ConfigError: A scale without adapters.
    """
    parameters = FoldedParameters(parameters, lora_scale, source)
    if lora_scale != 1.0 and not parameters.scaled:
        raise ConfigError(f"lora_scale: expected a checkpoint with LoRA adapters of attention, got {lora_scale}")
    places = targets(parameters.shapes, source)
    shapes = {t.name: t.shape for t in places}
    config = infer_config(
        shapes, "", Stated(action_horizon=action_horizon, discrete_state_input=discrete_state_input), source
    )
    origin: Any = load_weights(_Shapes(shapes), config, source).origin
    wide = {part.name for name, parts in origin.recipe.items() if Pi0.kept_wide(name) for part in parts} | {DEAD[1]}
    dtypes = {name: _dtype(precision, name in wide) for name in shapes}
    entries = {name: (dtypes[name], shape) for name, shape in shapes.items()}
    if unused_head:
        entries[DEAD[0]] = (_dtype(precision, False), (config.vocab_size, config.expert.width))
    rows: list[dict[str, Any]] = []
    # The metadata says under which other name the table is known, as openpi's own writer has it.
    tied = {EMBEDDINGS[0]: EMBEDDINGS[1]}
    with replacing(output / "model.safetensors") as temporary, SafetensorsWriter(temporary, entries, tied) as writer:
        for name, parts in itertools.groupby(places, lambda target: target.source):
            array = parameters.read(name)
            for target in parts:
                tensor = _cut(array, target)
                # Without a copy of the tensor, which may be gigabytes.
                rms = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) / tensor.numel() ** 0.5
                if not np.isfinite(rms):
                    raise CheckpointError(f"checkpoint {source}: non-finite values in {name}")
                row = {"source": name, "source_dtype": parameters.dtypes[name], "index": [*target.index]}
                row |= {"layout": target.layout, "target": target.name, "shape": [*target.shape]}
                rows.append({**row, "dtype": str(dtypes[target.name]).removeprefix("torch."), "rms": rms})
                writer.write(target.name, tensor)
            advance(name)
        if unused_head:
            dtype, shape = entries[DEAD[0]]
            writer.write(DEAD[0], torch.zeros(1, dtype=dtype).expand(shape))
    if assets is not None and assets.is_dir():
        for file in sorted(path for path in assets.rglob("*") if path.is_file()):
            with replacing(output / "assets" / file.relative_to(assets)) as temporary:
                shutil.copyfile(file, temporary)
    # The fields of openpi's converter, and those that its files lack.
    written = {
        "action_dim": config.action_dim,
        "action_horizon": config.action_horizon,
        "precision": precision,
        "pi05": config.kind == "pi05",
        "max_token_len": config.max_token_len,
        **({} if discrete_state_input is None else {"discrete_state_input": discrete_state_input}),
        **({} if preset is None else {"preset": preset}),
    }
    report = {
        "schema": SCHEMA,
        "source": source,
        "output": str(output),
        "kind": config.kind,
        "parameters": sum(int(np.prod(t.shape)) for t in places),
        "adapters": parameters.adapters,
        "config": written,
        "rows": rows,
    }
    for file, content in (("config.json", written), ("conversion.json", report)):
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
    """Return a copy of the target's part alone: a whole parameter may be gigabytes."""
    # ml_dtypes' bfloat16 is none of torch's; its bits are.
    bf16 = array.dtype.name == "bfloat16"
    tensor = torch.from_numpy(np.array(target.cut(array.view(np.int16) if bf16 else array), order="C"))
    return tensor.view(torch.bfloat16) if bf16 else tensor
