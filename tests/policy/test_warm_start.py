"""`PolicyConfig.warm_start` of every flow family, eager and native: what a warm call computes, how it joins real-time
chunking and batches, over the server and in the runner, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.policy.test_schedules import FAMILIES, TIMES, load, noise_of, observed, plain_euler
from tests.support import tiny_pi0_fast
from tests.support.waiting import PATIENCE_S
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import RtcConfig, load_config
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.loading import load as load_checkpoint
from vla_accel.policy import ahead_of_time

START = 0.4


def rests(policy: OptimizedPolicy, *lengths: int) -> list[np.ndarray]:
    """The last actions of chunks that the policy answered, in the robot's units."""
    made = policy.infer_batch(observed(policy, *range(5, 5 + len(lengths))), noise=noise_of(policy, len(lengths)))
    return [one["actions"][-length:] for one, length in zip(made, lengths, strict=True)]


def mixed(policy: OptimizedPolicy, chunk: np.ndarray, noise: np.ndarray, start: float = START) -> np.ndarray:
    """The start of a warm call (1, H, A), written without what is tested."""
    seen = policy.processor.prepare(observed(policy, 0)[0])
    previous = policy.processor.normalize_actions(chunk, seen)
    last = np.repeat(previous[-1:], policy.action_shape[0] - len(previous), axis=0)
    return (start * noise + (1 - start) * np.concatenate((previous, last)))[None]


@pytest.mark.slow
@pytest.mark.parametrize("times", [(1.0, 0.0), TIMES])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_call_is_euler_from_the_mixed_start(
    flow_folders: dict[str, Path], family: str, times: tuple[float, ...]
) -> None:  # fmt: skip
    """The rest is short: its last action is repeated."""
    policy, native = (
        load(flow_folders[family], name, schedule=times, warm_start=START) for name in ("eager", "native")
    )
    (observation,), noise, (rest,) = observed(policy, 0), noise_of(policy, 1)[0], rests(policy, 2)
    cold = policy.infer(observation, noise=noise)["actions"]
    warm, other = (one.infer(observation, noise=noise, prev_chunk=rest)["actions"] for one in (policy, native))
    assert np.abs(warm[:, :6] - cold[:, :6]).max() > 1e-2
    np.testing.assert_allclose(other[:, :6], warm[:, :6], rtol=0, atol=2e-4)
    own = [START * time for time in times]
    dts = [after - before for before, after in pairwise(own)]
    want = plain_euler(policy, torch.tensor(own[:-1]), dts, torch.from_numpy(mixed(policy, rest, noise)).float())
    found = policy.pipelines.newest.engine("denoise").outputs["actions"]
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_calls_without_a_chunk_stay_cold_and_draw_the_same_noise(flow_folders: dict[str, Path], engine: str) -> None:
    plain, policy = load(flow_folders["pi05"], engine), load(flow_folders["pi05"], engine, warm_start=START)
    (observation,), (rest,) = observed(policy, 0), rests(policy, 3)
    warm = [policy.infer(observation, prev_chunk=chunk)["actions"] for chunk in (None, rest, None)]
    cold = [plain.infer(observation)["actions"] for _ in range(3)]
    np.testing.assert_array_equal([warm[0], warm[2]], [cold[0], cold[2]])
    policy.reset()
    noise = noise_of(policy, 1)[0]
    drawn = torch.randn(policy.action_shape, generator=torch.Generator().manual_seed(0)).numpy()
    np.testing.assert_array_equal(
        policy.infer(observation, prev_chunk=rest)["actions"],
        policy.infer(observation, prev_chunk=rest, noise=drawn)["actions"],
    )
    other = policy.infer(observation, prev_chunk=rest, noise=noise)["actions"]
    assert np.abs(other - policy.infer(observation, prev_chunk=rest, noise=drawn)["actions"]).max() > 1e-3


