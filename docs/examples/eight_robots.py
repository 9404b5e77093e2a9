# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["vla_accel[serve]"]
#
# [tool.uv.sources]
# vla_accel = { path = "../..", editable = true }
# ///
"""Serve eight robots: requests of different robots are batched and take turns.

uv run docs/examples/eight_robots.py
"""

from __future__ import annotations

import sys
import threading
import time

from vla_accel import OptimizedPolicy
from vla_accel.client import PolicyClient
from vla_accel.server import ServerConfig, background

ROBOTS, CALLS = 8, 20


def robot(address: str, observation: dict, waits: list[float]) -> None:
    """Request chunks one after another and record their times in milliseconds."""
    with PolicyClient(address) as client:
        for _ in range(CALLS):
            started = time.perf_counter()
            client.infer(observation)
            waits.append(1e3 * (time.perf_counter() - started))


def run(policy: OptimizedPolicy) -> list[list[float]]:
    """Serve the policy to `ROBOTS` threads and return the times of each."""
    waits: list[list[float]] = [[] for _ in range(ROBOTS)]
    with background(policy, ServerConfig(port=0, max_batch=4, max_wait_s=0.002)) as server:
        threads = [
            threading.Thread(target=robot, args=(server.address, policy.processor.example(), one)) for one in waits
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return waits


if __name__ == "__main__":
    for number, waited in enumerate(run(OptimizedPolicy.from_pretrained((sys.argv[1:] or ["demo"])[0]))):
        print(f"robot {number}: median {sorted(waited)[len(waited) // 2]:.1f} ms, longest {max(waited):.1f} ms")
