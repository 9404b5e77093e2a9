"""The engines of one shape, joined by the names of their inputs and outputs, with staging buffers and CUDA graphs.

A call has two halves: `start` uploads the images and launches the first engine, `finish` uploads everything else and
runs the other engines, so the GPU works while the host tokenizes prompts. `Pipelines` keeps the most recently used
shapes within a memory budget.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vla_accel.config import PolicyConfig
from vla_accel.engines import Engine, build
from vla_accel.engines.auto import Choice
from vla_accel.engines.graph import Captured, capture
from vla_accel.errors import EngineError
from vla_accel.families.family import IMAGES, Family, Rows, Shape, Store
from vla_accel.fp8 import Scales
from vla_accel.kernels.image import resize
from vla_accel.kernels.nvrtc import on, synchronize
from vla_accel.ledger import Ledger
from vla_accel.nn.memory import Counted
from vla_accel.nn.network import Network
from vla_accel.numeric import round_up
from vla_accel.pictures import Cameras
from vla_accel.runtime import Runtime

NOISE = "noise"
"""The input that is drawn on the device unless the caller passes it."""
ALIGNMENT = 256
"""Bytes; CUDA's allocator guarantees it, and kernels and libraries may rely on it."""
MOST_CAMERAS = 8
"""Sets of image sizes for which shapes are built; images of further sizes are resized on the host."""
_log = logging.getLogger("vla_accel")


@dataclass(frozen=True)
class Feed:
    """One call's inputs on the host.

    Attributes:
        inputs: By name, without guidance and noise.
        noise: float32 (B, H, A), or None to draw it on the device.
        guidance: Inputs of real-time chunking by name, or None for a plain call.
    """

    inputs: Mapping[str, Rows]
    noise: np.ndarray | None = None
    guidance: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Plan:
    """What the pipelines of all shapes share.

    Attributes:
        choices: The engine of each component.
        store: The native programs' weights.
        scales: FP8 scales for engines that are built from a quantised module.
    """

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


