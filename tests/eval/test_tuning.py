"""A benchmark's episodes for `vla-accel tune`: random order, equal starts, films, errors that are no failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.harness.benchmark import Suite, Task
from eval.harness.policies import PolicySource
from eval.harness.tuning import SEEDS, HarnessEpisodes, opener
from eval.libero.benchmark import LIBERO
from tests.support.eval_support import FakeEnv, FakePolicy
from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import ConfigError
from vla_accel.tune.search import Candidate

TASKS = tuple(Task(i, f"task_{i}", f"do {i}", [np.zeros(3)] * 2) for i in range(3))
CANDIDATE = Candidate("eager bf16", PolicyConfig(num_steps=3, precision="bf16"), "for a test")


@pytest.fixture
def episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HarnessEpisodes:
    def make(task: Task, settings: Mapping[str, Any], render: bool) -> FakeEnv:
        del settings, render
        return FakeEnv(crash_at=2 if task.id == 2 else None, succeed_after=4 if task.id == 0 else None)

    loaded: list[str | None] = []

    def load(source: PolicySource) -> FakePolicy:
        loaded.append(source.config)
        return FakePolicy()

    monkeypatch.setattr(PolicySource, "load", load)
    benchmark = replace(LIBERO, trials=2, load_suite=lambda name: Suite(name, TASKS, 12), make_environment=make)
    made = opener(benchmark)("demo", suite=None, tasks=None, device="cpu", workers=1, seed=0, folder=tmp_path)
    made.loaded = loaded  # type: ignore[attr-defined]
    return made


def test_all_starts_come_in_random_order_seed_by_seed(episodes: HarnessEpisodes) -> None:
    assert len(set(episodes.keys)) == len(episodes.keys) == len(SEEDS) * 3 * 2
    assert sorted(episodes.keys) != list(episodes.keys)
    by_seed = [[key.partition(", ")[2] for key in episodes.keys if key.startswith(f"seed {seed},")] for seed in SEEDS]
    assert [key for keys in by_seed for key in keys] == [key.partition(", ")[2] for key in episodes.keys]
    assert len({tuple(keys) for keys in by_seed}) > 1, "each in an order of its own"
    assert episodes.name == "libero, libero_spatial, tasks 0, 1, 2"


@pytest.mark.slow
def test_episodes_are_played_filmed_and_told_apart(episodes: HarnessEpisodes) -> None:
    keys = ["seed 7, task 0, trial 1", "seed 8, task 0, trial 1", "seed 7, task 1, trial 0", "seed 7, task 2, trial 0"]
    assert dict(episodes.play(CANDIDATE, keys)) == dict(zip(keys, (True, True, False, None), strict=True))
    assert list(episodes.play(CANDIDATE, keys[:1])) == [(keys[0], True)]
    (file,) = episodes.loaded  # type: ignore[attr-defined]
    assert load_config(file) == CANDIDATE.config, "worker processes load the candidate from its file, and once"
    films = [episodes.film(CANDIDATE, key) for key in keys[:3]]
    assert all(film is not None and film.stat().st_size for film in films) and len(set(films)) == 3
    assert episodes.film(CANDIDATE, "seed 9, task 0, trial 0") is None


def test_a_configuration_with_a_warm_start_is_played_warm(episodes: HarnessEpisodes) -> None:
    for start, chunking in ((None, "plain"), (0.5, "warm")):
        source, _ = episodes._policy(replace(CANDIDATE, config=replace(CANDIDATE.config, warm_start=start)))
        assert source.chunking == chunking


def test_without_films_nothing_is_written(episodes: HarnessEpisodes, tmp_path: Path) -> None:
    silent = opener(episodes._benchmark)(
        "demo", suite=None, tasks=None, device="cpu", workers=1, seed=0, folder=tmp_path / "silent", films=False
    )
    (key,) = silent.keys[:1]
    assert len(list(silent.play(CANDIDATE, [key]))) == 1 and silent.film(CANDIDATE, key) is None
    assert [path.suffix for path in (tmp_path / "silent").rglob("*") if path.is_file()] == [".yaml"]


@pytest.mark.slow
def test_the_reference_stays_loaded_beside_one_candidate(episodes: HarnessEpisodes) -> None:
    others = [replace(CANDIDATE, name=name) for name in ("reference", "first", "second")]
    for candidate in (others[0], others[1], others[0], others[1], others[2], others[0], others[2]):
        list(episodes.play(candidate, episodes.keys[:1]))
    assert len(episodes.loaded) == 3  # type: ignore[attr-defined]


def test_an_unknown_suite_or_task_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": None, "workers": 1, "seed": 0, "folder": tmp_path}
    benchmark = replace(LIBERO, load_suite=lambda name: Suite(name, TASKS, 12))
    with pytest.raises(ConfigError, match="suite: expected one of"):
        HarnessEpisodes(benchmark, "demo", suite="nonsense", tasks=None, **options)
    with pytest.raises(ConfigError, match="tasks: expected indices 0 to 2, got 3"):
        HarnessEpisodes(benchmark, "demo", suite=None, tasks="3", **options)
