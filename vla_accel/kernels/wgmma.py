"""Generate C++ wrappers of Hopper's warpgroup product (wgmma), one for each width, because the instruction names every
register."""

from __future__ import annotations

K = {"bf16": 16, "f16": 16, "e4m3": 32}
"""Columns of K of one instruction, by the kind of both operands: 32 bytes."""


def wgmma(name: str, n: int, kind: str, *, registers: bool = False, transposed: bool = False) -> str:
    """Return a C++ function around one wgmma of 64 x n x K: d (+)= a b, with float32 sums. Source: the PTX manual,
    wgmma.mma_async.

    Args:
        n: a multiple of 8 up to 256.
        kind: one of `K`.
        registers: a is in four packed registers; otherwise in shared memory, with k contiguous.
        transposed: b, in shared memory, has contiguous columns; otherwise contiguous k. Not for E4M3.
    """
    count = n // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    constraints = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    flags = "p, 1, 1"
    if registers:
        parameters = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more"
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a{i})' for i in range(4))
        b, more = f"%{count + 4}", f"%{count + 5}"
    else:
        parameters, a, inputs = "u64 a, u64 b, int more", f"%{count}", '"l"(a)'
        b, more = f"%{count + 1}", f"%{count + 2}"
        flags += "" if kind == "e4m3" else ", 0"
    flags += "" if kind == "e4m3" else f", {int(transposed)}"
    return f"""__device__ __forceinline__ void {name}(float (&d)[{count}], {parameters}) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {more}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k{K[kind]}.f32.{kind}.{kind} {{{outputs}}}, {a}, {b}, {flags};\\n}}"
      : {constraints} : {inputs}, "l"(b), "r"(more));
}}
"""
