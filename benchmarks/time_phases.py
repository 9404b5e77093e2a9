"""Time the phases of the blocks of Hopper's streamed denoising loop.

    python -m benchmarks.time_phases --output runs/phases.json [--only TEXT]

It inserts time stamps into the source of the kernels, at the lines of `STAMPS`, and reads them after a step at full
size: they belong to its last layer (for SmolVLA a cross-attention layer). The JSON has, for each kernel, when its first
and last block began and ended, in nanoseconds since the first kernel of the layer, and the median clock cycles of each
phase. Stamps take time themselves: compare shares.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import options_parser
from benchmarks.time_loops import LOOPS, SMOLVLA, inputs_of
from eval.script import concluded
from tests.support.streamed_support import Loops
from vla_accel.families.pi0.native_loop import expert_spec, expert_weights, steps_of
from vla_accel.families.pi0.network import Pi0
from vla_accel.files import write_json
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.machine import resolve_device
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import streamed_loop
from vla_accel.nn.random_weights import random_model

CASES = ("pi05 H=10 batch 1", "pi05 H=50", "pi0 H=50", *SMOLVLA)
KERNELS = ("attention", "output", "gate_up", "down")
"""Kernels of a layer; the first is `attend` or `grouped`."""
BLOCKS, PLACES = 176, 32
"""Blocks of a kernel; stamps of a block, of which the first and the last are nanoseconds."""
SUPPORT = f"""
__device__ unsigned long long stamps[{len(KERNELS)}][{BLOCKS}][{PLACES}];
__device__ __forceinline__ void stamp(int kernel, int place) {{
  unsigned long long t;
  if (place % {PLACES - 1} == 0) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  else t = clock64();
  if (threadIdx.x == 0) stamps[kernel][blockIdx.x][place] = t;
}}
extern "C" __global__ void read_stamps(unsigned long long* to) {{
  for (int i = threadIdx.x; i < {len(KERNELS) * BLOCKS * PLACES}; i += blockDim.x) to[i] = (&stamps[0][0][0])[i];
}}
"""
BEGIN, END = 0, PLACES - 1
ARGUMENT = "Hold hold, Emit emit"
LAST_EMIT = {
    "attend": "        out[Q_UNITS * PADDED_ROWS * 8] = round_bf16(b);\n      }",
    "grouped": "        out[8] = round_bf16(b);\n      }",
}
NORMED, SPLIT, GATE_UP = "normed_pairs(", "split_product(", " gate_up(const"
ATTEND, GROUPED = " attend(const", " grouped(const"
SPLITS = "K == MLP_DIM ? 3 : 1"
EXCHANGE, SCORES = "void exchange(", "void score_all("
EACH, ELEMENTS, OWN = "#pragma unroll\n", "(int n = 0; n < EACH; ++n) {\n", "thread + n * THREADS"
# Function, line in it, whether the stamp follows the line, kernel, index of the stamp, and the phase that ends there.
STAMPS = [
    (NORMED, "int kernel = 2) {\n", True, "kernel", 1, ""),
    (NORMED, "  griddepcontrol_wait();\n", False, "kernel", 2, "prologue"),
    (NORMED, "  griddepcontrol_wait();\n", True, "kernel", 3, "wait"),
    (NORMED, "  for (int done = 0; done < mine", False, "kernel", 4, "rows and norm"),
    (NORMED, "    __syncthreads();\n    put_sums<N>(sums", False, "kernel", 5, "product"),
    (NORMED, f"{EACH}    for {ELEMENTS}      const Place at({OWN});\n      if (at.tile", False, "kernel", 6, "sums"),
    (SPLIT, "  constexpr int N = SplitProduct", False, SPLITS, BEGIN, ""),
    (SPLIT, "  constexpr int N = SplitProduct", False, SPLITS, 1, ""),
    (SPLIT, "  griddepcontrol_wait();\n", False, SPLITS, 2, "prologue"),
    (SPLIT, "  griddepcontrol_wait();\n", True, SPLITS, 3, "wait"),
    (SPLIT, "  __syncthreads();\n  // The sums of", False, SPLITS, 5, "product"),
    (SPLIT, "  if constexpr (PARTS > 1)", False, SPLITS, 6, "sums"),
    (EXCHANGE, "    sent().wait_cluster();\n", False, SPLITS, 7, "sums sent"),
    (SPLIT, f"{EACH}  for {ELEMENTS}    const int e =", False, SPLITS, 8, "sums there"),
    (SPLIT, "sum, held, present[n]);\n    }\n  }\n", True, SPLITS, END, ""),
    (GATE_UP, "  const u64 at", False, "2", BEGIN, ""),
    (GATE_UP, "round_bf16(y);\n      });\n", True, "2", END, ""),
    (ATTEND, "  const u64 at", False, "0", BEGIN, ""),
    (ATTEND, "      }, 0);\n", True, "0", 7, "q/k/v"),
    (ATTEND, "  cluster_wait();  // The other blocks", True, "0", 8, "cluster there"),
    (ATTEND, "  attention.kv_arrived.wait();\n", False, "0", 9, "q sent"),
    (ATTEND, "  attention.q_arrived.wait_cluster();\n", True, "0", 11, "q there"),
    (SCORES, "        if (own == 0) break;\n", True, "0", 12, "prefix scores"),
    (SCORES, f"{EACH}      for (int r = 0; r < KEY_ROUNDS; ++r) {{\n        const", False, "0", 14, "suffix there"),
    (ATTEND, "  // The scores come first", False, "0", 15, "scores"),
    (ATTEND, "  float o[ROW_TILES][VALUE_TILES][4];", False, "0", 16, "softmax"),
    (ATTEND, "  attention.send_parts(o);", False, "0", 17, "values"),
    (ATTEND, "  cluster_arrive();\n  cluster_wait();\n  attention.combine", False, "0", 18, "parts sent"),
    (ATTEND, "  attention.combine();", False, "0", 19, "parts there"),
    (ATTEND, "\n}\n", False, "0", END, ""),
    (GROUPED, "  const u64 at", False, "0", BEGIN, ""),
    (GROUPED, "      }, 0);\n", True, "0", 7, "q/k/v"),
    (GROUPED, "  cluster_wait();  // The other blocks", True, "0", 8, "cluster there"),
    (GROUPED, "  attention.arrived.wait_cluster();\n", False, "0", 9, "q/k/v sent"),
    (GROUPED, "  attention.arrived.wait_cluster();\n", True, "0", 10, "q/k/v there"),
    (GROUPED, "    attention.multiply_values(", False, "0", 11, "scores"),
    (GROUPED, "    if (n) __syncthreads();", False, "0", 12, "values"),
    (GROUPED, "    attention.combine(tile);", False, "0", 13, "parts there"),
    (GROUPED, "\n}\n", False, "0", END, ""),
]  # fmt: skip


def stamps_of(attention: str) -> list[tuple[str, str, bool, str, int, str]]:
    """The stamps of a loop with this attention kernel, "attend" or "grouped"."""
    others = (GROUPED,) if attention == "attend" else (ATTEND, SCORES)
    return [stamp for stamp in STAMPS if stamp[0] not in others]


def stamped(source: str, attention: str) -> str:
    """The source of the kernels with the stamps of its attention kernel."""
    last = LAST_EMIT[attention]
    source = source.replace(ARGUMENT, f"{ARGUMENT}, int kernel = 2", 1).replace(f"{last});", f"{last}, 0);", 1)
    first = source.index("__device__")
    source = source[:first] + SUPPORT.lstrip() + source[first:]
    for function, line, behind, kernel, place, _ in stamps_of(attention):
        start = source.index(function)
        at = source.index(line, start) + (len(line) if behind and line.endswith("\n") else 0)
        if behind and not line.endswith("\n"):
            at = source.index("\n", at) + 1
        here = f"  stamp({kernel}, {place});\n"
        source = source[:at] + (here if source[at - 1] == "\n" else "\n" + here) + source[at:]
    return source


def phases_of(stamps: Tensor, blocks: dict[str, int]) -> dict[str, Any]:
    """What the stamps (kernels, BLOCKS, PLACES) say, by kernel."""
    found: dict[str, Any] = {}
    attention = next(name for name in LAST_EMIT if name in blocks)
    kernels = (attention, *KERNELS[1:])
    functions = ((NORMED, ATTEND, SCORES, GROUPED), (SPLIT, EXCHANGE), (NORMED, GATE_UP), (SPLIT, EXCHANGE))
    ended = {
        (kernel, place): name
        for kernel, mine in zip(kernels, functions, strict=True)
        for function, *_, place, name in stamps_of(attention) if function in mine
    }  # fmt: skip
    origin = int(stamps[0, : blocks[attention], BEGIN].min())
    for kernel, of_kernel in zip(kernels, stamps, strict=True):
        mine = of_kernel[: blocks[kernel]]
        whole = mine[mine[:, END] > 0]  # blocks of `attend` that end early have no last stamp
        there = [p for p in range(1, END) if (whole[:, p] > 0).all()]
        cycles = {
            ended[kernel, b]: float((whole[:, b] - whole[:, a]).double().median()) for a, b in itertools.pairwise(there)
        }
        ns = {
            f"{which} {what}": int(getattr(whole[:, place], how)()) - origin
            for what, place in (("begun", BEGIN), ("ended", END)) for which, how in (("first", "min"), ("last", "max"))
        }  # fmt: skip
        found[kernel] = {"blocks": blocks[kernel], "ns": ns, "cycles": cycles}
    return found


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """A row: one step of a loop."""
    gpu = Gpu.of(device)
    assert gpu is not None
    if name in SMOLVLA:
        loops = Loops(SMOLVLA[name])
        loop, state = loops.streamed(gpu, str(device)), None
        inputs = loops.placed(str(device), beyond=0.0) | {"noise": loops.noise.to(device)}
    else:
        case = LOOPS[name]
        model = random_model(Pi0, case.config).to(device).to_compute_dtype(torch.bfloat16)
        weights = expert_weights(model, "bf16", streamed=True)
        inputs, state = inputs_of(case, device, torch.bfloat16)
        tables = steps_of(model, weights, Schedule.uniform(1))
        loop = streamed_loop(gpu, weights, expert_spec(case.config), tables, case.batch, case.prefix_tokens)
    actions = inputs["noise"].clone()
    loop.run(inputs, state, actions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.run(inputs, state, actions)
    for _ in range(20):
        graph.replay()
    stamps = torch.zeros(len(KERNELS), BLOCKS, PLACES, dtype=torch.int64, device=device)
    loop.module.launch("read_stamps", 1, 256, (ctypes.c_void_p(stamps.data_ptr()),))
    return {"loop": name, "kernels": phases_of(stamps.cpu(), loop.schedule.blocks)}


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--only", default="", help="loops whose name contains this text")
    options, real = parser.parse_args(), nvrtc.Module.__init__

    def loaded(self: Any, source: str, shared: dict[str, int], *rest: Any) -> None:
        for attention in LAST_EMIT.keys() & shared.keys():
            source, shared = stamped(source, attention), {**shared, "read_stamps": 0}
        real(self, source, shared, *rest)

    nvrtc.Module.__init__ = loaded  # type: ignore[method-assign]
    rows = []
    with torch.inference_mode():
        for name in (case for case in CASES if options.only in case):
            rows.append(measure(name, resolve_device("cuda")))
            print(json.dumps(rows[-1]), flush=True)
            write_json(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(concluded(main))
