"""The head of OpenVLA-OFT and of starVLA's QwenOFT: an MLP that computes each action from the outputs at its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.nn.network import Network

STORED = {
    "norm_in": "layer_norm1", "fc_in": "fc1", "norm_out": "layer_norm2", "fc_out": "fc2",
    "norms": "mlp_resnet_blocks.{}.ffn.0", "products": "mlp_resnet_blocks.{}.ffn.1",
}  # fmt: skip
"""The names of its modules in checkpoints."""


class MlpHead(nn.Module):
    """Norm, product and ReLU, residual blocks of the same, norm and product."""

    def __init__(self, width: int, hidden: int, action_dim: int, depth: int = 2) -> None:
        super().__init__()
        self.norm_in, self.fc_in = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(depth))
        self.products = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.norm_out, self.fc_out = nn.LayerNorm(hidden), nn.Linear(hidden, action_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., action_dim)."""
        x = F.relu(self.fc_in(reference.layer_norm(x, self.norm_in)))
        for norm, product in zip(self.norms, self.products, strict=True):
            assert isinstance(norm, nn.LayerNorm)
            x = x + F.relu(product(reference.layer_norm(x, norm)))
        return self.fc_out(reference.layer_norm(x, self.norm_out))


def stored_name(name: str) -> str:
    """Return the name in checkpoints of a parameter of `MlpHead`."""
    module, *index, leaf = name.split(".")
    return f"{STORED[module].format(*index)}.{leaf}"


@dataclass(frozen=True)
class NativeMlpHead:
    """The head of a network by the library, as it has few rows. `weights`: those of `MlpHead` by name."""

    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Network, dtype: torch.dtype) -> NativeMlpHead:
        """Prepare the weights of a model's module `head`."""
        return cls({name.removeprefix("head."): model.weight(name).to(dtype) for name in model.names("head")})

    def __call__(self, x: Tensor) -> Tensor:
        """As `MlpHead`."""
        x = F.relu(self._product(x, "norm_in", "fc_in"))
        for index in range(sum(name.startswith("norms.") and name.endswith("weight") for name in self.weights)):
            x = x + F.relu(self._product(x, f"norms.{index}", f"products.{index}"))
        return self._product(x, "norm_out", "fc_out")

    def _product(self, x: Tensor, norm: str, name: str) -> Tensor:
        weights = self.weights
        x = F.layer_norm(x, x.shape[-1:], weights[f"{norm}.weight"], weights[f"{norm}.bias"])
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
