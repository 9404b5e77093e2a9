"""Products of INT8 weights and activations: exact sums in int32, then scales, bias and activation in float32.

The tile config of a product is measured when a program is built, and remembered.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import remembered
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import geglu, gelu, store
from vla_accel.runtime import current

if TYPE_CHECKING:
    from vla_accel.kernels.gemm.weights import Linear

CALLS = 10
"""Calls in a row that are measured together."""


@dataclass(frozen=True)
class Tile:
    """A tile config: `rows` x `columns` of the sums in a block, `depth` of K at a time in `stages` stages. A gated
    product takes half of the columns from gate and half from up.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}, {self.warps} warps, {self.stages} stages"

    @property
    def shared(self) -> int:
        """Shared memory of the operands, in bytes."""
        return (self.rows + self.columns) * self.depth * self.stages


FEW, SOME, MANY = Tile(32, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3)
"""Taken where nothing was measured, by the number of rows: what every GPU has room for."""
TILES = (
    FEW, SOME, MANY, Tile(32, 128, 128, 4, 4), Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3),
    Tile(128, 64, 128, 4, 3), Tile(128, 128, 128, 8, 2), Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 4),
    Tile(128, 256, 64, 8, 3), Tile(128, 256, 128, 8, 2), Tile(128, 256, 128, 8, 3), Tile(256, 128, 128, 8, 3),
)  # fmt: skip
_KNOWN: dict[tuple[torch.device, Gpu, Activation, int, int, int], Tile] = {}


def usual(rows: int) -> Tile:
    """Return the tile for this number of rows if none was measured, or in a deterministic runtime."""
    return MANY if rows > 64 else SOME if rows > 32 else FEW


def searched(gpu: Gpu, rows: int) -> list[Tile]:
    """Return the tiles that fit a GPU's shared memory and the rows; the usual one comes first."""
    first = usual(rows)
    heights = range(first.rows // 2, 2 * first.rows + 1 if rows > first.rows else first.rows + 1)
    return [first, *(t for t in TILES if t != first and t.shared <= gpu.shared_per_block and t.rows in heights)]


def measure(layer: Linear, activation: Activation, rows: int) -> None:
    """Measure the tile of a product on its weight's GPU, while a program is built. No RELU or SILU."""
    device = layer.weight.device
    runtime = current(device)
    gpu = runtime.gpu
    if gpu is None or runtime.deterministic or runtime.backend == "reference":
        return
    (n, k), gated = layer.weight.shape, activation.gated
    key = (device, gpu, activation, rows, n, k)
    if key in _KNOWN:
        return
    x = torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device)
    stored = torch.bfloat16 if activation is Activation.NONE else torch.int8
    out = torch.empty(rows, n // 2 if gated else n, dtype=stored, device=device)
    inverse_scale = None if activation is Activation.NONE else 1.0
    tiles = {str(tile): tile for tile in searched(gpu, rows)}
    ways = {
        name: functools.partial(_launch, x, layer, out, tile, activation, inverse_scale) for name, tile in tiles.items()
    }
    _KNOWN[key] = tiles[remembered(f"INT8 {activation} {rows}x{n}x{k}", ways, runtime, CALLS).candidate]


def product(
    x: Tensor,
    layer: Linear,
    out: Tensor,
    *,
    activation: Activation = Activation.NONE,
    inverse_scale: float | None = None,
) -> None:
    """out = activation(x Wᵀ + b), no RELU or SILU. x (R, K) and W (N, K) int8; out (R, N), or (R, N / 2) if gated."""
    if path(x) != "reference":
        return _launch(x, layer, out, tile(layer, activation, len(x)), activation, inverse_scale)
    assert layer.weight_scale is not None
    # Float64 holds every sum of 127 x 127 exactly; then in float32, in the kernel's order.
    y = (x.double() @ layer.weight.double().T).float() * (layer.weight_scale * layer.input_scale_value)
    if layer.bias is not None:
        y = y + layer.bias.float()
    if activation.gated:
        geglu(y, out, inverse_scale=inverse_scale, paired=layer.paired, activation=activation)
    elif activation is Activation.GELU:
        gelu(y, out, inverse_scale=inverse_scale)
    else:
        store(out, y, inverse_scale)


def tile(layer: Linear, activation: Activation, rows: int) -> Tile:
    """Return the measured tile of a product, or the usual one."""
    device, (n, k) = layer.weight.device, layer.weight.shape
    runtime = current(device)
    gpu = runtime.gpu
    known = None if gpu is None or runtime.deterministic else _KNOWN.get((device, gpu, activation, rows, n, k))
    return known or usual(rows)


def _launch(
    x: Tensor, layer: Linear, out: Tensor, tile: Tile, activation: Activation, inverse_scale: float | None
) -> None:
    kernels("gemm.triton_int8").int8_linear(
        x, layer.weight, layer.weight_scale, layer.input_scale_value, layer.bias, out, tile=tile, activation=activation,
        paired=layer.paired, inverse_scale=inverse_scale,
    )  # fmt: skip
