"""Progress while episodes are played: bars on a terminal, else a line for each episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from eval.harness import report
from eval.harness.rollout import EpisodeResult

Nodes = Mapping[str, tuple[int, int]]
UNWATCHED = 180  # columns without a terminal


def stderr_console() -> Console:
    """The console for progress; without a terminal its lines are long. Brackets are no markup."""
    width = None if Console(stderr=True).is_terminal else UNWATCHED
    return Console(stderr=True, highlight=False, markup=False, emoji=False, width=width)


class EpisodeProgress:
    """A bar for the run and one for each machine of a cluster; a context manager.

    Args:
        plan: number of episodes of the run.
        done: number of recorded episodes.
    """

    def __init__(self, console: Console, name: str, *, plan: int, done: int) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # On a narrow terminal only this column is wrapped.
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(overflow="fold")),
        )
        self._console, self._plan = console, plan
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._run = self._progress.add_task(name, total=plan, completed=done, note="")
        self._nodes: dict[str, TaskID] = {}

    def __enter__(self) -> EpisodeProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, result: EpisodeResult, results: Sequence[EpisodeResult], nodes: Nodes) -> None:
        """Show one more result. `results`: all recorded; `nodes`: simulators and finished episodes by machine."""
        rate = report.rate_of(results)
        note = (
            f"{result.key}: {result.outcome}, {result.env_steps} actions, "
            f"{result.wall_s:.1f} s; so far {rate.successes}/{rate.episodes}"
        )
        self._progress.update(self._run, advance=1, note=note)
        for name, (simulators, played) in nodes.items():
            if name not in self._nodes:
                self._nodes[name] = self._progress.add_task(name, total=self._plan, note="")
            self._progress.update(self._nodes[name], completed=played, note=f"{simulators} simulators")
        if result.error:
            self._console.print(f"error in {result.key}: {result.error}", style="red")
        elif not self._console.is_terminal:
            each = "".join(f"; {name}: {played} by {simulators}" for name, (simulators, played) in nodes.items())
            self._console.print(f"{len(results)}/{self._plan} {note}{each}")
