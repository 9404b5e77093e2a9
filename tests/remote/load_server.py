"""Load on a policy server over loopback: `python tests/remote/load_server.py --seconds 60`. Ends with one JSON line.

Every client asks with numbers of its own and checks every answer against them, so a lost or crossed answer cannot go
unnoticed. Requests are bounded by time and by count. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
MOST_REQUESTS = 2_000_000


def load(address: str, clients: int, seconds: float) -> dict[str, Any]:
    """What `clients` threads, each with a connection, saw in `seconds`."""
    from tests.support.server_support import expected_actions, metric
    from vla_accel.client import PolicyClient

    counts, latencies, problems = [0] * clients, [[] for _ in range(clients)], []
    image = np.zeros((224, 224, 3), np.uint8)
    memory = []
    begin, end = threading.Barrier(clients + 1), [0.0]

    def one(index: int) -> None:
        try:
            with PolicyClient(address, timeout_s=30) as policy:
                begin.wait(30)
                while time.monotonic() < end[0] and counts[index] < MOST_REQUESTS // clients:
                    state = np.array([index, counts[index], *np.random.default_rng(counts[index]).random(6)])
                    start = time.perf_counter()
                    answer = policy.infer({"observation/image": image, "observation/state": state, "prompt": "load"})
                    latencies[index].append(time.perf_counter() - start)
                    if not np.array_equal(answer["actions"], expected_actions(state)):
                        problems.append(f"client {index} got another's answer to request {counts[index]}")
                    counts[index] += 1
        except Exception as error:
            problems.append(f"client {index}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    end[0] = start + seconds
    begin.wait(30)
    while any(t.is_alive() for t in threads):
        if len(memory) < 10_000:
            memory.append(metric(address, "process_resident_memory_bytes"))
        time.sleep(min(1.0, seconds / 10))
    took = time.monotonic() - start
    every = np.array([s for row in latencies for s in row]) * 1e3
    settled = memory[len(memory) // 4 :] or memory
    answered = metric(address, 'vla_accel_requests_total{outcome="ok"}')
    if answered != sum(counts):
        problems.append(f"the server counts {answered:.0f} answers, the clients {sum(counts)}")
    return {
        "clients": clients,
        "seconds": round(took, 1),
        "requests": sum(counts),
        "per_second": round(sum(counts) / took, 1),
        "least_and_most_of_a_client": [min(counts), max(counts)],
        "ms_p50_p99_max": [round(float(np.percentile(every, q)), 2) for q in (50, 99, 100)] if every.size else [],
        "memory_mib_settled_and_peak": [round(min(settled) / 2**20, 1), round(max(memory) / 2**20, 1)],
        "problems": problems[:5],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-batch", type=int, default=1)
    words = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.support.server_support import server_process

    with server_process("--max-batch", str(words.max_batch)) as (address, process):
        result = load(address, words.clients, words.seconds)
    result |= {"max_batch": words.max_batch, "server_exit": process.returncode}
    print(json.dumps(result))
    return 1 if result["problems"] or process.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
