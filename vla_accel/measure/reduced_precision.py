"""A module in BF16 or FP16, except parts that stay in float32, and its ranges, memory and latency."""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from vla_accel.errors import ConfigError, EngineError
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import DTYPES

HEADROOM = 0.5
"""A module whose largest value is above this share of a dtype's range is reported as close to overflow."""


@dataclass(frozen=True)
class ModuleRange:
    """One leaf module in a run: dtypes of its weights and outputs, largest magnitude, number of non-finite values."""

    name: str
    kind: str
    weights: str
    outputs: str
    largest: float
    non_finite: int

    def state(self, dtype: torch.dtype) -> str:
        """ "overflow" if a value exceeds `dtype`'s range, "close" if one comes near, else "ok"."""
        limit = torch.finfo(dtype).max
        if self.non_finite or not self.largest <= limit:
            return "overflow"
        return "close" if self.largest > HEADROOM * limit else "ok"


@dataclass(frozen=True)
class Cost:
    """Memory of the weights and at the peak of a call (None without a GPU), in MiB, and a call's median ms."""

    weights_mib: float
    peak_mib: float | None
    latency_ms: float


def reduce_precision(module: nn.Module, dtype_name: str, keep_fp32: Sequence[str] = ()) -> list[str]:
    """Convert a module in place, with convolutions channels-last; return the names of the modules kept in float32,
    whose inputs are widened and whose outputs are rounded. `keep_fp32`: fnmatch patterns of module names.

    Raises ConfigError if a pattern names no module, EngineError if the GPU lacks the dtype.
    """
    dtype = DTYPES[dtype_name]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    gpu = Gpu.of(device)
    if dtype is torch.bfloat16 and gpu is not None and not gpu.bf16:
        raise EngineError(f"bf16: expected compute capability 8.0 or newer, got {gpu.version}: use fp16")
    kept = kept_by(module, keep_fp32)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])
    parts = [module.get_submodule(name) for name in kept]
    # Kept weights never pass through 16 bits.
    wide = {id(t) for part in parts for t in (*part.parameters(), *part.buffers())}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if id(tensor) in wide else dtype)
    for part in parts:
        part.register_forward_pre_hook(lambda _, args, named: _cast((args, named), torch.float32), with_kwargs=True)
        part.register_forward_hook(lambda _module, _args, output: _cast(output, dtype))
    return kept


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values)


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """Run without autograd, with measured convolutions."""
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        yield


def ranges(module: nn.Module, run: Callable[[], object]) -> list[ModuleRange]:
    """Return the range of every leaf module that `run` calls, in order of the first call."""
    found: dict[str, ModuleRange] = {}

    def watch(name: str, leaf: nn.Module) -> Any:
        weights = next((_name(p.dtype) for p in leaf.parameters(recurse=False)), "-")

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
            if not tensors:
                return
            largest = max(float(t.detach().float().abs().nan_to_num(posinf=torch.inf).amax()) for t in tensors)
            bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors)
            if (before := found.get(name)) is not None:
                largest, bad = max(largest, before.largest), bad + before.non_finite
            found[name] = ModuleRange(name, type(leaf).__name__, weights, _name(tensors[0].dtype), largest, bad)

        return hook

    with contextlib.ExitStack() as handles:
        for name, leaf in module.named_modules():
            if name and not any(True for _ in leaf.children()):
                handles.enter_context(leaf.register_forward_hook(watch(name, leaf)))
        run()
    return list(found.values())


def overflowing(found: Sequence[ModuleRange], dtype: torch.dtype) -> list[str]:
    """Return the names of the modules whose values exceed `dtype`'s range."""
    return [r.name for r in found if r.state(dtype) == "overflow"]


def cost(module: nn.Module, run: Callable[[], object], device: torch.device, calls: int = 10) -> Cost:
    """Measure a module's memory and a call's latency, after two calls to warm up."""
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
    # Other modules on the same GPU do not count.
    peak = weights + (torch.cuda.max_memory_allocated(device) - before) / 2**20 if cuda else None
    return Cost(weights, peak, sorted(taken)[len(taken) // 2])


def dtype_counts(module: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each dtype."""
    counts = Counter[str]()
    for parameter in module.parameters():
        counts[_name(parameter.dtype)] += parameter.numel()
    return dict(counts)


def kept_by(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the outermost modules that patterns name. Raises ConfigError for a pattern that names none."""
    names = [n for n, _ in module.named_modules() if n]
    kept: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"keep_fp32: no module is named {pattern!r}; the first are {', '.join(names[:4])}")
        for name in matching:
            if not any(name.startswith(f"{k}.") or name == k for k in kept):
                part = module.get_submodule(name)
                # A list of modules is never called, only its entries are.
                called = not isinstance(part, (nn.ModuleList, nn.ModuleDict))
                kept += [name] if called else [f"{name}.{child}" for child, _ in part.named_children()]
    return list(dict.fromkeys(kept))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
