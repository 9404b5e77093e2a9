"""The emulator's copies by tensor maps: which box arrives where, what is zero, and what such a copy must not do."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.cuda_emulator import EmulatedDriver, EmulatedModule, EmulationError
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.hopper import HopperTile, launch

BF16, HALF, WIDTH, ROWS = torch.bfloat16, 16, 80, 32
CALLS = {
    "two": "tma_load_2d(to, map, x, y, barrier, 0, 0)",
    "five": "tma_load_5d(to, map, x, y, z, barrier, 0)",
    "astray": "tma_load_2d(to + 64, map, x, y, barrier, 0, 0)",
    "unknown": "tma_load_2d(to, map, x, y, barrier + 8, 0, 0)",
}
KERNEL = """
extern "C" __global__ void {name}(const __grid_constant__ TensorMap map, int x, int y, int z, u16* out) {{
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 to = smem_of(memory), barrier = to + 4096;
  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, 4096);
    {call};
  }}
  __syncthreads();
  mbarrier_wait(barrier, 0);
  griddepcontrol_wait();
  for (int i = threadIdx.x; i < 2048; i += 32) out[i] = ((u16*)memory)[i];
}}
"""


@pytest.fixture
def module(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedModule:
    monkeypatch.setattr(nvrtc, "driver", EmulatedDriver)
    text = launch.source(torch.bfloat16, HopperTile(1, 1, 1, 64, 4), Epilogue(activation=Activation.GEGLU), half=64)
    text += "".join(KERNEL.format(name=name, call=call) for name, call in CALLS.items())
    return EmulatedModule(text, dict.fromkeys(CALLS, 4112), "sm_90a", torch.device("cpu"), folder=emulated)


def matrix(rows: int) -> Tensor:
    """Numbers that are all different, (rows, WIDTH)."""
    return torch.arange(rows * WIDTH, dtype=torch.int16).view(torch.bfloat16).view(rows, WIDTH)


def copied(module: EmulatedModule, name: str, of: Tensor, x: int, y: int, z: int = 0) -> Tensor:
    """A box of 32 rows by 64 columns, as it lies behind the swizzle."""
    box = launch.paired_map(of, HALF, ROWS, 64) if name == "five" else launch.rows_map(of, ROWS, 64)
    out = torch.zeros(ROWS, 8, 8, dtype=torch.bfloat16)
    module.allow(of, out)
    places = (ctypes.c_int(place) for place in (x, y, z))
    module.launch(name, 1, 32, (box, *places, ctypes.c_void_p(out.data_ptr())))
    pieces = torch.arange(8) ^ torch.arange(ROWS)[:, None] % 8
    return out.gather(1, pieces[..., None].expand(-1, -1, 8)).flatten(1)


def test_a_box_with_rows_of_64_bytes(module: EmulatedModule) -> None:
    """Two rows are 128 bytes: the four pieces of both change places alike."""
    of, out = torch.arange(40 * 48, dtype=torch.int16).view(torch.int8).view(40, 96), torch.zeros(2048, dtype=BF16)
    module.allow(of, out)
    box = launch.rows_map(of, 64, 64)
    module.launch("two", 1, 32, (box, *(ctypes.c_int(n) for n in (64, 8, 0)), ctypes.c_void_p(out.data_ptr())))
    pieces = torch.arange(4) ^ torch.arange(64)[:, None] // 2 % 4
    got = out.view(torch.int8).view(64, 4, 16).gather(1, pieces[..., None].expand(-1, -1, 16)).flatten(1)
    expected = torch.zeros(64, 64, dtype=torch.int8)
    expected[:32, :32] = of[8:, 64:]
    assert torch.equal(got, expected)


def want(of: Tensor, rows: Tensor, x: int) -> Tensor:
    """These rows, columns from `x` on, with zeros for what is not there."""
    columns = torch.arange(x, x + 64)
    there = ((rows >= 0) & (rows < len(of)))[:, None] & (columns < WIDTH)
    found = of.view(torch.int16)[rows.clamp(0, len(of) - 1)][:, columns.clamp(max=WIDTH - 1)]
    return found.masked_fill(~there, 0).view(torch.bfloat16)


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("x", "y"), [(0, 0), (64, 8), (8, 30), (0, -3)])
def test_a_box_of_a_matrix(x: int, y: int, module: EmulatedModule) -> None:
    of = matrix(40)
    assert same(copied(module, "two", of, x, y), want(of, torch.arange(y, y + ROWS), x))


@pytest.mark.parametrize(("x", "group"), [(0, 0), (64, 1), (0, 2)])
def test_a_box_of_pairs(x: int, group: int, module: EmulatedModule) -> None:
    """Eight rows of a side, then the eight that are HALF rows on: of the first side 0 to 7, 8 to 15."""
    of = matrix(4 * HALF)
    order = torch.arange(2 * HALF).view(2, -1, 8).transpose(0, 1).flatten() + group * 2 * HALF
    assert order[:24].tolist()[8::8] == [16 + 32 * group, 8 + 32 * group]
    assert same(copied(module, "five", of, x, 0, group), want(of, order, x))


def test_pairs_end_where_a_side_ends(module: EmulatedModule) -> None:
    """From the side's last eight rows on there are 16 rows, and none of the next group."""
    of = matrix(4 * HALF)
    order = torch.cat((torch.arange(8, 16), torch.arange(24, 32), torch.full((16,), -1)))
    assert same(copied(module, "five", of, 0, 1, 0), want(of, order, 0))


def test_what_a_copy_must_not_do(module: EmulatedModule) -> None:
    of = matrix(64)
    with pytest.raises(EmulationError, match="tma_load_2d: expected an address at a multiple of 128 bytes, got 64"):
        copied(module, "astray", of, 0, 0)
    with pytest.raises(EmulationError, match="tma_load_2d: there is no barrier at"):
        copied(module, "unknown", of, 0, 0)
    module.allow(torch.zeros(8))
    arguments = (*(ctypes.c_int(0) for _ in range(3)), ctypes.c_void_p(0))
    with pytest.raises(EmulationError, match="tma_load_5d: expected a map of 5 dimensions, got one of 2"):
        module.launch("five", 1, 32, (launch.rows_map(of, ROWS, 64), *arguments))
    with pytest.raises(EmulationError, match="tma_load_5d reads 128 bytes outside of every tensor"):
        module.launch("five", 1, 32, (launch.paired_map(of, HALF, ROWS, 64), *arguments))


def test_what_the_driver_refuses(module: EmulatedModule) -> None:
    of = matrix(64)
    for wrong, box, what in (
        (of[:, 1:], 32, "the tensor begins at no multiple of 16 bytes"),
        (of[:, :4].contiguous(), 32, r"strides are multiples of 16 bytes, got \[8\]"),
        (of, 264, r"a box has 1 to 256 a side, got \[64, 264\]"),
        (of[:0], 32, r"the tensor is empty: \[80, 0\]"),
    ):
        with pytest.raises(EmulationError, match=what):
            launch.rows_map(wrong, box, 64)
