"""What every family's native store is: weights prepared once for all shapes, and how much memory they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vla_accel.config import EngineSpec
from vla_accel.errors import EngineError
from vla_accel.fp8 import E4M3, FORMATS, Format, Products, Scales, no_scales
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.phases import phase
from vla_accel.nn.memory import tensors_in
from vla_accel.nn.network import Network
from vla_accel.numeric import DTYPES

N = TypeVar("N", bound=Network)
T = TypeVar("T")


class NativeStore(Generic[N]):
    """Prepared weights of one model, by component and precision. A family adds a method for each of its programs.

    `scales`: needed for FP8. Knows the models' weights, not how programs are run; the same programs run the ops' torch
    references where there is no GPU.
    """

    def __init__(self, model: N, scales: Scales | None = None) -> None:
        self.model, self.scales = model, scales
        self.prepared: dict[tuple[Any, ...], Any] = {}

    def weights(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` prepared the first time that `key` was asked for. A key begins with the component's name."""
        if key not in self.prepared:
            with phase("prepare"), torch.inference_mode():
                self.prepared[key] = make()
        return self.prepared[key]

    def tensors(self) -> dict[str, list[Tensor]]:
        """What was prepared so far, by component."""
        found: dict[str, list[Tensor]] = {}
        for key, prepared in self.prepared.items():
            found.setdefault(key[0], []).extend(tensors_in(prepared))
        return found

    def precision(self, component: str, spec: EngineSpec, extra: tuple[str, ...], *, calibrated: bool = True) -> str:
        """The precision that a component is prepared in: the policy's, or one of `extra`. `calibrated`: its FP8 needs
        scales. Raises EngineError for another one, and for scales that are not there."""
        own = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp32"}[self.model.dtype]
        asked = own if spec.precision == "auto" else spec.precision
        if asked not in (own, *extra):
            allowed = ", ".join((own, *extra))
            why = "; a policy on a CPU is fp32 unless it is asked for bf16" if own == "fp32" else ""
            raise EngineError(f"{component}: the native engine of a {own} policy has {allowed}, got {asked}{why}")
        if spec.keep and not calibrated:
            raise EngineError(f"{component}: keep: its weights are stored in one byte all or none")
        if asked in FORMATS and calibrated and self.scales is None:
            raise EngineError(f"{component}: {no_scales(asked)}")
        return asked

    def beside_bf16(self, *precisions: str) -> tuple[str, ...]:
        """Precisions of what works beside BF16 tensors, the cache of keys and values or activations: `precisions` for a
        BF16 policy, none for another."""
        return precisions if self.model.dtype == torch.bfloat16 else ()


def compute_dtype(precision: str) -> torch.dtype:
    """What everything but the FP8 or INT8 products themselves is stored in."""
    return DTYPES.get(precision, torch.bfloat16)


def format_of(precision: str) -> Format:
    """What the quantised products of a precision are stored in."""
    return FORMATS.get(precision, E4M3)


def plain_input(precision: str, weight: Tensor, bias: Tensor | None = None, pad_k: int = 0, pad_n: int = 0) -> Linear:
    """A product that takes its input as it is, padded as by `make_linear`. In FP8 and INT8 its weight alone is of one
    byte, widened in registers: nothing is calibrated, and the input's scale is one."""
    form = format_of(precision)
    amax = form.largest if precision in FORMATS else None
    return make_linear(weight, bias, compute_dtype(precision), amax, pad_k, pad_n, form=form)


def weights_in(precision: str) -> str:
    """Of what products with a plain input are, for the ledger."""
    return f"{precision.upper()} weights" if precision in FORMATS else str(compute_dtype(precision))


def amax_of(scales: Scales | None, precision: str, layer: str, products: Products) -> Callable[[str], float | None]:
    """Looks the calibrated input amax of a layer's product up by name; None unless FP8 or INT8 is asked for and takes
    it."""

    def find(name: str) -> float | None:
        if precision not in FORMATS or name not in products.names:
            return None
        if scales is None:
            raise EngineError(no_scales(precision))
        return scales.of(f"{layer}.{name}")

    return find
