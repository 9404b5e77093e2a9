"""The native programs: the policy's components written in fused ops over static buffers, ready for a CUDA graph.

`NativeStore` prepares each component's weights once and shares them among the programs of all shapes. Knows the models'
weights, not how programs are run; the same programs run the ops' torch references where there is no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.errors import EngineError
from vla_accel.fp8 import NO_SCALES, Scales
from vla_accel.models.pi0 import Pi0
from vla_accel.native.expert import ExpertWeights, NativeDenoise
from vla_accel.native.prefix import NativePrefix, PrefixWeights
from vla_accel.native.streamed import fits
from vla_accel.native.vision import NativeVision, VisionWeights


class NativeStore:
    """Prepared weights of one model, by component and precision. `scales`: needed for FP8."""

    def __init__(self, model: Pi0, scales: Scales | None = None) -> None:
        self.model, self.scales = model, scales
        self._vision: dict[str, VisionWeights] = {}
        self._prefix: dict[str, PrefixWeights] = {}
        self._expert: dict[str, ExpertWeights] = {}
        self.bytes = 0
        """Device memory of the weights prepared so far."""

    def vision(self, batch: int, views: int, spec: EngineSpec) -> Program:
        """The vision program of `batch` observations of `views` images."""
        precision = self._precision("vision", spec, ("fp8", "fp16"))
        if precision not in self._vision:
            with self._counted():
                self._vision[precision] = VisionWeights.of(self.model, precision, self.scales)
        return NativeVision(self._vision[precision], batch, views, spec.attention)

    def kv_cache(self, batch: int, image_tokens: int, length: int, spec: EngineSpec) -> Program:
        """The prefix program of `image_tokens` image tokens and `length` prompt tokens a row."""
        precision = self._precision("kv_cache", spec, ("fp8",))
        if precision not in self._prefix:
            with self._counted():
                self._prefix[precision] = PrefixWeights.of(self.model, precision, self.scales)
        return NativePrefix(self._prefix[precision], batch, image_tokens, length, spec.attention)

    def denoise(
        self, batch: int, prefix_tokens: int, num_steps: int, spec: EngineSpec, max_weight: float | None = None
    ) -> Program:
        """The whole Euler loop of `num_steps`. `max_weight`: of the guidance, as in `RtcConfig`."""
        precision = self._precision("denoise", spec, ("fp8",))
        if precision not in self._expert:
            with self._counted():
                self._expert[precision] = ExpertWeights.of(self.model, precision)
        weights = self._expert[precision]
        device = weights.w_out.device
        if not fits(self.model.config, batch, weights.dtype, weights.narrow, device):
            with self._counted():
                _ = weights.packed
        return NativeDenoise(weights, self.model, batch, prefix_tokens, num_steps, max_weight)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        device = next(self.model.parameters()).device
        cuda = device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if cuda else 0
        with torch.inference_mode():
            yield
        self.bytes += torch.cuda.memory_allocated(device) - before if cuda else 0

    def _precision(self, component: str, spec: EngineSpec, extra: tuple[str, ...]) -> str:
        own = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp32"}[self.model.dtype]
        asked = own if spec.precision == "auto" else spec.precision
        if asked not in (own, *extra):
            allowed = ", ".join((own, *extra))
            raise EngineError(f"{component}: the native engine of a {own} policy has {allowed}, got {asked}")
        if asked == "fp8" and component != "denoise" and self.scales is None:
            raise EngineError(f"{component}: {NO_SCALES}")
        return asked


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

__all__ = ["DTYPES", "NativeStore"]
