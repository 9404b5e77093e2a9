"""What compiled machine code says of its kernels: the attributes in the sections .nv.info of a cubin, an ELF file.

A record is a form, the number of an attribute and either two bytes or, of the form 4, a length and so many. Numbers of
attributes: NVIDIA's cuobjdump names them EIATTR_….
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

SIZED = 4
MIN_STACK_SIZE, REGCOUNT = 0x12, 0x2F


def stack_of(code: bytes) -> set[int]:
    """Bytes of stack a thread: a kernel with a stack has spilled, or indexes its accumulators."""
    return _values(code, MIN_STACK_SIZE)


def registers_of(code: bytes) -> set[int]:
    """Registers a thread."""
    return _values(code, REGCOUNT)


def local_between(code: bytes, instruction: str) -> bool:
    """Whether local memory is written or read between the first and the last of these instructions of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        found = find_spec("triton")
        assert found and found.origin, "NVIDIA's disassembler comes with triton"
        tool = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    places = [place for place, line in enumerate(lines) if instruction in line]
    return any(re.search(r"\b(STL|LDL)\b", line) for line in lines[places[0] : places[-1]])


def _values(code: bytes, number: int) -> set[int]:
    """Of every kernel: eight bytes each, which kernel it is and the value."""
    return {
        struct.unpack("<II", value)[1]
        for section in _info_sections(code)
        for attribute, value in _records(section)
        if attribute == number
    }


def _records(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(section):
        form, number, length = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == SIZED:
            yield number, section[at : at + length]
            at += length


def _info_sections(code: bytes) -> Iterator[bytes]:
    (table,) = struct.unpack_from("<Q", code, 0x28)
    entry, count, of_names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * entry) for i in range(count)]
    names = headers[of_names][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        if code[start : code.index(b"\0", start)].startswith(b".nv.info"):
            yield code[offset : offset + size]
