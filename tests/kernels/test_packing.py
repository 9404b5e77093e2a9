"""Where the streamed loop's kernels find their weights: each once, in the order that they read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vla_accel.kernels import nvrtc
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.loop import Packed
from vla_accel.kernels.loop.packing import pack, pair_tiles, split_of
from vla_accel.kernels.loop.schedule import shared_by

CODE = re.sub(r"//.*", "", nvrtc.source_of({}, "loop/core"))

# A slow model of the kernels' addressing: it walks the packed bytes as the kernels do and says which row n and which
# columns k of the weight (N, K) they take them for.

Read = tuple[int, int, int]  # byte offset of 256 weights, first of eight rows n, first of 32 columns k


def normed_pairs(at: int, units: int, width: int, columns: Any, size: int) -> Iterator[Read]:
    """`normed_pairs`: a unit is two tiles of eight rows, whole K. `columns(unit, tile)`: the tile's first row; `size`:
    bytes of a weight."""
    for unit in range(units):
        for tile in range(2):
            for kb in range(width // 32):
                yield at + (unit * 16 * width + tile * 8 * width + kb * 256) * size, columns(unit, tile), kb * 32


def split_product(at: int, n: int, k: int, tiles: int, size: int) -> Iterator[Read]:
    """`split_product`: a cluster of `parts` blocks, each with a part of K, for `parts` tiles of rows; `tiles` of 16
    activations' rows; `size`: bytes of a weight."""
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
                    yield at + (offset + kb * 256) * size, tile * 8, rank * part + i * chunk + kb * 32


