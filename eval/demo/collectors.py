"""The collector processes of one training process, and the store of their observations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from eval.demo.collect import AUX_DIM, HORIZON, collector
from eval.demo.settings import TrainConfig

Seen = tuple[np.ndarray, np.ndarray, np.ndarray]
"""An encoded observation: images uint8 (2, S, S, 3), tokens (L,), state (state_dim,)."""
Label = tuple[np.ndarray, np.ndarray]
"""The expert's actions (10, 7) and the privileged targets (13,)."""


class Store:
    """A ring buffer of labelled observations on the device."""

    def __init__(
        self, capacity: int, size: int, length: int, state_dim: int, action_dim: int, device: torch.device
    ) -> None:
        self.capacity, self.count, self.cursor, self.device = capacity, 0, 0, device
        self.images = torch.zeros(capacity, 2, size, size, 3, dtype=torch.uint8, device=device)
        self.tokens = torch.zeros(capacity, length, dtype=torch.int64, device=device)
        self.states = torch.zeros(capacity, state_dim, device=device)
        self.actions = torch.zeros(capacity, HORIZON, action_dim, device=device)
        self.aux = torch.zeros(capacity, AUX_DIM, device=device)

    def add(self, pairs: Sequence[tuple[Seen, Label]]) -> None:
        """Add rows."""
        if not pairs:
            return
        if self.cursor + len(pairs) > self.capacity:
            self.cursor = 0
        end = self.cursor + len(pairs)
        columns = zip(*((*seen, *label) for seen, label in pairs), strict=True)
        buffers = (self.images, self.tokens, self.states, self.actions[..., :7], self.aux)
        for buffer, rows in zip(buffers, columns, strict=True):
            buffer[self.cursor : end] = torch.from_numpy(np.stack(rows)).to(self.device)
        self.cursor = end
        self.count = max(self.count, end)

    def draw(self, batch: int) -> tuple[Tensor, ...]:
        """Random rows: images, tokens, states, actions, privileged targets; zero for an empty store."""
        rows = torch.randint(max(1, self.count), (batch,), device=self.device)
        return tuple(kept[rows] for kept in (self.images, self.tokens, self.states, self.actions, self.aux))


class Collectors:
    """The collectors of one process: their pipes, pending requests and finished episodes.

    Args:
        numbers: of the collectors of this process, among `total`; the more there are, the fewer tasks each plays,
            because an environment belongs to one task.
        encode: (task, images, state) to what the policy reads of them.
    """

    def __init__(
        self,
        config: TrainConfig,
        numbers: range,
        total: int,
        encode: Callable[[int, np.ndarray, np.ndarray], Seen],
        egl_device: int = -1,
    ) -> None:
        context = mp.get_context("spawn")
        self.encode, self.count = encode, len(numbers)
        self.pipes: dict[int, Connection] = {}
        self.looks: dict[int, Seen] = {}
        self.labelled: list[tuple[Seen, Label]] = []
        self.ended: list[tuple] = []
        self.ready: set[int] = set()
        """The collectors that wait for an answer."""
        for index in numbers:
            ours, theirs = context.Pipe()
            arguments = (theirs, index, tasks_of(index, total, config.tasks), config, egl_device)
            context.Process(target=collector, args=arguments, daemon=True).start()
            theirs.close()
            self.pipes[index] = ours

    def poll(self) -> None:
        """Receive all pending messages."""
        for i, pipe in list(self.pipes.items()):
            while i in self.pipes and pipe.poll():
                kind, *content = pipe.recv()
                if kind == "look":
                    images, state, task = content
                    self.looks[i] = self.encode(task, images, state)
                    self.ready.add(i)
                elif kind == "label":
                    if content[0] is not None:
                        self.labelled.append((self.looks[i], content[0]))
                elif kind == "end":
                    self.ended.append(tuple(content))
                else:
                    self._drop(i, content[0])

    def _drop(self, i: int, why: str) -> None:
        print(f"collector {i} ended: {why}", file=sys.stderr, flush=True)
        del self.pipes[i]
        self.ready.discard(i)
        if 2 * len(self.pipes) < self.count:
            raise RuntimeError(f"collectors: expected at least half of {self.count}, {len(self.pipes)} are left")

    def requests(self) -> list[Seen]:
        """The observations of the collectors that wait, in their order."""
        return [self.looks[i] for i in sorted(self.ready)]

    def answer(self, chunks: np.ndarray | None, share: float) -> None:
        """Send each collector that waits its chunk of (N, H, at least 7)."""
        for row, i in enumerate(sorted(self.ready)):
            self.pipes[i].send((None if chunks is None else chunks[row, :, :7], share))
        self.ready.clear()

    def take_labelled(self) -> list[tuple[Seen, Label]]:
        """The observations that were labelled since the last call."""
        pairs, self.labelled = self.labelled, []
        return pairs

    def close(self) -> None:
        """Close the pipes, which ends the collectors."""
        for pipe in self.pipes.values():
            pipe.close()


def tasks_of(index: int, total: int, tasks: int) -> list[int]:
    """The tasks of one of `total` collectors: all tasks are played equally often, each collector plays few."""
    each = max(1, -(-tasks // total), 1 if total >= 2 * tasks else 2 if total >= tasks else 3)
    return [(index * each + j) % tasks for j in range(each)]
