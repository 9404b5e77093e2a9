"""The search on candidates whose truth is known: what it chooses, what it refuses and why, and that it continues."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import ConfigError, EngineError, OutputError
from vla_accel.report.tune import times_as_fast, verdict
from vla_accel.tune.journal import Journal
from vla_accel.tune.noninferiority import Rule
from vla_accel.tune.search import Candidate, Search, Settings, Tried, front, outcome, write_config

# Milliseconds, cosine with the reference, and the probability of losing an episode that the reference wins.
TRUTH = {
    "eager_fp32": (100.0, 1.0, 0.0),
    "safe": (40.0, 0.9999, 0.0),
    "good": (20.0, 0.9993, 0.001),
    "bad": (10.0, 0.9992, 0.15),
    "garbage": (5.0, 0.5, 0.9),
    "slow": (120.0, 1.0, 0.0),
    "broken": (1.0, 1.0, 0.0),
    "two steps": (8.0, 0.2, 0.0),
}
KEYS = [f"episode {i}" for i in range(500)]


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill of the process is what is tested, not one of the machine."""
    monkeypatch.setattr("os.fsync", lambda file: None)


def candidate(name: str) -> Candidate:
    # Seeds make the configurations differ.
    config = PolicyConfig(seed=list(TRUTH).index(name))
    return Candidate(name, config, f"what {name} tries", other_policy=name == "two steps")


class Machine:
    """A `Bench` and `Episodes` that know the truth, and count what they are asked."""

    name = "a benchmark of coins"

    def __init__(self, *, dies_after: int | None = None) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()
        self.keys: Sequence[str] = KEYS
        self.dies_after = dies_after
        self.released = False
        self.reference_ms = TRUTH["eager_fp32"][0]

    def _note(self, what: str, name: str) -> None:
        if self.dies_after is not None and self.asked.total() >= self.dies_after:
            raise KeyboardInterrupt
        self.asked[what, name] += 1

    def agreement(self, candidate: Candidate) -> dict[str, Any]:
        if candidate.name == "broken":
            raise EngineError("denoise: it needs\nanother GPU")
        self._note("agreement", candidate.name)
        cosine = TRUTH[candidate.name][1]
        passed = cosine >= 0.999
        return {"passed": passed, "cosine": cosine, "reasons": [] if passed else [f"cosine {cosine}"]}

    def latency(self, candidate: Candidate) -> dict[str, Any]:
        self._note("latency", candidate.name)
        return {"median_ms": TRUTH[candidate.name][0]}

    def in_turns(self, candidate: Candidate) -> dict[str, Any]:
        self._note("in turns", candidate.name)
        return {"median_ms": TRUTH[candidate.name][0], "reference_ms": self.reference_ms}

    def release(self) -> None:
        self.released = True

    def play(self, candidate: Candidate, keys: Sequence[str]) -> Iterator[tuple[str, bool | None]]:
        assert self.released, "policies of the bench would take the memory"
        for key in reversed(keys):
            self._note(key, candidate.name)
            wins = random.Random(key).random() < 0.9
            loses = random.Random(f"{key} {candidate.name}").random() < TRUTH[candidate.name][2]
            yield key, wins and not loses

    def film(self, candidate: Candidate, key: str) -> Path | None:
        return Path(f"{candidate.name} {key}.mp4") if key != KEYS[0] else None


def search(
    folder: Path, names: Sequence[str], machine: Machine | None = None, *, episodes: bool = True, **settings: Any
) -> tuple[str, dict[str, Tried], Machine]:
    """What is chosen, all that was tried by name, and the machine."""
    machine = machine or Machine()
    with Journal(folder / "journal.jsonl", {"about": "coins"}) as journal:
        found = Search(
            candidate("eager_fp32"),
            [lambda tried: [candidate(n) for n in names[:2]], lambda tried: [candidate(n) for n in names[2:]]],
            machine,
            journal,
            Settings(**settings),
            machine if episodes else None,
        )
        chosen = found.run()
    return chosen.candidate.name, {t.candidate.name: t for t in found.tried}, machine


ALL = [name for name in TRUTH if name != "eager_fp32"]


