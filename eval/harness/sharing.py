"""Which episode a worker plays next, and how requests to one policy are answered together."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from eval.harness.policies import PolicyBySteps
from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import describe
from vla_accel.errors import EngineError

Request = tuple["int | None", dict[str, Any], dict[str, Any]]
"""Step count, observation, and options of `infer`."""
Answer = tuple[str, Any]
"""`answer` and the result of `infer`, or `failed` and the reason."""


class Schedule:
    """Hands out episodes. A worker keeps its task as long as that has episodes: another environment takes seconds."""

    def __init__(self, episodes: Sequence[EpisodeKey]) -> None:
        self._by_task: dict[tuple[str, int], deque[EpisodeKey]] = {}
        for key in episodes:
            self._by_task.setdefault(key.task, deque()).append(key)

    def __len__(self) -> int:
        return sum(map(len, self._by_task.values()))

    def give_back(self, key: EpisodeKey) -> None:
        """Put back an episode that was not finished, as the next one of its task."""
        self._by_task[key.task].appendleft(key)

    def next(self, mine: tuple[str, int] | None, busy: Container[tuple[str, int] | None]) -> EpisodeKey | None:
        """The next episode for a worker with an environment of task `mine`: of this task, else of a task that no worker
        plays (`busy`), else of the task with the most episodes."""
        open_tasks = [task for task, queue in self._by_task.items() if queue]
        if not open_tasks:
            return None
        if mine not in open_tasks:
            free = [task for task in open_tasks if task not in busy]
            mine = free[0] if free else max(open_tasks, key=lambda task: len(self._by_task[task]))
        assert mine is not None
        return self._by_task[mine].popleft()


def answer(policies: PolicyBySteps, requests: Sequence[Request]) -> list[Answer]:
    """Answer requests in their order; those with equal step counts, and all with or all without noise and a previous
    chunk, make a batch.

    A refused request gets the error as its answer, so that one bad episode does not end the run.
    """
    groups: dict[tuple[int | None, bool, bool], list[int]] = {}
    for index, (steps, _, options) in enumerate(requests):
        key = steps, options.get("noise") is not None, "prev_chunk" in options
        groups.setdefault(key, []).append(index)
    answers: list[Answer] = [("failed", "not answered")] * len(requests)
    for (steps, *_), left in groups.items():
        while left:
            # Engines and graphs are built for each batch size: powers of two are few.
            size = 1 << (len(left).bit_length() - 1) if hasattr(policies.policy, "infer_batch") else 1
            part, left = left[:size], left[size:]
            try:
                found = [("answer", result) for result in _infer(policies(steps), [requests[i] for i in part])]
            except Exception as exception:
                found = [("failed", describe(exception))] * len(part)
            for index, one in zip(part, found, strict=True):
                answers[index] = one
    return answers


def unwrap(answered: Answer) -> dict[str, Any]:
    """The result of `infer`; raises its error as an `EngineError`."""
    kind, content = answered
    if kind == "failed":
        raise EngineError(f"shared policy: {content}")
    return content


def _infer(policy: Any, group: Sequence[Request]) -> Sequence[dict[str, Any]]:
    if len(group) == 1:
        (_, observation, options), *_ = group
        return [policy.infer(observation, **options)]
    return policy.infer_batch([obs for _, obs, _ in group], **batch_options([options for *_, options in group]))


def batch_options(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Options of several `infer` calls as those of one `infer_batch`: noise (batch, horizon, action_dim), which all or
    none of them have, and previous chunks if any has one."""
    noise = [one["noise"] for one in options if one.get("noise") is not None]
    batch: dict[str, Any] = {"noise": np.stack(noise) if noise else None}
    if any("prev_chunk" in one for one in options):
        batch["prev_chunks"] = [one.get("prev_chunk") for one in options]
        batch["inference_delays"] = [one.get("inference_delay") for one in options]
    return batch
