"""A call's inputs on their way to the device: one copy of what is staged, and the cameras' images of other sizes than
the model's, which the device fits."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_accel.engines.graph import side_stream
from vla_accel.kernels.image.resize import Fit, fit, fit_of
from vla_accel.kernels.nvrtc import on
from vla_accel.numeric import round_up
from vla_accel.pictures import Picture

ALIGNMENT = 256
"""Bytes; of what CUDA's own allocator gives, which kernels and libraries may count on."""
MOST_GRAPHS = 8
"""Sets of image sizes for which a graph is kept; a robot's cameras are one."""


def beside(buffer: Tensor) -> Tensor:
    """A host buffer for one on the device, page-locked for a GPU."""
    return torch.zeros(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.device.type == "cuda")


@dataclass(frozen=True)
class _Fitting:
    """An image (H, W, 3) on the device, how it is fitted, and where to."""

    image: Tensor
    how: Fit
    place: Tensor


@dataclass(frozen=True)
class _Recorded:
    """A graph, and what its kernels read, which nobody else may keep."""

    graph: torch.cuda.CUDAGraph
    work: Sequence[_Fitting]


class Sending:
    """From `staged`, page-locked for a GPU, to `given` on the device, and images from a buffer beside it to their
    places in `given`. With `graphs` all of it is one launch from the second call with images of the same sizes on;
    otherwise it is a copy, and one to three kernels an image."""

    def __init__(self, staged: Tensor, given: Tensor, *, graphs: bool) -> None:
        self._staged, self._given, self._graphs = staged, given, graphs
        self._recorded: OrderedDict[Hashable, _Recorded | None] = OrderedDict()
        self._make_room(0)

    def send(self, pictures: Sequence[tuple[Tensor, Picture]] = ()) -> None:
        """Enqueue it; each picture goes to its place (size, size, 3), and may be overwritten after this. The call
        before must have ended."""
        if not pictures:
            self._given.copy_(self._staged, non_blocking=True)
            return
        starts = [0, *itertools.accumulate(round_up(picture.image.size, ALIGNMENT) for _, picture in pictures)]
        if starts[-1] > len(self._host):
            self._recorded.clear()
            self._make_room(starts[-1])
        for start, (_, picture) in zip(starts, pictures, strict=False):
            image = picture.image
            np.copyto(self._host[start : start + image.size].reshape(image.shape), image, casting="no")
        with on(self._given.device):
            key = tuple((place.data_ptr(), p.image.shape, p.size, p.method) for place, p in pictures)
            known = self._recorded.get(key)
            if known is not None:
                self._recorded.move_to_end(key)
            else:
                work = [self._fitting(*one) for one in zip(starts, pictures, strict=False)]
                known = self._graph_of(key, work)
                if known is None:
                    self._enqueue(work)
                    return
            known.graph.replay()

    def _graph_of(self, key: Hashable, work: Sequence[_Fitting]) -> _Recorded | None:
        """For what comes a second time; of what came once no more is known than that."""
        if not self._graphs:
            return None
        self._recorded[key] = known = self._record(work) if key in self._recorded else None
        self._recorded.move_to_end(key)
        if len(self._recorded) > MOST_GRAPHS:
            self._recorded.popitem(last=False)
        return known

    def _record(self, work: Sequence[_Fitting]) -> _Recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side_stream(self._given.device)):
            # Not `torch.cuda.graph`, which collects garbage and gives memory back: this happens between two calls.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue(work)
            finally:
                graph.capture_end()
        return _Recorded(graph, work)

    def _enqueue(self, work: Sequence[_Fitting]) -> None:
        self._given.copy_(self._staged, non_blocking=True)
        self._raw.copy_(self._images, non_blocking=True)
        for one in work:
            fit(one.image, one.how, one.place)

    def _fitting(self, start: int, given: tuple[Tensor, Picture]) -> _Fitting:
        place, picture = given
        image = self._raw[start : start + picture.image.size].view(picture.image.shape)
        how = fit_of(*picture.image.shape[:2], picture.size, picture.method, image.device)
        return _Fitting(image, how, place)

    def _make_room(self, size: int) -> None:
        """Bytes for a call's images, on the host and on the device."""
        self._raw = torch.empty(size, dtype=torch.uint8, device=self._given.device)
        self._images = beside(self._raw)
        self._host = self._images.numpy()
