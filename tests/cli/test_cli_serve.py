"""`vla-accel serve` as users start it: the bundled checkpoint, the key, SIGTERM; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from concurrent.futures import ThreadPoolExecutor

from tests.support.server_support import get, metric, serve_command
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.client import PolicyClient
from vla_accel.errors import ServerError
from vla_accel.server import ServerConfig

CONFIG = "configs/eager_fp32.yaml"


def test_the_bundled_checkpoint_is_served_and_answers_as_in_process(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a secret\n")
    words = ("--config", CONFIG, "--num-steps", "2", "--device", "cpu", "--api-key-file", str(key))
    local = OptimizedPolicy.from_pretrained("demo", CONFIG, device="cpu", num_steps=2)
    frame = dict(local.processor.example())
    expected = [local.infer(frame)["actions"] for _ in range(2)]
    with serve_command(*words) as address:
        with pytest.raises(ServerError, match="HTTP 401"):
            PolicyClient(address)
        with PolicyClient(address, api_key="a secret") as client:
            assert client.metadata["policy"] == "demo" and client.metadata["num_steps"] == 2
            for actions in expected:  # the noise of both begins with the configured seed
                np.testing.assert_allclose(client.infer(frame)["actions"], actions, rtol=0, atol=1e-5)
            with pytest.raises(ServerError, match="reported: ObservationError: observation/state: expected shape"):
                client.infer({**frame, "observation/state": np.zeros(7)})
            result = client.infer(frame)
            assert result["engines"][0]["component"] == "vision"
        page = get(address, "/metrics", {"Authorization": "Api-Key a secret"})[2]
    for component in ("preprocess", "vision", "kv_cache", "denoise", "postprocess", "total"):
        assert f'vla_accel_component_seconds_count{{component="{component}"}} 3' in page


@pytest.mark.slow
def test_a_real_policy_answers_batches_of_different_observations(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny")
    words = (str(tmp_path / "tiny"), "--config", CONFIG, "--device", "cpu", "--max-batch", "4")
    with serve_command(*words, "--max-wait-ms", "3600000") as address, ThreadPoolExecutor(4) as pool:
        # A full batch waits for nobody, and nobody goes alone.
        clients = [PolicyClient(address) for _ in range(4)]

        def ask(index: int) -> dict:
            return clients[index].infer(tiny_observation(index, "pick up the bowl" if index % 2 else "pick it"))

        results = list(pool.map(ask, range(4)))
        assert {r["server_timing"]["batch"] for r in results} == {4}
        for index, result in enumerate(results):
            np.testing.assert_array_equal(result["state"], tiny_observation(index)["observation/state"])
        assert metric(address, "vla_accel_batch_size_sum") == 16
        wrongs: list[dict[str, Any]] = [{"prompt": b"pick \xff"}, {"observation/state": np.full(8, b"12")}, {}, {}]
        asked = [pool.submit(c.infer, {**tiny_observation(), **w}) for c, w in zip(clients, wrongs, strict=True)]
        with pytest.raises(ServerError, match="ObservationError: prompt: expected text in UTF-8"):
            asked[0].result()
        with pytest.raises(ServerError, match=r"ObservationError: observation/state: .* got dtype \|S2"):
            asked[1].result()
        assert all("actions" in one.result() for one in asked[2:])
        for client in clients:
            client.close()
        assert metric(address, 'vla_accel_requests_total{outcome="bad request"}') == 2


@pytest.mark.slow
def test_two_processes_answer_as_one_policy(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny")
    expected = OptimizedPolicy.from_pretrained(tmp_path / "tiny", CONFIG, device="cpu").infer(tiny_observation())
    with serve_command(str(tmp_path / "tiny"), "--config", CONFIG, "--devices", "cpu,cpu") as address:
        with PolicyClient(address) as client:
            for _ in range(2):  # each process draws its first noise
                got = client.infer(tiny_observation())
                np.testing.assert_allclose(got["actions"], expected["actions"], rtol=0, atol=1e-5)
        page = get(address, "/metrics")[2]
    for name in ("0 cpu", "1 cpu"):
        assert f'vla_accel_replica_requests_total{{replica="{name}"}} 1' in page


@pytest.mark.slow
def test_two_policies_are_served_and_one_is_put_away_and_loaded_again(tmp_path: Path) -> None:
    expected = {}
    for seed, name in enumerate(("first", "second")):
        write_tiny_checkpoint(tmp_path / name, seed=seed)
        policy = OptimizedPolicy.from_pretrained(tmp_path / name, CONFIG, device="cpu")
        expected[name] = policy.infer(tiny_observation())["actions"]
    words = [w for n in expected for w in ("--policy", f"{n}={CONFIG}:{tmp_path / n}")]
    with serve_command(*words, "--device", "cpu", "--memory-budget-gib", "1e-5") as address:
        for name, actions in expected.items():
            with PolicyClient(f"{address}/{name}") as client:
                got = client.infer(tiny_observation())["actions"]
                np.testing.assert_allclose(got, actions, rtol=0, atol=1e-5)


def test_who_can_reach_an_address() -> None:
    assert [ServerConfig(h).public for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [False] * 4
    assert [ServerConfig(h).public for h in ("0.0.0.0", "::", "192.168.1.5", "robot", "")] == [True] * 5
