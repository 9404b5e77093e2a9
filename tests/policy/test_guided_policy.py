"""Real-time chunking through the whole policy: `infer(prev_chunk=…, inference_delay=…)` eager and native on a CPU, for
every preset, in batches, over the server and in the runner. The mathematics alone is in test_rtc.py."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import EAGER, NATIVE, TOKENIZER, draw, random_model, statistics, tiny_config, tiny_observation
from tests.support.waiting import PATIENCE_S
from tests.transforms.test_presets import inputs_of, processor_of
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.config import RtcConfig
from vla_accel.errors import ObservationError
from vla_accel.families.loading import Checkpoint
from vla_accel.families.pi0.family import PI0
from vla_accel.families.pi0.network import Kind
from vla_accel.remote.metadata import batches_prev_chunks
from vla_accel.transforms.normalisation import Normaliser, Statistics
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import PRESETS

CONFIGS = {"eager": EAGER, "native": NATIVE}
PLACED = (1.0, 0.3, 0.01, 0.0)
OF_MODELS = [name for name, preset in PRESETS.items() if preset.pose == "model"]
"""Presets of every family; the other poses are X-VLA's alone."""


def with_steps(config: PolicyConfig, steps: int | tuple[float, ...]) -> PolicyConfig:
    """With a number of equal steps, or with placed ones."""
    return config.with_steps(steps) if isinstance(steps, int) else config.with_steps(schedule=steps)


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def folder(request: pytest.FixtureRequest, folders: dict[Kind, Path]) -> Path:
    return folders[request.param]


def load(folder: Path, config: PolicyConfig = EAGER) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(folder, config)


def chunk(seed: int, left: int = 4) -> np.ndarray:
    """What the tiny robot could have been told, `left` actions of it."""
    return np.random.default_rng(seed).uniform(-1, 2, (left, 7))


