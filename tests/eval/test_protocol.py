"""The protocol's numbers are openpi's, its plan is complete, and bad numbers are named."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from eval.harness.protocol import EpisodeKey, Protocol, fingerprint, parse_tasks
from eval.libero.benchmark import LIBERO
from eval.libero.suites import MAX_STEPS
from vla_accel.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = Protocol("libero_spatial", tasks=(0, 2), trials=2, steps=(1, 10), max_steps=220, settings=LIBERO.settings)


def test_defaults_are_openpis() -> None:
    # openpi examples/libero/main.py
    assert (SMALL.seed, SMALL.replan_steps, LIBERO.trials) == (7, 5, 50)
    assert LIBERO.settings == {"resolution": 256, "wait_steps": 10}
    limits = {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400}
    assert {f"libero_{name}": limit for name, limit in limits.items()} == MAX_STEPS


@pytest.mark.parametrize("name", ["libero_spatial_demo", "libero_spatial_quick_cpu"])
def test_a_stored_runs_fingerprint_is_still_that_of_its_protocol_and_policy(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    rules = {k: v for k, v in stored["protocol"].items() if k != "max_steps_source"}
    protocol = Protocol.from_json(rules)
    assert protocol.settings == LIBERO.settings
    policy = {k: v for k, v in stored["policy"].items() if k != "metadata"}
    assert fingerprint(protocol, policy) == stored["fingerprint"]


def test_plan_has_every_episode_once_and_groups_tasks() -> None:
    plan = SMALL.plan()
    expected = {EpisodeKey(n, task, i) for n in (1, 10) for task in (0, 2) for i in (0, 1)}
    assert set(plan) == expected
    assert max(Counter(plan).values()) == 1
    tasks = [key.task_id for key in plan]
    assert tasks == sorted(tasks), "a task that comes back would build its environment again"
    # Step counts alternate within a trial, so that they share the conditions of the machine.
    assert [key.steps for key in plan[:4]] == [1, 10, 1, 10]


def test_fingerprint_tells_runs_apart() -> None:
    policy = {"kind": "local", "sha256": "a"}
    mark = fingerprint(SMALL, policy)
    assert mark == fingerprint(dataclasses.replace(SMALL), dict(policy))
    changes = {
        "suite": "libero_goal",
        "tasks": (0,),
        "trials": 3,
        "steps": (1, 5),
        "max_steps": 221,
        "seed": 8,
        "replan_steps": 4,
        "settings": {"resolution": 128, "wait_steps": 10},
        "stress": {"noise": 0.1},
    }
    assert {f.name for f in dataclasses.fields(Protocol)} == set(changes)
    marks = [fingerprint(dataclasses.replace(SMALL, **{k: v}), policy) for k, v in changes.items()]
    marks.append(fingerprint(SMALL, {**policy, "sha256": "b"}))
    assert len({mark, *marks}) == len(changes) + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": (0,)}, "steps 0: expected an integer >= 1, got 0"),
        ({"steps": ()}, "steps: expected distinct step counts"),
        ({"steps": (3, 3)}, "steps: expected distinct step counts"),
        ({"tasks": ()}, "tasks: expected distinct task indices"),
        ({"tasks": (1, 1)}, "tasks: expected distinct task indices"),
        ({"trials": 0}, "trials: expected an integer >= 1, got 0"),
        ({"max_steps": 0}, "max_steps: expected an integer >= 1, got 0"),
        ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
        ({"seed": 2**32}, r"seed: expected an integer below 2\*\*32"),
        ({"replan_steps": 0}, "replan_steps: expected an integer >= 1, got 0"),
    ],
)
def test_bad_numbers_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(("text", "tasks"), [("4", (4,)), ("0-2,5", (0, 1, 2, 5)), ("9, 0-1", (9, 0, 1))])
def test_parse_tasks(text: str, tasks: tuple[int, ...]) -> None:
    assert parse_tasks(text, 10) == tasks


@pytest.mark.parametrize("text", ["10", "-1", "5-12", "2-1", "a", "0-2,1", "", "0-99999999999"])
def test_parse_tasks_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^tasks: expected"):
        parse_tasks(text, 10)
