"""How a GEMM is cut into tiles (`gemm.cu`), and what a block of a tiling takes: shared memory, registers, threads.

Plain arithmetic for Hopper's multiprocessor, which must agree with the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vla_accel.kernels.activation import Activation
from vla_accel.numeric import round_up

SHARED_LIMIT, SHARED_MULTIPROCESSOR = 232_448, 233_472
"""Shared memory of a block at most, and of a multiprocessor, in bytes: Hopper's, for which the kernel is made."""


class Memory(NamedTuple):
    """A block's shared memory, in bytes: where the output is staged, where the sums of others arrive, where the
    barriers are (and the norms behind them), and all of it."""

    staging: int
    exchange: int
    barriers: int
    size: int


@dataclass(frozen=True)
class Tiling:
    """How a GEMM is cut; the names are `gemm.cu`'s.

    A block takes 64 * groups * blocks weight rows and parts * width tokens; a cluster is across * along * split blocks.
    `resident`: blocks a multiprocessor; `persistent`: as many blocks as fit at once take all tiles, one after another.
    """

    groups: int
    blocks: int
    parts: int
    width: int
    stages: int
    across: int = 1
    along: int = 1
    split: int = 1
    resident: int = 1
    persistent: bool = False

    @property
    def weight_rows(self) -> int:
        """Weight rows of a block."""
        return 64 * self.blocks * self.groups

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.parts * self.width

    @property
    def shares(self) -> tuple[int, int]:
        """Rows of weights and of tokens that a block fetches for itself and those that share them: whole eights."""
        return round_up(-(-self.weight_rows // self.along), 8), round_up(-(-self.tokens // self.across), 8)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.across * self.along * self.split

    @property
    def threads(self) -> int:
        """Threads of a block: the groups that multiply and the one that fetches."""
        return (self.groups + 1) * 128

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread: at the start, then of one that fetches, and of one that multiplies."""
        # Every quarter of a multiprocessor has a quarter of them and of a group's warps.
        start = min(65_536 // (self.resident * self.threads) // 8 * 8, 248)
        fetching = 40
        return start, fetching, min((start * (self.groups + 1) - fetching) // self.groups // 8 * 8, 248)

    def memory(self, activation: Activation, normed: bool = False) -> Memory:
        """How a block uses its shared memory."""
        ring = self.stages * (self.weight_rows + self.tokens) * 128
        pitch = (32 if activation.gated else 64) * 2 + 16
        share = 8 * -(-self.tokens // (8 * self.split)) if self.split > 1 else self.width
        staged = self.groups * share * pitch
        sums = self.weight_rows * share * (self.split - 1) * 4
        rest = 16 * self.stages + (8 * self.tokens if normed else 0) + 1024
        staging = exchange = 0
        end = max(ring, staged)
        if self.persistent:
            staging, end = ring, ring + staged
        elif sums and round_up(max(ring, staged) + sums, 16) + rest <= self._limit:
            # Stages and sums side by side: nobody waits before it sends.
            exchange = max(ring, staged)
            end = exchange + sums
        elif sums:
            staging, end = sums, max(ring, sums + staged)
        barriers = round_up(end, 16)
        return Memory(staging, exchange, barriers, barriers + rest)

    @property
    def _limit(self) -> int:
        return min(SHARED_LIMIT, SHARED_MULTIPROCESSOR // self.resident - 1024)

    def why_not(
        self, activation: Activation = Activation.NONE, *, residual: bool = False, normed: bool = False
    ) -> str | None:
        """Why the kernel cannot run with this tiling; None where it can."""
        if self.width % 8 or not 8 <= self.width <= 256:
            return f"a width of {self.width} is no multiple of 8 up to 256"
        if self.split > 1 and self.persistent:
            return "a split tile cannot be persistent"
        if max(self.shares) > 512 or self.cluster > 16 or any(share > 256 and share % 16 for share in self.shares):
            return "it fetches too many rows, or its cluster is too large"
        if normed and self.persistent:
            return "a block that takes several tiles has the norms of one"
        if self.memory(activation, normed).size > self._limit:
            return "it needs too much shared memory"
        accumulators = self.blocks * self.tokens // 2
        if residual:
            accumulators += self.blocks * 4 * -(-self.tokens // (16 * self.split))
        # One wgmma's must fit among those of the start, too.
        if accumulators + 32 > self.registers[2] or self.width // 2 + 26 > self.registers[0]:
            return "it needs too many registers"
        return None
