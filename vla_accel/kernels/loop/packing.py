"""The expert's weights in the order in which the denoise kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.gemm.weights import Linear

CHUNK = 1024
"""Columns of K that a kernel loads and waits for as one unit."""
LEAST_PART = 512
"""The fewest columns of K that are worth a block of their own."""


def pack(tiles: Tensor, k_chunk: int) -> Tensor:
    """Reorder weights for the kernels.

    Args:
        tiles: (units, T, 8, K) BF16, T tiles of eight output rows in each unit.
        k_chunk: columns of K in a chunk.

    Returns:
        Bytes in the order (unit, chunk of K, tile, block of 32 columns, matrix, row, pair). A block has four matrices
        of 8 x 8: row g of matrix c holds columns 8 t + 2 c and 8 t + 2 c + 1 of the block, t = 0 … 3.
    """
    units, count, _, k = tiles.shape
    parts = tiles.reshape(units, count, 8, k // k_chunk, k_chunk // 32, 4, 4, 2)
    return parts.permute(0, 3, 1, 4, 6, 2, 5, 7).contiguous().view(torch.uint8).flatten()


def unpack(data: Tensor, k: int) -> Tensor:
    """Invert `pack` for two tiles in a unit and one chunk. Returns tiles (units, 2, 8, K)."""
    parts = data.view(torch.bfloat16).view(-1, 2, k // 32, 4, 8, 4, 2)
    return parts.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, 2, 8, k)


def pair_tiles(weight: Tensor, distance: int, block: int) -> Tensor:
    """Return (units, 2, 8, K) of a weight (N, K): rows r and r + `distance` of each `block` rows share a unit."""
    k = weight.shape[1]
    blocks = weight.view(-1, block // distance, distance // 8, 8, k)
    return blocks.transpose(1, 2).reshape(-1, 2, 8, k)


def unpair_tiles(tiles: Tensor, distance: int, block: int) -> Tensor:
    """Invert `pair_tiles`. Returns the weight (N, K)."""
    k = tiles.shape[-1]
    return tiles.view(-1, distance // 8, block // distance, 8, k).transpose(1, 2).reshape(-1, k)


def split_of(width: int, k: int) -> int:
    """Return how many blocks share K of a product into the residual stream."""

    def suits(n: int) -> bool:
        part = k // n
        whole = part <= CHUNK or part % CHUNK == 0
        return width % (8 * n) == 0 and k % (32 * n) == 0 and part >= LEAST_PART and whole

    return next((n for n in (4, 2) if suits(n)), 1)


def splits_well(width: int, k: int) -> bool:
    """Whether the parts of K are whole chunks."""
    part = k // split_of(width, k)
    return part <= CHUNK or part % CHUNK == 0


def pack_split(weight: Tensor) -> Tensor:
    """Pack a weight (N, K) by cluster of `split_of` blocks, part of K and chunk, then as `pack`."""
    n, k = weight.shape
    split = split_of(n, k)
    part = k // split
    tiles = weight.view(n // (8 * split), split, 8, split, part).permute(0, 3, 1, 2, 4)
    return pack(tiles.reshape(-1, split, 8, part), min(part, CHUNK))


@dataclass(frozen=True)
class Packed:
    """The weights of all layers in one buffer of bytes, and the offset of each product.

    `width`: K of q/k/v and gate/up.
    """

    data: Tensor
    layer_at: int
    layer_bytes: int
    o_at: int
    gate_up_at: int
    down_at: int
    width: int
    head_dim: int

    @classmethod
    def of(
        cls, layers: Iterable[tuple[Linear, Linear, Linear, Linear]], mix: Tensor | None, head_dim: int, depth: int
    ) -> Packed:
        """Pack q/k/v, o, gate/up and down of `depth` layers, one layer at a time, and `mix`; all (N, K) in BF16."""
        first = torch.empty(0, dtype=torch.uint8) if mix is None else pack_split(mix)
        data, offsets, size, width = first, (0, 0, 0), 0, 0
        for index, products in enumerate(layers):
            qkv, o, gate_up, down = (product.weight for product in products)
            four = (
                pack(pair_tiles(qkv, head_dim // 2, head_dim), qkv.shape[1]),
                pack_split(o),
                pack(pair_tiles(gate_up, len(gate_up) // 2, len(gate_up)), gate_up.shape[1]),
                pack_split(down),
            )
            if index == 0:
                sizes = [part.numel() for part in four]
                offsets, size, width = (sizes[0], sum(sizes[:2]), sum(sizes[:3])), sum(sizes), qkv.shape[1]
                data = torch.empty(len(first) + depth * size, dtype=torch.uint8, device=qkv.device)
                data[: len(first)] = first
            torch.cat(four, out=data[len(first) + index * size :][:size])
        return cls(data, len(first), size, *offsets, width, head_dim)

    def normed_products(self) -> Iterator[tuple[Linear, Linear]]:
        """Yield copies of q/k/v and gate/up of each layer."""
        for start in range(self.layer_at, self.data.numel(), self.layer_bytes):
            layer = self.data[start : start + self.layer_bytes]
            qkv = unpack(layer[: self.o_at], self.width)
            gate_up = unpack(layer[self.gate_up_at : self.down_at], self.width)
            hidden = gate_up.shape[0] * 8
            yield (
                Linear(unpair_tiles(qkv, self.head_dim // 2, self.head_dim)),
                Linear(unpair_tiles(gate_up, hidden, 2 * hidden)),
            )
