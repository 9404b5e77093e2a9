"""A module in BF16 or FP16, and what that costs and saves: dtypes, ranges, memory, latency. Knows no model.

`ReducedPrecision` says how: weights are converted at load, modules named to stay in float32 compute there, and autocast
covers what is left between them. Sources of the ranges: IEEE 754 binary16 (65504) and bfloat16 (3.4e38).
"""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError, EngineError
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import DTYPES

ReducedDtype = Literal["bf16", "fp16"]
HEADROOM = 0.5
"""A module whose largest value is above this share of a dtype's range is reported as close to overflow."""


@dataclass(frozen=True)
class ReducedPrecision:
    """How a module computes. `dtype`: of weights and activations; `keep_fp32`: patterns of module names that stay in
    float32 (fnmatch: "decoder.mid_block.*"); `channels_last`: weights laid out for the GPU's convolutions."""

    dtype: ReducedDtype = "bf16"
    keep_fp32: tuple[str, ...] = ()
    channels_last: bool = True


@dataclass(frozen=True)
class ModuleRange:
    """One leaf module in a run: its weights' dtype, its outputs' dtype, largest magnitude, and non-finite values."""

    name: str
    kind: str
    weights: str
    outputs: str
    largest: float
    non_finite: int

    def state(self, dtype: torch.dtype) -> str:
        """ "overflow" if its values leave `dtype`'s range, "close" if they come near, else "ok"."""
        limit = torch.finfo(dtype).max
        if self.non_finite or not self.largest <= limit:
            return "overflow"
        return "close" if self.largest > HEADROOM * limit else "ok"


@dataclass(frozen=True)
class Cost:
    """Memory of the weights and at the peak of a call (of a GPU; else None), in MiB, and a call's median ms."""

    weights_mib: float
    peak_mib: float | None
    latency_ms: float


def reduce_precision(module: nn.Module, how: ReducedPrecision) -> list[str]:
    """Convert a module in place; the names that stay in float32. Their inputs are widened and outputs rounded.

    Raises ConfigError for a pattern that names no module, EngineError on a device without the dtype.
    """
    dtype = DTYPES[how.dtype]
    require_supported(module, dtype)
    kept = kept_by(module, how.keep_fp32)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if how.channels_last else {}
    for parameter in module.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])
    parts = [module.get_submodule(name) for name in kept]
    # Never through 16 bits: what is kept keeps every digit.
    wide = {id(t) for part in parts for t in (*part.parameters(), *part.buffers())}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if id(tensor) in wide else dtype)
    for part in parts:
        part.register_forward_pre_hook(_widen, with_kwargs=True)
        part.register_forward_hook(_rounding_to(dtype))
    return kept


def require_supported(module: nn.Module, dtype: torch.dtype) -> None:
    """Raise EngineError if the module's GPU has no bfloat16 units (older than Ampere)."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    gpu = Gpu.of(device)
    if dtype is torch.bfloat16 and gpu is not None and not gpu.bf16:
        raise EngineError(f"bf16: expected compute capability 8.0 or newer, got {gpu.version}: use fp16")


@contextlib.contextmanager
def inference(device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """How a forward pass is run: no autograd bookkeeping, the fastest convolutions measured, autocast to `dtype`.

    Autocast is for modules that mix dtypes; one that was converted whole needs none (`dtype=None`). cuDNN's setting
    is put back afterwards.
    """
    cast = (
        torch.autocast(device.type, dtype=dtype)
        if dtype in (torch.bfloat16, torch.float16)
        else contextlib.nullcontext()
    )
    with torch.inference_mode(), cast, torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        yield


def ranges(module: nn.Module, run: Callable[[], object]) -> list[ModuleRange]:
    """Every leaf module that `run` calls, in order of its first call, with the largest value it put out."""
    found: dict[str, ModuleRange] = {}

    def watch(name: str, leaf: nn.Module) -> Any:
        weights = next((_name(p.dtype) for p in leaf.parameters(recurse=False)), "-")

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [t for t in _tensors(output) if t.is_floating_point()]
            if not tensors:
                return
            largest = max(float(t.detach().float().abs().nan_to_num(posinf=torch.inf).amax()) for t in tensors)
            bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors)
            before = found.get(name)
            found[name] = ModuleRange(
                name,
                type(leaf).__name__,
                weights,
                _name(tensors[0].dtype),
                max(largest, before.largest if before else 0.0),
                bad + (before.non_finite if before else 0),
            )

        return hook

    leaves = [(n, m) for n, m in module.named_modules() if n and not any(True for _ in m.children())]
    handles = [m.register_forward_hook(watch(n, m)) for n, m in leaves]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def overflowing(found: Sequence[ModuleRange], dtype: torch.dtype) -> list[str]:
    """Names of the modules whose values do not fit `dtype`: the ones to keep in float32."""
    return [r.name for r in found if r.state(dtype) == "overflow"]


def cost(module: nn.Module, run: Callable[[], object], device: torch.device, calls: int = 10) -> Cost:
    """What a module weighs and what a call takes, after two calls to warm up."""
    cuda = device.type == "cuda"
    for _ in range(2):
        run()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    taken: list[float] = []
    for _ in range(calls):
        began = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) * 1e3)
    weights = sum(t.nbytes for t in (*module.parameters(), *module.buffers())) / 2**20
    # Of this module alone: others may lie on the same GPU.
    peak = weights + (torch.cuda.max_memory_allocated(device) - before) / 2**20 if cuda else None
    return Cost(weights, peak, sorted(taken)[len(taken) // 2])


def dtype_counts(module: nn.Module) -> dict[str, int]:
    """Parameters by dtype."""
    counts: dict[str, int] = {}
    for parameter in module.parameters():
        counts[_name(parameter.dtype)] = counts.get(_name(parameter.dtype), 0) + parameter.numel()
    return counts


def kept_by(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The outermost modules that patterns name. Raises ConfigError for a pattern that names none."""
    names = [n for n, _ in module.named_modules() if n]
    kept: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"keep_fp32: no module is named {pattern!r}; the first are {', '.join(names[:4])}")
        for name in matching:
            # The outermost of what matches: its parts go with it. A list of modules is never called, its entries are.
            if not any(name.startswith(f"{k}.") or name == k for k in kept):
                part = module.get_submodule(name)
                called = not isinstance(part, (nn.ModuleList, nn.ModuleDict))
                kept += [name] if called else [f"{name}.{child}" for child, _ in part.named_children()]
    return list(dict.fromkeys(kept))


def _widen(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    return _cast(inputs, torch.float32), _cast(keywords, torch.float32)


def _rounding_to(dtype: torch.dtype) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return _cast(output, dtype)

    return hook


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype) for v in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
