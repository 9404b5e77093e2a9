"""Tables and a picture of the server: what it adds to a call, what several GPUs give, a run of load and faults. Knows
their reports, no other result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.markdown import machine, machines, rows
from vla_accel.report import charts

GPUS_PICTURE = "bench_server_gpus.png"


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
    one, costs = result["rows"][0]["parts_ms"], result["costs"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in one.items())
    woken = f", {costs['bare_socket_woken_ms']:.2f} after a pause" if "bare_socket_woken_ms" in costs else ""
    policy = "a policy that costs nothing" if result["policy"] == "nothing" else result["policy"]
    client, place = costs["client_ms"], f"{machine(result)}, {result['hardware']['cores']} cores"
    return (
        rows(header, body)
        + f"\nMilliseconds, {policy}; added: the round trip without policy and waiting. Of one client's call: {parts}. "
        f"The client encodes in {client['encode']:.2f} and decodes in {client['decode']:.2f}; the same bytes over a "
        f"bare socket and back take {costs['bare_socket_ms']:.2f}{woken}. {place} that clients, server and others "
        f"share (load {result['load_average']:.1f} before the run).\n"
    )


def server_gpus(results: Sequence[dict[str, Any]]) -> str:
    """A row a policy, number of replicas and number of clients; needs the picture beside the results. Runs of one GPU
    and of several are only compared where their machine has as many cores, which all of them share."""
    header = ["policy", "GPUs", "clients", "requests/s", "one GPU's", "round trip", "p99", "of it policy"]
    alone = {
        (result["policy"], result["hardware"]["cores"], row["clients"]): row["per_second"]
        for result in results
        if _gpus(result) == 1
        for row in result["rows"]
    }
    body = []
    for result in sorted(results, key=lambda r: (r["policy"], _gpus(r))):
        for row in result["rows"]:
            one = alone.get((result["policy"], result["hardware"]["cores"], row["clients"]))
            body.append([
                result["policy"],
                str(_gpus(result)),
                str(row["clients"]),
                f"{row['per_second']:.0f}",
                "-" if one is None else f"{row['per_second'] / one:.2f}×",
                f"{row['round_trip_ms']['p50']:.2f}",
                f"{row['round_trip_ms']['p99']:.2f}",
                f"{row['infer_ms']['p50']:.2f}",
            ])  # fmt: skip
    where = machines((f"{r['policy']} on {_gpus(r)}", r) for r in results)
    cores = " and ".join(dict.fromkeys(str(r["hardware"]["cores"]) for r in results))
    return (
        rows(header, body)
        + f"\nMilliseconds; one observation at a time on each GPU. {where}, {cores} cores that all share.\n\n"
        f"![Requests a second against clients, one GPU and more](../eval/results/{GPUS_PICTURE})\n"
    )


def draw_server_gpus(results: Sequence[dict[str, Any]]) -> Any:
    """Requests a second against clients, a line a policy and number of replicas: a matplotlib figure."""
    lines = {
        f"{r['policy']}, {_gpus(r)} GPU{'s' * (_gpus(r) > 1)}": [(w["clients"], w["per_second"]) for w in r["rows"]]
        for r in sorted(results, key=lambda r: (r["policy"], _gpus(r)))
    }
    return charts.lines(lines, x="clients at once", y="requests a second")


def _gpus(result: dict[str, Any]) -> int:
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
