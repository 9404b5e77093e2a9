"""Diffusion Policy as a policy: both engines, steps, batches, and the history of observations wherever one is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eval.harness.policies import PolicyActor, PolicyBySteps
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import run_episode
from eval.libero.benchmark import LIBERO
from tests.support.eval_support import TASK, FakeEnv
from tests.support.tiny_diffusion_policy import CAMERAS, config_of, observation, tiny_model, transforms_of
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.errors import ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.diffusion_policy.family import DIFFUSION_POLICY
from vla_accel.families.diffusion_policy.network import DiffusionPolicyConfig
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler
from vla_accel.families.loading import Checkpoint
from vla_accel.nn.resnet import ResNetConfig
from vla_accel.transforms.history import History

EAGER: dict[str, Any] = {"precision": "fp32", "strict": True, "device": "cpu", "vision": "eager", "denoise": "eager"}
NATIVE = {**EAGER, "vision": "native", "denoise": "native"}
VARIANTS: dict[str, dict[str, Any]] = {
    "ddpm": {},
    "ddim": {"scheduler": NoiseScheduler("DDIM", prediction="sample", clip=None)},
    "separate": {"shared_encoder": False, "backbone": ResNetConfig(norm="batch"), "scaled": False},
    "resized": {"resize": (45, 61), "crop": (40, 54), "history": 3, "widths": (16, 24), "kernel": 3},
}


def policy_of(settings: dict[str, Any] = EAGER, config: DiffusionPolicyConfig | None = None) -> OptimizedPolicy:
    model = tiny_model(config)
    return OptimizedPolicy(
        Checkpoint("tiny", DIFFUSION_POLICY, model, transforms_of(model.config)), load_config(settings)
    )


@pytest.fixture(scope="module")
def policy() -> OptimizedPolicy:
    return policy_of()


@pytest.fixture
def noise(policy: OptimizedPolicy) -> np.ndarray:
    policy.reset()
    return np.random.default_rng(0).standard_normal(policy.noise_shape)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_native_engine_agrees_with_eager(variant: str) -> None:
    config = config_of(**VARIANTS[variant])
    eager, native = (policy_of(settings, config) for settings in (EAGER, NATIVE))
    drawn = np.random.default_rng(1).standard_normal((3, *eager.noise_shape))
    given = [observation(seed, config.history) for seed in range(3)]
    want, got = (
        np.stack([r["actions"] for r in one.infer_batch(given, noise=drawn)]) for one in (eager, native)
    )  # fmt: skip
    assert want.shape == (3, config.action_horizon + 1 - config.history, 5)
    np.testing.assert_allclose(got, want, atol=2e-5)
    alone = native.infer(given[2], noise=drawn[2])["actions"]
    np.testing.assert_allclose(alone, want[2], atol=2e-5)
    assert np.abs(want[0] - want[1]).max() > 0.1 and {e["used"] for e in native.metadata["engines"]} == {"native"}


def test_fp8_and_int8_weights_are_the_blocks_alone() -> None:
    bf16 = policy_of({**NATIVE, "precision": "bf16"})
    given, drawn = observation(0, 2), np.random.default_rng(0).standard_normal(bf16.noise_shape)
    want = bf16.infer(given, noise=drawn)["actions"]
    for precision in ("fp8", "int8"):
        low = policy_of({**NATIVE, "precision": "bf16", "denoise": {"engine": "native", "precision": precision}})
        got = low.infer(given, noise=drawn)["actions"]
        assert 0 < np.abs(got - want).max() < 1.0
        assert f"{precision.upper()} weights" in str(low.metadata["engines"])


def test_the_noise_has_a_draw_for_each_step(policy: OptimizedPolicy) -> None:
    assert policy.noise_shape == (4, 8, 5) and policy.metadata["noise_shape"] == [4, 8, 5]
    assert policy.with_steps(2).noise_shape == (2, 8, 5) and policy.with_steps(1).noise_shape == (8, 5)
    assert policy_of(config=config_of(scheduler=NoiseScheduler("DDIM"))).noise_shape == (8, 5)
    with pytest.raises(ObservationError, match=r"noise: expected shape \(4, 8, 5\), got \(8, 5\)"):
        policy.infer(observation(0, 2), noise=np.zeros((8, 5)))


def test_every_step_draws_noise_of_its_own(policy: OptimizedPolicy, noise: np.ndarray) -> None:
    given = observation(0, 2)
    first = policy.infer(given, noise=noise)["actions"]
    for draw in range(4):
        other = noise.copy()
        other[draw] += 1.0
        assert np.abs(policy.infer(given, noise=other)["actions"] - first).max() > 1e-3


# -- history ------------------------------------------------------------------------------------------------------


def stacked(*seeds: int) -> dict[str, Any]:
    """The observations of these seeds as one with a history."""
    ones = [observation(seed) for seed in seeds]
    return {key: np.stack([one[key] for one in ones]) for key in ones[0]}


def test_a_policy_keeps_the_last_observations_of_its_episode(policy: OptimizedPolicy, noise: np.ndarray) -> None:
    def actions(given: dict[str, Any]) -> np.ndarray:
        return policy.infer(given, noise=noise)["actions"]

    assert policy.metadata["history"] == 2
    alone, both = actions(stacked(0)), actions(stacked(0, 1))
    np.testing.assert_array_equal(alone, actions(stacked(0, 0)), "the first one is repeated")
    assert np.abs(both - alone).max() > 1e-3
    np.testing.assert_array_equal(actions(observation(0)), alone)
    np.testing.assert_array_equal(actions(observation(1)), both)
    np.testing.assert_array_equal(actions(stacked(0)), alone, "its own history counts")
    policy.observe(observation(5))
    policy.observe(observation(0))
    np.testing.assert_array_equal(actions(observation(1)), both)
    policy.reset()
    np.testing.assert_array_equal(actions(observation(0)), alone)


def test_the_oldest_observation_is_repeated() -> None:
    three = policy_of(config=config_of(history=3))
    drawn = np.random.default_rng(0).standard_normal(three.noise_shape)
    short, filled = (three.infer(stacked(*seeds), noise=drawn)["actions"] for seeds in ((0, 1), (0, 0, 1)))
    np.testing.assert_array_equal(short, filled)


@pytest.mark.parametrize(
    "change",
    [
        {CAMERAS[0]: np.zeros((4, 4, 3), np.uint8)}, {"observation.state": np.full(6, np.nan)},
        {"observation.state": np.full(6, 1e300)},
        {CAMERAS[0]: np.ma.masked_equal(np.zeros((40, 56, 3), np.uint8), 0)}, {CAMERAS[1]: None},
        {CAMERAS[0]: SimpleNamespace(mode="HSV")},
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["infer", "observe"])
def test_a_refused_observation_is_not_kept(
    call: str, change: dict[str, Any], policy: OptimizedPolicy, noise: np.ndarray
) -> None:
    policy.observe(observation(0))
    bad = {key: value for key, value in {**observation(7), **change}.items() if value is not None}
    with pytest.raises(ObservationError):
        getattr(policy, call)(bad)
    got = policy.infer(observation(1), noise=noise)["actions"]
    np.testing.assert_array_equal(got, policy.infer(stacked(0, 1), noise=noise)["actions"])


def test_an_observation_of_another_form_begins_anew() -> None:
    kept = History(2, ("state",))
    kept.add({"state": np.zeros(2)})
    assert np.shape(kept.add({"state": np.ones(3)})["state"]) == (1, 3)
    assert np.shape(kept.add({"state": np.ones(3)})["state"]) == (2, 3)


def test_the_metadata_say_what_a_call_returns(policy: OptimizedPolicy) -> None:
    assert policy.metadata["action_horizon"] == 8 and policy.metadata["returned_actions"] == 7
    assert not policy.processor.preset.optional_images


def test_a_batch_has_the_history_of_each_row(policy: OptimizedPolicy, noise: np.ndarray) -> None:
    rows = policy.infer_batch([stacked(0, 1), stacked(2)], noise=np.stack((noise, noise)))
    for got, seeds in zip(rows, ((0, 1), (2, 2)), strict=True):
        want = policy.infer(stacked(*seeds), noise=noise)["actions"]
        np.testing.assert_allclose(got["actions"], want, atol=1e-5)
    with pytest.raises(
        ObservationError, match=r"observations\[1\]: observation: expected 1 to 2 images of each camera"
    ):
        policy.infer_batch([stacked(0, 1), observation(2)])


class Spy:
    """A policy that reads two observations, and records its inputs."""

    supports_prev_chunk = False

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []
        self.metadata = {
            "history": 2, "action_horizon": 8, "action_dim": 7,
            "robot": {"images": ["observation/image"], "state": ["observation/state"]},
        }  # fmt: skip

    def with_steps(self, steps: int) -> Spy:
        return self

    def infer(self, given: dict[str, Any], **options: Any) -> dict[str, Any]:
        self.seen.append(np.asarray(given["observation/state"])[:, 0])
        return {"actions": np.zeros((8, 7)), "state": [], "policy_timing": {}}

    def reset(self) -> None:
        self.seen.clear()


def frame(tick: float) -> dict[str, Any]:
    return {"observation/image": np.zeros((4, 4, 3), np.uint8), "observation/state": np.full(8, tick), "prompt": "go"}


def test_the_async_runner_sees_every_tick() -> None:
    from vla_accel.remote.async_runner import AsyncRunner

    spy = Spy()
    with AsyncRunner(spy, hz=1000, replan_ticks=3, max_wait_s=1.0) as runner:
        for episode in range(2):
            runner.start(frame(10 * episode))
            for tick in range(1, 6):
                runner.step(frame(10 * episode + tick))
                if runner._inference.busy:
                    runner._inference.wait_until(time.monotonic() + 10)
            first, *others = spy.seen
            assert list(first) == [10 * episode]
            assert others and all(b - a == 1 for a, b in others)


def test_a_client_sends_the_history_and_a_server_keeps_none(caplog: pytest.LogCaptureFixture) -> None:
    from vla_accel.client import PolicyClient
    from vla_accel.server import ServerConfig, background

    spy = Spy()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(background(spy, ServerConfig(port=0))).address
        ours, other = (stack.enter_context(PolicyClient(address)) for _ in range(2))
        ours.infer(frame(0))
        ours.observe(frame(1))
        ours.infer(frame(2))
        ours.reset()
        ours.infer(frame(3))
        assert [list(seen) for seen in spy.seen] == [[0], [1, 2], [3]], "this package's client sends its history"
        spy.seen.clear()
        other._history = None  # as openpi's client, which sends one observation
        for tick in (5, 6):
            other.infer(frame(tick))
        other.infer_batch([frame(7), frame(8)])
        assert [list(seen) for seen in spy.seen] == [[5], [6], [7], [8]]
    assert sum("it is repeated" in record.message for record in caplog.records) == 1


def test_the_evaluation_shows_the_policy_every_last_observation() -> None:
    class Env(FakeEnv):
        def observation(self) -> dict[str, Any]:
            return frame(len(self.steps))

    protocol = Protocol("libero_spatial", tasks=(4,), trials=1, steps=(3,), max_steps=12)
    spy, env = Spy(), Env()
    actor = PolicyActor(PolicyBySteps(spy), LIBERO, protocol, send_noise=False)
    result = run_episode(env, TASK, actor, EpisodeKey(3, 4, 0), dataclasses.replace(protocol))
    assert result.error is None and [list(seen) for seen in spy.seen] == [[0], [4, 5], [9, 10]]
    assert [i for i, (_, look) in enumerate(env.steps, 1) if look] == [4, 5, 9, 10]


def test_the_floor_counts_the_weights_of_convolutions() -> None:
    """471 MiB of the U-Net in BF16 a step (hand-counted, within 2 %)."""
    card = bench_card(DIFFUSION_POLICY)
    config = card.published()
    processor = card.dummy(config, len(config.cameras))
    specs = load_config("eager").specs(DIFFUSION_POLICY.parts)
    work = card.work(config, processor.prepare(processor.example()), 10, specs)
    assert work["denoise"].bytes / 10 == pytest.approx(471 * 2**20, rel=0.02)