def scaling(kind: Kind, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(centre, half range or deviation) of the tiny checkpoint's statistics, as openpi scales."""
    table = {k: np.array(v) for k, v in statistics()[name].items()}
    if kind == "pi05":
        half = (table["q99"] - table["q01"] + 1e-6) / 2
        return table["q01"] + half, half
    return table["mean"], table["std"] + 1e-6


def observed_by_hand(
    policy: OptimizedPolicy, kind: Kind, observation: Mapping[str, Any]
) -> tuple[Any, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The model in float64, the state if it takes one, and the keys and values of an observation."""
    model = copy.deepcopy(policy.model).whole().double()
    inputs = policy.processor.prepare(observation)
    centre, half = scaling(kind, "state")
    state = torch.from_numpy((observation["observation/state"] - centre) / half)[None].double()
    pixels = torch.from_numpy(np.stack(inputs.images)).permute(0, 3, 1, 2)[None].double() / 255 * 2 - 1
    cache = model.prefix_cache(model.embed_images(pixels), torch.from_numpy(inputs.tokens)[None])
    return model, state if kind == "pi0" else None, *cache


def exact_times(policy: OptimizedPolicy) -> Sequence[float]:
    """The times of a policy's steps, equal ones without openpi's rounding."""
    steps, schedule = policy.num_steps, policy.schedule
    return [1 - step / steps for step in range(steps + 1)] if schedule.is_uniform else schedule.times


def by_hand(policy: OptimizedPolicy, kind: Kind, observation: Mapping[str, Any], noise: np.ndarray,
            previous: np.ndarray, weights: np.ndarray, bound: float | None) -> np.ndarray:  # fmt: skip
    """The guided loop in float64, in the paper's time, written without what is tested."""
    model, state, keys, values = observed_by_hand(policy, kind, observation)
    centre, half = scaling(kind, "actions")
    target = np.zeros((1, 5, 8))
    target[0, : len(previous), :7] = (previous - centre) / half
    w, y, x = torch.from_numpy(weights)[None, :, None], torch.from_numpy(target), torch.from_numpy(noise)[None].double()
    for t, following in pairwise(exact_times(policy)):
        tau, dt = 1 - t, t - following
        embedding, rows = model.conditioning(torch.tensor([1 - tau], dtype=torch.float64))
        row = None if rows is None else rows[0]
        v = -model.velocity(x, embedding[0], row, state, keys, values)
        error = w * (y - (x + (1 - tau) * v))
        r_squared = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        most = 1 / dt if bound is None else bound
        scale = most if tau == 0 else min(most, (1 - tau) / (tau * r_squared))
        x = x + (v + scale * error) * dt
    return x[0, :, :7].numpy() * half + centre


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("engine", CONFIGS)
@pytest.mark.parametrize(
    ("steps", "rtc", "bound", "left", "delay", "weights"),
    [
        (PLACED, RtcConfig(), None, 4, 2, [1, 1, 2 / 3, 1 / 3, 0]),
        (PLACED, RtcConfig("ones", 1.2, 3), 1.2, 5, 1, [1, 1, 1, 0, 0]),
        (1, RtcConfig(), 1.0, 4, 2, [1, 1, 2 / 3, 1 / 3, 0]),
        (4, RtcConfig(), 4.0, 4, 1, [1, 0.75, 0.5, 0.25, 0]),
        (10, RtcConfig("ones", 5.0, 3), 5.0, 5, 1, [1, 1, 1, 0, 0]),
        (3, RtcConfig("zeros", 2.0), 2.0, 3, 9, [1, 1, 1, 0, 0]),
        (3, RtcConfig(), 3.0, 1, 0, [0.5, 0, 0, 0, 0]),
    ],
)
def test_the_chunk_is_the_papers(
    folders: dict[Kind, Path], kind: Kind, engine: str, steps: Any, rtc: RtcConfig, bound: float | None, left: int,
    delay: int, weights: list[float],
) -> None:  # fmt: skip
    policy = load(folders[kind], replace(with_steps(CONFIGS[engine], steps), rtc=rtc))
    observation, noise, previous = tiny_observation(3), draw(policy, 4, 1)[0], chunk(5, left)
    want = by_hand(policy, kind, observation, noise, previous, np.array(weights), bound)
    got = policy.infer(observation, noise=noise, prev_chunk=previous, inference_delay=delay)["actions"]
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-4)
    assert np.abs(policy.infer(observation, noise=noise)["actions"] - want).max() > 0.1


def test_batches_mix_guided_and_plain_observations(folder: Path) -> None:
    eager, native = load(folder), load(folder, NATIVE)
    observations = [tiny_observation(seed) for seed in range(4)]
    noise = draw(eager, 1, 4)
    chunks = [None, chunk(1, 3), chunk(2, 5), None]
    delays = [None, 2, 0, None]
    alone = [
        eager.infer(o, noise=n, prev_chunk=c, inference_delay=d)["actions"]
        for o, n, c, d in zip(observations, noise, chunks, delays, strict=True)
    ]
    plain = [r["actions"] for r in eager.infer_batch(observations, noise=noise)]
    for policy, atol in ((eager, 1e-5), (native, 2e-4)):
        for _ in range(2):
            got = policy.infer_batch(observations, noise=noise, prev_chunks=chunks, inference_delays=delays)
            np.testing.assert_allclose([r["actions"] for r in got], alone, rtol=0, atol=atol)
        # What one call brought is gone from the next.
        got = [r["actions"] for r in policy.infer_batch(observations, noise=noise)]
        np.testing.assert_allclose(got, plain, rtol=0, atol=atol)
    differs = [float(np.abs(a - p).max()) > 0.1 for a, p in zip(alone, plain, strict=True)]
    assert differs == [False, True, True, False]


@pytest.mark.parametrize("engine", CONFIGS)
def test_weights_of_zero_change_no_bit(folder: Path, engine: str) -> None:
    policy = load(folder, replace(CONFIGS[engine], rtc=RtcConfig("zeros")))
    observation, noise = tiny_observation(1), draw(policy, 2, 1)[0]
    plain = policy.infer(observation, noise=noise)["actions"]
    kept = len(policy.pipelines)
    guided = policy.infer(observation, noise=noise, prev_chunk=chunk(3) * 50, inference_delay=0)["actions"]
    np.testing.assert_array_equal(guided, plain)
    assert np.abs(
        policy.infer(observation, noise=noise, prev_chunk=chunk(3), inference_delay=1)["actions"] - plain
    ).max()
    np.testing.assert_array_equal(policy.infer(observation, noise=noise)["actions"], plain)
    assert len(policy.pipelines) == kept, "one pipeline, and so one graph, for all of them"


@pytest.mark.parametrize("engine", CONFIGS)
def test_all_inputs_of_a_call_travel_in_one_copy(folder: Path, engine: str) -> None:
    pipeline = load(folder, CONFIGS[engine]).pipelines.newest
    inputs = [(e, n) for _, e in pipeline.engines for n in e.inputs if n in pipeline._host]
    assert {n for _, n in inputs} >= {"images", "tokens", "target", "weights"}
    for e, name in inputs:
        assert e.inputs[name].untyped_storage().data_ptr() == pipeline._rest_part[0].untyped_storage().data_ptr()
        assert e.inputs[name].storage_offset() * e.inputs[name].itemsize % 256 == 0
        assert e.inputs[name].is_contiguous()


@torch.inference_mode()
def test_a_loop_without_guidance_is_the_same_bit_for_bit(folder: Path) -> None:
    policy = load(folder)
    policy.infer(tiny_observation(1), noise=draw(policy, 2, 1)[0])
    denoise = policy.pipelines.newest.engine("denoise")
    module: Any = denoise.component.module
    state = denoise.inputs.get("state")
    noise, keys, values = (denoise.inputs[n] for n in ("noise", "keys", "values"))
    rows = module.embeddings, module.modulations
    plain = policy.model.integrate(noise, *rows, keys, values, state, schedule=policy.schedule)
    assert torch.equal(denoise.outputs["actions"], plain)


@pytest.mark.slow
def test_the_demo_goes_on_where_the_last_chunk_was() -> None:
    """The frozen actions come back within 0.08 of normalised ranges that are 2 wide, ten times nearer than without
    guidance: the last of ten Euler steps leaves 9 % of what the flow still disagrees by."""
    policy = OptimizedPolicy.from_pretrained("demo", device="cpu")
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)

    def observation(shift: int) -> dict[str, Any]:
        state = [-0.2, 0.0, 1.2, 3.1, 0.0, 0.0, 0.03, -0.03] + 0.01 * np.random.default_rng(shift).normal(size=8)
        base, wrist = policy.processor.preset.images
        views = {base: np.roll(image, shift, 0), wrist: image[::-1]}
        return {**policy.processor.example(), "observation/state": state, **views}

    half = policy.processor.actions.span / 2
    for number, (used, delay) in enumerate(((2, 3), (4, 4), (5, 2), (3, 7))):
        first, second = draw(policy, number, 2)
        previous = policy.infer(observation(number), noise=first)["actions"][used:]
        now = observation(number + 1)
        plain = policy.infer(now, noise=second)["actions"]
        guided = policy.infer(now, noise=second, prev_chunk=previous, inference_delay=delay)["actions"]
        before, after = (np.abs(c[:delay] - previous[:delay]) / half for c in (plain, guided))
        assert after.max() < 0.08 and after.mean() < 0.1 * before.mean() and before.max() > 0.2
        # Beyond the previous chunk nothing is held: it is the flow's own.
        assert np.abs(guided[len(previous) :] - plain[len(previous) :]).max() < 0.5 * before.max()


