"""Tables of the server: what it adds to a call, several GPUs, and a run with faults."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables.table import Row, blocks, machine, machines, picture, plural, table

GPUS_PICTURE = "bench_server_gpus.png"
GOAL_MS = 0.5
"""Most that the server may add to the call of one client."""


def server(result: Row) -> str:
    """Calls over a server by the number of clients."""
    one, costs = result["rows"][0], result["costs"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in one["parts_ms"].items())
    woken = f", {costs['bare_socket_woken_ms']:.2f} after a pause" if "bare_socket_woken_ms" in costs else ""
    policy = "a policy that computes nothing" if result["policy"] == "nothing" else result["policy"]
    process = "in a process of its own" if result["devices"] else "in the server's process"
    return table(
        "clients = {clients} | requests/s = {per_second:.0f} | round trip = {round_trip_ms[p50]:.2f} | "
        "its p99 = {round_trip_ms[p99]:.2f} | in the queue = {queue_ms[p50]:.2f} | added = {added_ms[p50]:.2f} | "
        "added, p99 = {added_ms[p99]:.2f}",
        result["rows"],
        f"Milliseconds, {policy}, {process}. Added: the round trip minus policy and queue. Parts of one client's call: "
        f"{parts}. The client encodes in {costs['client_ms']['encode']:.2f} and decodes in "
        f"{costs['client_ms']['decode']:.2f}; a round trip of the same bytes over a bare socket takes "
        f"{costs['bare_socket_ms']:.2f}{woken}. {machine(result)}, {result['hardware']['cores']} cores that clients, "
        f"server and others share (load {result['load_average']:.1f} before the run).\n\n{_goal(one)}",
    )


def _goal(one: Row) -> str:
    """Whether one client's call meets `GOAL_MS`, and the two largest parts of what is added."""
    added = one["added_ms"]["p50"]
    goal = f"The goal of at most {GOAL_MS} ms added to one client's call is"
    if added <= GOAL_MS:
        return f"{goal} met."
    (first, most), (second, more), *_ = sorted(one["parts_ms"].items(), key=lambda part: -part[1])
    return (
        f"{goal} missed by {added - GOAL_MS:.2f} ms. Most of the {added:.2f} is {first} ({most:.2f}), then {second} "
        f"({more:.2f})."
    )


def replicas(result: Row) -> int:
    """How many copies of the policy a server ran."""
    return len(result["devices"] or [None])


def gpu_of(result: Row) -> str:
    """The model of a run's GPUs."""
    return result["hardware"]["gpu"].removeprefix("NVIDIA ")


def by_gpus(results: Sequence[Row]) -> list[Row]:
    """Runs in the order of policy, model of the GPUs, and their number."""
    return sorted(results, key=lambda result: (result["policy"], gpu_of(result), replicas(result)))


def server_gpus(results: Sequence[Row]) -> str:
    """Servers on one GPU and on several, compared only where machines have the same model of GPU and equally many
    cores."""
    calls = [(result, row) for result in by_gpus(results) for row in result["rows"]]
    keys = [(result["policy"], gpu_of(result), result["hardware"]["cores"], row["clients"]) for result, row in calls]
    alone = {k: row["per_second"] for k, (result, row) in zip(keys, calls, strict=True) if replicas(result) == 1}
    rows = [
        {
            **row,
            "policy": result["policy"],
            "gpu": gpu_of(result),
            "gpus": replicas(result),
            "gain": row["per_second"] / alone[key] if key in alone else None,
        }
        for key, (result, row) in zip(keys, calls, strict=True)
    ]
    where = machines((f"{r['policy']} on {replicas(r)} {gpu_of(r)}", r) for r in results)
    cores = " and ".join(dict.fromkeys(str(r["hardware"]["cores"]) for r in results))
    return blocks(
        table(
            "policy = {policy} | GPU = {gpu} | GPUs = {gpus} | clients = {clients} | requests/s = {per_second:.0f} | "
            "over one GPU = {gain:.2f}× | round trip = {round_trip_ms[p50]:.2f} | p99 = {round_trip_ms[p99]:.2f} | "
            "policy ms = {infer_ms[p50]:.2f}",
            rows,
            f"Milliseconds; one observation at a time in each process. {where}, {cores} cores that all share.",
        ),
        picture("Requests a second against clients, one GPU and several", GPUS_PICTURE),
    )


def faults(result: Row) -> str:
    """A run with hostile clients and dying replicas."""
    done, ended, trip = result["done"], result["server"], result["round_trip_ms"]
    cells = {
        "requests of well-behaved clients": f"{result['requests']} in {result['seconds']:.0f} s",
        "lost answers": f"**{result['lost']}**",
        "replicas that died, requests computed again": f"{ended['deaths']}, {ended['retried']}",
        "connections with garbage, slow readers": f"{done['hostile']}, {done['slow_readers']}",
        "round trip p50, p99, longest (ms)": f"{trip['p50']:.1f}, {trip['p99']:.1f}, {trip['max']:.0f}",
    }
    if (back := result.get("back_s")) is not None:
        cells["until it served again: median, longest (s)"] = f"{back['median']:.1f}, {back['max']:.1f}"
    policy, devices = result.get("policy", "nothing"), result.get("devices", ["cpu", "cpu"])
    named = f"{policy} on {' and '.join(devices)}"
    what = "A policy that computes nothing, in two processes" if policy == "nothing" else named
    rows = [{"what": name, "value": value} for name, value in cells.items()]
    return table(
        f" = {{what}} | {plural(result['clients'], 'client')} = {{value}}",
        rows,
        f"{what}. {machine(result)}, {result['hardware']['cores']} cores.",
    )
