"""Which episode comes next, for simulators that build a task's environment in seconds and keep it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence

from eval.harness.protocol import EpisodeKey


class Schedule:
    """Hands out episodes, keeping each worker at its task as long as that has any left."""

    def __init__(self, episodes: Sequence[EpisodeKey]) -> None:
        self._by_task: dict[tuple[str, int], deque[EpisodeKey]] = {}
        for key in episodes:
            self._by_task.setdefault(key.task, deque()).append(key)

    def __len__(self) -> int:
        return sum(map(len, self._by_task.values()))

    def give_back(self, key: EpisodeKey) -> None:
        """Take an episode back that nobody finished; it is its task's next."""
        self._by_task[key.task].appendleft(key)

    def next(self, mine: tuple[str, int] | None, busy: Container[tuple[str, int] | None]) -> EpisodeKey | None:
        """The next episode for a worker whose environment is that of the task `mine` (`EpisodeKey.task`).

        Its own task first, then one that no other worker plays (`busy`), then the longest.
        """
        open_tasks = [task for task, queue in self._by_task.items() if queue]
        if not open_tasks:
            return None
        if mine not in open_tasks:
            free = [task for task in open_tasks if task not in busy]
            mine = free[0] if free else max(open_tasks, key=lambda t: len(self._by_task[t]))
        assert mine is not None
        return self._by_task[mine].popleft()
