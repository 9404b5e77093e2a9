"""The kernels of the streamed loop read each packed weight exactly once, in the order of their loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.loop import Packed
from vla_accel.kernels.loop.packing import split_of
from vla_accel.kernels.loop.schedule import shared_by

# A slow model of the kernels' addresses: it walks the packed bytes as the kernels do and yields the row n and the
# columns k of the weight (N, K) that they use them for.

Read = tuple[int, int, int]  # byte offset of 256 weights, first of eight rows n, first of 32 columns k


def normed_pairs(at: int, units: int, width: int, row_of: Any) -> Iterator[Read]:
    """`normed_pairs`: a unit is two tiles of eight rows, all of K. `row_of(unit, tile)`: the first row of the tile."""
    for unit in range(units):
        for tile in range(2):
            for kb in range(width // 32):
                yield at + (unit * 16 * width + tile * 8 * width + kb * 256) * 2, row_of(unit, tile), kb * 32


def split_product(at: int, n: int, k: int, tiles: int) -> Iterator[Read]:
    """`split_product`: a cluster of `parts` blocks, each with a part of K, for `parts` tiles of rows.

    `tiles`: tiles of 16 rows of the activations.
    """
    packed = split_of(n, k)
    parts = shared_by(n, k, packed, tiles)
    part, ratio = k // parts, parts // packed
    chunk = min(part, 1024)
    chunks = part // chunk
    for block in range(n // 8):
        rank, first = block % parts, block // parts * parts
        for i in range(chunks):
            for tile in range(first, first + parts):
                whole = (tile // packed * packed + rank // ratio) * chunks + i
                offset = whole * packed * ratio * 8 * chunk + (tile % packed * ratio + rank % ratio) * 8 * chunk
                for kb in range(chunk // 32):
                    yield at + (offset + kb * 256) * 2, tile * 8, rank * part + i * chunk + kb * 32


def random_bits(n: int, k: int, seed: int) -> Tensor:
    bits = torch.randint(-(2**15), 2**15, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return bits.view(torch.bfloat16)


def check_reads(packed: Packed, weight: Tensor, reads: Iterator[Read], read_count: Tensor) -> None:
    """`read_count`: how often each packed weight is read."""
    offsets, rows, columns = (torch.tensor(part)[:, None, None, None] for part in zip(*reads, strict=True))
    # ldmatrix and wgmma alike: lane 4 g + t reads a pair from each of four matrices of 8 x 16 bytes. `load_rows` gives
    # lane t the columns 8 t … 8 t + 7 of the activations.
    matrix, lane, pair = torch.arange(4)[:, None, None], torch.arange(32)[:, None], torch.arange(2)
    places = offsets // 2 + matrix * 64 + lane * 2 + pair
    rows = (rows + (lane >> 2)).expand_as(places)
    columns = (columns + (lane & 3) * 8 + matrix * 2 + pair).expand_as(places)
    assert torch.equal(packed.data.view(torch.int16)[places], weight.view(torch.int16)[rows, columns])
    read_count.index_add_(0, places.flatten(), torch.ones(places.numel(), dtype=read_count.dtype))
    seen = torch.zeros(weight.shape, dtype=torch.int32)
    seen.index_put_((rows, columns), torch.ones(1, dtype=torch.int32), True)
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.parametrize(
    ("width", "mlp", "heads", "kv_heads", "head_dim", "mix"),
    [
        (128, 512, 4, 1, 64, False),  # the demo
        (64, 96, 2, 2, 128, True),  # one part of K; π0
        (64, 1024, 1, 1, 256, False),  # two parts
        (64, 2048, 64, 1, 64, True),  # four parts of both products
        (32, 4096, 2, 1, 64, False),  # four parts of one chunk each
        (32, 8192, 1, 1, 64, False),  # four parts of two chunks each
    ],
)
@pytest.mark.parametrize("tiles", [1, 4])  # with many rows, more blocks share K
def test_the_kernels_read_every_weight_once(
    width: int, mlp: int, heads: int, kv_heads: int, head_dim: int, mix: bool, tiles: int
) -> None:
    attended, columns, half = heads * head_dim, (heads + 2 * kv_heads) * head_dim, head_dim // 2
    shapes = ((columns, width), (width, attended), (2 * mlp, width), (width, mlp))
    layers = [[Linear(random_bits(n, k, seed + i)) for i, (n, k) in enumerate(shapes)] for seed in (1, 1000)]
    time_mlp = random_bits(width, width, 99) if mix else None
    packed = Packed.of(((a, b, c, d) for a, b, c, d in layers), time_mlp, head_dim, len(layers))
    for (qkv, _, gate_up, _), copies in zip(layers, packed.normed_products(), strict=True):
        for product, copy in zip((qkv, gate_up), copies, strict=True):
            assert torch.equal(copy.weight.view(torch.int16), product.weight.view(torch.int16))
    read_count = torch.zeros(packed.data.numel() // 2, dtype=torch.int32)
    if time_mlp is not None:
        check_reads(packed, time_mlp, split_product(0, width, width, tiles), read_count)

    def of_head(unit: int, tile: int) -> int:
        # As `qkv` reads it: unit % (D / 16) selects eight rows of half a head; the second tile is its partner.
        return unit // (head_dim // 16) * head_dim + unit % (head_dim // 16) * 8 + tile * half

    for index, (qkv, o, gate_up, down) in enumerate(layers):
        at = packed.layer_at + index * packed.layer_bytes
        check_reads(packed, qkv.weight, normed_pairs(at, columns // 16, width, of_head), read_count)
        check_reads(packed, o.weight, split_product(at + packed.o_at, width, attended, tiles), read_count)
        pairs = normed_pairs(at + packed.gate_up_at, mlp // 8, width, lambda unit, tile: unit * 8 + tile * mlp)
        check_reads(packed, gate_up.weight, pairs, read_count)
        check_reads(packed, down.weight, split_product(at + packed.down_at, width, mlp, tiles), read_count)
    assert torch.equal(read_count, torch.ones_like(read_count))


def test_more_blocks_share_k_if_there_are_many_rows() -> None:
    assert [shared_by(1024, 4096, 4, tiles) for tiles in (1, 2, 3, 4)] == [4, 4, 8, 8]
    # Packed whole: as many as leave each 128 columns, where they divide both.
    assert [shared_by(768, k, 1, 4) for k in (960, 768, 160, 1056)] == [3, 6, 1, 1]
    assert shared_by(768, 960, 1, 2) == 1
    # Fewer parts, columns that eight blocks cannot share, a part of two chunks: as packed.
    assert [shared_by(*sizes, 4) for sizes in ((1024, 1024, 2), (32, 4096, 4), (1024, 8192, 4))] == [2, 4, 4]


@pytest.mark.parametrize(
    ("width", "k", "split"),
    [(1024, 4096, 4), (128, 512, 1), (64, 1024, 2), (64, 2048, 4), (8, 4096, 1), (64, 1536, 2), (64, 3072, 4)],
)
def test_k_is_split_into_parts_worth_a_block(width: int, k: int, split: int) -> None:
    assert split_of(width, k) == split
