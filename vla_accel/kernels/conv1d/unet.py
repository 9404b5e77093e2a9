"""All denoising steps of a 1-D U-Net as one persistent kernel, in CUDA C++, for every GPU from Ampere on.

A step is a list of phases, one for each convolution that must wait for the one before. The kernel reads them from a
table, so that one source serves every network; `unet.cu` has the details.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels import nvrtc
from vla_accel.kernels.conv1d.ops import StepSizes
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.image.ops import GroupNorm
from vla_accel.kernels.persistent import NotResident
from vla_accel.kernels.struct import address, block
from vla_accel.numeric import round_up

WARPS, MAKERS, TEAMS = 8, 16, 8
"""Warps that multiply, each a block of 32 columns of K of a unit; warps that make their input, these and more, in teams
of a group of channels each. One more warp copies."""
THREADS = (MAKERS + 1) * 32
_TEAM = MAKERS // TEAMS * 32
MOST_ROWS = 16
BLOCK = 32
STAGE_UNITS, UNIT_BYTES, MOST_STAGES, LEAST_STAGES = 4, 8 * BLOCK * WARPS * 2, 12, 2
UNDER_WAY = 8
"""Units of 4 KB that a block copies at once, at most."""
_NAME = "unet"

SourceBlock = block(
    "Source",
    ("const float*", "rows", "(rows, channels); none: the noisy chunk"),
    ("const float*", "weight bias", "of the group norm, (channels,)"),
    ("const float*", "residual", "added at the end, (rows, channels)"),
    ("float*", "kept", "where the result goes for later phases, (rows, channels)"),
    ("int", "channels groups", "no groups: no norm"),
    ("int", "films condition", "numbers of a channel's condition, 2: it scales, too; its first column"),
    ("float", "eps", ""),
)
ProductBlock = block(
    "Product",
    ("const u16*", "weights", "as `pack` returns them"),
    ("const float*", "bias", "(8 * tiles,)"),
    ("float*", "sums", "(outputs, 8 * tiles)"),
    ("int", "tiles taps stride pad outputs", ""),
)
PhaseBlock = block(
    "Phase",
    (SourceBlock, "front behind", "the input's channels"),
    (ProductBlock, "first second", "of the same input"),
    ("int", "rows blocks", "of the input; its channels in blocks of 32"),
)
CallBlock = block(
    "Call",
    ("const Phase*", "phases", "(count + 1,)"),
    ("const float*", "conditions", "(steps, films), of all channels"),
    ("const float*", "sizes", "(steps, 7): StepSizes"),
    ("const float*", "noise", "(draws, LENGTH, ACTIONS)"),
    ("float*", "actions", "(LENGTH, ACTIONS)"),
    ("int", "count steps draws films", ""),
)


@dataclass(frozen=True)
class PackedConvolution:
    """`weights` (tiles, units, WARPS, 8, BLOCK) BF16: eight output channels of a tile, and K in the kernel's order;
    `bias` (8 * tiles,) float32."""

    weights: Tensor
    bias: Tensor
    taps: int

    @property
    def channels(self) -> int:
        """Output channels, in whole tiles."""
        return len(self.bias)


def pack(weight: Tensor, bias: Tensor) -> PackedConvolution:
    """Pack a convolution's weight (N, taps, C) and bias (N,). N and C are filled up with zeros to whole tiles."""
    n, taps, channels = weight.shape
    missing = -n % 8
    filled = F.pad(weight, (0, -channels % (WARPS * BLOCK), 0, 0, 0, missing)).flatten(1)
    tiles = filled.view(len(filled) // 8, 8, -1, WARPS, BLOCK).permute(0, 2, 3, 1, 4)
    return PackedConvolution(
        tiles.to(torch.bfloat16).contiguous(), F.pad(bias.float(), (0, missing)).contiguous(), taps
    )


@dataclass(frozen=True)
class Source:
    """Channels of a phase's input: film(mish(group norm of `rows`)) + `residual`; what is None is left out.

    Attributes:
        rows: (T, C) float32. None: the noisy chunk.
        channels: C.
        norm: Group norm.
        condition: First column of the condition, if there is one.
        films: Numbers of the condition for each channel.
        residual: (T, C) float32.
        kept: (T, C) float32, where the kernel stores the result for later phases.
    """

    rows: Tensor | None
    channels: int
    norm: GroupNorm | None = None
    condition: int = 0
    films: int = 0
    residual: Tensor | None = None
    kept: Tensor | None = None

    @property
    def groups(self) -> int:
        """Groups of channels, each of which a team of warps makes."""
        return TEAMS if self.norm is None else self.norm.groups

    def quads(self, rows: int) -> tuple[int, int]:
        """Return the rows of a group, and the quads of each, that a lane holds at most."""
        across = self.channels // self.groups // 4
        return -(-rows // max(1, _TEAM // across)), -(-across // _TEAM)


@dataclass(frozen=True)
class Product:
    """A convolution of a phase's input, and its sums (outputs, channels) float32; None: the network's output."""

    convolution: PackedConvolution
    sums: Tensor | None
    outputs: int
    stride: int = 1

    @property
    def pad(self) -> int:
        """Rows of zeros before the input."""
        return self.convolution.taps // 2


@dataclass(frozen=True)
class Phase:
    """One or two products of the same input of `rows` rows."""

    rows: int
    sources: tuple[Source, ...]
    products: tuple[Product, ...]

    @property
    def maps(self) -> list[Tensor]:
        """What the phase stores in memory."""
        found = [*(source.kept for source in self.sources), *(product.sums for product in self.products)]
        return [m for m in found if m is not None]

    @property
    def blocks(self) -> int:
        """Blocks of the input's channels, with zeros up to whole units."""
        return round_up(sum(source.channels for source in self.sources), WARPS * BLOCK) // BLOCK


def why_not(gpu: Gpu | None, widths: Sequence[int], groups: Sequence[int], rows: int, actions: int) -> str | None:
    """Explain why the kernel does not run a network; None if it does. `rows`: of all sequences; `groups`: of the norms;
    `actions`: numbers of an action."""
    if gpu is None:
        return "there is no GPU"
    if not gpu.bf16:
        return f"it needs compute capability 8.0, {gpu.name} has {gpu.version}"
    if rows > MOST_ROWS:
        return f"{rows} rows are more than {MOST_ROWS}"
    if any(width % BLOCK for width in widths) or any(width % (4 * count) for width in widths for count in groups):
        return f"its tiles do not fit widths of {', '.join(map(str, widths))}"
    return None


@dataclass(frozen=True)
class Layout:
    """The kernel's source and shared memory for a network."""

    phases: Sequence[Phase]
    length: int
    actions: int
    gpu: Gpu

    @property
    def offsets(self) -> dict[str, int]:
        """Where the areas of shared memory begin."""
        sizes = {
            "INPUT_AT": max(phase.rows * phase.blocks for phase in self.phases) * 2 * BLOCK,
            "ZEROS_AT": 2 * BLOCK, "SUMS_AT": 2 * 2 * WARPS * MOST_ROWS * 8 * 4,
            "TEAMS_AT": 2 * MAKERS * 4,
            "CHUNK_AT": self.length * self.actions * 4, "TABLE_AT": len(self.phases) * ctypes.sizeof(PhaseBlock),
            "BARRIERS_AT": 2 * MOST_STAGES * 8, "RING_AT": 0,
        }  # fmt: skip
        found, end = {}, 0
        for name, size in sizes.items():
            found[name] = end
            end = round_up(end + size, 128)
        return found

    @property
    def stages(self) -> int:
        """Stages of the ring that fit, at most `MOST_STAGES`."""
        left = self.gpu.shared_per_block - self.offsets["RING_AT"]
        return min(MOST_STAGES, left // (STAGE_UNITS * UNIT_BYTES))

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.offsets["RING_AT"] + self.stages * STAGE_UNITS * UNIT_BYTES

    @property
    def source(self) -> str:
        """The source of the kernel, with its sizes at the beginning."""
        quads = [s.quads(phase.rows) for phase in self.phases for s in phase.sources if s.rows is not None]
        columns = max(wide for _, wide in quads)
        held = max(rounds * (1 if wide == 1 else columns) for rounds, wide in quads)
        macros = {
            "WARPS": WARPS, "MAKERS": MAKERS, "STAGES": self.stages, "STAGE_UNITS": STAGE_UNITS, "UNDER_WAY": UNDER_WAY,
            "HELD": held, "COLUMNS": columns,
            "LENGTH": self.length, "ACTIONS": self.actions, **self.offsets,
        }  # fmt: skip
        generated = "".join(one.cpp for one in (SourceBlock, ProductBlock, PhaseBlock, CallBlock))
        return nvrtc.source_of(macros, "tensor_cores", "persistent/blocks", "conv1d/unet", generated=generated)


class PersistentUnet:
    """The loaded kernel and its table of phases.

    Raises:
        NotResident: the device does not run a block on every multiprocessor at once, or lacks shared memory.
    """

    def __init__(
        self, gpu: Gpu, phases: Sequence[Phase], sizes: Sequence[StepSizes], conditions: Tensor, chunk: tuple[int, int]
    ) -> None:
        """`phases`: the last one makes the network's output; `conditions` (steps, n) float32 of a call; `chunk`: rows
        and numbers of the actions."""
        device, self.phases = conditions.device, phases
        widest = max(len(product.convolution.weights) for phase in phases for product in phase.products)
        self.blocks = min(gpu.multiprocessors, widest)  # each has work in the widest phase
        self.maps = [m for phase in phases for m in phase.maps]
        layout = Layout(phases, *chunk, gpu)
        if layout.stages < LEAST_STAGES:
            raise NotResident(f"its ring needs {LEAST_STAGES} stages, the GPU's shared memory holds {layout.stages}")
        # Compiled for the device itself: with portable kernels the layout's GPU has another architecture.
        architecture = (Gpu.of(device) or gpu).architecture
        self.module = nvrtc.load_module(layout.source, {_NAME: layout.shared}, architecture, device)
        held = self.module.blocks_at_once(_NAME, THREADS)
        if held < self.blocks:
            raise NotResident(f"its {self.blocks} blocks must run at once, the device holds {held}")
        content = (PhaseBlock * len(phases))(*map(_phase, phases))
        self.table = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        numbers = [[s.x_of, s.out_of, s.clean, s.keep, s.out, s.noise, s.clip] for s in sizes]
        self.sizes = torch.tensor(numbers, dtype=torch.float32, device=device)
        self.conditions = conditions

    def run(self, noise: Tensor, actions: Tensor) -> None:
        """Enqueue all steps: `noise` (draws, T, A) float32 to `actions` (T, A) float32."""
        torch._foreach_zero_(self.maps)
        call = CallBlock(
            phases=address("phases", self.table), conditions=address("conditions", self.conditions),
            sizes=address("sizes", self.sizes, 4), noise=address("noise", noise, 4),
            actions=address("actions", actions, 4),
            count=len(self.phases) - 1, steps=len(self.sizes), draws=len(noise), films=self.conditions.shape[1],
        )  # fmt: skip
        self.module.launch(_NAME, self.blocks, THREADS, (call,), cooperative=True)


def _phase(phase: Phase) -> Any:
    front, behind = (*map(_source, phase.sources), SourceBlock())[:2]
    first, second = (*map(_product, phase.products), ProductBlock())[:2]
    return PhaseBlock(front=front, behind=behind, first=first, second=second, rows=phase.rows, blocks=phase.blocks)


def _source(source: Source) -> Any:
    norm = source.norm
    return SourceBlock(
        rows=address("rows", source.rows), weight=address("weight", None if norm is None else norm.weight),
        bias=address("bias", None if norm is None else norm.bias), residual=address("residual", source.residual),
        kept=address("kept", source.kept), channels=source.channels, groups=source.groups,
        films=source.films, condition=source.condition, eps=0.0 if norm is None else norm.eps,
    )  # fmt: skip


def _product(product: Product) -> Any:
    packed = product.convolution
    return ProductBlock(
        weights=address("weights", packed.weights), bias=address("bias", packed.bias),
        sums=address("sums", product.sums), tiles=len(packed.weights), taps=packed.taps, stride=product.stride,
        pad=product.pad, outputs=product.outputs,
    )  # fmt: skip


def weight_bytes(phases: Sequence[Phase]) -> int:
    """Return the bytes of weights that a step reads."""
    return sum(2 * math.prod(p.convolution.weights.shape) for phase in phases for p in phase.products)
