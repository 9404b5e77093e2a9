"""What the native programs of networks with a prefix share: vision, and how the other two come to weights and
precisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.nn.native_vision import NativeVision, VisionWeights
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.store import NativeStore

N = TypeVar("N", bound=PrefixNetwork)
W = TypeVar("W")


class FlowStore(NativeStore[N]):
    """Prepared weights of one network with a prefix."""

    def vision(self, batch: int, views: int, spec: EngineSpec) -> Program:
        """The vision program of `batch` observations of `views` images."""
        precision = self.precision("vision", spec, (*QUANTISED["vision"]["native"].precisions, "fp16"))
        weights = self.weights(
            ("vision", precision, spec.keep), lambda: VisionWeights.of(self.model, precision, self.scales, spec.keep)
        )
        return NativeVision(weights, batch, views, spec.attention)

    def prefix_weights(self, spec: EngineSpec, of: Callable[..., W]) -> W:
        """The prefix's weights, prepared by `of` as `PrefixWeights.of` is called."""
        precision = self.precision("kv_cache", spec, self.beside_bf16(*QUANTISED["kv_cache"]["native"].precisions))
        where = spec.native.embeddings
        return self.weights(
            ("kv_cache", precision, where, spec.keep), lambda: of(self.model, precision, self.scales, where, spec.keep)
        )

    def loop_precision(self, component: str, spec: EngineSpec) -> str:
        """Of the weights of a loop of few rows. Raises EngineError where products of it are to be kept."""
        precisions = QUANTISED[component]["native"].precisions
        return self.precision(component, spec, self.beside_bf16(*precisions), calibrated=False)

    def loop_weights(
        self, spec: EngineSpec, batch: int, trained: bool, why_not_streamed: Callable[..., str | None],
        of: Callable[..., W],
    ) -> tuple[tuple[str, ...], W, str | None]:  # fmt: skip
        """A denoise loop's weights, prepared by `of(model, precision, streamed=…)`, their key, and why they are not for
        the streamed kernels. `trained`: as in `RtcConfig`; `why_not_streamed`: asked for model, precision and batch."""
        precision = self.loop_precision("denoise", spec)
        why_not = "they have one flow time for all actions" if trained else None
        why_not = why_not or why_not_streamed(self.model, precision, batch)
        key = ("denoise", precision, "layers" if why_not else "streamed")
        return key, self.weights(key, lambda: of(self.model, precision, streamed=why_not is None)), why_not
