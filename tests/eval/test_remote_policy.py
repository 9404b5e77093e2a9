"""The websocket client against a small server that speaks openpi's wire format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eval.harness.policies import PolicyActor, PolicyBySteps
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import run_episode
from eval.libero.benchmark import LIBERO
from tests.support.eval_support import OBS, TASK, FakeEnv
from tests.support.openpi_wire import openpi_pack, serving
from tests.support.waiting import eventually, silent_port
from vla_accel.client import PolicyClient
from vla_accel.errors import ServerError


def test_an_observation_goes_out_and_actions_come_back() -> None:
    seen: list[dict[str, Any]] = []

    def answer(obs: dict[str, Any]) -> bytes:
        seen.append(obs)
        actions = np.arange(70, dtype=np.float32).reshape(10, 7)
        return openpi_pack({"actions": actions, "policy_timing": {"infer_ms": np.float64(3.5)}})

    image = np.arange(224 * 224 * 3, dtype=np.uint32).astype(np.uint8).reshape(224, 224, 3)
    state = np.linspace(0, 1, 8)
    with serving(answer) as address:
        policy = PolicyClient(address)
        assert policy.metadata == {"model": "fake"}
        obs = {**OBS, "observation/image": image, "observation/state": state}
        result = policy.infer(obs)
        policy.close()
    np.testing.assert_array_equal(result["actions"], np.arange(70).reshape(10, 7))
    assert result["policy_timing"]["infer_ms"] == 3.5
    (got,) = seen
    assert set(got) == set(obs) and got["prompt"] == "do it"
    np.testing.assert_array_equal(got["observation/image"], image)
    np.testing.assert_array_equal(got["observation/state"], state)
    assert got["observation/state"].dtype == np.float64


def test_a_servers_traceback_becomes_an_error_and_the_next_episode_connects_again() -> None:
    calls: list[int] = []

    def answer(obs: dict[str, Any]) -> bytes | str:
        calls.append(1)
        if len(calls) == 1:
            return "Traceback (most recent call last):\n  File x\nValueError: bad state\n"
        return openpi_pack({"actions": np.zeros((10, 7))})

    with serving(answer) as address:
        policy = PolicyClient(address)
        with pytest.raises(ServerError, match=f"{address} reported: ValueError: bad state$"):
            policy.infer(OBS)
        policy.reset()
        assert policy.infer(OBS)["actions"].shape == (10, 7)
        policy.close()


def test_a_dropped_connection_is_an_error_of_the_episode() -> None:
    protocol = Protocol("libero_spatial", tasks=(0,), trials=1, steps=(None,), max_steps=5)
    key = EpisodeKey(None, 0, 0)
    with serving(lambda obs: None) as address:
        policies = PolicyBySteps(PolicyClient(address))
        actor = PolicyActor(policies, LIBERO, protocol, send_noise=False)
        result = run_episode(FakeEnv(), TASK, actor, key, protocol)
    assert result.outcome == "error"
    assert result.error is not None and "no answer" in result.error


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ("a web page", "expected metadata, got text: 'a web page'"),
        (b"\xc1", "expected a plain value"),
        (b"\x01", "expected a map"),
    ],
)
def test_a_server_of_another_kind_is_refused(hello: bytes | str, message: str) -> None:
    with serving(lambda obs: None, hello) as address, pytest.raises(ServerError, match=message):
        PolicyClient(address)


def test_an_answer_without_actions_is_refused() -> None:
    wrong = pytest.raises(ServerError, match=r"expected actions in its answer, got \['state'\]")
    with serving(lambda obs: openpi_pack({"state": 1})) as address, PolicyClient(address) as policy, wrong:
        policy.infer(OBS)


def test_an_answer_that_came_too_late_or_after_an_interrupt_is_not_the_next_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def answer(obs: dict[str, Any]) -> bytes:
        calls.append(1)
        return openpi_pack({"actions": np.full((10, 7), float(len(calls)))})

    for stop in (KeyboardInterrupt, TimeoutError):
        calls.clear()
        with serving(answer) as address, PolicyClient(address) as policy:

            def interrupt(timeout: float, stop: type[BaseException] = stop) -> bytes:
                eventually(lambda: bool(calls))
                raise stop

            policy._connection.recv = interrupt
            with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else ServerError):
                policy.infer(OBS)
            policy.reset()
            assert policy.infer(OBS)["actions"][0, 0] == len(calls) == 2


def test_nobody_there_is_one_clear_error() -> None:
    with silent_port() as port, pytest.raises(ServerError, match=f"ws://127.0.0.1:{port}: cannot connect"):
        PolicyClient(f"ws://127.0.0.1:{port}")
