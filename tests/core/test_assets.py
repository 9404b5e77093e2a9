"""The bundled checkpoints: small, complete, loadable, and not trained on a state that evaluation uses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_accel import OptimizedPolicy
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.policy.agreement import weights_of
from vla_accel.transforms.normalisation import load_statistics
from vla_accel.transforms.tokenizer import SmallTokenizer, tokenize_prompt

EVALUATION_SEED = 7
ALWAYS = {"config.json", "instructions.json", "model.safetensors", "tokenizer.json", "training.json", "fp8_scales.json"}
FILES = {
    "demo": {*ALWAYS, "norm_stats.json"},
    "smolvla_demo": {
        *ALWAYS,
        "policy_preprocessor.json",
        "policy_preprocessor_step_4_normalizer_processor.safetensors",
        "policy_postprocessor.json",
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
    },
}
LIMITS = {"demo": 25_000_000, "smolvla_demo": 20_000_000}
SUITES = {"demo": ["libero_spatial", "libero_object"], "smolvla_demo": ["libero_spatial"]}


@pytest.fixture(scope="module", params=list(FILES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def instructions(name: str) -> list[str]:
    return json.loads((NAMED[name] / "instructions.json").read_text())


@pytest.fixture(scope="module")
def record(name: str) -> dict[str, Any]:
    return json.loads((NAMED[name] / "training.json").read_text())


@pytest.fixture(scope="module")
def policy(name: str) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(name, device="cpu", num_steps=1)


def test_the_files_their_size_and_their_precision(name: str) -> None:
    assert NAMED.keys() == FILES.keys()
    files = {p.name: p.stat().st_size for p in NAMED[name].iterdir()}
    assert files.keys() == FILES[name] and sum(files.values()) <= LIMITS[name]
    weights = SafetensorsWeights(NAMED[name])
    assert {weights.read(one).dtype for one in weights.shapes} <= {torch.float16, torch.bfloat16}


def test_it_loads_and_acts(policy: OptimizedPolicy, instructions: list[str]) -> None:
    config = policy.model.config
    assert config.action_horizon == 10
    image = np.full((224, 224, 3), 127, np.uint8)
    observation = {
        "observation/image": image,
        "observation/wrist_image": image,
        "observation/state": np.array([-0.2, 0.0, 1.2, 3.1, 0.0, 0.0, 0.03, -0.03]),
    }
    noise = np.random.default_rng(0).normal(size=(10, config.action_dim))
    chunks = [policy.infer({**observation, "prompt": p}, noise=noise)["actions"] for p in instructions]
    assert all(np.abs(c).max() < 2 for c in chunks), "actions are in [-1, 1]"
    assert np.abs(chunks[0] - chunks[1]).max() > 1e-3, "the prompt changes the actions"


def test_every_instruction_is_equally_long_and_known(name: str, instructions: list[str]) -> None:
    tokenizer = SmallTokenizer.load(NAMED[name] / "tokenizer.json")
    count, state = 10 * len(SUITES[name]), np.zeros(8) if name == "demo" else None
    assert len(set(instructions)) == count
    prompts = [tokenize_prompt(tokenizer, p, state, 64) for p in instructions]
    assert {len(p) for p in prompts} == {tokenizer.fill_to}
    assert all(2 not in p for p in prompts), "an unknown word"
    assert len({tuple(p) for p in prompts}) == count


def test_statistics_bound_the_actions() -> None:
    statistics = load_statistics(NAMED["demo"] / "norm_stats.json")
    for name, count in (("state", 8), ("actions", 7)):
        low, high = statistics[name].q01, statistics[name].q99
        assert low is not None and high is not None and low.shape == (count,) and (high > low).all()


def test_the_record_keeps_evaluation_states_apart(name: str, record: dict[str, Any]) -> None:
    assert record["settings"]["seed"] != EVALUATION_SEED
    assert list(record["start_states"]) == record["settings"]["suites"] == SUITES[name]
    spans = []
    for suite, manifest in record["start_states"].items():
        assert manifest["suite"] == suite and manifest["tolerance_m"] >= 1e-3
        assert manifest["tasks"].keys() == {str(i) for i in range(10)}
        for entry in manifest["tasks"].values():
            assert entry["shipped_states_compared"] == 50
            assert entry["min_distance_m"] > manifest["tolerance_m"]
            drawn = set(range(entry["first_seed"], entry["last_seed"] + 1)) - set(entry["refused_seeds"])
            assert len(drawn) == entry["count"] > 0
            assert EVALUATION_SEED not in drawn and entry["first_seed"] > 1000
            spans.append((entry["first_seed"], entry["last_seed"]))
    spans.sort()
    assert all(a[1] < b[0] for a, b in pairwise(spans)), "tasks share seeds"


def test_the_record_describes_the_training_of_these_weights(record: dict[str, Any], policy: OptimizedPolicy) -> None:
    assert record["steps"] > 0 and record["seconds"] > 0 and record["gpus"] >= 1 and record["history"]
    assert '"/' not in json.dumps(record), "a path of the training machine"
    files = [entry["file"] for suite in record["start_states"].values() for entry in suite["tasks"].values()]
    assert len(files) == 10 * len(record["start_states"]) and all(Path(file).name == file for file in files)
    # Tables recognise stored runs of former weights by this.
    assert record["weights"] == weights_of(policy.model)


@pytest.mark.slow
def test_recorded_seeds_give_states_away_from_the_shipped_ones(record: dict[str, Any]) -> None:
    """Draw four of one task's training states again in the simulator."""
    pytest.importorskip("libero", reason="needs LIBERO")
    from eval.libero.simulator import LiberoEnv
    from eval.libero.suites import load_suite

    entry = record["start_states"]["libero_spatial"]["tasks"]["0"]
    first, last = entry["first_seed"], entry["last_seed"]
    seeds = [s for s in (first, first + 1, (first + last) // 2, last) if s not in entry["refused_seeds"]]
    task = load_suite("libero_spatial").tasks[0]
    assert task.name == entry["task"]
    env = LiberoEnv(task, render=False, hard_reset=True)
    try:
        addresses = [1 + env.object_qpos[name] for name in entry["objects"]]
        assert sorted(env.object_qpos) == entry["objects"]

        def positions(states: np.ndarray) -> np.ndarray:
            return np.stack([states[:, a : a + 2] for a in addresses], 1)

        def draw(seed: int) -> np.ndarray:
            np.random.seed(seed)
            return env.sample_placement()

        drawn = np.stack([draw(seed) for seed in seeds])
        again = draw(seeds[0])
    finally:
        env.close()
    np.testing.assert_array_equal(again, drawn[0])
    shipped = positions(task.start_states)
    assert len(shipped) == entry["shipped_states_compared"]
    gaps = np.linalg.norm(positions(drawn)[:, None] - shipped[None], axis=-1).max(-1)
    assert gaps.shape == (len(seeds), 50)
    # No drawn state may be nearer than the record's nearest.
    assert gaps.min() >= entry["min_distance_m"] - 1e-9 and gaps.min() < 0.5
    # The training states differ among themselves, too.
    assert min(np.abs(drawn[i] - drawn[j]).max() for i in range(len(drawn)) for j in range(i)) > 1e-3
