"""What every family's native store is: weights prepared once for all shapes, and how much memory they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vla_accel.config import EngineSpec
from vla_accel.errors import EngineError
from vla_accel.fp8 import FORMATS, Scales, no_scales
from vla_accel.kernels.phases import phase
from vla_accel.nn.memory import tensors_in
from vla_accel.nn.network import Network

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
