"""Cameras' images of other sizes than the model's, on their way to the device that fits them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vla_accel.ops.cuda.runtime import on
from vla_accel.ops.resize import fit, fit_of
from vla_accel.pictures import Picture


class Pictures:
    """Buffers for the images of a call, page-locked for a GPU; they grow to the largest that came."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms: list[tuple[Tensor, Tensor]] = []

    def put(self, number: int, picture: Picture, place: Tensor) -> None:
        """Enqueue that `place` (size, size, 3) becomes the call's image `number`, which may be overwritten after
        this. The call before must have ended."""
        shape = picture.image.shape
        staged, raw = (room[: math.prod(shape)].view(shape) for room in self._room(number, math.prod(shape)))
        np.copyto(staged.numpy(), picture.image, casting="no")
        with on(self.device):
            raw.copy_(staged, non_blocking=True)
            fit(raw, fit_of(shape[0], shape[1], picture.size, picture.method, self.device), place)

    def _room(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Bytes on the host and on the device."""
        while number >= len(self._rooms):
            self._rooms.append((torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)))
        if len(self._rooms[number][0]) < size:
            pinned = self.device.type == "cuda"
            staged = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._rooms[number] = staged, torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._rooms[number]
