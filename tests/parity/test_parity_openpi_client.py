"""openpi's own client, from PyPI and in its own environment, against this server.

Needs `--openpi-client-python=PATH`; without it every test here is skipped and says so. Three processes: the server with
the bundled checkpoint, started as users start it; openpi's client; and this one, with the simulator in its hands.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.openpi_wire import openpi_pack, openpi_unpack
from tests.support.server_support import EchoPolicy, expected_actions, metric, observation, port_of, serve_command
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.server import ServerConfig, background

pytestmark = pytest.mark.parity
BRIDGE = Path(__file__).parents[1] / "references" / "openpi_client_bridge.py"


class OpenpiClient:
    """openpi's `WebsocketClientPolicy` in its process: `infer`, `reset` and `metadata`."""

    def __init__(self, python: str, address: str, key: str = "-", *, chunk: int | None = None) -> None:
        words = [python, str(BRIDGE), "127.0.0.1", str(port_of(address)), key, *([] if chunk is None else [str(chunk)])]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            hello = self._read()
        except ConnectionError:
            self.close()
            raise
        self.metadata, self.versions = hello["metadata"], hello["versions"]

    def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        data = openpi_pack({"obs": dict(obs)})
        self._process.stdin.write(struct.pack(">Q", len(data)) + data)
        self._process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def reset(self) -> None:
        """openpi's does nothing either."""

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        head = self._process.stdout.read(8)
        if not head:
            raise ConnectionError("openpi's client ended")
        return openpi_unpack(self._process.stdout.read(struct.unpack(">Q", head)[0]))


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    path = request.config.getoption("--openpi-client-python")
    if not path:
        pytest.skip("NOT RUN: needs --openpi-client-python (see CONTRIBUTING)")
    return str(path)


def test_openpis_client_gets_metadata_answers_and_errors(python: str) -> None:
    with background(EchoPolicy(), ServerConfig(port=0, api_key="secret")) as server:
        client = OpenpiClient(python, server.address, "secret")
        assert client.versions["openpi-client"] == "0.1.2" and client.versions["numpy"].startswith("1.")
        assert client.metadata["policy"] == "echo"
        for index in range(3):
            obs = observation(index, 2, image=True)
            result = client.infer(obs)
            np.testing.assert_array_equal(result["actions"], expected_actions(obs["observation/state"]))
            assert result["server_timing"]["infer_ms"] > 0
        with pytest.raises(RuntimeError, match="Error in inference server:\nObservationError: observation: missing"):
            client.infer({"prompt": "x"})
        client.close()
        again = OpenpiClient(python, server.address, "secret")
        assert again.infer(observation(4))["actions"][0, 0] == 4
        again.close()
        with pytest.raises(ConnectionError):
            OpenpiClient(python, server.address, "wrong")


def test_openpis_broker_hands_out_a_chunk_that_is_longer_than_the_state(python: str, tmp_path: Path) -> None:
    folder, horizon = tmp_path / "checkpoint", 12
    write_tiny_checkpoint(folder, action_horizon=horizon)
    policy = OptimizedPolicy.from_pretrained(folder, {"device": "cpu", "num_steps": 1})
    with background(policy, ServerConfig(port=0)) as server:
        client = OpenpiClient(python, server.address, chunk=horizon)
        steps = [client.infer(tiny_observation(0)) for _ in range(horizon + 1)]
        client.close()
        assert metric(server.address, 'vla_accel_requests_total{outcome="ok"}') == 2, "one for each chunk"
    policy.reset()
    chunk = policy.infer(tiny_observation(0))["actions"]
    np.testing.assert_array_equal([step["actions"] for step in steps[:horizon]], chunk)


@pytest.mark.slow
def test_openpis_client_plays_a_whole_libero_episode(python: str) -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    from eval.harness.policies import PolicyActor
    from eval.harness.protocol import EpisodeKey, Protocol
    from eval.harness.rollout import run_episode
    from eval.libero.benchmark import LIBERO

    suite = LIBERO.load_suite("libero_spatial")
    protocol = Protocol(
        suite.name, tasks=(0,), trials=1, steps=(None,), max_steps=suite.max_steps, settings=LIBERO.settings
    )
    task = suite.tasks[0]
    with serve_command("--config", "configs/eager.yaml", "--num-steps", "3", "--device", "cpu") as address:
        client = OpenpiClient(python, address)
        assert client.metadata["policy"] == "demo" and client.metadata["num_steps"] == 3
        actor = PolicyActor(lambda steps: client, LIBERO, protocol, send_noise=False)
        env = LIBERO.make_environment(task, protocol.settings, True)
        try:
            result = run_episode(env, task, actor, EpisodeKey(None, 0, 0), protocol)
        finally:
            env.close()
        asked = metric(address, 'vla_accel_requests_total{outcome="ok"}')
        client.close()
    print(f"\n{result.outcome}: {result.env_steps} actions, {result.infer_count} requests, {result.wall_s:.1f} s")
    assert result.error is None
    assert result.outcome == "success"
    assert result.infer_count == asked == -(-result.env_steps // protocol.replan_steps)
