"""What one evaluation run measures: the rules of its episodes, and which episodes they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vla_accel.errors import ConfigError

SEED = 7
"""openpi's, in its `examples/libero/main.py`."""
REPLAN_STEPS = 5
_MOST = 100_000
"""Most numbers in one range: more would be a typing error that fills the memory."""


@dataclass(frozen=True)
class EpisodeKey:
    """One episode of a run. `steps`: denoising steps, None where the harness does not set them (the scripted expert, a
    remote server); `task_id` and `trial` count from 0; `suite`: empty in a run of one suite."""

    steps: int | None
    task_id: int
    trial: int
    suite: str = ""

    def __str__(self) -> str:
        steps = "" if self.steps is None else f", {self.steps} step{'s' * (self.steps > 1)}"
        return f"{self.suite} task {self.task_id}, trial {self.trial}{steps}".lstrip()

    @property
    def task(self) -> tuple[str, int]:
        """Suite and task, which an environment is built for."""
        return self.suite, self.task_id

    @classmethod
    def from_json(cls, episode: Mapping[str, Any]) -> EpisodeKey:
        """The key of a recorded episode; a missing field raises `KeyError`."""
        return cls(episode["steps"], episode["task_id"], episode["trial"], episode.get("suite", ""))


@dataclass(frozen=True)
class Protocol:
    """The rules of one run; equal protocols have equal episodes.

    Attributes:
        suite: a suite of the benchmark, or several with commas between them.
        tasks: task indices in playing order, equal for each suite.
        trials: episodes per task and step count; trial i starts from start state i of the task.
        steps: denoising step counts to sweep; `(None,)` where the harness does not set them.
        max_steps: actions after which an episode is a failure; one number for each of several suites.
        seed: with task and trial it seeds the simulator and the policy's noise (openpi seeds once per run, so that its
            episodes depend on earlier ones).
        replan_steps: actions executed of each predicted chunk.
        settings: the benchmark's own (`Benchmark.settings`).
        stress: what is disturbed, and how much (`eval.harness.stress`).
    """

    suite: str
    tasks: tuple[int, ...]
    trials: int
    steps: tuple[int | None, ...]
    max_steps: int | tuple[int, ...]
    seed: int = SEED
    replan_steps: int = REPLAN_STEPS
    settings: Mapping[str, Any] = field(default_factory=dict)
    stress: Mapping[str, float] = field(default_factory=dict)

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites by name."""
        return tuple(self.suite.split(","))

    @property
    def limits(self) -> tuple[int, ...]:
        """Each suite's `max_steps`."""
        return self.max_steps if isinstance(self.max_steps, tuple) else (self.max_steps,) * len(self.suites)

    def suite_of(self, key: EpisodeKey) -> str:
        """The suite of an episode."""
        return key.suite or self.suite

    def limit(self, key: EpisodeKey) -> int:
        """The `max_steps` of an episode."""
        return self.limits[self.suites.index(self.suite_of(key))]

    @property
    def latency(self) -> int:
        """Control ticks from an observation to the actions it leads to."""
        return int(self.stress.get("latency", 0))

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ConfigError(f"tasks: expected distinct task indices, got {list(self.tasks)}")
        if len(set(self.suites)) != len(self.suites):
            raise ConfigError(f"suite: expected distinct suites, got {self.suite!r}")
        if len(self.limits) != len(self.suites):
            raise ConfigError(f"max_steps: expected one for each of {self.suite}, got {list(self.limits)}")
        if not self.steps or len(set(self.steps)) != len(self.steps):
            raise ConfigError(f"steps: expected distinct step counts, got {list(self.steps)}")
        for name, value, low in (
            *((f"steps {n}", n, 1) for n in self.steps if n is not None),
            *((f"task {n}", n, 0) for n in self.tasks),
            ("trials", self.trials, 1),
            *(("max_steps", n, 1) for n in self.limits),
            ("seed", self.seed, 0),
            ("replan_steps", self.replan_steps, 1),
        ):
            if value < low:
                raise ConfigError(f"{name}: expected an integer >= {low}, got {value}")
        if self.seed >= 2**32:
            raise ConfigError(f"seed: expected an integer below 2**32, got {self.seed}")
        taken = sorted({field.name for field in fields(self)} & self.settings.keys())
        if taken:
            raise ConfigError(f"settings of a benchmark: expected other names than the protocol's own, got {taken}")

    def plan(self) -> tuple[EpisodeKey, ...]:
        """All episodes, grouped by task so that each environment is created once.

        Step counts vary fastest, so that they run under similar load and their latencies compare.
        """
        several = len(self.suites) > 1
        return tuple(
            EpisodeKey(steps, task_id, trial, suite if several else "")
            for suite in self.suites
            for task_id in self.tasks
            for trial in range(self.trials)
            for steps in self.steps
        )

    def to_json(self) -> dict[str, Any]:
        """The protocol as JSON types, the benchmark's settings on the level of the fields, and stress only if any."""
        own = asdict(self)
        settings = own.pop("settings")
        if not self.stress:
            del own["stress"]
        return json.loads(json.dumps({**own, **settings}))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Protocol:
        """The inverse of `to_json`: unknown fields are settings of the benchmark."""
        names = {field.name for field in fields(cls)} - {"settings"}
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in names
        }
        return cls(**own, settings={name: value for name, value in data.items() if name not in names})


@dataclass(frozen=True)
class Shard:
    """Part `number` (from 1) of `count` parts of a plan: consecutive episodes, of equal counts up to one, so that few
    parts build the same environment."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`"3/16"`, the third of sixteen parts. Raises `ConfigError`."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ConfigError(f"shard: expected a part such as 3/16, counted from 1, got {text!r}")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def part(self, plan: Sequence[EpisodeKey]) -> tuple[EpisodeKey, ...]:
        """The episodes of this part. Raises `ConfigError` if there are fewer episodes than parts."""
        if len(plan) < self.count:
            raise ConfigError(f"shard: expected at most {len(plan)} parts of {len(plan)} episodes, got {self}")
        first, last = (len(plan) * k // self.count for k in (self.number - 1, self.number))
        return tuple(plan[first:last])


def fingerprint(protocol: Protocol, policy: Mapping[str, Any]) -> str:
    """SHA-256 over the protocol and the policy's identity (JSON types), as 64 hex digits."""
    content = json.dumps({"protocol": protocol.to_json(), "policy": policy}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def parse_tasks(text: str, count: int) -> tuple[int, ...]:
    """`"0-2,5"` to `(0, 1, 2, 5)`, ranges with both ends; an index outside a suite of `count` tasks raises."""
    form = 'integers such as "0-2,5"'
    tasks: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high) if dash else int(low)
        except ValueError:
            raise ConfigError(f"tasks: expected {form}, got {text!r}") from None
        if last - first >= _MOST:
            raise ConfigError(f"tasks: expected {form}, got {last - first + 1} in {part.strip()!r}")
        if first > last:
            raise ConfigError(f"tasks: expected {form}, got the empty range {part.strip()!r}")
        tasks.extend(range(first, last + 1))
    if len(set(tasks)) != len(tasks):
        raise ConfigError(f"tasks: expected distinct {form}, got {text!r}")
    for value in tasks:
        if not 0 <= value < count:
            raise ConfigError(f"tasks: expected indices 0 to {count - 1}, got {value} in {text!r}")
    return tuple(tasks)