def test_the_fastest_that_is_not_worse_is_chosen(tmp_path: Path) -> None:
    chosen, tried, _ = search(tmp_path, [n for n in ALL if n != "two steps"])
    assert chosen == "good"
    success = tried["good"].success
    assert success is not None and success["verdict"] == "not worse" and success["lower_bound"] >= -0.02
    assert success["pairs"] < len(KEYS), "a clear case stops early"
    dropped = {name: t.dropped for name, t in tried.items()}
    assert dropped["good"] is None and dropped["eager_fp32"] is None
    assert "gate one: cosine 0.5" in str(dropped["garbage"])
    assert "gate two: worse" in str(dropped["bad"])
    assert dropped["safe"] == "slower than good, which passed"
    assert dropped["slow"] == "not faster than eager_fp32"
    assert dropped["broken"] == "cannot run here: denoise: it needs another GPU"
    bad = tried["bad"].success
    assert bad is not None and bad["pairs"] < 200 and len(bad["discordant"]) == bad["lost"] + bad["gained"]
    assert all(len(e["films"]) == (2 if e["key"] != KEYS[0] else 0) for e in bad["discordant"])


def test_without_a_benchmark_agreement_decides_and_no_other_policy_is_taken(tmp_path: Path) -> None:
    chosen, tried, machine = search(tmp_path, ALL, episodes=False)
    assert chosen == "bad", "nobody could know better"
    assert "no benchmark to judge it by" in str(tried["two steps"].dropped)
    assert not [name for (what, name), _ in machine.asked.items() if what.startswith("episode")]
    said = {name: verdict({**t.to_json(), "chosen": name == chosen}) for name, t in tried.items()}
    assert said["eager_fp32"] == "the reference" and said["bad"] == "chosen"
    assert said["good"] == said["safe"] == "agrees, and is slower" and said["slow"] == "not faster than eager_fp32"


@pytest.mark.parametrize("episodes", [True, False])
def test_the_ratio_is_of_calls_in_turns_and_what_is_slower_then_is_dropped(tmp_path: Path, episodes: bool) -> None:
    machine = Machine()
    machine.reference_ms = 20.0  # it had been timed while others kept the machine busy
    chosen, tried, _ = search(tmp_path, ["good", "safe"], machine, episodes=episodes)
    assert chosen == "eager_fp32"
    assert tried["good"].dropped == "not faster than eager_fp32 in turns: 20.00 ms, and it 20.00"
    assert not [name for (what, name), _ in machine.asked.items() if what.startswith("episode")]
    machine.reference_ms = 30.0
    chosen, tried, _ = search(tmp_path / "again", ["good", "safe"], machine, episodes=episodes)
    assert chosen == "good" and tried["good"].in_turns == {"median_ms": 20.0, "reference_ms": 30.0}
    assert tried["safe"].in_turns is None, "only what is to be chosen is timed again"


def test_another_policy_is_judged_by_success_alone(tmp_path: Path) -> None:
    chosen, tried, machine = search(tmp_path, ALL)
    assert chosen == "two steps" and tried["two steps"].agreement is None
    assert ("agreement", "two steps") not in machine.asked


def test_a_full_disk_ends_the_search_and_drops_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(candidate: Candidate) -> dict[str, Any]:
        raise OutputError("journal.jsonl: cannot be written: No space left on device")

    machine = Machine()
    monkeypatch.setattr(machine, "agreement", full)
    with pytest.raises(OutputError, match="No space left on device"):
        search(tmp_path, ["safe"], machine)


def test_if_nothing_passes_the_reference_stays(tmp_path: Path) -> None:
    chosen, tried, _ = search(tmp_path, ["bad", "garbage", "slow"])
    assert chosen == "eager_fp32" and tried["bad"].success is not None


def test_only_finalists_play_and_share_the_error_rate(tmp_path: Path) -> None:
    chosen, tried, _ = search(tmp_path, ["bad", "good", "safe"], finalists=1)
    assert chosen == "eager_fp32"
    assert "slower than the 1 finalists" in str(tried["good"].dropped) and tried["good"].success is None
    assert Settings(finalists=4, rule=Rule(0.02, 0.02)).each().alpha == pytest.approx(0.005)


def test_too_few_episodes_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    machine = Machine()
    with pytest.raises(ConfigError, match=r"margin of 2 points need at least \d+ pairs each"):
        search(tmp_path, ["good"], machine, most_pairs=100)
    assert not machine.asked


@pytest.mark.parametrize("dies_after", [1, 4, 7, 300, 500])
def test_a_killed_search_continues_and_does_nothing_twice(tmp_path: Path, dies_after: int) -> None:
    names = [n for n in ALL if n != "two steps"]
    whole_name, whole, whole_machine = search(tmp_path / "whole", names)
    first = Machine(dies_after=dies_after)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, names, first)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "latency", "na')  # a line that the kill cut in half
    chosen, tried, second = search(tmp_path, names)
    assert chosen == whole_name
    assert {n: t.to_json() for n, t in tried.items()} == {n: t.to_json() for n, t in whole.items()}
    assert first.asked + second.asked == whole_machine.asked
    assert max((first.asked + second.asked).values()) == 1
    assert not search(tmp_path, names)[2].asked


