"""The table of `vla-accel bench-server`: what the server adds to a call. Knows the report, no other result."""

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
