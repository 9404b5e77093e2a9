"""The three engines of one shape, wired output to input, with their staging buffers and, on a GPU, one CUDA graph.

`Pipelines` keeps the most recently used shapes within a memory budget. Knows nothing about observations or robots.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_accel.component import Component
from vla_accel.components import denoise_component, kv_cache_component, vision_component
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.engines import Engine, build
from vla_accel.engines.graph import Captured, capture
from vla_accel.fp8 import Scales
from vla_accel.ledger import Ledger
from vla_accel.models.pi0 import Pi0
from vla_accel.native import NativeStore
from vla_accel.ops.cuda.runtime import on, synchronize

_log = logging.getLogger("vla_accel")

_ALIGNMENT = 256
"""Bytes; of what CUDA's own allocator gives, which kernels and libraries may count on."""


@dataclass(frozen=True)
class Shape:
    """What decides a pipeline's static shapes. `tokens`: prompt tokens; `padded`: rows may have fewer."""

    batch: int
    views: int
    tokens: int
    steps: int
    padded: bool


@dataclass(frozen=True)
class Feed:
    """One call's inputs on the host, as NumPy arrays, or a sequence of them where each row has its own.

    images uint8 (S, S, 3), V of them for each of the B rows; tokens int64 (up to L,) of each row; lengths int32 (B,),
    real prefix tokens; state float32 (A,) of each row; noise float32 (B, H, A) or None where it is drawn on the device.
    Of real-time chunking, target float32 (B, H, A), the previous chunk as the model would have given it, and weights
    float32 (B, H); both or None for a plain call.
    """

    images: Sequence[Sequence[np.ndarray]]
    tokens: Sequence[np.ndarray]
    lengths: np.ndarray
    state: Sequence[np.ndarray]
    noise: np.ndarray | None
    target: np.ndarray | None = None
    weights: np.ndarray | None = None


