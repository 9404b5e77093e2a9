"""The properties of a GPU that kernels are chosen by. Knows GPUs, not kernels.
`Gpu.of(device)` is the only place that reads the properties of a device from torch.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters can run; more (up to 16) is a question to the device."""
PORTABLE_SHARED = 99 << 10
"""Bytes of shared memory that a block can have on every GPU from compute capability 8.0 on."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. `shared_per_block` and `shared_per_multiprocessor` (of which each block needs 1 KB for itself) and
    `memory` in bytes; `registers` of 32 bits a multiprocessor. Source: cudaDeviceProp; CUDA C++ Programming Guide,
    "Compute Capabilities"."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    memory: int
    registers: int = 65_536

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """Return the GPU behind a device; None if the device is no GPU."""
        if device.type != "cuda":
            return None
        return _asked(torch.cuda.current_device() if device.index is None else device.index)

    @property
    def version(self) -> str:
        """The compute capability as it is written: "9.0"."""
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def architecture(self) -> str:
        """What machine code is compiled for: "sm_90a", with the features of this very architecture from Hopper on."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    @property
    def bf16(self) -> bool:
        """Whether its tensor cores multiply BF16."""
        return self.capability >= (8, 0)

    @property
    def int8(self) -> bool:
        """Whether its tensor cores multiply INT8."""
        return self.capability >= (7, 5)

    @property
    def fp8(self) -> bool:
        """Whether its tensor cores multiply FP8."""
        return self.capability >= (8, 9)

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel can be launched while its predecessor still runs (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def tma(self) -> bool:
        """Whether it has a tensor memory accelerator, which copies a tile by one instruction of one thread."""
        return self.capability >= (9, 0)

    @property
    def wgmma(self) -> bool:
        """Whether four warps multiply tiles of 64 rows together, the first from registers or shared memory, the second
        from shared memory."""
        return self.capability == (9, 0)

    @property
    def clusters(self) -> bool:
        """Whether blocks can form clusters and read each other's shared memory."""
        return self.capability >= (9, 0)

    def clusters_at_once(self, blocks: int) -> int:
        """Clusters of `blocks` blocks that surely run at once, one block a multiprocessor.

        A cluster lies within one of the chip's groups of 16 or more multiprocessors, of which some may be short of two:
        groups of 16 are counted. A lower bound, where the device itself (cuOccupancyMaxActiveClusters) is not asked.
        """
        if not self.clusters:
            return 0
        return max(self.multiprocessors // 16, 1) * (min(self.multiprocessors, 16) // blocks)

    @property
    def portable(self) -> Gpu:
        """The same GPU with no more than an Ada one has: without what came with Hopper, and with as little shared
        memory a block, 99 KB, of which large Ampere GPUs have more."""
        return dataclasses.replace(
            self,
            name=f"{self.name} with portable kernels",
            capability=min(self.capability, (8, 9)),
            shared_per_block=min(self.shared_per_block, PORTABLE_SHARED),
        )


@functools.cache
def _asked(index: int) -> Gpu:
    p = torch.cuda.get_device_properties(index)
    return Gpu(
        p.name, (p.major, p.minor), p.multi_processor_count, p.shared_memory_per_block_optin,
        p.shared_memory_per_multiprocessor, p.total_memory, p.regs_per_multiprocessor,
    )  # fmt: skip
