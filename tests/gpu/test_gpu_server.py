"""The server on GPUs: replicas answer as the policy in this process does, a GPU may stand twice in the list, and one
that dies comes back on its own device; a policy that is put away leaves the GPU."""

from __future__ import annotations

import gc
import os
import signal

import numpy as np
import pytest
import torch

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.server_support import metric
from tests.support.waiting import eventually
from vla_accel import OptimizedPolicy
from vla_accel.cli.options import StepOptions
from vla_accel.cli.serve import Load, LoadSeveral
from vla_accel.client import PolicyClient
from vla_accel.machine import resolve_devices
from vla_accel.server import Replicas, ServerConfig, background
from vla_accel.server.metrics import gpus

pytestmark = pytest.mark.gpu


def test_replicas_on_gpus_answer_as_the_policy_here_and_one_that_dies_comes_back() -> None:
    # Every GPU, or the only one twice.
    devices = resolve_devices("all") if torch.cuda.device_count() > 1 else ("cuda:0", "cuda:0")
    local = OptimizedPolicy.from_pretrained("demo", "native", device="cuda", num_steps=3)
    observation = local.processor.example()
    expected = local.infer(observation)["actions"]
    with background(Replicas(Load("demo", "native", StepOptions(3)), devices), ServerConfig(port=0)) as server:
        replicas = server.dispatcher.replicas

        def answers() -> None:
            with PolicyClient(server.address) as client:
                for _ in replicas:  # in turn; each one's first noise is the configured seed's
                    answer = client.infer(observation)
                    assert answer["engines"][0]["used"] == "native"
                    np.testing.assert_allclose(answer["actions"], expected, rtol=0, atol=1e-3)

        answers()
        os.kill(replicas[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        eventually(lambda: len(server.dispatcher.loaded) == len(devices) - 1)
        eventually(lambda: len(server.dispatcher.loaded) == len(devices), within_s=300)
        assert metric(server.address, f'vla_accel_replica_deaths_total{{replica="0 {devices[0]}"}}') == 1


def in_use() -> int:
    """Bytes that this process's tensors and graphs have reserved on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_policy_that_is_put_away_leaves_the_gpu() -> None:
    load = Load("demo", "native", StepOptions(3))
    policy = load("cuda")
    observation = policy.processor.example()
    expected = policy.infer(observation)["actions"]
    weights = sum(tensor.numel() for tensor in policy.model.state_dict().values())
    del policy
    before = in_use()  # what stays with the process, such as cuBLAS's workspaces, is there from the first call on
    policy, size = load.sized("cuda")
    assert size > weights, "at least a byte each"
    del policy
    assert in_use() - before < size / 2

    shelf = LoadSeveral({"one": load, "two": load}, budget=3 * size // 2)("cuda")
    shelf.start()
    assert shelf.loaded == ["one"], "both are loaded at the start, and one has room"
    for name in ("two", "one", "two"):
        answer = shelf.get(name).policy.infer(observation)  # its first noise is the configured seed's
        np.testing.assert_allclose(answer["actions"], expected, rtol=0, atol=1e-3)
        assert shelf.loaded == [name] and in_use() - before < 3 * size // 2


def test_the_driver_tells_memory_and_clock() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    here = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    states = gpus()
    assert len(states) >= 1 and max(state.memory_used_bytes for state in states) > here.numel()
    assert all(0 < state.memory_used_bytes <= state.memory_total_bytes and state.clock_hertz > 0 for state in states)
