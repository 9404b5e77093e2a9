"""The search: stages propose candidates, gates drop them, and the fastest that no gate dropped is chosen.

Gate one is agreement with FP32 eager of the same denoising steps on recorded observations; fewer steps must also end
no further from the exact flow than the checkpoint's own (`measure.schedules`). Gate two, with a benchmark, is success
on paired episodes, not worse than FP32 eager's by the margin (`noninferiority`). Candidates that passed gate one and
are faster than FP32 eager, also when timed in turns with it, play in order of latency; the first that passes gate two
is chosen. At most `finalists` play, each with its share of the error rate alpha of the whole search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vla_accel.config import PolicyConfig, load_config
from vla_accel.config.mapping import as_mapping
from vla_accel.errors import ConfigError, OutputError, VlaAccelError
from vla_accel.files import replacing
from vla_accel.tune.journal import Journal
from vla_accel.tune.noninferiority import Pairs, Rule, tango

SCHEMA = "vla_accel.tune/1"
REFERENCE = "eager_fp32"
MOST_CRASHED = 0.05
"""Largest share of pairs with a crashed episode; with more, success says nothing."""


@dataclass(frozen=True)
class Candidate:
    """A configuration to try. `other_policy`: it has other denoising steps that no distance from the exact flow judged,
    so only success can judge it."""

    name: str
    config: PolicyConfig
    why: str
    other_policy: bool = False

    @property
    def key(self) -> str:
        """Its identity in a journal."""
        text = json.dumps(as_mapping(self.config), sort_keys=True)
        return f"{self.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass
class Tried:
    """A candidate's measurements. `in_turns`: latency in turns with the reference; `dropped`: the reason, or None."""

    candidate: Candidate
    agreement: dict[str, Any] | None = None
    latency: dict[str, Any] | None = None
    in_turns: dict[str, Any] | None = None
    success: dict[str, Any] | None = None
    dropped: str | None = None

    @property
    def ms(self) -> float:
        """Median milliseconds of a call; infinite where it was not timed."""
        return self.latency["median_ms"] if self.latency else float("inf")

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        c = self.candidate
        about = {"name": c.name, "tries": c.why, "other_policy": c.other_policy, "config": as_mapping(c.config)}
        return about | {name: value for name, value in vars(self).items() if name != "candidate"}


class Episodes(Protocol):
    """A benchmark's episodes; `keys`: all of them in random order. `play` yields each episode's key and whether it
    was won (None: it crashed), in any order. `film` returns the film of an episode that was played, or None."""

    name: str
    keys: Sequence[str]

    def play(self, candidate: Candidate, keys: Sequence[str]) -> Iterable[tuple[str, bool | None]]: ...
    def film(self, candidate: Candidate, key: str) -> Path | None: ...


Stage = Callable[[Sequence[Tried]], Sequence[Candidate]]
"""Proposes candidates from all that were tried so far, including dropped ones."""
Progress = Callable[[int, int, str], None]
"""Takes the work done, the total, and a description."""


@dataclass(frozen=True)
class Settings:
    """`rule`: of gate two for the whole search; `finalists`: candidates that may play; `most_pairs`: episodes of each;
    `block`: pairs between two verdicts."""

    rule: Rule = field(default_factory=Rule)
    finalists: int = 3
    most_pairs: int = 1000
    block: int = 20

    def each(self) -> Rule:
        """The rule of one finalist; the error rates of all add up to that of the search."""
        return Rule(self.rule.margin, self.rule.alpha / self.finalists)


