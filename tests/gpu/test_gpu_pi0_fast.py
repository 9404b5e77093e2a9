"""π0-FAST on a GPU: the captured turns of its decode beside eager, at a small and at the published size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_pi0_fast import observation, tiny_config, write_lerobot
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.families.pi0_fast.family import PI0_FAST
from vla_accel.families.pi0_fast.native_decode import TURN
from vla_accel.measure.random_policy import random_observations, random_policy

pytestmark = pytest.mark.gpu

PROMPTS = ("pick up the bowl", "pick it", "pick up the bowl : pick it up")


def settings(precision: str, engine: str, **parts: str) -> PolicyConfig:
    """`parts`: precision of the engine of a component."""
    spec = EngineSpec(engine)  # type: ignore[arg-type]
    specs = {n: replace(spec, precision=parts.get(n, "auto")) for n in PI0_FAST.parts}  # type: ignore[arg-type]
    base = {"precision": precision, "device": "cuda", "checkpoint": {"relaxed_actions": True}}
    return load_config(base).with_specs(specs)


def unchecked(files: dict[str, Any]) -> None:
    files["config"]["validate_action_token_prefix"] = False


def tokens_of(policy: OptimizedPolicy) -> torch.Tensor:
    return policy.pipelines.newest.outputs["action_tokens"].cpu().clone()


def test_captured_turns_write_what_launches_do(tmp_path: Path) -> None:
    """In BF16, bit for bit: as one call of graphs, and launched one by one."""
    write_lerobot(tmp_path, change=unchecked)
    given = [observation(i, p) for i, p in enumerate(PROMPTS)]
    found = []
    for captured in (True, False):
        policy = OptimizedPolicy.from_pretrained(
            tmp_path, replace(settings("bf16", "native"), cuda_graph=captured), num_steps=3 * TURN + 2
        )
        for _ in range(3):
            policy.infer_batch(given)
            found.append(tokens_of(policy))
        used = {e.used for e in policy.ledger.entries.values()}
        assert used == ({"native", "cuda_graph"} if captured else {"native"})
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_it_ends_early_for_every_stop_token(tmp_path: Path) -> None:
    """And what comes before the end is what it is without one."""
    write_lerobot(tmp_path / "endless", tiny_config(stop_token=None, max_steps=40), change=unchecked)
    policy = OptimizedPolicy.from_pretrained(tmp_path / "endless", settings("bf16", "native"))
    model = policy.model
    for given in (observation(0), observation(3, "pick it")):
        policy.infer(given)
        whole = tokens_of(policy)[0].tolist()
        stop = model.config.stop_token
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        # At most two turns more than needed.
        assert not any(whole[(end // TURN + 3) * TURN :])
        times = policy.infer(given)["policy_timing"]
        assert times["decode_ms"] > 0 and times["total_ms"] >= times["decode_ms"]


def test_fp32_native_is_eager(tmp_path: Path) -> None:
    """Products on either side are TF32's or float32's; the first tokens must be the same."""
    write_lerobot(tmp_path, change=unchecked)
    found = []
    for engine in ("native", "eager"):
        policy = OptimizedPolicy.from_pretrained(tmp_path, settings("fp32", engine), num_steps=TURN)
        policy.infer(observation())
        found.append(tokens_of(policy))
    assert torch.equal(found[0][:, :1], found[1][:, :1])


@pytest.mark.parametrize(
    "low", [{}, {"kv_cache": "fp8"}, {"kv_cache": "fp8", "decode": "fp8"}, {"decode": "int8"}], ids=str
)
def test_published_size(low: dict[str, str]) -> None:
    """Random weights: keys and values are near eager's, and as many tokens come as were asked for, in one call of
    graphs."""
    policy, _ = random_policy(PI0_FAST, settings("bf16", "native", **low), steps=32)
    given = random_observations(policy, 2)
    answers = [policy.infer(one)["actions"] for one in given]
    assert all(np.isfinite(actions).all() and actions.shape == (50, 7) for actions in answers)
    assert {e["used"] for e in policy.ledger.as_list()} == {"native", "cuda_graph"}
    written = tokens_of(policy)
    assert written.shape == (1, 32)
    for one, actions in zip(given, answers, strict=True):
        np.testing.assert_array_equal(policy.infer(one)["actions"], actions)
    if low:
        return
    keys = policy.pipelines.newest.outputs["keys"].float()
    plain, _ = random_policy(PI0_FAST, settings("bf16", "eager"), steps=1)
    plain.infer(given[1])
    real = plain.pipelines.newest.outputs["keys"].float()
    kept = keys[:, :, : real.shape[2]]
    assert torch.nn.functional.cosine_similarity(kept.flatten(), real.flatten(), dim=0) > 0.999
    # Each weight once: tower and projector, Gemma, and the table that is the head, too.
    assert policy.memory()["total"] - policy.memory()["buffers"] < 6.3e9
