"""The engines of one shape, joined by the names of their inputs and outputs, with their staging buffers and, on a GPU,
two CUDA graphs: the first engine runs while the host prepares what only the others need.

`Pipelines` keeps the most recently used shapes within a memory budget. Knows nothing about observations or robots, and
no model: the family's components say what there is.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.config import PolicyConfig
from vla_accel.engines import Engine, build
from vla_accel.engines.auto import Choice
from vla_accel.engines.graph import Captured, capture
from vla_accel.errors import EngineError
from vla_accel.families.family import Family, Rows, Shape, Store, Transforms
from vla_accel.fp8 import Scales
from vla_accel.kernels.nvrtc import on, synchronize
from vla_accel.ledger import Ledger
from vla_accel.nn.memory import Counted
from vla_accel.nn.network import Network
from vla_accel.numeric import round_up
from vla_accel.pictures import Picture
from vla_accel.policy.sending import ALIGNMENT, Sending, beside
from vla_accel.runtime import Runtime

_log = logging.getLogger("vla_accel")

NOISE = "noise"
"""The input that is drawn on the device where none is given."""


@dataclass(frozen=True)
class Feed:
    """One call's inputs on the host.

    `given`: by name, but for guidance and noise; `noise` float32 (B, H, A), or None where it is drawn on the device;
    `guidance`: inputs of real-time chunking by name, or None for a plain call.
    """

    given: Mapping[str, Rows]
    noise: np.ndarray | None = None
    guidance: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Plan:
    """What the pipelines of all shapes have in common. `choices`: the engine of each component; `store`: the native
    programs' weights; `scales`: FP8 scales for engines that are built from a quantised module."""

    family: Family
    model: Network
    config: PolicyConfig
    choices: Mapping[str, Choice]
    store: Store
    runtime: Runtime
    ledger: Ledger
    scales: Scales | None = None

    @property
    def device(self) -> torch.device:
        """The device of weights and engines."""
        return self.runtime.device

    def weight_bytes(self) -> int:
        """Bytes of all weights on the device, the model's own and the store's."""
        return Counted(self.device.type).add([*self.model.parameters(), *chain(*self.store.tensors().values())])


