"""The tile configs of products of INT8 weights and activations (`triton_int8`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.config import measure, measured, too_large
from vla_accel.kernels.dispatch import kernels
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import current

CALLS = 10
"""Calls in a row that are measured together."""


@dataclass(frozen=True)
class Int8Tile:
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
        """Bytes of shared memory of the operands."""
        return (self.rows + self.columns) * self.depth * self.stages

    def why_not(self, gpu: Gpu | None, rows: int) -> str | None:
        return too_large(self, self.shared, gpu)

    def cost(self, gpu: Gpu | None, rows: int) -> tuple[float, ...]:
        """The default for this number of rows is the first; the others are only measured."""
        return (float(self != default(rows)),)


FEW, SOME, MANY = Int8Tile(32, 128, 64, 4, 3), Int8Tile(64, 128, 64, 4, 3), Int8Tile(128, 128, 64, 8, 3)
"""Defaults by the number of rows, which fit on every GPU."""
TILES = (
    FEW, SOME, MANY, Int8Tile(32, 128, 128, 4, 4), Int8Tile(64, 64, 128, 4, 4), Int8Tile(64, 128, 128, 4, 3),
    Int8Tile(128, 64, 128, 4, 3), Int8Tile(128, 128, 128, 8, 2), Int8Tile(128, 128, 128, 8, 3),
    Int8Tile(128, 128, 128, 8, 4), Int8Tile(128, 256, 64, 8, 3), Int8Tile(128, 256, 128, 8, 2),
    Int8Tile(128, 256, 128, 8, 3), Int8Tile(256, 128, 128, 8, 3),
)  # fmt: skip


def default(rows: int) -> Int8Tile:
    """Return the tile for this number of rows if none was measured."""
    return MANY if rows > 64 else SOME if rows > 32 else FEW


def candidates(gpu: Gpu, rows: int) -> list[Int8Tile]:
    """Return the tiles that fit a GPU's shared memory and the rows; the default comes first."""
    first = default(rows)
    heights = range(first.rows // 2, 2 * first.rows + 1 if rows > first.rows else first.rows + 1)
    fitting = (t for t in TILES if t.why_not(gpu, rows) is None and (t == first or t.rows in heights))
    return sorted(fitting, key=lambda tile: tile.cost(gpu, rows))


def tile(weights: Linear, activation: Activation, rows: int) -> Int8Tile:
    """Return the measured tile of a product, or the default one."""
    return measured(_name(weights, activation, rows), weights.weight.device) or default(rows)


def tune(weights: Linear, activation: Activation, rows: int) -> None:
    """Measure the tile of a product on its weight's GPU, while a program is built. No RELU or SILU."""
    device, runtime = weights.weight.device, current(weights.weight)
    gpu, name = runtime.gpu, _name(weights, activation, rows)
    if gpu is None or runtime.deterministic or runtime.backend == "reference" or measured(name, device) is not None:
        return
    (n, k), plain = weights.weight.shape, activation is Activation.NONE
    x = torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device)
    stored = torch.bfloat16 if plain else torch.int8
    out = torch.empty(rows, n // 2 if activation.gated else n, dtype=stored, device=device)
    epilogue = Epilogue(activation=activation, quantize=None if plain else 1.0)
    measure(name, candidates(gpu, rows), functools.partial(launch, x, weights, out, epilogue), device, CALLS)


def launch(x: torch.Tensor, weights: Linear, out: torch.Tensor, epilogue: Epilogue, config: Int8Tile) -> None:
    """Launch the product of INT8 rows. See `vla_accel.kernels.gemm.gemm`."""
    kernels("gemm.triton_int8").product(x, weights, out, epilogue, config)


def _name(weights: Linear, activation: Activation, rows: int) -> str:
    n, k = weights.weight.shape
    return f"INT8 {activation} {rows}x{n}x{k}"
