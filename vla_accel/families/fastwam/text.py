"""FastWAM's prompts as rows of UMT5's encoder: from a file with the prompts that a robot uses, or from the encoder.

The encoder has 11 GB and a prompt never changes, so a robot reads `prompts.safetensors`, which `vla-accel prompts`
writes next to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vla_accel.checkpoints.checkpoint import fitted
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, read_json, size_of
from vla_accel.errors import CheckpointError, ObservationError
from vla_accel.nn.umt5 import Umt5Config, Umt5Encoder
from vla_accel.transforms.tokenizer import Tokenizer, checked_prompt

FILE = "prompts.safetensors"
"""Instructions to rows (tokens, width), in the checkpoint's folder. Its metadata has the prompt's template."""
_TEMPLATE = "template"
_BLOCK, _MLP = "layer.0.", "layer.1."
_NAMES = {
    "norm.weight": (_BLOCK + "layer_norm",), "mlp_norm.weight": (_MLP + "layer_norm",),
    "qkv_proj.weight": tuple(f"{_BLOCK}SelfAttention.{part}" for part in "qkv"),
    "out_proj.weight": (_BLOCK + "SelfAttention.o",), "distances": (_BLOCK + "SelfAttention.relative_attention_bias",),
    "gate_up_proj.weight": (_MLP + "DenseReluDense.wi_0", _MLP + "DenseReluDense.wi_1"),
    "down_proj.weight": (_MLP + "DenseReluDense.wo",),
}  # fmt: skip
_TABLES = ("shared.weight", "encoder.embed_tokens.weight")


@dataclass(frozen=True)
class Prompts:
    """The rows of instructions.

    Attributes:
        template: The prompt, with `{task}`.
        rows: Rows float32 (tokens, width) by instruction.
        width: Numbers of a row.
        most: Tokens of the longest prompt.
        encoder: Computes the rows of a prompt that `rows` lacks; None for a policy without it.
    """

    template: str
    rows: dict[str, np.ndarray]
    width: int
    most: int
    encoder: Callable[[str], np.ndarray] | None = field(default=None, compare=False)

    def of(self, instruction: Any, key: str) -> np.ndarray:
        """Return the rows of an instruction. Raises ObservationError that begins with `key`."""
        instruction = checked_prompt(instruction, key)
        if (known := self.rows.get(instruction)) is not None:
            return known
        if self.encoder is None:
            some = ", ".join(f"{name!r:.60}" for name in list(self.rows)[:3])
            raise ObservationError(
                f"{key}: expected one of the {len(self.rows)} instructions in {FILE} ({some}), got "
                f"{instruction!r:.80}; add it with `vla-accel prompts CHECKPOINT {instruction!r:.80}`, or load the "
                "text encoder, 11 GB, with `checkpoint: {text_encoder: true}`"
            )
        rows = self.encoder(self.template.replace("{task}", instruction))
        if len(rows) > self.most:
            raise ObservationError(f"{key}: expected at most {self.most} tokens, got {len(rows)}: {instruction!r:.60}")
        self.rows[instruction] = rows
        return rows


def read_prompts(path: Path, template: str, width: int, most: int) -> dict[str, np.ndarray]:
    """Read a file of `write_prompts`, empty if there is none. Raises CheckpointError for one of another checkpoint."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(_TEMPLATE)
            rows = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected encoded prompts, got: {error}") from error
    if found != template:
        raise CheckpointError(f"{path}: expected prompts of the template {template!r}, got {found!r}")
    wrong = [n for n, r in rows.items() if r.ndim != 2 or r.shape[1] != width or not 0 < len(r) <= most]
    if wrong:
        raise CheckpointError(
            f"{path}: expected up to {most} rows of {width}, got {rows[wrong[0]].shape} of {wrong[0]!r}"
        )
    return rows


def write_prompts(path: Path, template: str, rows: Mapping[str, np.ndarray]) -> None:
    """Write instructions with their rows, in BF16 where that loses nothing."""
    tensors = {name: torch.from_numpy(value) for name, value in rows.items()}
    narrow = {name: t.bfloat16() if torch.equal(t, t.bfloat16().float()) else t for name, t in tensors.items()}
    save_file(narrow, path, metadata={_TEMPLATE: template})


def load_encoder(folder: Path) -> Umt5Encoder:
    """Return UMT5's encoder of a folder of transformers, whose weights are still there. Raises CheckpointError."""
    path, weights = folder / "config.json", SafetensorsWeights(folder)
    content = read_json(path)
    if content.get("feed_forward_proj", "gated-gelu") != "gated-gelu":
        raise CheckpointError(f"{path}: feed_forward_proj: expected gated-gelu, got {content['feed_forward_proj']!r}")
    names = {
        "vocab_size": "vocab_size", "width": "d_model", "mlp_dim": "d_ff", "heads": "num_heads", "head_dim": "d_kv",
        "depth": "num_layers", "buckets": "relative_attention_num_buckets",
        "farthest": "relative_attention_max_distance",
    }  # fmt: skip
    model = Umt5Encoder.empty(Umt5Config(**{ours: size_of(content, theirs, path) for ours, theirs in names.items()}))
    # One table under two names; files have one or both.
    table = next((name for name in _TABLES if name in weights.shapes), _TABLES[0])
    recipe: dict[str, tuple[Piece, ...]] = {
        "embed.weight": (Piece(table),),
        "final_norm.weight": (Piece("encoder.final_layer_norm.weight"),),
    }
    attended, hidden = model.config.heads * model.config.head_dim, model.config.mlp_dim
    for index in range(model.config.depth):
        for ours, theirs in _NAMES.items():
            rows = {"qkv_proj.weight": attended, "gate_up_proj.weight": hidden}.get(ours)
            pieces = (Piece(f"encoder.block.{index}.{name}.weight", rows) for name in theirs)
            recipe[f"layers.{index}.{ours}"] = tuple(pieces)
    return fitted(model, weights, recipe, str(folder), "UMT5's encoder", _TABLES)


class TextEncoder:
    """Computes the rows of prompts. The encoder's weights are read on the first call."""

    def __init__(self, model: Umt5Encoder, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.tokenizer = model.placed(device, dtype), tokenizer

    @property
    def weights(self) -> list[Tensor]:
        """The weights that are in memory."""
        return [parameter for parameter in self.model.parameters() if not parameter.is_meta]

    @torch.inference_mode()
    def __call__(self, prompt: str) -> np.ndarray:
        """Return rows float32 (tokens, width)."""
        with self.model.progress():
            self.model.fetch()
        ids = torch.tensor(self.tokenizer.encode(prompt, add_bos=True), device=self.model.device)
        return self.model(ids).float().cpu().numpy()