def test_crashes_say_nothing_about_success(tmp_path: Path) -> None:
    class Crashing(Machine):
        def play(self, candidate: Candidate, keys: Sequence[str]) -> Iterator[tuple[str, bool | None]]:
            for key, won in super().play(candidate, keys):
                yield key, None if candidate.name == "good" and random.Random(key).random() < 0.2 else won

    chosen, tried, _ = search(tmp_path, ["good", "safe"], Crashing())
    assert chosen == "safe" and "an episode crashed" in str(tried["good"].dropped)


def test_the_front_holds_what_nothing_beats_in_both(tmp_path: Path) -> None:
    _, tried, _ = search(tmp_path, [n for n in ALL if n != "broken"], episodes=False)
    names = {t.candidate.name for t in tried.values() if t.candidate.key in front(tried.values())}
    assert names == {"eager_fp32", "safe", "good", "bad", "garbage"}


def test_the_outcome_has_everything_tried(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {}) as journal:
        machine = Machine()
        machine.reference_ms = 90.0
        found = Search(candidate("eager_fp32"), [lambda _: [candidate(n) for n in ALL]], machine, journal, Settings(),
                       machine)  # fmt: skip
        made = outcome(found, found.run(), {"tensorrt": "no GPU"}, {"command": ["vla-accel", "tune"]})
    assert made["schema"] == "vla_accel.tune/1" and made["chosen"] == "two steps"
    assert made["times_as_fast"] == pytest.approx(90 / 8), "of the calls in turns"
    assert times_as_fast(made) == "11.25 times as fast as FP32 eager (8.00 and 90.00 ms in turns)"
    assert [row["name"] for row in made["tried"]] == list(TRUTH)
    assert [row["name"] for row in made["tried"] if row["chosen"]] == ["two steps"]
    assert all(row["dropped"] or row["chosen"] or row["name"] == "eager_fp32" for row in made["tried"])


def test_fewer_steps_are_chosen_for_their_distance_from_the_exact_flow(tmp_path: Path) -> None:
    fewer = Candidate("good", PolicyConfig(num_steps=3, schedule="cubic"), "near")
    for found, said in ((fewer, True), (candidate("good"), False)):
        with Journal(tmp_path / f"{said}.jsonl", {}) as journal:
            search = Search(candidate("eager_fp32"), [lambda _, c=found: [c]], Machine(), journal, Settings())
            made = outcome(search, search.run(), {}, {})
        assert made["chosen"] == "good" and ("exact flow" in made["why"]) == said


@pytest.mark.parametrize("name", ["eager_fp32", "native_fp8_vision", "native_fp8_decode", "tensorrt_rtx_fp8", "auto"])
def test_a_written_configuration_loads_as_the_same(tmp_path: Path, name: str) -> None:
    config = load_config(name)
    path = write_config(config, tmp_path / "tuned.yaml", "made by\ntwo lines")
    assert load_config(path) == config
    assert path.read_text().startswith("# made by\n# two lines\n")


def test_a_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"a": 1, "b": (2,)}) as journal:
        journal.put("latency", "x", {"median_ms": 1.0})
        with pytest.raises(ConfigError, match="another process is writing"):
            Journal(path, {"a": 1, "b": (2,)})
    with Journal(path, {"a": 1, "b": (2,)}) as journal:
        assert journal.get("latency", "x") == {"median_ms": 1.0} and journal.get("latency", "y") is None
    with pytest.raises(ConfigError, match=r"about another search, differing in a; .*--overwrite"):
        Journal(path, {"a": 2, "b": (2,)})
    path.unlink()
    with Journal(path, {"base": {"num_steps": 10, "denoise": {"engine": "native"}}}) as journal:
        journal.put("latency", "x", {"median_ms": 1.0})
    with pytest.raises(ConfigError, match=r"differing in base\.denoise\.engine, base\.num_steps; "):
        Journal(path, {"base": {"num_steps": 3, "denoise": {"engine": "eager"}}})
    path.unlink()
    Journal(path, {"a": 1}).close()
    with Journal(path, {"a": 2}) as journal:  # nothing was measured that could be lost
        journal.put("latency", "x", {"median_ms": 1.0})
    with Journal(path, {"a": 2}) as journal:
        assert journal.get("latency", "x") == {"median_ms": 1.0}
    path.write_text("not a journal\n")
    with pytest.raises(ConfigError, match="expected a journal of vla-accel tune"):
        Journal(path, {})
