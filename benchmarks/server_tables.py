"""Tables and a picture of the server: what it adds to a call, what several GPUs give, a run of load and faults. Knows
their reports, no other result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import machine, machines, rows
from vla_accel.report import charts

GPUS_PICTURE = "bench_server_gpus.png"
GOAL_MS = 0.5
"""What the server may add to one client's call."""


def server(result: dict[str, Any]) -> str:
    """A row a number of clients."""
    header = ["clients", "requests/s", "round trip", "its p99", "of it waiting", "added", "its p99"]
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
    one, costs = result["rows"][0], result["costs"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in one["parts_ms"].items())
    woken = f", {costs['bare_socket_woken_ms']:.2f} after a pause" if "bare_socket_woken_ms" in costs else ""
    policy = "a policy that costs nothing" if result["policy"] == "nothing" else result["policy"]
    policy += ", in a process of its own" if result["devices"] else ", in the server's process"
    client, place = costs["client_ms"], f"{machine(result)}, {result['hardware']['cores']} cores"
    return (
        rows(header, body)
        + f"\nMilliseconds, {policy}; added: the round trip without policy and waiting. Of one client's call: {parts}. "
        f"The client encodes in {client['encode']:.2f} and decodes in {client['decode']:.2f}; the same bytes over a "
        f"bare socket and back take {costs['bare_socket_ms']:.2f}{woken}. {place} that clients, server and others "
        f"share (load {result['load_average']:.1f} before the run).\n\n{_against_the_goal(one)}\n"
    )


def _against_the_goal(one: dict[str, Any]) -> str:
    """What one client's row says of `GOAL_MS`, and where the time goes, the largest part first."""
    added, over = one["added_ms"]["p50"], one["added_ms"]["p50"] - GOAL_MS
    if over <= 0:
        return f"The goal of at most {GOAL_MS} ms added to one client's call is met."
    first, second, *_ = sorted(one["parts_ms"].items(), key=lambda part: -part[1])
    return (
        f"The goal of at most {GOAL_MS} ms added to one client's call is missed by {over:.2f} ms. Most of the "
        f"{added:.2f} is {first[0]} ({first[1]:.2f}), then {second[0]} ({second[1]:.2f})."
    )


def server_gpus(results: Sequence[dict[str, Any]]) -> str:
    """A replica on each GPU: a row a policy, number of GPUs and number of clients; needs the picture beside the
    results. Runs of one GPU and of several are only compared where their machine has as many cores, which all of them
    share."""
    header = ["policy", "GPUs", "clients", "requests/s", "one GPU's", "round trip", "p99", "of it policy"]
    alone = {
        (result["policy"], result["hardware"]["cores"], row["clients"]): row["per_second"]
        for result in results
        if _replicas(result) == 1
        for row in result["rows"]
    }
    body = []
    for result in sorted(results, key=lambda r: (r["policy"], _replicas(r))):
        for row in result["rows"]:
            one = alone.get((result["policy"], result["hardware"]["cores"], row["clients"]))
            body.append([
                result["policy"],
                str(_replicas(result)),
                str(row["clients"]),
                f"{row['per_second']:.0f}",
                "-" if one is None else f"{row['per_second'] / one:.2f}×",
                f"{row['round_trip_ms']['p50']:.2f}",
                f"{row['round_trip_ms']['p99']:.2f}",
                f"{row['infer_ms']['p50']:.2f}",
            ])  # fmt: skip
    where = machines((f"{r['policy']} on {_replicas(r)}", r) for r in results)
    cores = " and ".join(dict.fromkeys(str(r["hardware"]["cores"]) for r in results))
    return (
        rows(header, body)
        + f"\nMilliseconds; one observation at a time in each process. {where}, {cores} cores that all share.\n"
        f"\n![Requests a second against clients, one GPU and more](../benchmarks/results/{GPUS_PICTURE})\n"
    )


def draw_server_gpus(results: Sequence[dict[str, Any]]) -> Any:
    """Requests a second against clients, a line a policy and number of replicas: a matplotlib figure."""
    lines = {
        f"{r['policy']}, {_replicas(r)} GPU{'s' * (_replicas(r) > 1)}": [
            (w["clients"], w["per_second"]) for w in r["rows"]
        ]
        for r in sorted(results, key=lambda r: (r["policy"], _replicas(r)))
    }
    return charts.lines(lines, x="clients at once", y="requests a second")


def _replicas(result: dict[str, Any]) -> int:
    return len(result["devices"] or [None])


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
    if (back := result.get("back_s")) is not None:
        body.append(["until it served again: median, longest (s)", f"{back['median']:.1f}, {back['max']:.1f}"])
    place = f"{machine(result)}, {result['hardware']['cores']} cores"
    policy, devices = result.get("policy", "nothing"), result.get("devices", ["cpu", "cpu"])
    what = (
        "A policy that costs nothing, in two processes"
        if policy == "nothing"
        else f"{policy} on {' and '.join(devices)}"
    )
    return rows(["", f"{result['clients']} clients"], body) + f"\n{what}. {place}.\n"