class Pipeline:
    """vision → kv_cache → denoise for one shape."""

    def __init__(
        self,
        model: Pi0,
        config: PolicyConfig,
        store: NativeStore,
        shape: Shape,
        device: torch.device,
        ledger: Ledger,
        scales: Scales | None = None,
    ) -> None:
        self.shape, self.device = shape, device
        self.lengths = np.zeros(shape.batch, np.int32)
        """Real prefix tokens of the newest call's rows."""
        self._guided = False
        """Whether the staged target and weights may differ from zero."""
        prefix_tokens = shape.views * model.config.vision.tokens + shape.tokens

        def engine(component: Component, spec: EngineSpec) -> Engine:
            return build(component, spec, device=device, ledger=ledger)

        vision = vision_component(model, shape.batch, shape.views, store)
        kv_cache = kv_cache_component(model, shape.batch, shape.views, shape.tokens, shape.padded, store, scales)
        denoise = denoise_component(
            model, shape.batch, prefix_tokens, shape.steps, shape.padded, store, config.rtc.max_guidance_weight
        )
        self.vision = engine(vision, config.vision)
        self.kv_cache = engine(kv_cache, config.kv_cache)
        self.denoise = engine(denoise, config.denoise)
        self.engines = [("vision", self.vision), ("kv_cache", self.kv_cache), ("denoise", self.denoise)]
        self.kv_cache.bind("image_tokens", self.vision.outputs["image_tokens"])
        for name in ("keys", "values"):
            self.denoise.bind(name, self.kv_cache.outputs[name])
        self._stage()
        if shape.padded:
            self.denoise.bind("lengths", self.kv_cache.inputs["lengths"])
        self.captured: Captured | None = None
        if device.type == "cuda" and config.cuda_graph:
            self._fill_for_capture()
            self.captured = capture(self.engines, self._upload, self._download, ledger)

    def _stage(self) -> None:
        """Host buffers, pinned for a GPU, of every input that comes from the host, and of the actions.

        All inputs of a call share one buffer on either side, so that they travel in one copy.
        """
        pinned = self.device.type == "cuda"

        def beside(buffer: Tensor) -> Tensor:
            return torch.zeros(buffer.shape, dtype=buffer.dtype, pin_memory=pinned)

        sources = [(self.vision, "images"), (self.kv_cache, "tokens")]
        sources += [(self.denoise, "target"), (self.denoise, "weights")]
        if self.shape.padded:
            sources.append((self.kv_cache, "lengths"))
        if "state" in self.denoise.inputs:
            sources.append((self.denoise, "state"))
        places, end = [], 0
        for engine, name in sources:
            places.append(end)
            end += -(-engine.inputs[name].nbytes // _ALIGNMENT) * _ALIGNMENT
        self._given = torch.zeros(end, dtype=torch.uint8, device=self.device)
        self._staged = beside(self._given)
        self._host: dict[str, np.ndarray] = {}
        for (engine, name), start in zip(sources, places, strict=True):
            like = engine.inputs[name]
            part = slice(start, start + like.nbytes)
            engine.bind(name, self._given[part].view(like.dtype).view(like.shape))
            self._host[name] = self._staged[part].view(like.dtype).view(like.shape).numpy()
        self._noise = beside(self.denoise.inputs["noise"])
        self._actions = beside(self.denoise.outputs["actions"])

    def _fill_for_capture(self) -> None:
        # Any valid input will do, but a length of zero would leave rows without a key.
        if "lengths" in self._host:
            self._host["lengths"][:] = self.kv_cache.outputs["keys"].shape[2]
        self.denoise.inputs["noise"].zero_()

    def _upload(self) -> None:
        self._given.copy_(self._staged, non_blocking=True)

    def _download(self) -> None:
        self._actions.copy_(self.denoise.outputs["actions"], non_blocking=True)

    def feed(self, feed: Feed, generator: torch.Generator) -> None:
        """Put a call's inputs into the staging buffers; noise goes to the device, or is drawn there.

        The only copy of the images on the host; afterwards they may be overwritten.
        """
        self.lengths = feed.lengths
        host = self._host
        for places, views in zip(host["images"], feed.images, strict=True):
            _write(places, views)
        for row, tokens in zip(host["tokens"], feed.tokens, strict=True):
            np.copyto(row[: len(tokens)], tokens, casting="no")
            row[len(tokens) :] = 0
        if "lengths" in host:
            np.copyto(host["lengths"], feed.lengths, casting="no")
        if "state" in host:
            _write(host["state"], feed.state)
        self._guide(feed.target, feed.weights)
        noise = self.denoise.inputs["noise"]
        if feed.noise is None:
            noise.normal_(generator=generator)
        else:
            self._noise.numpy()[:] = feed.noise
            noise.copy_(self._noise, non_blocking=True)

    def _guide(self, target: np.ndarray | None, weights: np.ndarray | None) -> None:
        """Stage what guides the actions. Weights of zero: the graph that guides computes a plain call, too."""
        if target is not None and weights is not None:
            self._guided = True
            np.copyto(self._host["target"], target, casting="no")
            np.copyto(self._host["weights"], weights, casting="no")
        elif self._guided:
            self._host["target"].fill(0)
            self._host["weights"].fill(0)
            self._guided = False

    def run(self) -> tuple[np.ndarray, dict[str, float]]:
        """Actions float32 (B, H, A) and milliseconds by engine, and of `transfer`: launch, copies and waiting.

        Returns after the call's one synchronisation. The actions are overwritten by the next call.
        """
        began = time.perf_counter()
        if self.device.type != "cuda":
            times = self._run_here()
        elif self.captured is not None:
            self.captured.replay()
            synchronize(self.device)
            times = self.captured.times()
        else:
            with on(self.device):
                times = self._run_on_stream()
        elapsed = (time.perf_counter() - began) * 1e3
        times["transfer"] = max(0.0, elapsed - sum(times.values()))
        return self._actions.numpy(), times

    def _run_here(self) -> dict[str, float]:
        self._upload()
        times = {}
        for name, engine in self.engines:
            start = time.perf_counter()
            engine.run()
            times[name] = (time.perf_counter() - start) * 1e3
        self._download()
        return times

    def _run_on_stream(self) -> dict[str, float]:
        self._upload()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(self.engines) + 1)]
        events[0].record()
        for (_, engine), event in zip(self.engines, events[1:], strict=True):
            engine.run()
            event.record()
        self._download()
        synchronize(self.device)
        return {n: a.elapsed_time(b) for (n, _), a, b in zip(self.engines, events, events[1:], strict=False)}


def _write(rows: np.ndarray, given: Sequence[np.ndarray]) -> None:
    for row, one in zip(rows, given, strict=True):
        np.copyto(row, one, casting="no")


class Pipelines:
    """Pipelines by shape, most recently used last, within `limit` shapes and a budget of device memory."""

    def __init__(
        self, model: Pi0, config: PolicyConfig, store: NativeStore, device: torch.device, ledger: Ledger,
        scales: Scales | None = None, *, limit: int = 16,
    ) -> None:  # fmt: skip
        self._parts = (model, config, store)
        self.device, self.ledger, self.scales, self.limit = device, ledger, scales, limit
        self.budget = int(config.pipeline_memory_gib * 2**30)
        self._kept: OrderedDict[Shape, tuple[Pipeline, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def newest(self) -> Pipeline:
        """The pipeline used last."""
        return next(reversed(self._kept.values()))[0]

    @property
    def bytes(self) -> int:
        """Device memory of the pipelines kept (0 on a CPU)."""
        return sum(size for _, size in self._kept.values())

    def get(self, shape: Shape) -> Pipeline:
        """The pipeline of a shape, built on first use."""
        known = self._kept.get(shape)
        if known is not None:
            self._kept.move_to_end(shape)
            return known[0]
        store = self._parts[2]
        before = self._allocated() - store.bytes
        pipeline = Pipeline(*self._parts, shape, self.device, self.ledger, self.scales)
        # Weights are shared by all shapes and stay.
        self._kept[shape] = (pipeline, max(0, self._allocated() - store.bytes - before))
        while len(self._kept) > 1 and (len(self._kept) > self.limit or self.bytes > self.budget):
            dropped, _ = self._kept.popitem(last=False)
            _log.info("dropped the pipeline of %s: %d kept within %d bytes", dropped, len(self._kept), self.budget)
        return pipeline

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
