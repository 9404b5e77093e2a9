"""A call of an op, its arguments placed on a device between margins of NaN, and its result next to the reference's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vla_accel.fp8 import E4M3, FORMATS
from vla_accel.kernels.attention import few as few_attention
from vla_accel.kernels.attention import maps
from vla_accel.kernels.attention import normed as normed_attention
from vla_accel.kernels.attention import ops as attention_ops
from vla_accel.kernels.attention import suffix as suffix_attention
from vla_accel.kernels.attention.config import KeySplit, SuffixShape
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import moments as moment_ops
from vla_accel.kernels.gemm import ops
from vla_accel.kernels.gemm.config import GemmConfig, GemmSizes, Library
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows import flow, mix
from vla_accel.kernels.rows import rows as row_ops

MARGIN = 1024  # elements; keeps the alignment that compilers count on
FP8 = E4M3.dtype
MODULES = (
    row_ops, ops, attention_ops, suffix_attention, few_attention, normed_attention, maps, flow, mix, moment_ops,
)  # fmt: skip
# Where an op is defined.
MODULE_OF = {n: m for m in MODULES for n, f in vars(m).items() if getattr(f, "__module__", "") == m.__name__}
EPS = 1e-6


@dataclass(frozen=True)
class Empty:
    """An output that nothing may read: NaN before the run. `dtype` None: the case's."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Part:
    """A view of a larger tensor, as q is of q/k/v."""

    whole: Tensor | Empty
    take: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Same:
    """The same tensor as another argument."""

    name: str


@dataclass(frozen=True)
class Workspace:
    """What programs of these sizes keep between them, in this config."""

    sizes: SuffixShape | GemmSizes
    config: KeySplit | GemmConfig


@dataclass(frozen=True)
class Call:
    """One call of an op of `MODULE_OF`. `hidden`: by argument, where the kernel finds NaN and the reference 0."""

    op: str
    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    hidden: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Between a kernel and its reference, relative to each value plus the root mean square of all: worst and mean."""

    worst: float
    mean: float


class Draw:
    """Seeded random arguments in the case's dtype, made on the CPU so that every device sees the same."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def wide(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self(*shape, scale=scale, dtype=torch.float32)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(dtype)

    def linear(self, n: int, k: int, *, weights: str = "", bias: bool = False) -> Linear:
        """Of unit gain. `weights`: as the expert has them, of one byte, fp8 or int8."""
        weight, form = self.wide(n, k, scale=k**-0.5), FORMATS.get(weights)
        added = self(n) if bias else None
        if form is None:
            return make_linear(weight, added, self.dtype)
        return make_linear(weight, added, self.dtype, form.largest, form=form)


def eight_bit(what: str) -> str:
    """The weights that a case's letters ask for."""
    return "fp8" if "8" in what else "int8" if "i" in what else ""


def outputs_of(call: Call, device: torch.device, *, kernel: bool, early: bool = False, repeat: int = 1) -> list[Tensor]:
    """Run a call and return its outputs. `kernel`: NaN where it must not look, margins checked; else the reference.
    `early`: as a dependent launch, where the device has them."""
    placed = Placed(call, device, kernel)
    before = {name: [tensor.clone() for tensor in _tensors(value)] for name, value in placed.arguments.items()}
    with Chain(Gpu.of(device)).resumed() if early else contextlib.nullcontext():
        for _ in range(repeat):
            getattr(MODULE_OF[call.op], call.op)(**placed.arguments)
    if kernel:
        placed.check_margins()
        aliased = {value.name for value in call.arguments.values() if isinstance(value, Same)}
        for name, value in placed.arguments.items():
            if name not in (*(output.split(".")[0] for output in call.outputs), *aliased, "workspace"):
                _check_equal(f"{call.op} changed its input {name}", value, before[name])
    return [_part(placed.arguments, name) for name in call.outputs]


def _part(arguments: dict[str, Any], name: str) -> Tensor:
    """An argument, or a tensor in one."""
    owner, *fields = name.split(".")
    return functools.reduce(getattr, fields, arguments[owner])


