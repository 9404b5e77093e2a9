"""The properties of a GPU by which kernels are chosen. Only `Gpu.of` reads them from torch."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters can run. Some can run up to 16 (`Module.clusters_at_once`)."""
PORTABLE_SHARED = 99 << 10
"""Bytes of shared memory that a block can have on every GPU from compute capability 8.0 on."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Source: cudaDeviceProp; CUDA C++ Programming Guide, "Compute Capabilities".

    Attributes:
        shared_per_block, shared_per_multiprocessor, memory: in bytes. A block needs 1 KB of shared memory for itself.
        registers: of 32 bits, of a multiprocessor.
    """

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
        return _properties(torch.cuda.current_device() if device.index is None else device.index)

    @property
    def version(self) -> str:
        """The compute capability as text: "9.0"."""
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def architecture(self) -> str:
        """The target of the compiler: "sm_90a". From Hopper on, code uses features of one architecture alone."""
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
        """Whether four warps multiply tiles of 64 rows together (Hopper's wgmma)."""
        return self.capability == (9, 0)

    @property
    def clusters(self) -> bool:
        """Whether blocks can form clusters and read each other's shared memory."""
        return self.capability >= (9, 0)

    def clusters_at_once(self, blocks: int) -> int:
        """Return a lower bound of the clusters of `blocks` blocks that run at once, one block a multiprocessor.

        A cluster lies within one of the GPU's groups of 16 or 18 multiprocessors; this counts groups of 16.
        `Module.clusters_at_once` returns the device's own number.
        """
        if not self.clusters:
            return 0
        return max(self.multiprocessors // 16, 1) * (min(self.multiprocessors, 16) // blocks)

    @property
    def portable(self) -> Gpu:
        """The same GPU without the features of Hopper, and with the shared memory a block of Ada, 99 KB."""
        return dataclasses.replace(
            self,
            name=f"{self.name} with portable kernels",
            capability=min(self.capability, (8, 9)),
            shared_per_block=min(self.shared_per_block, PORTABLE_SHARED),
        )


@functools.cache
def _properties(index: int) -> Gpu:
    p = torch.cuda.get_device_properties(index)
    shared = (p.shared_memory_per_block_optin, p.shared_memory_per_multiprocessor)
    return Gpu(p.name, (p.major, p.minor), p.multi_processor_count, *shared, p.total_memory, p.regs_per_multiprocessor)
