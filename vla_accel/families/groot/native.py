"""The native programs of GR00T N1.7: the components written in fused ops over static buffers, for a CUDA graph."""

from __future__ import annotations

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.groot.native_prefix import NativeReader, ReaderWeights
from vla_accel.families.groot.network import Groot
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.qwen_store import TransformerStore


class GrootStore(TransformerStore[Groot]):
    """Prepared weights of one GR00T."""

    def kv_cache(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The program of language model and vision-language attention."""
        precision = self.precision("kv_cache", spec)
        weights = self.weights(("kv_cache", precision), lambda: ReaderWeights.of(self.model, precision))
        return NativeReader(weights, batch, layout, spec.attention)
