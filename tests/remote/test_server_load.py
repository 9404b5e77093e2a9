"""Many clients at once: nothing lost, nothing crossed, turns fair, memory bounded. `load_server.py` runs it longer."""

from __future__ import annotations

import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.remote.load_server import load
from tests.support.server_support import server_process

SECONDS = 4.0


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [1, 8])
def test_32_clients_at_once(max_batch: int) -> None:
    with server_process("--max-batch", str(max_batch)) as (address, process):
        result = load(address, 32, SECONDS)
    assert result["problems"] == []
    assert process.returncode == 0
    least, most = result["least_and_most_of_a_client"]
    # Turns are fair; a slow machine makes few.
    assert least >= 0.5 * most - 5 and most > 0, result
    settled, peak = result["memory_mib_settled_and_peak"]
    assert peak - settled < 60, result
