"""The engines of one shape, joined by the names of their inputs and outputs, with staging buffers and CUDA graphs.

A call has two halves: `start` uploads the images and launches the first engine, `finish` uploads everything else and
runs the other engines, so the GPU works while the host tokenizes prompts. `Pipelines` keeps the most recently used
shapes within a memory budget.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.component import Component
from vla_accel.config import PolicyConfig
from vla_accel.engines import Engine, build
from vla_accel.engines.auto import Choice
from vla_accel.engines.graph import SELDOM, Captured, capture, leaves_out
from vla_accel.errors import EngineError
from vla_accel.families.family import IMAGES, Family, Rows, Shape, Store
from vla_accel.fp8 import Scales
from vla_accel.kernels.image import resize
from vla_accel.kernels.nvrtc import on, synchronize
from vla_accel.ledger import Ledger
from vla_accel.nn.flow import Schedule
from vla_accel.nn.memory import Counted
from vla_accel.nn.network import Network
from vla_accel.numeric import round_up
from vla_accel.pictures import Cameras
from vla_accel.policy.staging import ALIGNMENT, fill, host_buffer, upload
from vla_accel.runtime import Runtime

NOISE = "noise"
"""The input that is drawn on the device unless the caller passes it."""
PREVIOUS = "previous"
"""The previous chunk (B, H, A) float32, which a warm start mixes with the noise."""
EARLY_BYTES = 1 << 20
"""Images of at least so many bytes are uploaded one by one, each while the host copies the next one."""
MOST_CAMERAS = 8
"""Sets of image sizes for which shapes are built; images of further sizes are resized on the host."""
_log = logging.getLogger("vla_accel")


@dataclass(frozen=True)
class Feed:
    """One call's inputs on the host. `noise`: float32 (B, H, A), or None to draw it on the device; `guidance`: inputs
    of real-time chunking and of a warm start, or None for a plain call. Absent ones are zero."""

    inputs: Mapping[str, Rows]
    noise: np.ndarray | None = None
    guidance: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Plan:
    """What the pipelines of all shapes share. `choices`: the engine of each component; `store`: the native programs'
    weights; `scales`: for engines that are built from a quantised module."""

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
        self._warm = shape.schedule.start < 1.0
        self.launched = 0.0
        """When the last call launched its first engine, in seconds of `time.perf_counter`."""
        parts = plan.family.components(
            plan.model, shape, store=plan.store, scales=plan.scales, rtc=plan.config.rtc
        )  # fmt: skip
        if (got := tuple(part.name for part in parts)) != plan.family.parts:
            expected = f"{', '.join(plan.family.parts)} (`parts`)"
            raise EngineError(f"{plan.family.name}: components: expected {expected}, got {', '.join(got)}")
        self.engines: list[tuple[str, Engine]] = []
        for part in parts:
            choice = plan.choices[part.name]
            engine = build(part, choice.spec, device=plan.device, ledger=plan.ledger, why=choice.why)
            self.engines.append((part.name, engine))
        self._stage()
        self._check_seldom(parts)
        self._bind()
        engines = [engine for _, engine in self.engines]
        self._seldom = [*engines[SELDOM].inputs] if leaves_out(engines) else []
        self._known: list[np.ndarray] | None = None
        for (_, earlier), (name, engine) in itertools.pairwise(self.engines):
            if overlapped := engine.follow(earlier):
                plan.ledger.add(name, overlapped)
        self.captured: Captured | None = None
        if plan.device.type == "cuda" and plan.config.cuda_graph:
            self._fill_with_examples()
            self._upload_rest()
            between = None if self._warm else self._upload_rest
            if len(self.engines) > 1 and self._first_part[0].nbytes >= EARLY_BYTES:
                upload(*self._first_part)
                self._find_pieces()
            before = self._resize_images if self._pieces else self._upload_images
            self.captured = capture(
                self.engines, self._download, plan.ledger, before=before, between=between, split_first=True
            )

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Every component's outputs in the last call, by name; the next call overwrites them."""
        return {name: tensor for _, engine in self.engines for name, tensor in engine.outputs.items()}

    def engine(self, name: str) -> Engine:
        return dict(self.engines)[name]

    def _stage(self) -> None:
        """Lay out the host inputs in one buffer on the host and one on the device: first those of the first engine,
        then the others, so that a call uploads in two copies. An input that several engines share is there once."""
        cameras, first = self.shape.cameras, self.engines[0][1].inputs
        entries: list[tuple[str, tuple[int, ...], torch.dtype, slice]] = []
        known, end, split = {NOISE}, 0, 0

        def add(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            nonlocal end
            size = math.prod(shape) * dtype.itemsize
            entries.append((name, shape, dtype, slice(end, end + size)))
            end += round_up(size, ALIGNMENT)

        for index, (_, engine) in enumerate(self.engines):
            for name, like in engine.inputs.items():
                if name == NOISE and self._warm:
                    name = PREVIOUS
                if name in known:
                    continue
                if cameras is not None and name == IMAGES:
                    for _, size in zip(like.flatten(0, 1), itertools.cycle(cameras.sizes), strict=False):
                        add(name, (*size, 3), torch.uint8)
                else:
                    add(name, tuple(like.shape), like.dtype)
                known.add(name)
            known |= engine.outputs.keys()
            split = end if index == 0 else split
        on_device = torch.zeros(end, dtype=torch.uint8, device=self.device)
        on_host = host_buffer(on_device)
        self._first_part, self._rest_part = (
            (on_device[part], on_host[part]) for part in (slice(split), slice(split, end))
        )
        self._pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """The rows of the first engine's inputs on the device and on the host, if each is uploaded on its own."""
        self._host: dict[str, np.ndarray] = {}
        self._inputs: dict[str, Tensor] = {}
        self._slots: dict[str, list[np.ndarray]] = {}
        self._resizes: list[tuple[Tensor, resize.Fitting | None, Tensor]] = []
        """Camera images on the device, how they are resized, and the images of the first engine that they become."""
        for name, shape, dtype, part in entries:
            tensor, staged = (b[part].view(dtype).view(shape) for b in (on_device, on_host))
            host = staged.numpy()
            if cameras is not None and name == IMAGES:
                out = first[name].flatten(0, 1)[len(self._resizes)]
                fits = isinstance(cameras.method, str) and out.shape == tensor.shape
                how = None if fits else resize.fit_of(*shape[:2], len(out), cameras.method, self.device)
                self._resizes.append((tensor, how, out))
                self._slots.setdefault(name, []).append(host)
            else:
                self._inputs[name], self._host[name] = tensor, host
                rows = host.reshape(-1, *shape[2:]) if name == IMAGES and host.ndim == 5 else host
                self._slots[name] = [rows[index, ...] for index in range(len(rows))]
        self._guidance = [n for n in self._slots if n == PREVIOUS or n in self._family.chunking.inputs]
        fed = {name: rows for name, rows in self._slots.items() if name not in self._guidance}
        self._first = {name: rows for name, rows in fed.items() if name in first}
        self._rest = {name: rows for name, rows in fed.items() if name not in first}

    def _check_seldom(self, parts: Sequence[Component]) -> None:
        """Raise EngineError for a component with `seldom` set that no call can leave out."""
        for index, part in enumerate(parts):
            if not part.seldom:
                continue
            if index != SELDOM or index == len(parts) - 1:
                raise EngineError(
                    f"{part.name}: expected a component whose inputs seldom change to be the second of at least three, "
                    f"got component {index + 1} of {len(parts)}"
                )
            if others := [spec.name for spec in part.inputs if spec.name not in self._host]:
                raise EngineError(
                    f"{part.name}: expected inputs from the host, because they seldom change, got {', '.join(others)}"
                )

    def _bind(self) -> None:
        """Bind every engine input to the output or the staged input of its name."""
        produced: dict[str, Tensor] = {}
        noise: Tensor | None = None
        for component, engine in self.engines:
            for name, own in list(engine.inputs.items()):
                source = produced.get(name, self._inputs.get(name))
                if name == NOISE and source is None:
                    source = noise = own if noise is None else noise
                # Camera images are not bound: the device resizes them into the engine's own input.
                if source is not None and source is not own:
                    engine.bind(name, source)
            if again := sorted(engine.outputs.keys() & produced.keys()):
                raise EngineError(f"{component}.{again[0]}: an earlier component has an output of this name")
            produced |= engine.outputs
        part, last = self.engines[-1]
        if len(last.outputs) != 1:
            raise EngineError(f"{part}: expected one output of the last component, got {', '.join(last.outputs)}")
        ((name, self.result),) = last.outputs.items()
        self.result_name = f"{part}.{name}"
        self._noise = noise
        self._host_noise = None if noise is None else host_buffer(noise)
        self._host_result = host_buffer(self.result)
        self._answer = self._host_result.numpy()

    def _fill_with_examples(self) -> None:
        for slot in chain(*self._slots.values()):
            slot.fill(0)
        self.shape.make_valid(self._sizes, self._host)
        if self._noise is not None:
            self._noise.zero_()

    def _find_pieces(self) -> None:
        on_device, on_host = self._first_part
        for name, slots in self._first.items():
            starts = [slot.ctypes.data - on_host.data_ptr() for slot in slots]
            places = [slice(start, start + slot.nbytes) for start, slot in zip(starts, slots, strict=True)]
            self._pieces[name] = [(on_device[place], on_host[place]) for place in places]

    def _upload_images(self) -> None:
        """Upload the first engine's inputs and resize images: the first work of the first CUDA graph."""
        upload(*self._first_part)
        self._resize_images()

    def _resize_images(self) -> None:
        for image, how, out in self._resizes:
            resize.fit(image, how, out)

    def _upload_rest(self) -> None:
        upload(*self._rest_part)

    def _download(self) -> None:
        self._host_result.copy_(self.result, non_blocking=True)

    def accepts(self, images: Mapping[str, Rows]) -> bool:
        """Whether `Family.image_feed` holds all inputs of the first engine, in the sizes of this shape."""
        return images.keys() == self._first.keys() and all(
            [row.shape for row in images[name]] == [slot.shape for slot in slots] for name, slots in self._first.items()
        )

    def start(self, inputs: Mapping[str, Rows]) -> None:
        """Stage and upload the first engine's inputs and, with CUDA graphs, run that engine; `finish` follows.
        The images may be overwritten afterwards. A caller that gives up after `start` must synchronise."""
        self._write(self._first, inputs, self._pieces)
        self._launch_first()

    def finish(self, feed: Feed, generator: torch.Generator) -> tuple[np.ndarray, dict[str, float]]:
        """Stage and upload everything but the first engine's inputs, run the other engines and wait for the result.

        `generator` draws the noise if `feed` has none. Returns the last component's output, which the next call
        overwrites, and milliseconds by engine. Raises EngineError for values that are not finite.
        """
        self._write(self._rest, feed.inputs)
        # The graph with guidance also computes plain calls: with zeros.
        for name in self._guidance:
            if feed.guidance is None or name not in feed.guidance:
                self._host[name].fill(0)
            else:
                fill(name, self._slots[name], feed.guidance[name])
        if self.captured is None or self._warm:  # otherwise the graph does it
            self._upload_rest()
        if self._noise is not None and self._host_noise is not None:
            if feed.noise is None:
                self._family.draw(self._noise, generator)
            else:
                self._host_noise.numpy()[:] = feed.noise
                self._noise.copy_(self._host_noise, non_blocking=True)
            if self._warm:
                self._noise.lerp_(self._inputs[PREVIOUS], 1.0 - self.shape.schedule.start)
        result, times = self._run()
        if not np.isfinite(result).all():
            raise EngineError(f"{self.result_name}: expected finite values, got NaN or infinity; try --config eager")
        return result, times

    def rehearse(self) -> None:
        """Run once, so that the first call finds every kernel compiled."""
        self._known = None
        self._fill_with_examples()
        self._launch_first()
        self._upload_rest()
        self._run()

    def _launch_first(self) -> None:
        self.launched = time.perf_counter()  # before the GPU has work: no component's time is before it
        if self.captured is None:
            with on(self.device), self.runtime.open():
                self._upload_images()
        else:
            self.captured.start()

    def _write(
        self, slots: Mapping[str, Sequence[np.ndarray]], inputs: Mapping[str, Rows],
        pieces: Mapping[str, Sequence[tuple[Tensor, Tensor]]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        for name, buffers in slots.items():
            if name not in inputs:
                raise EngineError(f"{self._family.name}: feed: expected {name}, got {', '.join(inputs)}")
            fill(name, buffers, inputs[name], pieces.get(name, ()))

    def _changed(self) -> bool:
        """Whether the inputs of the engine that a call may leave out are not those of the last complete call."""
        known, self._known = self._known, None
        if not self._seldom or known is None:
            return True
        return not all(map(np.array_equal, known, (self._host[name] for name in self._seldom)))

    def _run(self) -> tuple[np.ndarray, dict[str, float]]:
        changed = self._changed()
        result, times = self._enqueue_and_wait(changed)
        self._known = [self._host[name].copy() for name in self._seldom]
        return result, times

    def _enqueue_and_wait(self, changed: bool) -> tuple[np.ndarray, dict[str, float]]:
        if self.captured is not None:
            self.captured.replay(changed=changed)
            synchronize(self.device)
            return self._answer, self.captured.times()
        on_gpu = self.device.type == "cuda"
        with on(self.device), self.runtime.open():
            self.launched = time.perf_counter()
            marks = [_mark(on_gpu)]
            for index, (_, engine) in enumerate(self.engines):
                if changed or index != SELDOM or not self._seldom:
                    engine.run()
                marks.append(_mark(on_gpu))
            self._download()
            if on_gpu:
                synchronize(self.device)
        times = {n: a.elapsed_time(b) for (n, _), a, b in zip(self.engines, marks, marks[1:], strict=False)}
        return self._answer, times


class _HostEvent:
    """As `torch.cuda.Event`, for work that is done when it returns."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end.at - self.at) * 1e3


def _mark(on_gpu: bool) -> Any:
    """A recorded event."""
    if not on_gpu:
        return _HostEvent()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Pipelines:
    """Pipelines by shape, most recently used last, within `limit` shapes and a budget of device memory."""

    def __init__(self, plan: Plan, *, limit: int = 16) -> None:
        self.plan, self.limit = plan, limit
        self.budget = int(plan.config.pipeline_memory_gib * 2**30)
        self._kept: OrderedDict[Shape, tuple[Pipeline, int]] = OrderedDict()
        self._cameras: set[Cameras] = set()

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
        """Device memory of the pipelines kept."""
        return sum(size for _, size in self._kept.values())

    def resizes(self, cameras: Cameras | None) -> bool:
        """Whether the device takes images of these sizes: up to `MOST_CAMERAS` sets, because each has CUDA graphs."""
        if cameras is None or cameras in self._cameras:
            return True
        if not resize.fits_on(self.plan.device):
            return False
        if len(self._cameras) == MOST_CAMERAS:
            self.plan.ledger.warn(
                f"images: more than {MOST_CAMERAS} sets of camera sizes; others are resized on the host"
            )
            return False
        self._cameras.add(cameras)
        return True

    def started(self, images: Mapping[str, Rows], schedule: Schedule) -> Pipeline | None:
        """Start the call in the newest pipeline of a schedule if that has CUDA graphs and these images fit; None
        otherwise."""
        kept = (pipeline for pipeline, _ in reversed(self._kept.values()) if pipeline.shape.schedule == schedule)
        pipeline = next(kept, None) if images else None
        if pipeline is None or pipeline.captured is None or not pipeline.accepts(images):
            return None
        pipeline.start(images)
        return pipeline

    def get(self, shape: Shape) -> Pipeline:
        """The pipeline of a shape, built on first use."""
        known = self._kept.get(shape)
        if known is not None:
            self._kept.move_to_end(shape)
            return known[0]
        before = self._allocated() - self.plan.weight_bytes()
        # Kernels that are tried while it is built run on the current device.
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