@pytest.fixture(scope="module")
def wide_model() -> Any:
    return random_model(tiny_config("pi0", vocab_size=TOKENIZER.vocab_size, action_dim=16))


def preset_processor(name: str, kind: Any = "quantile") -> Processor:
    """A preset with statistics that are not symmetric and differ from dimension to dimension."""
    preset = PRESETS[name]

    def scale(count: int) -> Normaliser:
        steps = np.arange(count) / count
        return Normaliser.of(Statistics(steps, 0.5 + steps, -1 - steps, 1 + 2 * steps), kind, "test")

    return processor_of(
        preset, state=scale(preset.state_dim), actions=scale(preset.action_dim), action_dim=16, max_token_len=48
    )


def robots_observation(processor: Processor, seed: int) -> dict[str, Any]:
    """An observation of any preset, whose state differs with the seed."""
    rng, preset = np.random.default_rng(seed), processor.preset
    observed = processor.example()
    for key in preset.state:
        observed[key] = np.asarray(observed[key]) + rng.uniform(0.05, 0.3, np.shape(observed[key]))
    return {**observed, preset.prompt: "pick up the bowl"}


@pytest.mark.parametrize("engine", CONFIGS)
@pytest.mark.parametrize("name", OF_MODELS)
def test_the_robot_goes_on_where_it_was_whatever_its_conventions(wide_model: Any, name: str, engine: str) -> None:
    """With one step, whole weights reproduce the previous chunk, in the robot's numbers, although the state has
    changed since: deltas are against the state of now."""
    processor = preset_processor(name)
    config = replace(CONFIGS[engine], num_steps=1, rtc=RtcConfig("ones"))
    policy = OptimizedPolicy(Checkpoint(name, PI0, copy.deepcopy(wide_model), processor), config)
    previous = policy.infer(robots_observation(processor, 0))["actions"][2:]
    now = robots_observation(processor, 1)
    plain = policy.infer(now)["actions"]
    guided = policy.infer(now, prev_chunk=previous, inference_delay=2)["actions"]
    np.testing.assert_allclose(guided[: len(previous)], previous, rtol=0, atol=2e-5)
    assert np.abs(plain[: len(previous)] - previous).max() > 0.1
    assert np.abs(guided[len(previous) :] - previous[-1]).max() > 0.1


