"""`vla-accel bench-server`: measure the latency that a policy server adds to a call; a table and one JSON line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from vla_accel.cli.options import Checkpoint, Count, OutputFile, Seconds, StepOptions, Within
from vla_accel.errors import ConfigError
from vla_accel.server.connection import websockets_server


@dataclass(frozen=True)
class BenchServer(StepOptions):
    """Time calls over a server on this machine, with one client and many, next to the policy's own time."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name or one on the hub; default: a policy that costs nothing."""
    model: str | None = None
    """Instead: random weights of a model family's published size, such as pi05, the same in every replica."""
    config: str | None = None
    """With a checkpoint or --model: a shipped configuration's name, or a file."""
    clients: Annotated[tuple[int, ...], Within(1)] = (1, 8, 64)
    """Numbers of clients to measure."""
    seconds: Seconds = 10.0
    """Duration for each number of clients."""
    devices: str | None = None
    """Replicas, as `vla-accel serve --devices` takes them."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    max_batch: Count = 1
    """As `vla-accel serve --max-batch`: 1, 2, 4, 8, …"""
    output: OutputFile = None
    """JSON file."""


def main(options: BenchServer, words: list[str]) -> int:
    """Time and report; fails if an answer was lost or crossed."""
    from vla_accel import machine
    from vla_accel.cli.common import finish, print_table, say
    from vla_accel.files import without_folders
    from vla_accel.measure.serving import SCHEMA, costs, measure, served
    from vla_accel.progress import shown

    began = time.monotonic()
    if options.devices is not None and options.device is not None:
        raise ConfigError(f"devices: expected --devices alone, got --device {options.device}, too")
    websockets_server()  # a missing package is an error before a checkpoint is read
    load_policy, observation = _policy(options)
    devices = None if options.devices is None else machine.resolve_devices(options.devices)
    first = machine.resolve_device(devices[0] if devices else options.device or "auto")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "command": " ".join(("vla-accel", "bench-server", *without_folders(words))),
        "policy": options.checkpoint or (f"random {options.model}" if options.model else "nothing"),
        "config": options.config,
        "devices": devices,
        "max_batch": options.max_batch,
        "hardware": machine.hardware(first) | {"cores": os.cpu_count()},
        "software": machine.software(),
        "load_average": round(os.getloadavg()[0], 2),
        "rows": [],
    }
    limits = {"max_clients": max(64, 2 * max(options.clients)), "max_batch": options.max_batch}
    say(f"starting a server of {report['policy']}")
    with served(load_policy, devices, device=options.device, **limits) as address:
        report["costs"] = costs(address, observation)
        for clients in options.clients:
            say(f"clients: {clients}, for {options.seconds:g} s")
            with shown(f"clients: {clients}, warming up") as advance:
                row = measure(address, observation, clients, options.seconds, advance)
            report["rows"].append(row)
            say(f"clients: {clients}, {row['per_second']:.0f} requests/s")
    print_table("Milliseconds of a call over the server", COLUMNS, [_cells(row) for row in report["rows"]])
    report["seconds"] = round(time.monotonic() - began, 1)
    report["passed"] = not any(row["problems"] for row in report["rows"])
    return finish(report, options.output)


COLUMNS = ("clients", "requests/s", "round trip", "p99", "policy", "waits", "added", "p99")


def _cells(row: dict[str, Any]) -> list[str]:
    shown = ("round_trip p50", "round_trip p99", "infer p50", "queue p50", "added p50", "added p99")
    times = [row[f"{name}_ms"][quantile] for name, quantile in map(str.split, shown)]
    return [str(row["clients"]), f"{row['per_second']:.0f}", *(f"{value:.3f}" for value in times)]


def _policy(options: BenchServer) -> tuple[Callable[[str | None], Any], dict[str, Any]]:
    """The policy's loader and an observation of its robot. This builds no engines."""
    from vla_accel.cli.serve import Load
    from vla_accel.config import load_config
    from vla_accel.families.loading import load
    from vla_accel.measure.random_policy import random_observation
    from vla_accel.measure.serving import Nothing

    if options.checkpoint is not None and options.model is not None:
        raise ConfigError(f"model: expected a checkpoint or --model, got {options.checkpoint} and {options.model}")
    if options.model is not None:
        return LoadRandom(options.model, options.config, options.steps), random_observation(options.model)
    if options.checkpoint is None:
        if extra := options.config or options.num_steps or options.schedule:
            names = "config, num-steps, schedule"
            raise ConfigError(f"{names}: expected a checkpoint or --model with them, got {extra} alone")
        return Nothing, Nothing.example()
    loaded = load(options.checkpoint, load_config(options.config), whole=False)
    return Load(options.checkpoint, options.config, options.steps), dict(loaded.processor.example())


@dataclass(frozen=True)
class LoadRandom:
    """Makes a policy with random weights, the same in every process."""

    family: str
    config: str | None
    steps: StepOptions

    def __call__(self, device: str | None) -> Any:
        from vla_accel.cli.serve import use_gpu
        from vla_accel.config import load_config
        from vla_accel.measure.random_policy import random_policy

        use_gpu(device)
        return random_policy(self.family, self.steps.with_steps(load_config(self.config)), device=device)[0]
