"""Hopper's product of a warpgroup (wgmma) as C++ text: its many operands are written out by name, one wrapper for each
width. Knows the instruction, not what is multiplied."""

from __future__ import annotations


def product(name: str, n: int, kind: str, *, registers: bool, values: bool = False) -> str:
    """C++ of a function around one wgmma of 64 x n x 16: d (+)= a b, n a multiple of 8 up to 256; float32 sums.

    `kind`: "bf16" or "f16". `registers`: a is four packed registers; otherwise it lies in shared memory, k in a row.
    b always does; `values`: its columns in a row, otherwise k. Source: the PTX manual, wgmma.mma_async.
    """
    count = n // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    constraints = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:
        parameters = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more"
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a{i})' for i in range(4))
        b, more, tail = f"%{count + 4}", f"%{count + 5}", f"p, 1, 1, {int(values)}"
    else:
        parameters, a, inputs = "u64 a, u64 b, int more", f"%{count}", '"l"(a)'
        b, more, tail = f"%{count + 1}", f"%{count + 2}", f"p, 1, 1, 0, {int(values)}"
    return f"""__device__ __forceinline__ void {name}(float (&d)[{count}], {parameters}) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {more}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{outputs}}}, {a}, {b}, {tail};\\n}}"
      : {constraints} : {inputs}, "l"(b), "r"(more));
}}
"""
