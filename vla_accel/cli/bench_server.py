"""`vla-accel bench-server`: what a policy server adds to a call, and where; a table and one JSON line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vla_accel import machine
from vla_accel.cli.asked.servers import BenchServer
from vla_accel.cli.common import finish, print_table, say
from vla_accel.cli.serve import Load, use_gpu
from vla_accel.config import load_config
from vla_accel.errors import ConfigError
from vla_accel.families.loading import load
from vla_accel.files import without_folders
from vla_accel.measure.random_policy import random_observation, random_policy
from vla_accel.measure.serving import SCHEMA, Nothing, costs, measure, served
from vla_accel.progress import shown
from vla_accel.server.connection import websockets_server


def main(chosen: BenchServer, words: list[str]) -> int:
    """Time and report; fails if an answer was lost or crossed."""
    began = time.monotonic()
    if chosen.devices is not None and chosen.device is not None:
        raise ConfigError(f"devices: expected --devices alone, got --device {chosen.device}, too")
    websockets_server()  # or what is missing is said, before a checkpoint is read
    load_policy, observation = _policy(chosen)
    devices = None if chosen.devices is None else machine.resolve_devices(chosen.devices)
    first = machine.resolve_device(devices[0] if devices else chosen.device or "auto")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "command": " ".join(("vla-accel", "bench-server", *without_folders(words))),
        "policy": chosen.checkpoint or (f"random {chosen.model}" if chosen.model else "nothing"),
        "config": chosen.config,
        "devices": devices,
        "max_batch": chosen.max_batch,
        "hardware": machine.hardware(first) | {"cores": os.cpu_count()},
        "software": machine.software(),
        "load_average": round(os.getloadavg()[0], 2),
        "rows": [],
    }
    limits = {"max_clients": max(64, 2 * max(chosen.clients)), "max_batch": chosen.max_batch}
    say(f"starting a server of {report['policy']}")
    with served(load_policy, devices, device=chosen.device, **limits) as address:
        report["costs"] = costs(address, observation)
        for clients in chosen.clients:
            say(f"clients: {clients}, for {chosen.seconds:g} s")
            with shown(f"clients: {clients}, warming up") as advance:
                row = measure(address, observation, clients, chosen.seconds, advance)
            report["rows"].append(row)
            say(f"clients: {clients}, {row['per_second']:.0f} requests/s")
    print_table("Milliseconds of a call over the server", COLUMNS, [_cells(row) for row in report["rows"]])
    report["seconds"] = round(time.monotonic() - began, 1)
    report["passed"] = not any(row["problems"] for row in report["rows"])
    return finish(report, chosen.output)


COLUMNS = ("clients", "requests/s", "round trip", "p99", "policy", "waits", "added", "p99")


def _cells(row: dict[str, Any]) -> list[str]:
    times = [
        row["round_trip_ms"]["p50"],
        row["round_trip_ms"]["p99"],
        row["infer_ms"]["p50"],
        row["queue_ms"]["p50"],
        row["added_ms"]["p50"],
        row["added_ms"]["p99"],
    ]
    return [str(row["clients"]), f"{row['per_second']:.0f}", *(f"{value:.3f}" for value in times)]


def _policy(chosen: BenchServer) -> tuple[Callable[[str | None], Any], dict[str, Any]]:
    """What makes the policy in a process, and what its robot sends; no engine is built for that."""
    if chosen.checkpoint is not None and chosen.model is not None:
        raise ConfigError(f"model: expected a checkpoint or --model, got {chosen.checkpoint} and {chosen.model}")
    if chosen.model is not None:
        return LoadRandom(chosen.model, chosen.config, chosen.num_steps), random_observation(chosen.model)
    if chosen.checkpoint is None:
        if beside := chosen.config or chosen.num_steps:
            raise ConfigError(f"config, num-steps: expected a checkpoint or --model with them, got {beside} alone")
        return Nothing, Nothing.example()
    loaded = load(chosen.checkpoint, load_config(chosen.config), whole=False)
    return Load(chosen.checkpoint, chosen.config, chosen.num_steps), dict(loaded.processor.example())


@dataclass(frozen=True)
class LoadRandom:
    """How a policy with random weights is made, in any process; the same weights in each."""

    family: str
    config: str | None
    num_steps: int | None

    def __call__(self, device: str | None) -> Any:
        use_gpu(device)
        return random_policy(self.family, load_config(self.config), steps=self.num_steps, device=device)[0]
