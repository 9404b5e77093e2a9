"""The expert's weights in the order in which the denoise kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.gemm.weights import Linear

CHUNK = 1024
"""Columns of K that a kernel waits for at once, where a block has more."""


def pack(tiles: Tensor, k_chunk: int) -> Tensor:
    """Weights in the order in which the kernel reads them.

    tiles (units, T, 8, K): T tiles of eight output rows a unit, BF16 or INT8. Returns bytes: unit, chunk of K, tile,
    block of 32, and of that in BF16 four matrices of 8 x 8, of which row g of matrix c holds columns 8 t + 2 c and
    8 t + 2 c + 1 of the block, t = 0 … 3; in INT8 the rows as they are.
    """
    units, count, _, k = tiles.shape
    chunks = k // k_chunk
    if tiles.dtype == torch.int8:
        parts = tiles.reshape(units, count, 8, chunks, k_chunk // 32, 32)
        return parts.permute(0, 3, 1, 4, 2, 5).contiguous().view(torch.uint8).flatten()
    parts = tiles.reshape(units, count, 8, chunks, k_chunk // 32, 4, 4, 2)
    return parts.permute(0, 3, 1, 4, 6, 2, 5, 7).contiguous().view(torch.uint8).flatten()


def pair_tiles(weight: Tensor, apart: int, block: int) -> Tensor:
    """(units, 2, 8, K) of a (N, K) weight: rows r and r + apart of every `block` rows share a unit."""
    k = weight.shape[1]
    blocks = weight.view(-1, block // apart, apart // 8, 8, k)
    return blocks.transpose(1, 2).reshape(-1, 2, 8, k)


def split_of(width: int, k: int) -> int:
    """Blocks that share K of a product into the residual stream: as many as leave each a part that is worth a block."""

    def suits(n: int) -> bool:
        part = k // n
        return width % (8 * n) == 0 and k % (32 * n) == 0 and part >= 512 and (part <= CHUNK or part % CHUNK == 0)

    return next((n for n in (4, 2) if suits(n)), 1)


def splits_well(width: int, k: int) -> bool:
    """Whether the parts of K are whole chunks."""
    part = k // split_of(width, k)
    return part <= CHUNK or part % CHUNK == 0


def pack_split(weight: Tensor) -> Tensor:
    """A weight (N, K) by cluster of `split_of` blocks, part of K, chunk, then as `pack`."""
    n, k = weight.shape
    split = split_of(n, k)
    part = k // split
    tiles = weight.view(n // (8 * split), split, 8, split, part).permute(0, 3, 1, 2, 4)
    return pack(tiles.reshape(-1, split, 8, part), min(part, CHUNK))


def unpack(data: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack` for two tiles a unit and all of K in a chunk: tiles (units, 2, 8, K)."""
    if dtype == torch.int8:
        return data.view(dtype).view(-1, 2, k // 32, 8, 32).transpose(2, 3).reshape(-1, 2, 8, k)
    parts = data.view(torch.bfloat16).view(-1, 2, k // 32, 4, 8, 4, 2)
    return parts.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, 2, 8, k)


def unpair_tiles(tiles: Tensor, apart: int, block: int) -> Tensor:
    """The inverse of `pair_tiles`: the weight (N, K)."""
    k = tiles.shape[-1]
    return tiles.view(-1, apart // 8, block // apart, 8, k).transpose(1, 2).reshape(-1, k)


@dataclass(frozen=True)
class Packed:
    """All layers' weights in one buffer of bytes, and where each product starts. `width`: K of q/k/v and gate/up;
    `scales` (depth, columns of all products) float32 of INT8 weights, None of BF16."""

    data: Tensor
    layer_at: int
    layer_bytes: int
    o_at: int
    gate_up_at: int
    down_at: int
    width: int
    head_dim: int
    scales: Tensor | None = None

    @property
    def weight_bytes(self) -> int:
        """Of a layer's weight."""
        return 2 if self.scales is None else 1

    @classmethod
    def of(
        cls, layers: Iterable[tuple[Linear, Linear, Linear, Linear]], mix: Tensor | None, head_dim: int, depth: int
    ) -> Packed:
        """`layers`: q/k/v, o, gate/up and down of each of `depth` layers, (N, K) in BF16, or in INT8 with a scale a
        row; `mix` (N, K) BF16. Each layer is packed before the next is asked for."""
        first = None if mix is None else pack_split(mix)
        layer_at = 0 if first is None else first.numel()
        data, offsets, size, width = torch.empty(0), (0, 0, 0), 0, 0
        scales: list[Tensor] = []
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
                data = torch.empty(layer_at + depth * size, dtype=torch.uint8, device=qkv.device)
                if first is not None:
                    data[:layer_at] = first
            torch.cat(four, out=data[layer_at + index * size : layer_at + (index + 1) * size])
            if qkv.dtype == torch.int8:
                scales.append(torch.cat([p.weight_scale for p in products if p.weight_scale is not None]))
        return cls(data, layer_at, size, *offsets, width, head_dim, torch.stack(scales) if scales else None)

    def normed_products(self) -> Iterator[tuple[Linear, Linear]]:
        """Copies of each layer's q/k/v and gate/up."""
        dtype = torch.bfloat16 if self.scales is None else torch.int8
        for index, start in enumerate(range(self.layer_at, self.data.numel(), self.layer_bytes)):
            layer = self.data[start : start + self.layer_bytes]
            qkv = unpack(layer[: self.o_at], self.width, dtype)
            gate_up = unpack(layer[self.gate_up_at : self.down_at], self.width, dtype)
            hidden, columns = gate_up.shape[0] * 8, qkv.shape[0] * 16
            weights = unpair_tiles(qkv, self.head_dim // 2, self.head_dim), unpair_tiles(gate_up, hidden, 2 * hidden)
            if self.scales is None:
                yield Linear(weights[0]), Linear(weights[1])
                continue
            of_gate_up = columns + self.width  # what o writes is as wide as what q/k/v reads
            scales = self.scales[index, :columns], self.scales[index, of_gate_up : of_gate_up + 2 * hidden]
            yield Linear(weights[0], weight_scale=scales[0]), Linear(weights[1], weight_scale=scales[1])
