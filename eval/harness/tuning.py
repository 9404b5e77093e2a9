"""A benchmark's episodes for `vla-accel tune`: played by candidates, each from the same start with the same noise.

`vla_accel.tune.search.Episodes` is the interface; `vla_accel.tune` loads a benchmark by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from eval.harness import workers
from eval.harness.benchmark import Benchmark
from eval.harness.figures import check_video_packages
from eval.harness.policies import PolicyBySteps, PolicySource
from eval.harness.protocol import SEED, EpisodeKey, Protocol, parse_tasks
from eval.harness.runner import Setup, video_name
from vla_accel.tune.search import Candidate, write_config

SEEDS = (SEED, SEED + 1, SEED + 2, SEED + 3)
"""Of simulator and noise: each start state is played once with each, so that there are enough episodes."""


class HarnessEpisodes:
    """All episodes of a suite, in random order; an `Episodes` of `vla_accel.tune`. One seed comes after the other,
    because each has processes of its own, which take seconds to start.

    Args: `tasks`: such as "0-2,5", all if None; `device`: of every policy, None for the configuration's; `workers`:
    processes; `seed`: of the order; `folder`: for candidates' files and films; `films`: whether there are any.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        checkpoint: str,
        *,
        suite: str | None,
        tasks: str | None,
        device: str | None,
        workers: int,
        seed: int,
        folder: Path,
        films: bool = True,
    ) -> None:
        name = suite or benchmark.suites[0]
        benchmark.check_suite(name)
        self._suite = benchmark.load_suite(name)
        chosen = range(len(self._suite.tasks)) if tasks is None else parse_tasks(tasks, len(self._suite.tasks))
        self._benchmark, self._checkpoint, self._folder = benchmark, checkpoint, folder
        self._device, self._workers, self._filmed = device or "auto", workers, films and bool(benchmark.cameras)
        starts = ((s, t, i) for s in SEEDS for t in chosen for i in range(benchmark.trials))
        self._by_key = {f"seed {s}, task {t}, trial {i}": (s, t, i) for s, t, i in starts}
        shuffled = random.Random(seed).sample(list(self._by_key), len(self._by_key))
        self.keys: Sequence[str] = sorted(shuffled, key=lambda key: self._by_key[key][0])
        self.name = f"{benchmark.name}, {name}, tasks {', '.join(map(str, chosen))}"
        self._loaded: dict[str, PolicyBySteps] = {}

    def play(self, candidate: Candidate, keys: Sequence[str]) -> Iterator[tuple[str, bool | None]]:
        """Each episode's key, and whether it was won; None where it crashed. As they end."""
        wanted = {self._by_key[key]: key for key in keys}
        source, policies = self._policy(candidate)
        for seed in dict.fromkeys(seed for seed, _, _ in wanted):
            mine = [EpisodeKey(candidate.config.num_steps, t, i) for s, t, i in wanted if s == seed]
            protocol = Protocol(
                suite=self._suite.name,
                tasks=tuple(dict.fromkeys(key.task_id for key in mine)),
                trials=self._benchmark.trials,
                steps=(candidate.config.num_steps,),
                max_steps=self._suite.max_steps,
                seed=seed,
                settings=self._benchmark.settings_of(policies.policy.metadata),
            )
            filming = {"video_folder": self._films(candidate, seed), "video_every": protocol.replan_steps}
            setup = Setup(self._benchmark, protocol, source, video_keys=frozenset(mine), **filming)
            shared = policies if self._workers <= 1 or policies.policy.device.type == "cuda" else None
            with closing(workers.play(setup, mine, shared, workers=self._workers)) as results:
                for result in results:
                    key = wanted[seed, result.key.task_id, result.key.trial]
                    yield key, None if result.error else result.success

    def film(self, candidate: Candidate, key: str) -> Path | None:
        """The film of an episode that was played, or None."""
        seed, task, trial = self._by_key[key]
        folder = self._films(candidate, seed)
        if folder is None:
            return None
        path = folder / video_name(self._suite.name, EpisodeKey(candidate.config.num_steps, task, trial))
        return next((p for p in (path.with_name(f"{path.name}.{s}") for s in ("mp4", "gif")) if p.is_file()), None)

    def _films(self, candidate: Candidate, seed: int) -> Path | None:
        """Films cost no rendering: they have the images that the policy sees. Writing one takes a second or so."""
        if not self._filmed:
            return None
        check_video_packages()
        return self._folder / candidate.key.replace(" ", "-") / f"seed{seed}"

    def _policy(self, candidate: Candidate) -> tuple[PolicySource, PolicyBySteps]:
        """The candidate, loaded once; its file is what worker processes load it from."""
        file = write_config(candidate.config, self._folder / f"{candidate.key.replace(' ', '-')}.yaml", candidate.why)
        chunking = "plain" if candidate.config.warm_start is None else "warm"
        source = PolicySource("local", self._checkpoint, str(file), self._device, chunking)
        if candidate.key not in self._loaded:
            # The reference first, then a candidate: they play in turns.
            for key in list(self._loaded)[1:]:
                del self._loaded[key]
            self._loaded[candidate.key] = PolicyBySteps(source.load())
        return source, self._loaded[candidate.key]


def opener(benchmark: Benchmark) -> Callable[..., HarnessEpisodes]:
    """The interface that `vla-accel tune --benchmark` expects."""
    return partial(HarnessEpisodes, benchmark)
