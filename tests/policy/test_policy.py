"""`OptimizedPolicy` on tiny random checkpoints and on the bundled one: what it answers, times, records and refuses."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import EAGER, PARTS, TOKENIZER, draw, statistics, tiny_observation, write_tiny_checkpoint
from tests.support.whole_calls import pi0_actions
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.component import Component
from vla_accel.config import load_config
from vla_accel.engines import ENGINES
from vla_accel.engines.eager import EagerEngine
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ObservationError
from vla_accel.families.pi0.network import Kind
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.tokenizer import tokenize_prompt

SECTIONS = ("preprocess", "vision", "kv_cache", "denoise", "transfer", "postprocess")
PROMPTS = ("pick up the bowl", "place it on the plate", "pick it")


@pytest.fixture
def policy(folders: dict[Kind, Path]) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(folders["pi05"], EAGER)


@pytest.fixture(scope="module")
def demo() -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained("demo", device="cpu", num_steps=2)


def close(a: np.ndarray, b: np.ndarray, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def check_result(result: dict[str, Any], horizon: int, state: np.ndarray) -> None:
    assert result.keys() == {"actions", "state", "policy_timing", "engines"}
    assert result["actions"].shape == (horizon, 7) and result["actions"].dtype == np.float64
    assert np.isfinite(result["actions"]).all()
    # openpi's ActionChunkBroker takes the row of its step of every array.
    assert [name for name, value in result.items() if isinstance(value, np.ndarray)] == ["actions"]
    assert result["state"] == state.tolist()
    timing = result["policy_timing"]
    assert timing.keys() == {"infer_ms", "total_ms", *(f"{p}_ms" for p in SECTIONS)}
    assert timing["infer_ms"] == timing["total_ms"] and all(v > 0 for v in timing.values())
    assert [(e["component"], e["used"], e["fell_back"]) for e in result["engines"]] == [
        (part, "eager", False) for part in PARTS
    ]


def test_the_bundled_policy(demo: OptimizedPolicy) -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)
    state = np.array([-0.2, 0.0, 1.2, 3.1, 0.0, 0.0, 0.03, -0.03])
    observation = {
        "observation/image": image,
        "observation/wrist_image": image[::-1],
        "observation/state": state.astype(np.float32),
        "prompt": "pick up the black bowl on the stove and place it on the plate",
    }
    check_result(demo.infer(observation), 10, state.astype(np.float32).astype(np.float64))
    parts = [demo.infer(observation)["policy_timing"] for _ in range(5)]
    for t in parts:
        assert sum(t[f"{p}_ms"] for p in SECTIONS) == pytest.approx(t["total_ms"], rel=1e-9)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_actions_are_those_of_sample_actions(folders: dict[Kind, Path], kind: Kind, steps: int) -> None:
    """The engines' path and the model's own, put together here from raw arrays."""
    policy = OptimizedPolicy.from_pretrained(folders[kind], replace(EAGER, num_steps=steps))
    observation, noise = tiny_observation(3), draw(policy, 4)
    table = {k: {n: np.array(v) for n, v in d.items()} for k, d in statistics().items()}
    state, actions = table["state"], table["actions"]
    raw = observation["observation/state"]
    if kind == "pi05":
        normalised = (raw - state["q01"]) / (state["q99"] - state["q01"] + 1e-6) * 2 - 1
    else:
        normalised = (raw - state["mean"]) / (state["std"] + 1e-6)
    tokens = tokenize_prompt(TOKENIZER, observation["prompt"], normalised if kind == "pi05" else None, 48)
    blank = np.zeros((28, 28, 3), np.uint8)
    views = [observation["observation/image"], observation["observation/wrist_image"], blank]
    ours = pi0_actions(
        policy.model,
        images=torch.from_numpy(np.stack(views)[None]).permute(0, 1, 4, 2, 3).float() / 255 * 2 - 1,
        image_mask=torch.tensor([[True, True, False]]),
        tokens=torch.from_numpy(np.pad(tokens, (0, 4))[None]),
        token_mask=torch.from_numpy(np.arange(len(tokens) + 4) < len(tokens))[None],
        state=torch.from_numpy(normalised.astype(np.float32))[None],
        noise=torch.from_numpy(noise)[None],
        num_steps=steps,
    )[0, :, :7].double()
    if kind == "pi05":
        expected = (ours.numpy() + 1) / 2 * (actions["q99"] - actions["q01"] + 1e-6) + actions["q01"]
    else:
        expected = ours.numpy() * (actions["std"] + 1e-6) + actions["mean"]
    result = policy.infer(observation, noise=noise)
    close(result["actions"], expected, atol=1e-4)
    check_result(result, 5, raw)


def test_reset_begins_the_noise_anew(folders: dict[Kind, Path], policy: OptimizedPolicy) -> None:
    observation = tiny_observation()
    first, second = (policy.infer(observation)["actions"] for _ in range(2))
    assert np.abs(first - second).max() > 1e-2
    policy.reset()
    np.testing.assert_array_equal(policy.infer(observation)["actions"], first)
    np.testing.assert_array_equal(policy.infer(observation)["actions"], second)
    same = OptimizedPolicy.from_pretrained(folders["pi05"], EAGER)
    np.testing.assert_array_equal(same.infer(observation)["actions"], first)
    other = OptimizedPolicy.from_pretrained(folders["pi05"], EAGER, seed=1)
    assert np.abs(other.infer(observation)["actions"] - first).max() > 1e-2


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (np.zeros((5, 7)), r"noise: expected shape \(5, 8\), got \(5, 7\)"),
        (np.zeros((1, 5, 8)), r"noise: expected shape \(5, 8\), got \(1, 5, 8\)"),
        (np.zeros(40), r"noise: expected shape \(5, 8\), got \(40,\)"),
        (np.full((5, 8), np.nan), "noise: expected finite numbers"),
        (np.full((5, 8), "1"), "noise: expected numbers, got dtype <U1"),
        ([[1.0], [1.0, 2.0]], "noise: expected numbers, got a list"),
    ],
)
def test_bad_noise_is_refused(policy: OptimizedPolicy, noise: np.ndarray, message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        policy.infer(tiny_observation(), noise=noise)


def test_a_bad_batch_is_refused_and_its_first_bad_observation_named(policy: OptimizedPolicy) -> None:
    good: Any = tiny_observation()
    bad = {**good, "observation/state": np.zeros(3)}
    with pytest.raises(ObservationError, match=r"^observation/state: ") as alone:
        policy.infer(bad)
    for observations, noise, message in (
        (good, None, "observations: expected a list of them, got one dict"),
        ([], None, "observations: expected at least one, got none"),
        ([good, good], np.zeros((1, 5, 8)), "noise: expected shape (2, 5, 8), got (1, 5, 8)"),
        ([good, good], np.zeros((5, 8)), "noise: expected shape (2, 5, 8), got (5, 8)"),
        ([good], draw(policy, 0, 2), "noise: expected shape (1, 5, 8)"),
        ([good, bad], None, f"observations[1]: {alone.value}"),
        ([good, good, bad, {}], None, f"observations[2]: {alone.value}"),
        ([bad, good], None, f"observations[0]: {alone.value}"),
        ([bad], None, str(alone.value)),
    ):
        with pytest.raises(ObservationError) as caught:
            policy.infer_batch(observations, noise=noise)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("prompts", [(PROMPTS[0],) * 3, PROMPTS], ids=["equal", "different"])
def test_a_batch_equals_single_calls(folders: dict[Kind, Path], kind: Kind, prompts: tuple[str, ...]) -> None:
    policy = OptimizedPolicy.from_pretrained(folders[kind], EAGER)
    observations = [tiny_observation(i, p) for i, p in enumerate(prompts)]
    noise = draw(policy, 0, 3)
    single = [policy.infer(o, noise=n)["actions"] for o, n in zip(observations, noise, strict=True)]
    for _ in range(2):  # the second time through engines that were fed before
        batch = policy.infer_batch(observations, noise=noise)
        for one, result in zip(single, batch, strict=True):
            close(result["actions"], one)
    assert np.abs(single[0] - single[1]).max() > 1e-2
    for i, result in enumerate(batch):
        np.testing.assert_array_equal(result["state"], observations[i]["observation/state"])


def test_old_pipelines_are_dropped_and_rebuilt(policy: OptimizedPolicy) -> None:
    noise = draw(policy, 0)
    first = policy.infer(tiny_observation(0, "bowl"), noise=noise)["actions"]
    for count in range(2, policy.pipelines.limit + 3):
        policy.infer(tiny_observation(0, "bowl " * count), noise=noise)
    assert len(policy.pipelines) == policy.pipelines.limit
    np.testing.assert_array_equal(policy.infer(tiny_observation(0, "bowl"), noise=noise)["actions"], first)


def test_a_refused_observation_leaves_the_policy_usable(policy: OptimizedPolicy) -> None:
    noise = draw(policy, 0)
    before = policy.infer(tiny_observation(), noise=noise)["actions"]
    with pytest.raises(ObservationError, match="prompt"):
        policy.infer({**tiny_observation(), "prompt": " "}, noise=noise)
    np.testing.assert_array_equal(policy.infer(tiny_observation(), noise=noise)["actions"], before)
    assert policy.latency_report()["samples"] == 2


def test_a_control_loop_gets_the_actions_of_infer(policy: OptimizedPolicy) -> None:
    policy.reset()
    want = policy.infer(tiny_observation())["actions"]
    policy.reset()
    with policy.async_runner(20, max_wait_s=10.0) as runner:
        runner.start(tiny_observation())
        np.testing.assert_array_equal(runner.step(tiny_observation()), want[0])


@pytest.fixture
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_get_the_serial_results(policy: OptimizedPolicy, eager_switching: None) -> None:
    jobs = [(tiny_observation(i, PROMPTS[i % 3]), draw(policy, i)) for i in range(8)]
    serial = [policy.infer(o, noise=n)["actions"] for o, n in jobs]

    def work(index: int) -> list[np.ndarray]:
        observation, noise = jobs[index]
        return [policy.infer(observation, noise=noise)["actions"] for _ in range(6)]

    with ThreadPoolExecutor(8) as pool:
        for index, results in enumerate(pool.map(work, range(8))):
            for result in results:
                np.testing.assert_array_equal(result, serial[index])
    assert policy.latency_report()["samples"] == 8 + 8 * 6


def test_two_policies_in_one_process(tmp_path: Path, policy: OptimizedPolicy) -> None:
    write_tiny_checkpoint(tmp_path / "other", "pi05", seed=7)
    other = OptimizedPolicy.from_pretrained(tmp_path / "other", EAGER)
    observation, noise = tiny_observation(), draw(policy, 0)
    ours = policy.infer(observation, noise=noise)["actions"]
    theirs = other.infer(observation, noise=noise)["actions"]
    assert np.abs(ours - theirs).max() > 1e-2
    for _ in range(2):
        np.testing.assert_array_equal(policy.infer(observation, noise=noise)["actions"], ours)
        np.testing.assert_array_equal(other.infer(observation, noise=noise)["actions"], theirs)
    assert (policy.latency_report()["samples"], other.latency_report()["samples"]) == (3, 3)


def test_with_steps_shares_the_weights(folders: dict[Kind, Path], policy: OptimizedPolicy) -> None:
    one = policy.with_steps(1)
    pointers = {n: p.data_ptr() for n, p in policy.model.named_parameters()}
    assert {n: p.data_ptr() for n, p in one.model.named_parameters()} == pointers
    assert (one.config.num_steps, policy.config.num_steps) == (1, 3)
    observation, noise = tiny_observation(), draw(policy, 0)
    before = policy.infer(observation, noise=noise)["actions"]
    fresh = OptimizedPolicy.from_pretrained(folders["pi05"], EAGER, num_steps=1)
    np.testing.assert_array_equal(
        one.infer(observation, noise=noise)["actions"], fresh.infer(observation, noise=noise)["actions"]
    )
    np.testing.assert_array_equal(policy.infer(observation, noise=noise)["actions"], before)
    assert (one.latency_report()["samples"], policy.latency_report()["samples"]) == (1, 2)
    with pytest.raises(ConfigError, match="num_steps"):
        policy.with_steps(0)


def test_metadata_and_latency_report(folders: dict[Kind, Path], policy: OptimizedPolicy) -> None:
    for seed in range(3):
        policy.infer(tiny_observation(seed))
    metadata, report = policy.metadata, policy.latency_report()
    assert {k: v for k, v in metadata.items() if k not in ("model", "engines", "memory")} == {
        "policy": str(folders["pi05"]),
        "action_horizon": 5,
        "action_dim": 8,
        "noise_shape": [5, 8],
        "image_size": 28,
        "robot": {
            "images": ["observation/image", "observation/wrist_image"],
            "state": ["observation/state"],
            "prompt": "prompt",
            "action_dim": 7,
            "motion_dims": [0, 1, 2, 3, 4, 5],
            "pose": "model",
        },
        "max_delay": None,
        "num_steps": 3,
        "device": "cpu",
        "dtype": "float32",
    }
    assert metadata["model"]["kind"] == "pi05"
    assert metadata["model"]["parameters"] == sum(p.numel() for p in policy.model.parameters())
    assert [e["component"] for e in metadata["engines"]] == ["vision", "kv_cache", "denoise"]
    assert json.loads(json.dumps(metadata)) == metadata

    assert report["schema"] == "vla_accel.breakdown/1"
    assert (report["steps"], report["samples"]) == (3, 3) and report["engines"] == metadata["engines"]
    components = report["components"]
    assert set(components) == {*SECTIONS, "total"}
    for row in components.values():
        assert row.keys() == {"mean_ms", "p50_ms", "p90_ms", "p99_ms", "share"}
    assert components["total"]["share"] == 1.0
    assert sum(components[p]["share"] for p in SECTIONS) == pytest.approx(1.0, rel=1e-9)
    assert report["memory"] == metadata["memory"] == policy.memory()
    assert report["hz"] == pytest.approx(1e3 / components["total"]["mean_ms"])
    assert json.loads(json.dumps(report)) == report


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> PolicyConfig:
    """A configuration whose engine of denoise cannot be built; its fallback can."""

    class Refuses(EagerEngine):
        def __init__(self, component: Component, device: torch.device, spec: EngineSpec) -> None:
            raise EngineError(f"cannot build {component.name}")

    monkeypatch.setitem(ENGINES, "broken", Refuses)
    return replace(EAGER, denoise=EngineSpec("broken", ("eager",)))  # type: ignore[arg-type]


def test_a_fallback_is_in_the_ledger_everywhere(
    folder: Path, policy: OptimizedPolicy, broken: PolicyConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vla_accel"):
        fallen = OptimizedPolicy.from_pretrained(folder, broken)
        noise = draw(fallen, 0)
        assert [e["fell_back"] for e in fallen.metadata["engines"]] == [False, False, True], "known before a call"
        result = fallen.infer(tiny_observation(), noise=noise)
    np.testing.assert_array_equal(result["actions"], policy.infer(tiny_observation(), noise=noise)["actions"])
    for ledger in (result["engines"], fallen.metadata["engines"], fallen.latency_report()["engines"]):
        *others, entry = ledger
        assert (entry["component"], entry["requested"], entry["used"]) == ("denoise", "broken", "eager")
        assert entry["fell_back"] and entry["reason"] == "broken: cannot build denoise"
        assert not any(e["fell_back"] for e in others)
    assert caplog.messages == ["denoise: requested engine broken, using eager: broken: cannot build denoise"]


def test_an_engine_that_cannot_be_built_is_an_error_where_no_fallback_is_allowed(
    folder: Path, broken: PolicyConfig
) -> None:
    for config, message in (
        (replace(broken, strict=True), "strict mode: denoise: requested engine broken"),
        (replace(broken, denoise=replace(broken.denoise, fallback=())), r"denoise: no engine .*\(broken: cannot build"),
    ):
        with pytest.raises(EngineError, match=message):
            OptimizedPolicy.from_pretrained(folder, config)


def test_non_finite_actions_are_an_error(policy: OptimizedPolicy) -> None:
    policy.infer(tiny_observation())
    policy.model.action_out_proj.bias.data[2] = torch.nan
    with pytest.raises(EngineError, match=r"denoise\.actions: expected finite values, got NaN"):
        policy.infer(tiny_observation())


def test_statistics_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    table = statistics()
    table["actions"] = {k: v for k, v in table["actions"].items() if k in ("mean", "std")}
    (tmp_path / "norm_stats.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"norm_stats\.actions: expected q01 and q99"):
        OptimizedPolicy.from_pretrained(tmp_path)


def test_a_device_that_is_not_there_is_refused(folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("tpu", "meta", "cuda:x", ""):
        with pytest.raises(ConfigError, match="device: expected auto, cpu, cuda or cuda:N, got"):
            OptimizedPolicy.from_pretrained(folders["pi05"], device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device: 'cuda:0' was requested, but torch .* no CUDA GPU"):
        OptimizedPolicy.from_pretrained(folders["pi05"], device="cuda:0")
    assert OptimizedPolicy.from_pretrained(folders["pi05"]).device == torch.device("cpu")


def test_settings_override_the_file(folders: dict[Kind, Path], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_steps: 7\nseed: 3\nprecision: bf16\n")
    policy = OptimizedPolicy.from_pretrained(folders["pi05"], path, device="cpu", num_steps=2)
    assert (policy.config.num_steps, policy.config.seed, policy.metadata["dtype"]) == (2, 3, "bfloat16")
    assert np.isfinite(policy.infer(tiny_observation())["actions"]).all()
    with pytest.raises(ConfigError, match="num_steps: expected 1 to 1000, got 0"):
        OptimizedPolicy.from_pretrained(folders["pi05"], num_steps=0)


def test_an_engine_that_cannot_run_here_gives_way_to_the_native_one() -> None:
    """The native engine takes lengths: a configuration that may fall back to it pads its prompts from the start."""
    spec = {"engine": "tensorrt_rtx", "fallback": ["native", "eager"]}
    config = load_config({"num_steps": 1, "vision": spec, "kv_cache": spec, "denoise": spec})
    policy = OptimizedPolicy.from_pretrained("demo", config, device="cpu")
    inputs = [policy.processor.prepare(policy.processor.example())]
    family, model = policy.family, policy.model
    assert family.shape(model.config, inputs, Schedule.uniform(1), config.specs(family.parts)).padded
    alone = {name: EngineSpec("tensorrt_rtx") for name in family.parts}
    assert not family.shape(model.config, inputs, Schedule.uniform(1), alone).padded
    assert {e["component"]: e["used"] for e in policy.metadata["engines"]} == dict.fromkeys(PARTS, "native")