class Pipeline:
    """The components of one shape, one after the other."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.shape, self.runtime, self.device = shape, plan.runtime, plan.device
        self._family, self._sizes = plan.family, plan.model.config
        self._guided = False
        """Whether the staged guidance may differ from zero."""
        self._begun = False
        self.launched = 0.0
        """When the newest call had its first work enqueued, in seconds of `time.perf_counter`."""
        components = plan.family.components(
            plan.model, shape, store=plan.store, scales=plan.scales, rtc=plan.config.rtc
        )  # fmt: skip
        self.engines: list[tuple[str, Engine]] = []
        for component in components:
            choice = plan.choices[component.name]
            engine = build(component, choice.spec, device=plan.device, ledger=plan.ledger, why=choice.why)
            self.engines.append((component.name, engine))
        graphs = plan.device.type == "cuda" and plan.config.cuda_graph
        self._join(graphs)
        for (_, earlier), (name, engine) in itertools.pairwise(self.engines):
            if beside := engine.follow(earlier):
                plan.ledger.add(name, beside)
        self.captured: Captured | None = None
        if graphs:
            self._rehearse()
            self.captured = capture(self.engines, self._download, plan.ledger, lead=True)

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Every component's outputs in the newest call, by name; the next call overwrites them."""
        return {name: tensor for _, engine in self.engines for name, tensor in engine.outputs.items()}

    def engine(self, name: str) -> Engine:
        """A component's engine."""
        return dict(self.engines)[name]

    def _join(self, graphs: bool) -> None:
        """Bind every input that is an earlier output, and stage the rest.

        Host buffers are pinned for a GPU. All inputs of a call share one buffer on either side, so that they travel in
        two copies, the first engine's before the others'; an input that several components have is there once.
        """
        made: dict[str, Tensor] = {}
        places: dict[str, tuple[Tensor, int]] = {}
        end = first = 0
        for index, (_, engine) in enumerate(self.engines):
            for name, like in engine.inputs.items():
                if name != NOISE and name not in made and name not in places:
                    places[name] = like, end
                    end += round_up(like.nbytes, ALIGNMENT)
            made |= engine.outputs
            if index == 0:
                first = end
        self._given = torch.zeros(end, dtype=torch.uint8, device=self.device)
        self._staged = beside(self._given)
        self._sending = Sending(self._staged[:first], self._given[:first], graphs=graphs)
        self._later = slice(first, end)
        self._host: dict[str, np.ndarray] = {}
        self._placed = on_device = dict[str, Tensor]()
        for name, (like, start) in places.items():
            part = slice(start, start + like.nbytes)
            on_device[name] = self._given[part].view(like.dtype).view(like.shape)
            self._host[name] = self._staged[part].view(like.dtype).view(like.shape).numpy()
        fed = [(name, place) for name, place in self._host.items() if name not in self._family.guidance]
        self._first = [(name, place) for name, place in fed if places[name][1] < first]
        self._others = [(name, place) for name, place in fed if places[name][1] >= first]
        made = {}
        noise: Tensor | None = None
        for component, engine in self.engines:
            for name in list(engine.inputs):
                if name in made or name in on_device:
                    engine.bind(name, made[name] if name in made else on_device[name])
                elif noise is None:
                    noise = engine.inputs[name]
                else:
                    engine.bind(name, noise)
            again = sorted(engine.outputs.keys() & made.keys())
            if again:
                raise EngineError(f"{component}.{again[0]}: an earlier component has an output of this name")
            made |= engine.outputs
        last, name = self.engines[-1][1], self._family.result
        if name not in last.outputs:
            raise EngineError(f"{self._family.name}: expected an output {name} of the last component")
        self._drawn, self._result = noise, last.outputs[name]
        self._noise = None if noise is None else beside(noise)
        self._answer = beside(self._result)

    def _rehearse(self) -> None:
        for place in self._host.values():
            place.fill(0)
        self._family.rehearse(self._sizes, self.shape, self._host)
        self._sending.send()
        self._send_others()
        if self._drawn is not None:
            self._drawn.zero_()

    def rehearse(self) -> None:
        """Run once on any valid inputs, so that the first call finds every kernel compiled."""
        self._rehearse()
        if self.captured is not None:
            self.captured.begin()
        self.run()

    def _download(self) -> None:
        self._answer.copy_(self._result, non_blocking=True)

    def _send_others(self) -> None:
        self._given[self._later].copy_(self._staged[self._later], non_blocking=True)

    def begin(self, given: Mapping[str, Rows]) -> None:
        """Put a call's inputs of the first engine into the staging buffers and send them; where that engine has a CUDA
        graph of its own, launch it. `feed` and `run` follow, or `abandon`.

        The only copy of the images on the host; afterwards they may be overwritten.
        """
        self._sending.send(self._write(self._first, given))
        if self.captured is not None:
            self.captured.begin()
        self._begun, self.launched = True, time.perf_counter()

    def abandon(self) -> None:
        """Forget a call that began and will not be fed; what it sent has left the host after this."""
        self._begun = False
        synchronize(self.device)

    def feed(self, feed: Feed, generator: torch.Generator) -> None:
        """Put a call's inputs into the staging buffers and send them, but for what `begin` has sent; noise goes to the
        device, or is drawn there. A host input that no component of this shape has is left out."""
        if not self._begun:
            self.begin(feed.given)
        self._begun = False
        guidance = feed.guidance
        self._write(self._others, feed.given)
        if guidance is not None:
            self._guided = True
            for name, rows in guidance.items():
                np.copyto(self._host[name], rows, casting="no")
        elif self._guided:
            # The graph that guides computes a plain call, too: with zeros.
            for name in self._family.guidance:
                self._host[name].fill(0)
            self._guided = False
        self._send_others()
        if self._drawn is not None and self._noise is not None:
            if feed.noise is None:
                self._drawn.normal_(generator=generator)
            else:
                self._noise.numpy()[:] = feed.noise
                self._drawn.copy_(self._noise, non_blocking=True)
        if self.captured is None:
            self.launched = time.perf_counter()

    def _write(
        self, places: Sequence[tuple[str, np.ndarray]], given: Mapping[str, Rows]
    ) -> list[tuple[Tensor, Picture]]:  # fmt: skip
        """Copy what is given to its places on the host; images that are still to be fitted, with theirs on the
        device."""
        pictures: list[tuple[Tensor, Picture]] = []
        for name, place in places:
            if name not in given:
                raise EngineError(f"{self._family.name}: its feed lacks {name}; it has {', '.join(given)}")
            _write(place, given[name], self._placed[name], pictures)
        if pictures and places is not self._first:
            raise EngineError(f"{self._family.name}: expected images to be inputs of {self.engines[0][0]} alone")
        return pictures

    def run(self) -> tuple[np.ndarray, dict[str, float]]:
        """The family's `result` and milliseconds by engine.

        Returns after the call's one synchronisation. The result is overwritten by the next call.
        """
        if self.captured is not None:
            self.captured.replay()
            synchronize(self.device)
            times = self.captured.times()
        else:
            with on(self.device), self.runtime.open():
                times = self._run_on_stream() if self.device.type == "cuda" else self._run_here()
        return self._answer.numpy(), times

    def _run_here(self) -> dict[str, float]:
        times = {}
        for name, engine in self.engines:
            start = time.perf_counter()
            engine.run()
            times[name] = (time.perf_counter() - start) * 1e3
        self._download()
        return times

    def _run_on_stream(self) -> dict[str, float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(self.engines) + 1)]
        events[0].record()
        for (_, engine), event in zip(self.engines, events[1:], strict=True):
            engine.run()
            event.record()
        self._download()
        synchronize(self.device)
        return {n: a.elapsed_time(b) for (n, _), a, b in zip(self.engines, events, events[1:], strict=False)}


