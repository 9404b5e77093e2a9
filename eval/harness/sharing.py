"""One policy for several simulators: requests that wait together are answered together, in batches where the policy
offers `infer_batch`. Knows nothing of how requests and answers travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eval.harness.policies import PolicyBySteps
from eval.harness.rollout import describe
from vla_accel.errors import EngineError

Request = tuple["int | None", dict[str, Any], dict[str, Any]]
"""Steps, observation, options of `infer`."""
Answer = tuple[str, Any]
"""`answer` and what `infer` returned, or `failed` and why."""


def answer(policies: PolicyBySteps, requests: Sequence[Request]) -> list[Answer]:
    """The answers of `requests`, in order; those of equal step counts that all bring noise, or none, make a batch.

    A request that the policy refuses has its error as an answer: one bad episode must not end the run.
    """
    groups: dict[tuple[int | None, bool], list[int]] = {}
    for place, (steps, _, options) in enumerate(requests):
        groups.setdefault((steps, options.get("noise") is not None), []).append(place)
    answers: list[Answer] = [("failed", "not asked")] * len(requests)
    for (steps, _), places in groups.items():
        group = [requests[place] for place in places]
        for place, one in zip(places, _answer_group(policies(steps), group), strict=True):
            answers[place] = one
    return answers


def unwrap(answered: Answer) -> dict[str, Any]:
    """What `infer` returned; its error is raised as an `EngineError`."""
    kind, content = answered
    if kind == "failed":
        raise EngineError(f"shared policy: {content}")
    return content


def _answer_group(policy: Any, group: Sequence[Request]) -> list[Answer]:
    if len(group) == 1 or not hasattr(policy, "infer_batch"):
        return [_attempt(lambda o=obs, k=options: [policy.infer(o, **k)], 1)[0] for _, obs, options in group]
    answers: list[Answer] = []
    while rest := group[len(answers) :]:
        # Engines and graphs are built for each size of a batch: powers of two are few.
        batch = rest[: 1 << (len(rest).bit_length() - 1)]
        options = _together([options for _, _, options in batch])
        answers += _attempt(lambda b=batch, k=options: policy.infer_batch([obs for _, obs, _ in b], **k), len(batch))
    return answers


def _attempt(call: Callable[[], list[Any]], count: int) -> list[Answer]:
    """`count` answers, or the same refusal `count` times."""
    try:
        return [("answer", result) for result in call()]
    except Exception as exception:
        return [("failed", describe(exception))] * count


def _together(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Options of several `infer` as those of one `infer_batch`: noise (batch, horizon, action_dim), which all of them
    bring or none; previous chunks where any has one."""
    noise = [one["noise"] for one in options if one.get("noise") is not None]
    batch: dict[str, Any] = {"noise": np.stack(noise) if noise else None}
    if any("prev_chunk" in one for one in options):
        batch["prev_chunks"] = [one.get("prev_chunk") for one in options]
        batch["inference_delays"] = [one.get("inference_delay") for one in options]
    return batch
