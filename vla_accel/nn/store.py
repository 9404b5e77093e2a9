"""Prepared weights of one model, shared by the native programs of all shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vla_accel.config import EngineSpec
from vla_accel.errors import EngineError
from vla_accel.fp8 import FORMATS, Products, Scales, no_scales
from vla_accel.kernels.phases import phase
from vla_accel.nn.memory import tensors_in
from vla_accel.nn.network import Network

N = TypeVar("N", bound=Network)
T = TypeVar("T")


class NativeStore(Generic[N]):
    """Prepared weights by component and precision. A family adds a method for each of its programs.

    `scales`: required for FP8 and INT8 products with calibrated inputs.
    """

    def __init__(self, model: N, scales: Scales | None = None) -> None:
        self.model, self.scales = model, scales
        self.prepared: dict[tuple[Any, ...], Any] = {}

    def weights(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the weights `key`, which `make` prepares on the first call. A key begins with the component's name."""
        if key not in self.prepared:
            with phase("prepare"), torch.inference_mode():
                self.prepared[key] = make()
        return self.prepared[key]

    def tensors(self) -> dict[str, list[Tensor]]:
        """The prepared weights by component."""
        found: dict[str, list[Tensor]] = {}
        for key, prepared in self.prepared.items():
            found.setdefault(key[0], []).extend(tensors_in(prepared))
        return found

    def precision(
        self, component: str, spec: EngineSpec, products: Products | None = None, *others: str, any_policy: bool = False
    ) -> str:
        """Return the precision of a component: the policy's, or another one, which needs a BF16 policy.

        `products`: those that the family declares for FP8 and INT8; `others`: more precisions; `any_policy`: whether
        policies of other dtypes may have them as well. Raises EngineError if the component does not have the requested
        precision, or scales are missing.
        """
        own = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp32"}[self.model.dtype]
        requested = own if spec.precision == "auto" else spec.precision
        others = (*(() if products is None else products.precisions), *others)
        allowed = (own, *others) if own == "bf16" or any_policy else (own,)
        if requested not in allowed:
            why = "; policies on a CPU run in fp32 unless bf16 is requested" if own == "fp32" else ""
            raise EngineError(
                f"{component}: the native engine of a {own} policy has {', '.join(allowed)}, got {requested}{why}"
            )
        calibrated = products is not None and products.activations
        if spec.keep and not calibrated:
            raise EngineError(f"{component}: keep: its weights are stored in one byte all or none")
        if requested in FORMATS and calibrated and self.scales is None:
            raise EngineError(f"{component}: {no_scales(requested)}")
        return requested
