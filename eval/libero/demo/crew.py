"""The collectors of one training process, and the store of what they saw. Knows nothing of models or losses."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from eval.libero.demo.collect import AUX_DIM, HORIZON, CollectConfig, collector


class Store:
    """Observations on the device, newest over oldest. A row counts once its label has come."""

    def __init__(self, capacity: int, length: int, action_dim: int, device: torch.device) -> None:
        self.capacity, self.count, self.cursor = capacity, 0, 0
        self.images = torch.zeros(capacity, 2, 224, 224, 3, dtype=torch.uint8, device=device)
        self.tokens = torch.zeros(capacity, length, dtype=torch.int64, device=device)
        self.actions = torch.zeros(capacity, HORIZON, action_dim, device=device)
        self.aux = torch.zeros(capacity, AUX_DIM, device=device)
        self.device = device

    def add(self, looks: list[tuple], labels: list[tuple]) -> None:
        """Keep rows: looks are (images, tokens), labels (actions, privileged)."""
        n = len(looks)
        if self.cursor + n > self.capacity:
            self.cursor = 0
        where = slice(self.cursor, self.cursor + n)
        self.images[where] = self._put([look[0] for look in looks])
        self.tokens[where] = self._put([look[1] for look in looks])
        self.actions[where, :, :7] = self._put([label[0] for label in labels])
        self.aux[where] = self._put([label[1] for label in labels])
        self.cursor += n
        self.count = max(self.count, self.cursor)

    def _put(self, rows: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(rows)).to(self.device)

    def draw(self, batch: int) -> tuple[Tensor, ...]:
        """Random rows: images, tokens, actions, privileged."""
        rows = torch.randint(self.count, (batch,), device=self.device)
        return self.images[rows], self.tokens[rows], self.actions[rows], self.aux[rows]


class Crew:
    """The collectors of one process: their pipes, their pending questions, the episodes that ended.

    `count` collectors of this process are numbers `first`, `first + 1`, … of `total`; the more there are, the fewer
    tasks each plays, because an environment belongs to one task. `encode(task, state)` gives a prompt's token ids.
    """

    def __init__(
        self,
        settings: CollectConfig,
        *,
        first: int,
        count: int,
        total: int,
        seed: int,
        encode: Callable[[int, np.ndarray], np.ndarray],
    ) -> None:
        context = mp.get_context("spawn")
        self.encode = encode
        self.pipes: list[Connection] = []
        self.looks: dict[int, tuple] = {}
        self.labels: dict[int, tuple] = {}
        self.ended: list[tuple] = []
        per_worker = 1 if total >= 40 else 2 if total >= 20 else 3
        for index in range(first, first + count):
            ours, theirs = context.Pipe()
            tasks = [(index + 3 * j) % settings.tasks for j in range(per_worker)]
            arguments = (theirs, index, tasks, seed, settings)
            context.Process(target=collector, args=arguments, daemon=True).start()
            theirs.close()
            self.pipes.append(ours)

    def poll(self) -> None:
        """Take in what has arrived, without waiting."""
        for i, pipe in enumerate(self.pipes):
            while i not in self.labels and pipe.poll():
                message = pipe.recv()
                if message[0] == "look":
                    self.looks[i] = (message[1], self.encode(message[3], message[2]))
                elif message[0] == "label":
                    self.labels[i] = message[1:]
                elif message[0] == "end":
                    self.ended.append(message[1:])
                else:
                    raise RuntimeError(f"collector {i}: {message[1]}")

    def ready(self) -> list[int]:
        """Which collectors wait for an answer."""
        return sorted(self.labels)

    def answer(self, which: list[int], chunks: np.ndarray | None, share: float) -> list[tuple[tuple, tuple]]:
        """Send each its chunk; returns the finished (look, label) pairs."""
        pairs = []
        for row, i in enumerate(which):
            self.pipes[i].send((None if chunks is None else chunks[row, :, :7], share))
            pairs.append((self.looks.pop(i), self.labels.pop(i)))
        return pairs

    def observations(self, which: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 (N, 2, 224, 224, 3) and tokens (N, L) of the pending questions."""
        return np.stack([self.looks[i][0] for i in which]), np.stack([self.looks[i][1] for i in which])

    def close(self) -> None:
        """Hang up; the collectors end by themselves."""
        for pipe in self.pipes:
            pipe.close()
