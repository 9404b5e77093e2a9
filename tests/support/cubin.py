"""What NVIDIA's tools, which come with triton, say of compiled machine code (a cubin)."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest


def stack_of(code: bytes) -> set[int]:
    """Bytes of stack a thread of each kernel: one with a stack has spilled, or indexes its accumulators."""
    return {int(size) for size in re.findall(r"STACK:(\d+)", _listing(code, "cuobjdump", "-res-usage"))}


def registers_of(code: bytes) -> set[int]:
    """Registers a thread of each kernel."""
    return {int(count) for count in re.findall(r"REG:(\d+)", _listing(code, "cuobjdump", "-res-usage"))}


def local_between(code: bytes, instruction: str) -> bool:
    """Whether local memory is written or read between the first and the last of these instructions of a kernel."""
    lines = _listing(code, "nvdisasm", "-c").splitlines()
    places = [place for place, line in enumerate(lines) if instruction in line]
    return any(re.search(r"\b(STL|LDL)\b", line) for line in lines[places[0] : places[-1]])


def _listing(code: bytes, tool: str, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        triton = pytest.importorskip("triton", reason="NOT RUN: needs triton, for NVIDIA's tools")
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout
