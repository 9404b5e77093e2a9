"""Prepared weights of what families with Qwen's vision tower and a diffusion transformer share."""

from __future__ import annotations

from typing import TypeVar

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.nn.dit import QUANTISED, DitNetwork
from vla_accel.nn.flow import Schedule
from vla_accel.nn.native_dit import NativeTransformer, TransformerWeights, step_tables
from vla_accel.nn.native_qwen_vision import NativeTower, TowerWeights
from vla_accel.nn.network import Network
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.store import NativeStore

N = TypeVar("N", bound=Network)
D = TypeVar("D", bound=DitNetwork)


class TowerStore(NativeStore[N]):
    """Prepared weights of a model with Qwen's vision tower."""

    def vision(self, batch: int, layout: Layout, spec: EngineSpec) -> Program:
        """The vision program of `batch` observations."""
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: TowerWeights.of(self.model, precision))
        return NativeTower(weights, batch, layout, spec.attention)


class TransformerStore(TowerStore[D]):
    """Prepared weights of a model that also has a diffusion transformer."""

    def denoise(self, batch: int, schedule: Schedule, spec: EngineSpec) -> Program:
        """The whole Euler loop. Its FP8 and INT8 are of weights alone and need no scales."""
        precision = self.precision("denoise", spec, QUANTISED["denoise"]["native"])
        form = ("denoise", precision)
        weights = self.weights(form, lambda: TransformerWeights.of(self.model, precision))
        tables = self.weights((*form, schedule), lambda: step_tables(self.model, weights, schedule))
        return NativeTransformer(weights, tables, self.model.config, batch)