def test_an_almost_finished_flow_keeps_the_chunk_and_repeats_its_last_action(flow_folders: dict[str, Path]) -> None:
    policy = load(flow_folders["pi05"], num_steps=1, warm_start=1e-6)
    (observation,), (rest,) = observed(policy, 0), rests(policy, 2)
    found = policy.infer(observation, prev_chunk=rest)["actions"]
    np.testing.assert_allclose(found, rest[[0, *[1] * (len(found) - 1)]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_with_a_delay_a_warm_start_is_also_guided(flow_folders: dict[str, Path], engine: str, trained: bool) -> None:
    """Of trained chunking the actions up to the delay are the chunk's; of guidance, one step of size t = START leaves
    1 - t * w(t) of their distance from it."""
    rtc = RtcConfig(trained=True) if trained else RtcConfig("ones")
    policy = load(flow_folders["pi05"], engine, num_steps=1, warm_start=START, rtc=rtc)
    (observation,), noise, (rest,) = observed(policy, 0), noise_of(policy, 1)[0], rests(policy, 3)
    alone = policy.infer(observation, noise=noise, prev_chunk=rest)["actions"]
    both = policy.infer(observation, noise=noise, prev_chunk=rest, inference_delay=2)["actions"]
    again = policy.infer(observation, noise=noise, prev_chunk=rest)["actions"]
    np.testing.assert_array_equal(again, alone)
    assert np.abs(alone[:2] - rest[:2]).max() > 1e-2
    left = 0.0 if trained else 1 - (START**2 + (1 - START) ** 2) / (1 - START)
    np.testing.assert_allclose(both[:2], rest[:2] + left * (alone[:2] - rest[:2]), rtol=0, atol=1e-4)
    cold = load(flow_folders["pi05"], engine, num_steps=1, rtc=rtc)
    guided = cold.infer(observation, noise=noise, prev_chunk=rest, inference_delay=2)["actions"]
    assert np.abs(both[3:] - guided[3:]).max() > 1e-2


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_batch_answers_each_row_as_alone(flow_folders: dict[str, Path], family: str, engine: str) -> None:
    """With a delay where the family has real-time chunking."""
    policy = load(flow_folders[family], engine, num_steps=2, warm_start=START)
    pair, noise, chunks = observed(policy, 0, 1), noise_of(policy, 2), rests(policy, 2, 3)
    delays = (None, 1 if policy.supports_prev_chunk else None)
    alone = [policy.infer(o, noise=n, prev_chunk=c, inference_delay=d)["actions"]
             for o, n, c, d in zip(pair, noise, chunks, delays, strict=True)]  # fmt: skip
    found = policy.infer_batch(pair, noise=noise, prev_chunks=chunks, inference_delays=delays)
    np.testing.assert_allclose([one["actions"] for one in found], alone, rtol=0, atol=2e-4)
    with pytest.raises(ObservationError, match=r"prev_chunks: expected one for every observation or .*, got 1 for 2"):
        policy.infer_batch(pair, prev_chunks=[None, chunks[0]])


def test_warm_up_builds_both_loops_for_every_prompt_length(flow_folders: dict[str, Path]) -> None:
    plain, policy = (load(flow_folders["pi05"], "native", warm_start=start) for start in (None, START))
    assert (built := len(policy.pipelines)) == 2 * len(plain.pipelines)
    (observation,) = observed(policy, 0)
    first = policy.infer(observation)["actions"]
    policy.infer(observation, prev_chunk=first[2:])
    assert len(policy.pipelines) == built
    assert policy.with_steps(4).warm_schedule.times[0] == START  # type: ignore[union-attr]


def test_the_server_answers_warm_and_cold_calls_in_separate_batches(flow_folders: dict[str, Path]) -> None:
    from tests.support.server_support import served
    from vla_accel.errors import ServerError
    from vla_accel.server.requests import Request
    from vla_accel.server.runner import LoadedPolicy, next_group, run_requests

    policy = load(flow_folders["pi05"], num_steps=1, warm_start=START)
    (observation,), (rest,) = observed(policy, 0), rests(policy, 3)
    policy.reset()
    calls: list[dict[str, Any]] = [{}, {"prev_chunk": rest}]
    want = [policy.infer(observation, **options)["actions"] for options in calls]
    policy.reset()
    with served(policy) as (_, client):
        assert client.metadata["warm_start"] == START
        found = [client.infer(observation, **options)["actions"] for options in calls]
        client.infer(observation, prev_chunk=rest, inference_delay=1)
        with pytest.raises(ConfigError, match="expected prev_chunk and inference_delay together"):
            client.infer(observation, inference_delay=1)
        with pytest.raises(ServerError, match="expected rtc/prev_chunk and rtc/inference_delay together"):
            client.infer({**observation, "rtc/inference_delay": 1})
    np.testing.assert_array_equal(found, want)
    loaded = LoadedPolicy(policy)
    kinds: list[dict[str, Any]] = [{}, {"prev_chunk": rest}, {}, {"prev_chunk": rest, "inference_delay": 1}]
    requests = [Request(observation, options, loaded) for options in kinds]
    for group, which in ((next_group(requests, 4), (0, 2)), (next_group(requests[1:], 4), (1, 3))):
        assert group == [requests[index] for index in which]
        before = len(policy.latency.samples)
        assert all("actions" in one for one in run_requests(policy, group))
        assert len(policy.latency.samples) == before + 1, "one batch"


def test_a_family_without_guidance_starts_warm_through_the_server(flow_folders: dict[str, Path]) -> None:
    from tests.support.server_support import served
    from vla_accel.errors import ServerError

    policy = load(flow_folders["vla_jepa"], num_steps=1, warm_start=START)
    (observation,), (rest,) = observed(policy, 0), rests(policy, 3)
    policy.reset()
    want = policy.infer(observation, prev_chunk=rest)["actions"]
    policy.reset()
    with served(policy) as (_, client):
        np.testing.assert_array_equal(client.infer(observation, prev_chunk=rest)["actions"], want)
        with pytest.raises(ConfigError, match="does not support real-time chunking"):
            client.infer(observation, prev_chunk=rest, inference_delay=1)
        with pytest.raises(ServerError, match="does not support real-time chunking"):
            client.infer({**observation, "rtc/prev_chunk": rest, "rtc/inference_delay": 1})


@pytest.mark.parametrize("guided", [True, False])
def test_a_runner_passes_the_rest_of_the_chunk(flow_folders: dict[str, Path], guided: bool) -> None:
    policy, passed = load(flow_folders["pi05"], num_steps=1, warm_start=START), []
    infer = policy.infer
    policy.infer = lambda seen, **options: (passed.append(options), infer(seen, **options))[1]  # type: ignore[method-assign]
    (observation,) = observed(policy, 0)
    with policy.async_runner(20.0, real_time_chunking=guided, max_wait_s=PATIENCE_S) as runner:
        runner.start(observation)
        for _ in range(12):
            runner.step(observation)
    later = [options for options in passed if options]
    assert later and all(set(one) == {"prev_chunk", *(["inference_delay"] * guided)} for one in later)


def test_a_checkpoint_of_tokens_has_no_start(tmp_path: Path) -> None:
    tiny_pi0_fast.write_lerobot(tmp_path)
    with pytest.raises(ConfigError, match=r"warm_start: expected none for pi0_fast, which has no flow, got 0.4"):
        OptimizedPolicy.from_pretrained(tmp_path, PolicyConfig(device="cpu", warm_start=START))


@pytest.mark.parametrize("start", [0, 1, 0.0, 1.0, -0.5, 2, float("nan"), float("inf")])
def test_a_start_lies_between_actions_and_noise(start: float) -> None:
    for make in (load_config, lambda settings: PolicyConfig(**settings)):
        with pytest.raises(ConfigError, match=r"^warm_start: expected more than 0, less than 1, got"):
            make({"warm_start": start})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_delay": 1}, "together, got no prev_chunk"),
        ({"prev_chunk": np.zeros((0, 7))}, "prev_chunk: expected shape .*k at least 1"),
        ({"prev_chunk": np.zeros((6, 7))}, "prev_chunk: expected at most 5 actions, got 6"),
        ({"prev_chunk": np.zeros((3, 7)), "inference_delay": -1}, "inference_delay: expected"),
    ],
)
def test_what_a_warm_call_cannot_use_is_refused(
    flow_folders: dict[str, Path], options: dict[str, Any], message: str
) -> None:  # fmt: skip
    policy = load(flow_folders["pi05"], num_steps=1, warm_start=START)
    with pytest.raises(ObservationError, match=message):
        policy.infer(observed(policy, 0)[0], **options)


@pytest.mark.parametrize(("trained", "engines"), [(False, 1), (True, 2)])
def test_a_build_ahead_of_time_has_an_engine_for_each_schedule_that_it_contains(
    flow_folders: dict[str, Path], trained: bool, engines: int
) -> None:
    """A loop that runs step by step takes its times as inputs: one engine serves both."""
    config = PolicyConfig(
        device="cpu", warm_start=START, rtc=RtcConfig(trained=trained), denoise=EngineSpec("tensorrt_rtx")
    )
    jobs = ahead_of_time.jobs(load_checkpoint(flow_folders["pi05"]), config, [(8, 9)])
    assert [job.component.name for job in jobs] == ["denoise"] * engines
