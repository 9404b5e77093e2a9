"""Runs CUDA C++ kernels on a CPU, as they are: their source, compiled by the system's C++ compiler, with threads,
warps, blocks, clusters, barriers, the copy engine and the tensor cores played by a runtime.

It says what a kernel computes, and it fails, with a sentence, where a kernel

- reads or writes outside of the shared memory that it asked for, or outside of every tensor it was given;
- reads or writes, in shared memory, what another warp writes or reads with no barrier between;
- writes, in shared memory, where a barrier lies, whether it is still used or not;
- touches memory with an address that is not aligned;
- waits for ever, or ends while a copy to its memory is under way;
- uses another block's memory before it is known to have started, or after it has ended;
- reads, before griddepcontrol.wait, what a kernel before it wrote, or writes anything before it; a thread that has not
  waited may write once it has what one that has waited fetched.

Warps run in an order that a seed gives; copies come late. What it does not see: time; kernels that overlap (one runs
after the other); fences, for memory is never stale; races between lanes of a warp, and between blocks in global memory;
registers. Its sums of products are rounded once a term, in order, which tensor cores do otherwise.
"""

from tests.support.cuda_emulator.driver import EmulatedDriver
from tests.support.cuda_emulator.module import EmulatedModule, EmulationError, compiler
from tests.support.cuda_emulator.translate import Untranslatable, instructions, translate

__all__ = [
    "EmulatedDriver", "EmulatedModule", "EmulationError", "Untranslatable", "compiler", "instructions", "translate",
]  # fmt: skip
