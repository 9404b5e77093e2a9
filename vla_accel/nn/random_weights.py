"""Models with random weights of any size, for measuring speed and agreement without a checkpoint.

Activations stay of order one through every layer (a residual branch adds 1 / √(2 depth)), and attention is sharp enough
that observations matter: with flat attention an expert would see only the mean of all tokens.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_accel.nn.network import Network
from vla_accel.nn.reference import RmsNorm

N = TypeVar("N", bound=Network)

SHARP, EXPERT_SHARP = 2.0, 4.0
"""Deviation of the attention's logits, in vision and prefix, and in the expert. At 1 attention over 500 tokens is
flat."""
EXPERT_BRANCH = 2.0
"""Factor on the residual branches of the expert, so that its result depends as much on the prefix as on itself."""
PIECE = 1 << 24
"""Values that are drawn at a time."""
_EXPERTS = ("expert", "head")
# The products that end a residual branch.
BRANCH_ENDS = ("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")


class Drawn:
    """Random weights as a network's `Origin`: each is drawn from a generator of its own, the same again each time.

    Drawn on the device: the same seed gives the same weights on one kind of device, not across kinds.
    """

    def __init__(self, network: Network, seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = network.config, seed, device
        self.shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
        self.plain = {
            f"{name}.weight": 1.0 - module.offset
            for name, module in network.named_modules() if isinstance(module, RmsNorm)
        }  # fmt: skip

    @torch.no_grad()
    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        shape = self.shapes[name]
        value = torch.empty(shape, device=device, dtype=dtype or torch.float32)
        generator = torch.Generator(self.device).manual_seed(self.seed + (zlib.crc32(name.encode()) << 8))
        mean, deviation = self._normal(name)
        sharp, boundary = math.sqrt(EXPERT_SHARP if _of(name) in _EXPERTS else SHARP), self._query_key_rows(name)
        # In pieces: in float32 the embedding table alone would take two gigabytes more than it keeps.
        step = max(1, PIECE // max(1, shape[1:].numel()))
        for first in range(0, shape[0], step):
            piece = torch.empty((min(step, shape[0] - first), *shape[1:]), device=self.device)
            piece.normal_(mean, deviation, generator=generator)
            piece[: max(0, boundary - first)] *= sharp
            # A norm's gate multiplies a branch: around one, as trained models have it, not around zero.
            if name.startswith("expert.") and name.endswith("norm.dense.bias"):
                piece[max(0, 2 * self.config.expert.width - first) :] += 1.0
            value[first : first + step] = piece
        return value

    def sample(self, name: str, stride: int) -> Tensor:
        return self.read(name, None, self.device).reshape(-1)[::stride]

    def progress(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _normal(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's values."""
        shape = self.shapes[name]
        if name.endswith("bias"):
            return 0.0, 0.02
        if name == "vision.position_embedding":
            return 0.0, 0.5
        if name == "embed.weight":
            # Scaled by √width on the way in, to the size of the image tokens.
            return 0.0, 1.0 / math.sqrt(self.config.prefix.width)
        if "norm" in name and name.endswith("dense.weight"):
            return 0.0, 0.2 / math.sqrt(shape[1])
        if "norm" in name:
            return self.plain.get(name, 1.0), 0.1
        gain = 1.0 / self.config.image_scale if name == "projector.weight" else _gain(self.config, name)
        return 0.0, gain / math.sqrt(shape[1:].numel())

    def _query_key_rows(self, name: str) -> int:
        """Rows of a projection that make queries and keys."""
        if name.endswith(".q_proj.weight"):
            return self.config.expert.heads * self.config.expert.head_dim
        if not name.endswith(".qkv_proj.weight"):
            return 0
        if _of(name) == "vision":
            return 2 * self.config.vision.width
        stack = self.config.expert if _of(name) == "expert" else self.config.prefix
        return (stack.heads + stack.kv_heads) * stack.head_dim


def drawn_model(
    kind: type[N], config: Any, *, seed: int, device: str, dtype: torch.dtype, drawn: type[Drawn] = Drawn
) -> N:  # fmt: skip
    """Return a model in eval mode whose weights `drawn` draws when they are read. `dtype`: of the large products."""
    model = kind.empty(config)
    model.origin = drawn(model, seed, torch.device(device))
    return model.placed(torch.device(device), dtype)


def random_model(
    kind: type[N], config: Any, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> N:  # fmt: skip
    """Return a `drawn_model` with all weights drawn."""
    return drawn_model(kind, config, seed=seed, device=device, dtype=dtype).whole()


def _of(name: str) -> str:
    return name.split(".")[0]


def _gain(config: Any, name: str) -> float:
    if not name.endswith(BRANCH_ENDS) or _of(name) not in ("vision", "prefix", "expert"):
        return 1.0
    depth = getattr(config, _of(name)).depth
    return (EXPERT_BRANCH if _of(name) == "expert" else 1.0) / math.sqrt(2 * depth)


class DrawnDit(Drawn):
    """Weights of a `DitNetwork`."""

    def _normal(self, name: str) -> tuple[float, float]:
        config: Any = self.config
        if name.endswith("bias"):
            return 0.0, 0.02
        if "norm" in name:
            return 1.0, 0.1
        if name in ("vision.position_embedding", "head.action_positions", "embed.weight"):
            return 0.0, 0.5
        part, gain = _of(name), 0.2 if "modulation" in name else 1.0
        if ".layers." in name and name.endswith(BRANCH_ENDS):
            gain = (EXPERT_BRANCH if part == "head" else 1.0) / math.sqrt(2 * getattr(config, part).depth)
        return 0.0, gain / math.sqrt(self.shapes[name][1:].numel())

    def _query_key_rows(self, name: str) -> int:
        rows: int = self.shapes[name][0]
        if name.startswith("head.vl_layers."):
            return 0
        if name.endswith(".q_proj.weight"):
            return rows
        if name.endswith(".kv_proj.weight"):
            return rows // 2
        if not name.endswith("qkv_proj.weight"):
            return 0
        if _of(name) != "language":
            return rows // 3 * 2
        language: Any = self.config.language
        return (language.heads + language.kv_heads) * language.head_dim
