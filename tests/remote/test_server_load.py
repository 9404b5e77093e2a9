"""Many clients at once: no answer is lost or mixed up, turns are fair, memory is bounded."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis", reason="the fuzzer needs hypothesis")

from tests.remote.load_server import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("max_batch", [1, 8])
def test_32_clients_at_once(max_batch: int) -> None:
    result = run(32, 4.0, max_batch=max_batch)
    assert result["lost"] == 0, result["problems"]
    least, most = result["fewest_and_most_of_a_client"]
    # Turns are fair; a slow machine makes few.
    assert least >= 0.5 * most - 5 and most > 0, result
    settled, peak = result["memory_mib_settled_and_peak"]
    assert peak - settled < 100, result
    assert result["server"]["requests"] == {"ok": result["requests"]}


def test_garbage_slow_readers_and_killed_replicas_lose_no_answer() -> None:
    result = run(16, 8.0, kill_every_s=3.0)
    assert result["lost"] == 0, result["problems"]
    done, server = result["done"], result["server"]
    assert min(done.values()) >= 1 and server["deaths"] >= 1, result
    assert server["requests"]["bad request"] >= 1 and server["refused"]["slow reader"] >= 1, result