class Placed:
    """A call's arguments on a device: for a kernel between margins, for a reference float32 where they were BF16."""

    def __init__(self, call: Call, device: torch.device, kernel: bool) -> None:
        self.call, self.device, self.kernel = call, device, kernel
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.counters: Tensor | None = None
        self.arguments: dict[str, Any] = {}
        for name, value in call.arguments.items():
            self.arguments[name] = self._place(name, value)

    def _place(self, name: str, value: Any) -> Any:
        if isinstance(value, Same):
            return self.arguments[value.name]
        if isinstance(value, Part):
            return value.take(self._place(name, value.whole))
        if isinstance(value, Workspace):
            return self._workspace(value)
        if isinstance(value, Empty):
            value = _fill_nan(torch.empty(value.shape, dtype=value.dtype or torch.float32))
        elif dataclasses.is_dataclass(value):
            parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return type(value)(**{n: self._place(n, v) for n, v in parts.items()})
        elif isinstance(value, tuple):
            return tuple(self._place(name, part) for part in value)
        if not isinstance(value, Tensor):
            return value
        if name in self.call.hidden:
            value = value.masked_fill(self.call.hidden[name], float("nan") if self.kernel else 0.0)
        if not self.kernel:
            return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).clone()
        return self._guarded(value)

    def _guarded(self, value: Tensor) -> Tensor:
        buffer = _fill_nan(torch.empty(value.numel() + 2 * MARGIN, dtype=value.dtype)).to(self.device)
        self.buffers.append((buffer, buffer.clone()))
        inside = buffer[MARGIN : MARGIN + value.numel()].view(value.shape)
        inside.copy_(value)
        return inside

    def _workspace(self, value: Workspace) -> tuple[Tensor, ...] | None:
        if isinstance(value.config, Library):
            assert isinstance(value.sizes, GemmSizes)
            shape, kind = (value.sizes.rows, value.sizes.n), self.call.arguments["weights"].weight.dtype
            return (self._guarded(_fill_nan(torch.empty(shape, dtype=kind))),) if self.kernel else None
        *parts, counters = value.config.workspace(value.sizes)  # type: ignore[arg-type]
        if not self.kernel or not counters:
            return None if len(parts) == 1 else tuple(torch.empty(0) for _ in range(3))
        self.counters = self._guarded(torch.zeros(counters, dtype=torch.int32))
        return *(self._guarded(torch.full((size,), float("nan"))) for size in parts), self.counters

    def check_margins(self) -> None:
        """Nothing was written outside of the tensors; the workspace is as the next call needs it."""
        for buffer, before in self.buffers:
            for margin in (slice(0, MARGIN), slice(-MARGIN, None)):
                _check_equal(f"{self.call.op} wrote outside of a tensor", buffer[margin], [before[margin]])
        assert self.counters is None or not self.counters.any(), f"{self.call.op} left counters that are not zero"


def difference(got: Tensor, want: Tensor) -> Difference:
    """NaN where `got` has one."""
    assert got.shape == want.shape
    a, b = got.cpu().double(), want.cpu().double()
    relative = (a - b).abs() / (b.abs() + b.square().mean().sqrt())
    return Difference(float(relative.max()), float(relative.mean()))


def check(call: Call, got: list[Tensor], worst: float, mean: float, fp8_mean: float) -> None:
    """Compare a kernel's outputs with the reference's. FP8 outputs may be one step off, but few of them."""
    for name, one, want in zip(call.outputs, got, outputs_of(call, torch.device("cpu"), kernel=False), strict=True):
        found = difference(one, want)
        narrow = one.dtype == FP8
        # A step of E4M3 is an eighth at most.
        assert found.worst <= (0.13 if narrow else worst), f"{call.op}.{name}: {found}"
        assert found.mean <= (fp8_mean if narrow else mean), f"{call.op}.{name}: {found}"


def _fill_nan(buffer: Tensor) -> Tensor:
    """NaN of a kind that no arithmetic makes, so that a computed NaN written over it shows; else a number too large."""
    if buffer.dtype == FP8:
        buffer.view(torch.uint8).fill_(0xFF)
    elif buffer.dtype == torch.bfloat16:
        buffer.view(torch.int16).fill_(0x7FD5)
    elif buffer.dtype == torch.float16:
        buffer.view(torch.int16).fill_(0x7ED5)
    elif buffer.dtype == torch.float32:
        buffer.view(torch.int32).fill_(0x7FD5A5A5)
    else:
        buffer.fill_({torch.uint8: 255, torch.int8: 127}.get(buffer.dtype, 1_000_000))
    return buffer


def _tensors(value: Any) -> list[Tensor]:
    """A tensor, or those in a dataclass or a tuple."""
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    if dataclasses.is_dataclass(value):
        return [tensor for f in dataclasses.fields(value) for tensor in _tensors(getattr(value, f.name))]
    return [value] if isinstance(value, Tensor) else []


def _check_equal(message: str, after: Any, before: Sequence[Tensor]) -> None:
    for one, other in zip(_tensors(after), before, strict=True):
        assert torch.equal(_bits(one), _bits(other)), message


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
