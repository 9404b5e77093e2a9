"""Argument blocks of CUDA C++ kernels: one description makes the C++ structure and the ctypes structure with its bytes.

A kernel's source begins with the text `cpp` of its blocks; a launch fills the same blocks by name and passes them by
value.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

from torch import Tensor

from vla_accel.errors import EngineError

_SCALARS = {"float": ctypes.c_float, "int": ctypes.c_int, "u64": ctypes.c_uint64}


class Block(ctypes.Structure):
    """A block made by `block`."""

    cpp: ClassVar[str]
    """The definition of the structure in C++."""


def block(name: str, *fields: tuple[str | type[ctypes.Structure], str, str]) -> type[Block]:
    """Describe a block.

    Args:
        name: the name of the structure in C++.
        fields: in the order of memory: a type, the names of all fields that have it, and a comment for the C++ source,
            which may be empty. A type is "float", "int", "u64", a pointer such as "const float*", or a structure whose
            name in C++ is the same.
    """
    members: list[tuple[str, type]] = []
    lines = [f"struct {name} {{"]
    for kind, names, comment in fields:
        if isinstance(kind, str):
            declared, pointer, _ = kind.partition("*")
            member = ctypes.c_void_p if pointer else _SCALARS[kind]
        else:
            declared, pointer, member = kind.__name__, "", kind
        members += [(field, member) for field in names.split()]
        declaration = f"  {declared} {', '.join(pointer + field for field in names.split())};"
        lines.append(f"{declaration}  // {comment}" if comment else declaration)
    return type(name, (Block,), {"_fields_": members, "cpp": "\n".join((*lines, "};\n"))})


def address(name: str, tensor: Tensor | None, alignment: int = 16) -> int | None:
    """Return the address of a tensor for a field of a block; None for None.

    Raises:
        EngineError: if the tensor is not contiguous or its address is not a multiple of `alignment` bytes.
    """
    if tensor is None:
        return None
    beyond = tensor.data_ptr() % alignment
    if beyond or not tensor.is_contiguous():
        raise EngineError(
            f"denoise: {name}: expected a contiguous tensor at a multiple of {alignment} bytes, got "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}, {beyond} bytes beyond a multiple"
        )
    return tensor.data_ptr()
