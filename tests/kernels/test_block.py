"""Argument blocks are the same in C++ and in Python."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests.support.cuda_emulator import EmulatedModule, EmulationError
from vla_accel.kernels import nvrtc
from vla_accel.kernels.attention.cuda import launch as attention
from vla_accel.kernels.gemm.hopper import arguments as gemm
from vla_accel.kernels.loop import arguments as denoise
from vla_accel.kernels.struct import Block, block
from vla_accel.kernels.tensor_map import TensorMap

BLOCKS: dict[str, tuple[type[Block], ...]] = {
    "denoise model": (denoise.Model,),
    "denoise call": (denoise.Call,),
    "gemm": (gemm.Call,),
    "attention of a tower": (attention.Output, attention.Whole),
    "maps of a tower": (attention.WholeMaps,),
    "attention of a prefix": (attention.Output, attention.SharedKeys),
    "maps of a prefix": (attention.Maps,),
}
SCALARS = block("Mixed", ("float", "a", ""), ("u64", "b", "after a hole"), ("int", "c d", ""), ("const void*", "e", ""))


def compile_with(text: str, folder: Path) -> None:
    """Compile a kernel for which this text was generated."""
    source = nvrtc.source_of({}, generated=text) + 'extern "C" __global__ void none() {}\n'
    EmulatedModule(source, {"none": 0}, "sm_90a", torch.device("cpu"), folder=folder)


def checks_of(kind: type[ctypes.Structure]) -> str:
    """C++ that compiles only where a structure has the size and the offsets of this one, and scalars of its sizes."""
    name = kind.__name__
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "{name}");\n']
    for field, *_ in kind._fields_:
        place = getattr(kind, field)
        lines.append(f'static_assert(__builtin_offsetof({name}, {field}) == {place.offset}, "{field}");\n')
        lines.append(f'static_assert(sizeof({name}::{field}) == {place.size}, "{field}");\n')
    return "".join(lines)


@pytest.mark.parametrize("kinds", [*BLOCKS.values(), (SCALARS,)], ids=[*BLOCKS, "holes"])
def test_a_block_has_the_same_layout_in_cpp(kinds: tuple[type[Block], ...], emulated: Path) -> None:
    compile_with("".join(kind.cpp for kind in kinds) + "".join(map(checks_of, kinds)), emulated)


def test_another_layout_does_not_compile(emulated: Path) -> None:
    other = block("Mixed", ("u64", "b", ""), ("float", "a", ""), ("int", "c d", ""), ("const void*", "e", ""))
    with pytest.raises(EmulationError, match="static assertion"):
        compile_with(SCALARS.cpp + checks_of(other), emulated)


def test_a_tensor_map_has_the_size_that_the_source_says(emulated: Path) -> None:
    compile_with(f'static_assert(sizeof(TensorMap) == {ctypes.sizeof(TensorMap)}, "TensorMap");\n', emulated)


def test_the_types_in_cpp_are_those_that_are_described() -> None:
    """Names of one type share a declaration, each with its own star."""
    made = block("Made", ("const float*", "a b", "(N,)"), ("int", "c", ""))
    assert made.cpp == "struct Made {\n  const float *a, *b;  // (N,)\n  int c;\n};\n"
    assert bytes(made(a=1, b=2, c=3)) == (1).to_bytes(8, "little") + (2).to_bytes(8, "little") + (3).to_bytes(
        8, "little"
    )


def test_an_unknown_type_is_an_error() -> None:
    with pytest.raises(KeyError, match="double"):
        block("Made", ("double", "a", ""))