def host_buffer(like: Tensor) -> Tensor:
    """A zeroed host tensor like `like`, page-locked if that is on a GPU."""
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class Pipeline:
    """The components of one shape, one after the other."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.shape, self.runtime, self.device = shape, plan.runtime, plan.device
        self._family, self._sizes = plan.family, plan.model.config
        self._guided = False
        """Whether the staged guidance may differ from zero."""
        self.launched = 0.0
        """When the last call launched its first engine, in seconds of `time.perf_counter`."""
        components = plan.family.components(
            plan.model, shape, store=plan.store, scales=plan.scales, rtc=plan.config.rtc
        )  # fmt: skip
        self.engines: list[tuple[str, Engine]] = []
        for component in components:
            choice = plan.choices[component.name]
            engine = build(component, choice.spec, device=plan.device, ledger=plan.ledger, why=choice.why)
            self.engines.append((component.name, engine))
        self._stage()
        self._bind()
        for (_, earlier), (name, engine) in itertools.pairwise(self.engines):
            if overlapped := engine.follow(earlier):
                plan.ledger.add(name, overlapped)
        self.captured: Captured | None = None
        if plan.device.type == "cuda" and plan.config.cuda_graph:
            self._fill_with_examples()
            self._upload_rest()
            self.captured = capture(
                self.engines, self._download, plan.ledger, before=self._upload_images, split_first=True
            )  # fmt: skip

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Every component's outputs in the last call, by name; the next call overwrites them."""
        return {name: tensor for _, engine in self.engines for name, tensor in engine.outputs.items()}

    def engine(self, name: str) -> Engine:
        """A component's engine."""
        return dict(self.engines)[name]

    # -- buffers ------------------------------------------------------------------------------------------------------

    def _stage(self) -> None:
        """Lay out the host inputs in one buffer on the host and one on the device: first those of the first engine,
        then the others, so that a call uploads in two copies. An input that several engines share is there once."""
        cameras, first = self.shape.cameras, self.engines[0][1]
        starts: dict[str, tuple[Tensor, int]] = {}
        produced: set[str] = set()
        end = self._split = 0
        for index, (_, engine) in enumerate(self.engines):
            for name, like in engine.inputs.items():
                if name != NOISE and name not in produced and name not in starts:
                    starts[name] = like, end
                    if cameras is not None and name == IMAGES:
                        end += len(like) * sum(map(_image_bytes, cameras.sizes))
                    else:
                        end += round_up(like.nbytes, ALIGNMENT)
            produced |= engine.outputs.keys()
            self._split = end if index == 0 else self._split
        self._device_buffer = torch.zeros(end, dtype=torch.uint8, device=self.device)
        self._host_buffer = host_buffer(self._device_buffer)
        self._host: dict[str, np.ndarray] = {}
        self._inputs: dict[str, Tensor] = {}
        slots: dict[str, list[np.ndarray]] = {}
        self._resizes: list[tuple[Tensor, resize.Fit | None, Tensor]] = []
        """Camera images on the device, how they are resized, and the images of the first engine that they become."""
        for name, (like, start) in starts.items():
            if cameras is not None and name == IMAGES:
                slots[name] = self._stage_cameras(cameras, like.flatten(0, 1), start)
                continue
            part = slice(start, start + like.nbytes)
            self._inputs[name] = self._device_buffer[part].view(like.dtype).view(like.shape)
            self._host[name] = host = self._host_buffer[part].view(like.dtype).view(like.shape).numpy()
            rows = host.reshape(-1, *host.shape[2:]) if name == IMAGES and host.ndim == 5 else host
            slots[name] = [rows[index, ...] for index in range(len(rows))]
        self._slots = slots
        fed = {name: rows for name, rows in slots.items() if name not in self._family.chunking.inputs}
        self._first = {name: rows for name, rows in fed.items() if name in first.inputs}
        self._rest = {name: rows for name, rows in fed.items() if name not in first.inputs}

    def _stage_cameras(self, cameras: Cameras, images: Tensor, start: int) -> list[np.ndarray]:
        """The slots of camera images, one for each of `images`, the first engine's."""
        slots = []
        for out, size in zip(images, itertools.cycle(cameras.sizes), strict=False):
            height, width = size
            part, shape = slice(start, start + height * width * 3), (height, width, 3)
            image, side = self._device_buffer[part].view(shape), out.shape[0]
            how = None
            if image.shape != out.shape:
                how = resize.fit_of(height, width, side, cameras.method, self.device)
            self._resizes.append((image, how, out))
            slots.append(self._host_buffer[part].view(shape).numpy())
            start += _image_bytes(size)
        return slots

    def _bind(self) -> None:
        """Bind every engine input to the output or the staged input of its name."""
        produced: dict[str, Tensor] = {}
        noise: Tensor | None = None
        for component, engine in self.engines:
            for name, own in list(engine.inputs.items()):
                source = produced.get(name, self._inputs.get(name))
                if name == NOISE and source is None:
                    source = noise = own if noise is None else noise
                # Camera images have no source: they are resized into the engine's own input.
                if source is not None and source is not own:
                    engine.bind(name, source)
            if again := sorted(engine.outputs.keys() & produced.keys()):
                raise EngineError(f"{component}.{again[0]}: an earlier component has an output of this name")
            produced |= engine.outputs
        last, name = self.engines[-1][1], self._family.result
        if name not in last.outputs:
            raise EngineError(f"{self._family.name}: expected an output {name} of the last component")
        self._noise, self._result = noise, last.outputs[name]
        self._host_noise = None if noise is None else host_buffer(noise)
        self._host_result = host_buffer(self._result)

    def _fill_with_examples(self) -> None:
        """Stage valid inputs that no caller sent."""
        for slot in chain(*self._slots.values()):
            slot.fill(0)
        self.shape.make_valid(self._sizes, self._host)
        if self._noise is not None:
            self._noise.zero_()

    def _upload_images(self) -> None:
        """Upload the first engine's inputs and resize images: the first work of the first CUDA graph."""
        self._device_buffer[: self._split].copy_(self._host_buffer[: self._split], non_blocking=True)
        for image, how, out in self._resizes:
            if how is None:
                out.copy_(image)
            else:
                resize.fit(image, how, out)

    def _upload_rest(self) -> None:
        self._device_buffer[self._split :].copy_(self._host_buffer[self._split :], non_blocking=True)

    def _download(self) -> None:
        self._host_result.copy_(self._result, non_blocking=True)

    # -- a call -------------------------------------------------------------------------------------------------------

    def accepts(self, images: Mapping[str, Rows]) -> bool:
        """Whether `Family.image_feed` holds all inputs of the first engine, in the sizes of this shape."""
        return images.keys() == self._first.keys() and all(
            [row.shape for row in images[name]] == [slot.shape for slot in slots] for name, slots in self._first.items()
        )

    def start(self, inputs: Mapping[str, Rows]) -> None:
        """Stage and upload the first engine's inputs and, with CUDA graphs, run that engine; `finish` follows.

        The images may be overwritten afterwards. The last call must have ended: `finish` waits for it, and a caller
        that gives up after `start` must synchronise.
        """
        self._write(self._first, inputs)
        self._launch_first()

    def finish(self, feed: Feed, generator: torch.Generator) -> tuple[np.ndarray, dict[str, float]]:
        """Stage and upload everything else, run the other engines and wait for the result.

        Args:
            feed: The call's inputs; those of the first engine are there already.
            generator: Draws the noise if `feed` has none.

        Returns:
            The family's `result`, which the next call overwrites, and milliseconds by engine.
        """
        self._write(self._rest, feed.inputs)
        if feed.guidance is not None:
            self._guided = True
            for name, rows in feed.guidance.items():
                _fill(name, self._slots[name], rows)
        elif self._guided:
            # The graph with guidance also computes plain calls: with zeros.
            for name in self._family.chunking.inputs:
                self._host[name].fill(0)
            self._guided = False
        self._upload_rest()
        if self._noise is not None and self._host_noise is not None:
            if feed.noise is None:
                self._noise.normal_(generator=generator)
            else:
                self._host_noise.numpy()[:] = feed.noise
                self._noise.copy_(self._host_noise, non_blocking=True)
        return self._run()

    def rehearse(self) -> None:
        """Run once on valid inputs, so that the first call finds every kernel compiled."""
        self._fill_with_examples()
        self._launch_first()
        self._upload_rest()
        self._run()

    def _launch_first(self) -> None:
        if self.captured is None:
            with on(self.device), self.runtime.open():
                self._upload_images()
        else:
            self.captured.start()
        self.launched = time.perf_counter()

    def _write(self, slots: Mapping[str, Sequence[np.ndarray]], inputs: Mapping[str, Rows]) -> None:
        for name, buffers in slots.items():
            if name not in inputs:
                raise EngineError(f"{self._family.name}: its feed lacks {name}; it has {', '.join(inputs)}")
            _fill(name, buffers, inputs[name])

    def _run(self) -> tuple[np.ndarray, dict[str, float]]:
        if self.captured is not None:
            self.captured.replay()
            synchronize(self.device)
            return self._host_result.numpy(), self.captured.times()
        with on(self.device), self.runtime.open():
            times = self._run_on_stream() if self.device.type == "cuda" else self._run_on_cpu()
        return self._host_result.numpy(), times

    def _run_on_cpu(self) -> dict[str, float]:
        times = {}
        self.launched = time.perf_counter()
        for name, engine in self.engines:
            start = time.perf_counter()
            engine.run()
            times[name] = (time.perf_counter() - start) * 1e3
        self._download()
        return times

    def _run_on_stream(self) -> dict[str, float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(self.engines) + 1)]
        self.launched = time.perf_counter()
        events[0].record()
        for (_, engine), event in zip(self.engines, events[1:], strict=True):
            engine.run()
            event.record()
        self._download()
        synchronize(self.device)
        return {n: a.elapsed_time(b) for (n, _), a, b in zip(self.engines, events, events[1:], strict=False)}


def _image_bytes(size: tuple[int, int]) -> int:
    """Bytes of an image of this height and width, aligned."""
    return round_up(size[0] * size[1] * 3, ALIGNMENT)


def _fill(name: str, slots: Sequence[np.ndarray], rows: Rows) -> None:
    """Copy rows into their slots; what a row leaves of its slot along the first axis becomes zero."""
    if len(rows) != len(slots):
        raise EngineError(f"{name}: expected {len(slots)} rows, got {len(rows)}")
    for slot, row in zip(slots, rows, strict=True):
        if row.shape == slot.shape:
            np.copyto(slot, row, casting="no")
        elif row.ndim == slot.ndim > 0 and row.shape[1:] == slot.shape[1:] and len(row) < len(slot):
            np.copyto(slot[: len(row)], row, casting="no")
            slot[len(row) :] = 0
        else:
            raise EngineError(f"{name}: expected shape {slot.shape}, got {row.shape}")


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
        """Device memory of the pipelines kept (0 on a CPU)."""
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

    def started(self, images: Mapping[str, Rows]) -> Pipeline | None:
        """Start the call in the newest pipeline if that has CUDA graphs and these images fit; None otherwise."""
        pipeline = self.newest if images and self._kept else None
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
