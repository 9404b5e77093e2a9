"""What compiled machine code says of its kernels, read from their attributes (the sections .nv.info of a cubin).

Eight bytes each: of which kernel, and the value. Numbers of attributes: NVIDIA's cuobjdump names them EIATTR_….
"""

from __future__ import annotations

import re


def stack_of(code: bytes) -> set[int]:
    """Bytes of stack a thread (MIN_STACK_SIZE): a kernel with a stack has spilled, or indexes its accumulators."""
    return _values(code, b"\x12")


def registers_of(code: bytes) -> set[int]:
    """Registers a thread (REGCOUNT)."""
    return _values(code, b"\x2f")


def _values(code: bytes, number: bytes) -> set[int]:
    found = re.finditer(b"\x04" + re.escape(number) + rb"\x08\x00....(....)", code, re.DOTALL)
    return {int.from_bytes(match[1], "little") for match in found}
