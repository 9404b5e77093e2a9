"""The collector processes of one training process, and the store of their observations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from eval.demo.collect import AUX_DIM, HORIZON, CollectConfig, collector

Seen = tuple[np.ndarray, np.ndarray, np.ndarray]
"""An encoded observation: images uint8 (2, S, S, 3), tokens (L,), state (state_dim,)."""
Label = tuple[np.ndarray, np.ndarray]
"""The expert's actions (10, 7) and the privileged targets (13,)."""


class Store:
    """A ring buffer of labelled observations on the device."""

    def __init__(
        self, capacity: int, size: int, length: int, state_dim: int, action_dim: int, device: torch.device
    ) -> None:  # fmt: skip
        self.capacity, self.count, self.cursor = capacity, 0, 0
        self.images = torch.zeros(capacity, 2, size, size, 3, dtype=torch.uint8, device=device)
        self.tokens = torch.zeros(capacity, length, dtype=torch.int64, device=device)
        self.states = torch.zeros(capacity, state_dim, device=device)
        self.actions = torch.zeros(capacity, HORIZON, action_dim, device=device)
        self.aux = torch.zeros(capacity, AUX_DIM, device=device)
        self.device = device

    def add(self, pairs: Sequence[tuple[Seen, Label]]) -> None:
        """Add rows."""
        if not pairs:
            return
        if self.cursor + len(pairs) > self.capacity:
            self.cursor = 0
        where = slice(self.cursor, self.cursor + len(pairs))
        self.images[where] = self._put([seen[0] for seen, _ in pairs])
        self.tokens[where] = self._put([seen[1] for seen, _ in pairs])
        self.states[where] = self._put([seen[2] for seen, _ in pairs])
        self.actions[where, :, :7] = self._put([label[0] for _, label in pairs])
        self.aux[where] = self._put([label[1] for _, label in pairs])
        self.cursor += len(pairs)
        self.count = max(self.count, self.cursor)

    def _put(self, rows: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(rows)).to(self.device)

    def draw(self, batch: int) -> tuple[Tensor, ...]:
        """Random rows: images, tokens, states, actions, privileged targets; zero for an empty store."""
        rows = torch.randint(max(1, self.count), (batch,), device=self.device)
        return tuple(kept[rows] for kept in (self.images, self.tokens, self.states, self.actions, self.aux))


class Collectors:
    """The collectors of one process: their pipes, pending requests and finished episodes.

    `count` collectors of this process are numbers `first`, `first + 1`, … of `total`; the more there are, the fewer
    tasks each plays, because an environment belongs to one task. `encode(task, images, state)` encodes an
    observation for the policy.
    """

    def __init__(
        self,
        settings: CollectConfig,
        *,
        first: int,
        count: int,
        total: int,
        seed: int,
        encode: Callable[[int, np.ndarray, np.ndarray], Seen],
    ) -> None:
        context = mp.get_context("spawn")
        self.encode = encode
        self.pipes: dict[int, Connection] = {}
        self.count = count
        self.looks: dict[int, Seen] = {}
        self.labelled: list[tuple[Seen, Label]] = []
        self.ended: list[tuple] = []
        self.ready: set[int] = set()
        """The collectors that wait for an answer."""
        for index in range(first, first + count):
            ours, theirs = context.Pipe()
            arguments = (theirs, index, tasks_of(index, total, settings.tasks), seed, settings)
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
