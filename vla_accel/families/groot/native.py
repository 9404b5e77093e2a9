"""The native programs of GR00T N1.7: the components written in fused ops over static buffers, for a CUDA graph."""

from __future__ import annotations

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.groot.native_prefix import NativeReader, ReaderWeights
from vla_accel.families.groot.network import Groot
from vla_accel.nn.dit import QUANTISED
from vla_accel.nn.flow import Schedule
from vla_accel.nn.native_dit import NativeTransformer, TransformerWeights, step_tables
from vla_accel.nn.native_qwen_vision import NativeTower, TowerWeights
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.store import NativeStore


class GrootStore(NativeStore[Groot]):
    """Prepared weights of one GR00T."""

    def vision(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The vision program of `batch` observations."""
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: TowerWeights.of(self.model, precision))
        return NativeTower(weights, batch, layout, spec.attention)

    def kv_cache(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The program of language model and vision-language attention."""
        precision = self.precision("kv_cache", spec)
        weights = self.weights(("kv_cache", precision), lambda: ReaderWeights.of(self.model, precision))
        return NativeReader(weights, batch, layout, spec.attention)

    def denoise(self, batch: int, layout: Layout, schedule: Schedule, spec: EngineSpec) -> Program:
        """The whole Euler loop. Its FP8 and INT8 are of weights alone and need no scales."""
        precision = self.precision("denoise", spec, QUANTISED["denoise"]["native"])
        form = ("denoise", precision)
        weights = self.weights(form, lambda: TransformerWeights.of(self.model, precision))
        tables = self.weights((*form, schedule), lambda: step_tables(self.model, weights, schedule))
        return NativeTransformer(weights, tables, self.model.config, batch)