def _write(place: np.ndarray, given: Rows, on_device: Tensor, pictures: list[tuple[Tensor, Picture]]) -> None:
    """Copy what is given to its place on the host; what is still to be fitted is kept with its place on the device."""
    if isinstance(given, Picture):
        pictures.append((on_device, given))
    elif not isinstance(given, np.ndarray):
        for row, one, there in zip(place, given, on_device, strict=True):
            _write(row, one, there, pictures)
    elif given.shape == place.shape:
        np.copyto(place, given, casting="no")
    elif given.ndim == place.ndim > 0 and given.shape[1:] == place.shape[1:] and len(given) < len(place):
        np.copyto(place[: len(given)], given, casting="no")
        place[len(given) :] = 0
    else:
        raise EngineError(f"a host input: expected shape {place.shape}, got {given.shape}")


class Pipelines:
    """Pipelines by shape, most recently used last, within `limit` shapes and a budget of device memory."""

    def __init__(self, plan: Plan, *, limit: int = 16) -> None:
        self.plan, self.limit = plan, limit
        self.budget = int(plan.config.pipeline_memory_gib * 2**30)
        self._kept: OrderedDict[Shape, tuple[Pipeline, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def newest(self) -> Pipeline:
        """The pipeline used last."""
        return next(reversed(self._kept.values()))[0]

    def eager_weights(self) -> dict[str, list[Tensor]]:
        """The model's own weights that engines read, by component."""
        found: dict[str, list[Tensor]] = {}
        for pipeline, _ in self._kept.values():
            for name, engine in pipeline.engines:
                found.setdefault(name, []).extend(engine.weights)
        return found

    @property
    def bytes(self) -> int:
        """Device memory of the pipelines kept (0 on a CPU)."""
        return sum(size for _, size in self._kept.values())

    @contextlib.contextmanager
    def ahead(self, transforms: Transforms, observations: Sequence[Mapping[str, Any]]) -> Iterator[Pipeline | None]:
        """The newest pipeline with the first component of a call on its way, where the observations suit it: the GPU
        works while the host prepares the rest. None elsewhere. What is raised inside ends that call."""
        pipeline = self.newest if self._kept else None
        given = None
        if pipeline is not None and pipeline.captured is not None:
            given = self.plan.family.ahead(transforms, observations, pipeline.shape, self.plan.device)
        if pipeline is None or given is None:
            yield None
            return
        try:
            pipeline.begin(given)
            yield pipeline
        except BaseException:
            pipeline.abandon()
            raise

    def get(self, shape: Shape) -> Pipeline:
        """The pipeline of a shape, built on first use."""
        known = self._kept.get(shape)
        if known is not None:
            self._kept.move_to_end(shape)
            return known[0]
        before = self._allocated() - self.plan.weight_bytes()
        # What is tried while it is built is launched on the current device.
        with on(self.plan.device), self.plan.runtime.open():
            pipeline = Pipeline(self.plan, shape)
        # Weights are shared by all shapes and stay.
        self._kept[shape] = (pipeline, max(0, self._allocated() - self.plan.weight_bytes() - before))
        while len(self._kept) > 1 and (len(self._kept) > self.limit or self.bytes > self.budget):
            dropped, _ = self._kept.popitem(last=False)
            _log.info("dropped the pipeline of %s: %d kept within %d bytes", dropped, len(self._kept), self.budget)
        return pipeline

    def _allocated(self) -> int:
        device = self.plan.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
