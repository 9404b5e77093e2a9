"""Models with random weights of any size, for measuring speed and agreement where no checkpoint can be had.

Weights are drawn so that activations stay of order one through every layer: a residual branch adds 1 / √(2 depth).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_accel.models.flow import FlowNetwork
from vla_accel.models.gemma import RmsNorm
from vla_accel.models.network import Network

N = TypeVar("N", bound=FlowNetwork)

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
        value = torch.empty(self.shapes[name], device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed + (zlib.crc32(name.encode()) << 8))
        mean, deviation = self._normal(name)
        value.normal_(mean, deviation, generator=generator)
        # A norm's gate multiplies a branch: around one, as trained models have it, not around zero.
        if name.startswith("expert.") and name.endswith("norm.dense.bias"):
            value[2 * self.config.expert.width :] += 1.0
        return value.to(device, dtype or value.dtype)

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
        gain = 1.0 / math.sqrt(2 * _depth(self.config, name)) if name.endswith(BRANCH_ENDS) else 1.0
        if name == "projector.weight":
            gain = 1.0 / self.config.image_scale
        return 0.0, gain / math.sqrt(shape[1:].numel())


def drawn_model(kind: type[N], config: Any, *, seed: int, device: str, dtype: torch.dtype) -> N:
    """A model of a kind and `config` whose weights are drawn when they are asked for, on `device`, large products in
    `dtype`, in eval mode."""
    with torch.device("meta"):
        model = kind(config)
    model.origin = Drawn(model, seed, torch.device(device))
    return model.requires_grad_(False).eval().placed(torch.device(device), dtype)


def random_model(
    kind: type[N], config: Any, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> N:  # fmt: skip
    """As `drawn_model`, with all weights drawn."""
    return drawn_model(kind, config, seed=seed, device=device, dtype=dtype).whole()


def _depth(config: Any, name: str) -> int:
    return {"vision": config.vision.depth, "prefix": config.prefix.depth}.get(name.split(".")[0], config.expert.depth)