@pytest.mark.parametrize("kind", ["quantile", "mean_std"])
@pytest.mark.parametrize("name", OF_MODELS)
def test_normalizing_actions_inverts_unnormalizing_them(name: str, kind: Any) -> None:
    processor, rng = preset_processor(name, kind), np.random.default_rng(1)
    preset = processor.preset
    inputs = inputs_of(rng.uniform(0.1, 0.9, preset.state_dim))
    model = rng.normal(size=(4, 16)).astype(np.float32)
    model[:, preset.action_dim :] = 0
    robot = processor.unnormalize_actions(model, inputs)
    before = robot.copy()
    again = processor.normalize_actions(robot, inputs)
    assert again.dtype == np.float32 and again.shape == (4, 16)
    np.testing.assert_allclose(again, model, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(robot, before)
    np.testing.assert_allclose(processor.unnormalize_actions(again, inputs), robot, rtol=0, atol=1e-6)
    # The state matters exactly where actions are relative to it.
    other = replace(inputs, raw_state=inputs.raw_state + 0.05)
    moved = np.abs(processor.normalize_actions(robot, other) - again).max(0) > 1e-3
    assert set(np.flatnonzero(moved)) == set(preset.delta_actions)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", ["quantile", "mean_std"])
def test_a_scale_is_inverted_whatever_its_rounding_and_where_it_is_nothing(kind: Any, single: bool) -> None:
    scale = Normaliser(kind, np.array([0.25, -3.0, 1.0]), np.array([0.5, 0.0, 2e-6]), single)
    x = np.random.default_rng(0).normal(size=(6, 3))
    got = scale.invert(scale.restore(x))
    np.testing.assert_allclose(got[:, [0, 2]], x[:, [0, 2]], rtol=0, atol=1e-9)
    assert not got[:, 1].any(), "a constant says nothing about what it was made of"


GOOD = chunk(0, 3)


REFUSED: list[tuple[Any, Any, str]] = [
    (GOOD, None, "together, got no inference_delay"),
    (None, 1, "together, got no prev_chunk"),
    *((bad, 1, re.escape(f"prev_chunk: expected shape (k, 7), k at least 1, got {bad.shape}")) for bad in
      (GOOD[:0], GOOD[0], GOOD[None], GOOD[:, :6], np.zeros((3, 8)))),
    (chunk(0, 6), 1, "prev_chunk: expected at most 5 actions, got 6"),
    *((np.where(np.eye(3, 7), bad, GOOD), 1, "prev_chunk: expected finite numbers") for bad in (np.nan, np.inf)),
    (GOOD * 1e200, 1, "prev_chunk: expected actions in the checkpoint's range"),
    *((bad, 1, "prev_chunk: expected numbers") for bad in ("chunk", GOOD.astype("S8"), GOOD > 0, [[1, 2], [3]])),
    *((GOOD, bad, f"inference_delay: expected a number of actions, .*, got {bad!r}") for bad in (-1, 1.0, True, "1")),
]  # fmt: skip


@pytest.mark.parametrize(("prev_chunk", "delay", "message"), REFUSED)
def test_bad_input_is_one_clear_error(folders: dict[Kind, Path], prev_chunk: Any, delay: Any, message: str) -> None:
    policy = load(folders["pi05"])
    with pytest.raises(ObservationError, match=message):
        policy.infer(tiny_observation(), prev_chunk=prev_chunk, inference_delay=delay)


def test_a_refused_chunk_draws_no_noise(folders: dict[Kind, Path]) -> None:
    policy, other = load(folders["pi05"]), load(folders["pi05"])
    with pytest.raises(ObservationError, match="at most 5"):
        policy.infer(tiny_observation(), prev_chunk=chunk(0, 6), inference_delay=1)
    np.testing.assert_array_equal(
        policy.infer(tiny_observation())["actions"], other.infer(tiny_observation())["actions"]
    )


def test_a_delay_of_all_that_is_left_or_more_keeps_all_of_it(folders: dict[Kind, Path]) -> None:
    policy = load(folders["pi05"])
    noise = draw(policy, 0, 1)[0]
    delays: tuple[Any, ...] = (2, 3, 5, 1000, np.int64(3))
    got = [policy.infer(tiny_observation(), noise=noise, prev_chunk=GOOD, inference_delay=d)["actions"] for d in delays]
    for one in got[2:]:
        np.testing.assert_array_equal(one, got[1])
    assert np.abs(got[0] - got[1]).max() > 1e-3


def test_a_batch_needs_a_chunk_or_none_for_each_observation(folders: dict[Kind, Path]) -> None:
    policy, two = load(folders["pi05"]), [tiny_observation(0), tiny_observation(1)]
    for options, message in (
        ({"prev_chunks": [GOOD], "inference_delays": [1, 1]}, "prev_chunks: expected one for each of 2 .*, got 1"),
        ({"prev_chunks": [GOOD, None], "inference_delays": [1]}, "inference_delays: expected one for each of 2"),
        (
            {"prev_chunks": [GOOD, None], "inference_delays": [None, 1]},
            r"observations\[0\]: .*together, got no inference_delay",
        ),
        (
            {"prev_chunks": [None, GOOD], "inference_delays": [None, -1]},
            r"^observations\[1\]: inference_delay: expected",
        ),
        ({"prev_chunks": [GOOD, GOOD[:, :1]], "inference_delays": [1, 1]}, r"^observations\[1\]: prev_chunk: expected"),
        ({"prev_chunks": [GOOD, None]}, "together, got no inference_delay"),
        ({"prev_chunks": [], "inference_delays": []}, "prev_chunks: expected one for each of 2 .*, got 0"),
    ):
        with pytest.raises(ObservationError, match=message):
            policy.infer_batch(two, **options)  # type: ignore[arg-type]


def test_the_servers_batches_mix_them(folders: dict[Kind, Path]) -> None:
    from vla_accel.server.requests import Request
    from vla_accel.server.runner import run_requests

    policy = load(folders["pi05"], replace(EAGER, num_steps=1, rtc=RtcConfig("ones")))
    assert batches_prev_chunks(policy)
    options = {"prev_chunk": chunk(1, 3), "inference_delay": 2}
    requests = [Request(tiny_observation(0)), Request(tiny_observation(1), options), Request(tiny_observation(2))]
    calls = len(policy.latency.samples)
    results = run_requests(policy, requests)
    assert len(policy.latency.samples) == calls + 1, "one batch"
    follows = [np.abs(r["actions"][:3] - options["prev_chunk"]).max() < 1e-4 for r in results]  # type: ignore[index]
    assert follows == [False, True, False]
    # A bad one fails alone.
    bad = Request(tiny_observation(1), {**options, "prev_chunk": chunk(1, 6)})
    results = run_requests(policy, [requests[0], bad, requests[1]])
    assert [isinstance(r, ObservationError) for r in results] == [False, True, False]
    assert np.abs(results[2]["actions"][:3] - options["prev_chunk"]).max() < 1e-4  # type: ignore[index]


def test_a_policys_own_runner_is_guided(folders: dict[Kind, Path]) -> None:
    with load(folders["pi05"]).async_runner(20.0, real_time_chunking=True) as runner:
        runner.start(tiny_observation(0))
        for tick in range(8):
            assert np.isfinite(runner.step(tiny_observation(tick))).all()
            assert not runner._inference.busy or runner._inference.wait_until(time.monotonic() + PATIENCE_S)
    assert runner.report().chunks >= 2