@dataclass
class Search:
    """One search; `run` measures only what the journal lacks. `bench`: a `measuring.PolicyBench`, whose methods raise
    VlaAccelError for a candidate that cannot run here."""

    reference: Candidate
    stages: Sequence[Stage]
    bench: Any
    journal: Journal
    settings: Settings
    episodes: Episodes | None = None
    progress: Progress = lambda done, total, text: None
    tried: list[Tried] = field(default_factory=list)

    def run(self) -> Tried:
        """Return the chosen candidate. Raises ConfigError if there are too few episodes to show the margin."""
        if self.episodes is not None:
            most = min(self.settings.most_pairs, len(self.episodes.keys))
            if most < (needed := self.settings.each().fewest_pairs):
                raise ConfigError(
                    f"episodes: {self.settings.finalists} finalists and a margin of "
                    f"{100 * self.settings.rule.margin:.3g} points need at least {needed} pairs each, even if no "
                    f"outcome differs, got {most}"
                )
        self._try([self.reference])
        for stage in self.stages:
            self._try(stage(self.tried))
        return self._choose()

    def _try(self, candidates: Sequence[Candidate]) -> None:
        known = {tried.candidate.key for tried in self.tried}
        for number, candidate in enumerate(candidates):
            if candidate.key in known:
                continue
            self._say(len(candidates) - number, f"{candidate.name}: {candidate.why}")
            tried = Tried(candidate)
            self.tried.append(tried)
            self._measure(tried)
            result = f"dropped: {tried.dropped}" if tried.dropped else f"{tried.ms:.2f} ms"
            self._say(len(candidates) - number - 1, f"{candidate.name}: {result}")

    def _measure(self, tried: Tried) -> None:
        """Gate one and latency. A candidate that cannot run here is dropped."""
        candidate, is_reference = tried.candidate, tried.candidate.key == self.reference.key
        try:
            if not candidate.other_policy and not is_reference:
                tried.agreement = self._once("agreement", candidate, self.bench.agreement)
                if not tried.agreement["passed"]:
                    tried.dropped = f"gate one: {'; '.join(tried.agreement['reasons'])}"
            # Dropped candidates are timed, too: they show what agreement costs.
            tried.latency = self._once("latency", candidate, self.bench.latency)
        except VlaAccelError as error:
            if is_reference or isinstance(error, OutputError):  # a full disk says nothing about a candidate
                raise
            tried.dropped = f"cannot run here: {' '.join(str(error).split())}"

    def _once(self, kind: str, candidate: Candidate, measure: Callable[[Candidate], dict[str, Any]]) -> dict[str, Any]:
        found = self.journal.get(kind, candidate.key)
        return found if found is not None else self.journal.put(kind, candidate.key, measure(candidate))

    def _choose(self) -> Tried:
        reference = self.tried[0]
        faster = sorted((t for t in self.tried[1:] if t.dropped is None and t.ms < reference.ms), key=lambda t: t.ms)
        for tried in self.tried[1:]:
            if tried.dropped is None and tried not in faster:
                tried.dropped = f"not faster than {reference.candidate.name}"
        if self.episodes is None:
            for tried in faster:
                if tried.candidate.other_policy:
                    tried.dropped = "gate two: another policy, and no benchmark to judge it by"
            return next((t for t in faster if t.dropped is None and self._is_faster(t)), reference)
        for place, tried in enumerate(faster):
            if place >= self.settings.finalists:
                tried.dropped = f"slower than the {self.settings.finalists} finalists, none of which passed gate two"
            elif self._is_faster(tried):
                self.bench.release()
                self._play(tried)
            if tried.dropped is None:
                for rest in faster[place + 1 :]:
                    rest.dropped = f"slower than {tried.candidate.name}, which passed"
                return tried
        return reference

    def _is_faster(self, tried: Tried) -> bool:
        """Whether it is also faster in turns with the reference: the load may have changed between the two."""
        name, reference = tried.candidate.name, self.reference.name
        self._say(1, f"{name}: in turns with {reference}")
        tried.in_turns = self._once("in turns", tried.candidate, self.bench.in_turns)
        mine, base = tried.in_turns["median_ms"], tried.in_turns["reference_ms"]
        if mine >= base:
            tried.dropped = f"not faster than {reference} in turns: {mine:.2f} ms, and it {base:.2f}"
        self._say(0, f"{name}: {base / mine:.2f} times as fast as {reference}", done=len(self.tried) + 1)
        return mine < base

    def _play(self, tried: Tried) -> None:
        """Gate two: pairs of episodes until the verdict is clear, or no more are left."""
        assert self.episodes is not None
        rule, settings = self.settings.each(), self.settings
        keys = list(self.episodes.keys)[: settings.most_pairs]
        pairs, crashed, verdict, differ, wins = Pairs(), 0, "open", [], [0, 0]
        for start in range(0, len(keys), settings.block):
            block = keys[start : start + settings.block]
            left = len(keys) - start
            self._say(left, f"{tried.candidate.name}: {_counts(pairs)}", done=start)
            won = [self._outcomes(candidate, block, start, left) for candidate in (self.reference, tried.candidate)]
            for key in block:
                reference, candidate = won[0][key], won[1][key]
                if reference is None or candidate is None:
                    crashed += 1
                else:
                    pairs = pairs.with_pair(reference, candidate)
                    wins = [wins[0] + reference, wins[1] + candidate]
                    if reference != candidate:
                        differ.append({"key": key, "won_by": "reference" if reference else "candidate",
                                       "films": self._films(tried.candidate, key)})  # fmt: skip
            verdict = rule.verdict(pairs)
            if verdict != "open" or crashed > max(MOST_CRASHED * len(keys), 2):
                break
        low, high = tango(pairs)
        tried.success = {
            "pairs": pairs.count, "lost": pairs.lost, "gained": pairs.gained, "crashed": crashed, "verdict": verdict,
            "difference": pairs.difference, "lower_bound": rule.lower_bound(pairs), "alpha": rule.alpha,
            "margin": rule.margin, "tango_95_low": low, "tango_95_high": high,
            "reference_won": wins[0], "candidate_won": wins[1], "discordant": differ,
        }  # fmt: skip
        if crashed > MOST_CRASHED * (pairs.count + crashed):
            tried.dropped = f"gate two: in {crashed} of {pairs.count + crashed} pairs an episode crashed"
        elif verdict != "not worse":
            shown = "worse" if verdict == "worse" else "not shown to be within the margin"
            tried.dropped = f"gate two: {shown}: {_counts(pairs)}"

    def _outcomes(self, candidate: Candidate, keys: Sequence[str], done: int, left: int) -> Mapping[str, bool | None]:
        """Outcomes of episodes; those missing in the journal are played. `done`, `left`: pairs before these."""
        assert self.episodes is not None
        kind = f"episode of {candidate.key}"
        missing = [key for key in keys if (kind, key) not in self.journal.found]
        if missing:
            known = len(keys) * (candidate is not self.reference) + len(keys) - len(missing)
            for count, (key, won) in enumerate(self.episodes.play(candidate, missing), 1):
                self.journal.put(kind, key, won)
                pairs = (known + count) // 2
                self._say(left - pairs, f"{candidate.name}: {count} of {len(missing)} episodes", done + pairs)
        return {key: self.journal.found[kind, key] for key in keys}

    def _films(self, candidate: Candidate, key: str) -> list[str]:
        """Films of the reference's and the candidate's episode; empty unless both exist."""
        assert self.episodes is not None
        films = [self.episodes.film(c, key) for c in (self.reference, candidate)]
        return [str(film) for film in films if film] if all(films) else []

    def _say(self, left: int, text: str, done: int | None = None) -> None:
        done = len(self.tried) if done is None else done
        self.progress(done, done + left, text)


