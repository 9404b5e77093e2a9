"""`serve --ray`: replicas on the nodes of a cluster lose no answer, and errors are clear."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="NOT RUN: needs ray")

from tests.support.ray_support import cluster_of
from tests.support.server_support import ProcessPolicy, Unloadable, expected_actions, local, metric, observation
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel import machine
from vla_accel.cli import main
from vla_accel.client import PolicyClient
from vla_accel.errors import CheckpointError, ConfigError, EngineError
from vla_accel.server import RayReplicas, background, ray_replica

# Ray's own.
pytestmark = pytest.mark.filterwarnings("ignore")
LOCAL = local()


class PlacedPolicy(ProcessPolicy):
    """Says which node it is on, too."""

    def infer(self, observation: Any) -> dict[str, Any]:
        import ray

        return {**super().infer(observation), "node": ray.get_runtime_context().get_node_id()}


@contextlib.contextmanager
def served(cluster: Any, load: Any = PlacedPolicy, device: str = "auto") -> Iterator[Any]:
    with background(RayReplicas(load, cluster.address, device, machine.software), LOCAL) as server:
        yield server


def ask(address: str, times: int, prompt: str = "") -> list[dict[str, Any]]:
    with PolicyClient(address) as client:
        answers = [client.infer({**observation(i), "prompt": prompt}) for i in range(times)]
    for index, answer in enumerate(answers):
        np.testing.assert_array_equal(answer["actions"], expected_actions(observation(index)["observation/state"]))
    return answers


@pytest.mark.slow
def test_replicas_on_two_nodes_lose_no_answer_whatever_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of({"num_cpus": 1}, {"num_cpus": 1}) as cluster, served(cluster) as server:
        address, nodes = server.address, {node.node_id for node in cluster.worker_nodes}
        answers = ask(address, 4)
        assert {answer["node"] for answer in answers} == nodes, "they take turns"
        assert all(answer["server_timing"]["handover_ms"] >= 0 for answer in answers)

        # One process is killed while both work.
        waiting = f"wait {tmp_path / 'go'}"
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, address, 1, waiting) for _ in range(2)]
            eventually(lambda: metric(address, "vla_accel_running_requests") == 2)
            os.kill(answers[0]["pid"], signal.SIGKILL)
            eventually(lambda: metric(address, "vla_accel_retried_total") == 1)
            (tmp_path / "go").touch()
            (first,), (second,) = (future.result(PATIENCE_S) for future in asked)
        assert answers[0]["pid"] not in (first["pid"], second["pid"])
        eventually(lambda: metric(address, "vla_accel_replicas") == 2)

        # A node goes: its replica is started where there is room.
        monkeypatch.setattr(ray_replica, "PLACEMENT_TIMEOUT_S", 20.0)  # of an attempt on the node that is gone
        gone = next(node for node in cluster.worker_nodes if node.node_id == second["node"])
        cluster.remove_node(gone, allow_graceful=False)
        eventually(lambda: len(ask(address, 1)) == sum(server.metrics.counters["replica_deaths"].values()) - 1)
        eventually(lambda: metric(address, "vla_accel_replicas") == 2)
        assert gone.node_id not in {answer["node"] for answer in ask(address, 4)}


@pytest.mark.slow
def test_what_cannot_be_served_is_one_error() -> None:
    import ray

    with cluster_of({"num_cpus": 1}) as cluster:
        for error, kind, said in (
            (CheckpointError("x.safetensors: damaged"), CheckpointError, r"replica 0 [\d.]+/\w{6}: x.safetensors: dam"),
            (KeyError("layer"), EngineError, r"replica 0 [\d.]+/\w{6}: KeyError: 'layer'"),
        ):
            with pytest.raises(kind, match=said), served(cluster, Unloadable(error)):
                raise AssertionError("it must not serve")
            ray.shutdown()
        with (
            pytest.raises(ConfigError, match="device: expected a GPU in the Ray cluster"),
            served(cluster, device="cuda"),
        ):
            raise AssertionError("it must not serve")
        ray.shutdown()
        cluster.add_node(num_cpus=1, env_vars={"VLA_ACCEL_COMMIT": "0ff1ce"})
        told = r"node [\d.]+/\w{6}: expected the versions of this machine, got commit 0ff1ce \(here "
        with pytest.raises(EngineError, match=told), served(cluster):
            raise AssertionError("it must not serve")


def test_an_address_where_no_cluster_is_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--ray", "127.0.0.1:1"], "ray: expected a cluster at 127.0.0.1:1, "),
        (["--ray", "auto", "--devices", "cpu"], "devices: expected --devices alone, got --device or --ray, too"),
    ):
        assert main(["serve", "demo", "--port", "0", *words]) == 1
        assert said in capsys.readouterr().err
