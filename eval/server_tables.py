"""Tables of the server: what it adds to a call, and a run of load and faults. Knows their reports, no other result."""

from __future__ import annotations

from typing import Any

from eval.markdown import machine, rows


def server(result: dict[str, Any]) -> str:
    """A row a number of clients."""
    header = ["clients", "requests/s", "round trip", "p99", "of it waiting", "added", "p99"]
    body = [
        [
            str(row["clients"]),
            f"{row['per_second']:.0f}",
            f"{row['round_trip_ms']['p50']:.2f}",
            f"{row['round_trip_ms']['p99']:.2f}",
            f"{row['queue_ms']['p50']:.2f}",
            f"{row['added_ms']['p50']:.2f}",
            f"{row['added_ms']['p99']:.2f}",
        ]
        for row in result["rows"]
    ]
    one, costs = result["rows"][0]["parts_ms"], result["costs"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in one.items())
    policy = "a policy that costs nothing" if result["policy"] == "nothing" else result["policy"]
    client, place = costs["client_ms"], f"{machine(result)}, {result['hardware']['cores']} cores"
    return (
        rows(header, body)
        + f"\nMilliseconds, {policy}. Of one client's call: {parts}. The client encodes in {client['encode']:.2f} "
        f"and decodes in {client['decode']:.2f}; the same bytes over a bare socket and back take "
        f"{costs['bare_socket_ms']:.2f}. {place} that clients, server and others share (load "
        f"{result['load_average']:.1f} before the run).\n"
    )


def faults(result: dict[str, Any]) -> str:
    """What a run of load and faults did, and what it cost."""
    done, told, trip = result["done"], result["server"], result["round_trip_ms"]
    body = [
        ["requests of well-behaved clients", f"{result['requests']} in {result['seconds']:.0f} s"],
        ["answers lost", f"**{result['lost']}**"],
        ["replicas that died, requests computed again", f"{told['deaths']}, {told['retried']}"],
        ["connections with rubbish, slow readers", f"{done['hostile']}, {done['slow_readers']}"],
        ["round trip p50, p99, longest (ms)", f"{trip['p50']:.1f}, {trip['p99']:.1f}, {trip['max']:.0f}"],
    ]
    place = f"{machine(result)}, {result['hardware']['cores']} cores"
    return rows(["", f"{result['clients']} clients"], body) + f"\nA policy that costs nothing, twice. {place}.\n"