def front(tried: Iterable[Tried]) -> set[str]:
    """Keys of the candidates that no other beats in both latency and agreement; the reference agrees perfectly."""
    known = [(t.ms, 1.0 if t.agreement is None else t.agreement["cosine"], t.candidate.key) for t in tried
             if t.latency and not t.candidate.other_policy]  # fmt: skip
    return {
        key for ms, cosine, key in known
        if not any(a <= ms and b >= cosine and (a, b) != (ms, cosine) for a, b, _ in known)
    }  # fmt: skip


def _counts(pairs: Pairs) -> str:
    return f"lost {pairs.lost}, gained {pairs.gained} of {pairs.count} pairs"


def outcome(search: Search, chosen: Tried, left_out: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, Any]:
    """The search as JSON types (schema `vla_accel.tune/1`). `about`: command, machine, settings."""
    best, s = front(search.tried), chosen.success
    if chosen is search.tried[0]:
        why = "nothing faster passed the gates"
    elif s is None:
        own, mine = ((t.candidate.config.num_steps, t.candidate.config.schedule) for t in (search.tried[0], chosen))
        steps = " of the same steps, which end no further from the exact flow than the checkpoint's own" * (own != mine)
        why = f"the fastest that agrees with FP32 eager{steps}; success was not tested, because no benchmark was given"
    else:
        why = (
            f"the fastest that passed the gates: it lost {s['lost']} and gained {s['gained']} of {s['pairs']} pairs, "
            f"so that its success is above FP32 eager's minus {100 * s['margin']:.3g} points (error rate "
            f"{s['alpha']:.3g} a finalist)"
        )
    return {
        "schema": SCHEMA,
        **about,
        "chosen": chosen.candidate.name,
        "times_as_fast": timed["reference_ms"] / timed["median_ms"] if (timed := chosen.in_turns) else 1.0,
        "why": why,
        "left_out": dict(left_out),
        "tried": [{**t.to_json(), "front": t.candidate.key in best, "chosen": t is chosen} for t in search.tried],
    }


def write_config(config: PolicyConfig, path: Path, comment: str) -> Path:
    """Write a configuration as YAML with a comment above it. Raises OSError."""
    import yaml

    text = "".join(f"# {line}\n" for line in comment.splitlines())
    with replacing(path) as temporary:
        temporary.write_text(text + yaml.safe_dump(as_mapping(config), sort_keys=False))
        assert load_config(temporary) == config, f"{path.name} would load as another configuration"
    return path