def random_bits(n: int, k: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random bits: eight weights in a row are like no other eight."""
    bits = torch.randint(-(2**15), 2**15, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return bits.to(dtype) if dtype == torch.int8 else bits.view(dtype)


def product_of(n: int, k: int, seed: int, dtype: torch.dtype) -> Linear:
    scale = torch.rand(n, generator=torch.Generator().manual_seed(seed)) if dtype == torch.int8 else None
    return Linear(random_bits(n, k, seed, dtype), weight_scale=scale)


def check_reads(packed: Packed, weight: Tensor, reads: Iterator[Read], taken: Tensor) -> None:
    """`taken`: how often each byte of the packed weights is read."""
    offsets, rows, columns = (torch.tensor(part)[:, None, None, None] for part in zip(*reads, strict=True))
    size, bits = weight.element_size(), torch.int8 if weight.dtype == torch.int8 else torch.int16
    # ldmatrix and wgmma alike: a pair of lane 4 g + t from each of four matrices of 8 x 16 bytes; each lane's eight of
    # weights of one byte. What activations it meets: `load_rows` has lane t hold columns 8 t … 8 t + 7.
    matrix, lane, pair = torch.arange(4)[:, None, None], torch.arange(32)[:, None], torch.arange(2)
    places = offsets // size + (matrix * 64 + lane * 2 + pair if size == 2 else lane * 8 + matrix * 2 + pair)
    rows = (rows + (lane >> 2)).expand_as(places)
    columns = (columns + (lane & 3) * 8 + matrix * 2 + pair).expand_as(places)
    data = packed.data[: packed.data.numel() // size * size].view(bits)
    assert torch.equal(data[places], weight.view(bits)[rows, columns])
    for byte in range(size):
        taken.index_add_(0, (places * size + byte).flatten(), torch.ones(places.numel(), dtype=taken.dtype))
    seen = torch.zeros(weight.shape, dtype=torch.int32)
    seen.index_put_((rows, columns), torch.ones(1, dtype=torch.int32), True)
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
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
@pytest.mark.parametrize("tiles", [1, 4])  # of rows: many rows have more blocks share K
def test_the_kernels_find_every_weight_once(
    width: int, mlp: int, heads: int, kv_heads: int, head_dim: int, mix: bool, tiles: int, dtype: torch.dtype
) -> None:
    size = dtype.itemsize
    attended, columns, half = heads * head_dim, (heads + 2 * kv_heads) * head_dim, head_dim // 2
    layers = [
        (product_of(columns, width, 1 + i, dtype), product_of(width, attended, 2 + i, dtype),
         product_of(2 * mlp, width, 3 + i, dtype), product_of(width, mlp, 4 + i, dtype))
        for i in (0, 1000)
    ]  # fmt: skip
    time_mlp = random_bits(width, width, 99) if mix else None
    packed = Packed.of(layers, time_mlp, head_dim, len(layers))
    for index, (mine, copies) in enumerate(zip(layers, packed.normed_products(), strict=True)):
        for product, copy in zip((mine[0], mine[2]), copies, strict=True):
            assert torch.equal(copy.weight.view(torch.uint8), product.weight.view(torch.uint8))
            assert (copy.weight_scale is None) == (product.weight_scale is None) == (dtype == torch.bfloat16)
            if product.weight_scale is not None and copy.weight_scale is not None:
                assert torch.equal(copy.weight_scale, product.weight_scale)
        if packed.scales is not None:
            # As the kernels look a column's scale up: q/k/v, o, gate and up, down.
            first = [0, columns, columns + width, columns + width + 2 * mlp]
            for at, product in zip(first, mine, strict=True):
                scale = product.weight_scale
                assert scale is not None and torch.equal(packed.scales[index, at : at + len(scale)], scale)
            assert packed.scales.shape[1] == columns + 2 * width + 2 * mlp
    assert packed.weight_bytes == size
    taken = torch.zeros(packed.data.numel(), dtype=torch.int32)
    if time_mlp is not None:
        check_reads(packed, time_mlp, split_product(0, width, width, tiles, 2), taken)

    def of_head(unit: int, tile: int) -> int:
        # As `qkv` reads it: unit % (D / 16) eights of a half head; the second tile is the half's partner.
        return unit // (head_dim // 16) * head_dim + unit % (head_dim // 16) * 8 + tile * half

    for index, (qkv, o, gate_up, last) in enumerate(layers):
        at = packed.layer_at + index * packed.layer_bytes
        check_reads(packed, qkv.weight, normed_pairs(at, columns // 16, width, of_head, size), taken)
        check_reads(packed, o.weight, split_product(at + packed.o_at, width, attended, tiles, size), taken)
        pairs = normed_pairs(at + packed.gate_up_at, mlp // 8, width, lambda unit, tile: unit * 8 + tile * mlp, size)
        check_reads(packed, gate_up.weight, pairs, taken)
        check_reads(packed, last.weight, split_product(at + packed.down_at, width, mlp, tiles, size), taken)
    assert torch.equal(taken, torch.ones_like(taken))


def test_more_blocks_share_k_where_rows_are_many() -> None:
    assert [shared_by(1024, 4096, 4, tiles) for tiles in (1, 2, 3, 4)] == [4, 4, 8, 8]
    # Packed whole: as many as leave each 128 columns, where they divide both.
    assert [shared_by(768, k, 1, 4) for k in (960, 768, 160, 1056)] == [3, 6, 1, 1]
    assert shared_by(768, 960, 1, 2) == 1
    # Fewer parts, columns that eight blocks cannot share, a part of two chunks: as packed.
    assert [shared_by(*sizes, 4) for sizes in ((1024, 1024, 2), (32, 4096, 4), (1024, 8192, 4))] == [2, 4, 4]


def test_pack_puts_pairs_in_order() -> None:
    """Two units of one tile, 64 columns: the second block of 32 begins after the first block's four matrices."""
    tiles = torch.arange(2 * 8 * 64, dtype=torch.int16).view(2, 1, 8, 64).view(torch.bfloat16)
    values = pack(tiles, 64).view(torch.int16).view(2, 2, 4, 8, 8)
    for unit, block, matrix, row in ((0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 4), (0, 1, 3, 0), (1, 1, 2, 7)):
        first = unit * 512 + row * 64 + block * 32 + matrix * 2
        assert values[unit, block, matrix, row].tolist() == [first + t * 8 + i for t in range(4) for i in (0, 1)]


def test_bytes_are_widened_exactly() -> None:
    """The kernels' instructions on every byte, with the constants of the source: each lies in the mantissa of 128."""
    (spread,) = set(re.findall(r'"r"\((0x\w+)\)', CODE[CODE.index("widened_pair") :][:400]))
    second, first = re.findall(r'"n"\(FIRST \? (0x\w+) : (0x\w+)\)', CODE)[0]
    low, sign = re.findall(r"spread & (0x\w+)", CODE)

    def permuted(a: int, b: int, selector: int) -> int:
        """prmt.b32."""
        given = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        return int.from_bytes(bytes(given[selector >> 4 * i & 7] for i in range(4)), "little")

    def halves(word: int) -> Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    for byte in range(256):
        four = (byte, 255 - byte, byte ^ 85, byte ^ 170)
        word = int.from_bytes(bytes(four), "little")
        for selector, pair in ((first, four[:2]), (second, four[2:])):
            wide = permuted(word, int(spread, 16), int(selector, 16))
            got = halves(wide & int(low, 16)) - halves(wide & int(sign, 16))
            assert got.tolist() == [one - 256 if one > 127 else one for one in pair]


@pytest.mark.parametrize("k", [32, 128, 1024])
def test_bytes_are_widened_in_their_place(k: int) -> None:
    """As `widen` reads and writes a tile's place: what arrives in its second half fills it, as BF16 would have come."""
    tile = random_bits(8, k, 5, torch.int8)
    place = torch.zeros(16 * k, dtype=torch.uint8)
    place[8 * k :] = pack(tile.view(1, 1, 8, k), k)
    kb, lane, byte = torch.arange(k // 32)[:, None, None], torch.arange(32)[:, None], torch.arange(8)
    eight = place[8 * k + kb * 256 + lane * 8 + byte].view(torch.int8).to(torch.bfloat16)
    words = place.view(torch.int32)
    for matrix in range(4):
        at = (kb * 512 + matrix * 128 + lane * 4) // 4
        words[at[..., 0]] = eight[..., 2 * matrix : 2 * matrix + 2].contiguous().view(torch.int32)[..., 0]
    assert torch.equal(place, pack(tile.to(torch.bfloat16).view(1, 1, 8, k), k))


def test_pair_tiles_keeps_partners_together() -> None:
    weight = torch.arange(64).view(64, 1)
    pairs = pair_tiles(weight, 16, 32)
    assert pairs.shape == (4, 2, 8, 1)
    assert pairs[1, :, :, 0].tolist() == [list(range(8, 16)), list(range(24, 32))]
    assert pairs[2, :, :, 0].tolist() == [list(range(32, 40)), list(range(48, 56))]


@pytest.mark.parametrize(
    ("width", "k", "split"),
    [(1024, 4096, 4), (128, 512, 1), (64, 1024, 2), (64, 2048, 4), (8, 4096, 1), (64, 1536, 2), (64, 3072, 4)],
)
def test_parts_of_the_last_product(width: int, k: int, split: int) -> None:
    assert split_of(width, k) == split
