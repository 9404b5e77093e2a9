"""A Ray cluster: connecting to it, its nodes, and whether they have the code and the packages of this machine.

`--ray` is the only thing that needs the package `ray`, imported when used. Knows nothing of episodes.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from eval.harness import conditions
from eval.harness.benchmark import Benchmark
from eval.harness.rollout import describe
from vla_accel.errors import ConfigError, DependencyError, EngineError

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Node:
    """A living machine of the cluster.

    Attributes:
        id: Ray's.
        name: for people: its address and the beginning of its id.
        cores, gpus: what it lends.
    """

    id: str
    name: str
    cores: int
    gpus: int


def connect(address: str) -> Any:
    """Join a cluster; returns the module `ray`. `address`: auto, local (one that ends with this process) or HOST:PORT.

    Raises:
        ConfigError: no such address, nobody answers there, or another version of Ray or Python does.
        DependencyError: ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise DependencyError(f"--ray needs ray: pip install 'vla_accel[ray]' ({error})") from error
    if address not in ("auto", "local"):
        _knock(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here reports to nobody
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"ray: expected a cluster at {address!r}, got: {what}") from error
    return ray


def nodes(ray: Any) -> list[Node]:
    """The living nodes that lend cores or GPUs."""
    found = []
    for node in ray.nodes():
        lent = {name: int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU")}
        if node["Alive"] and any(lent.values()):
            name = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"
            found.append(Node(node["NodeID"], name, lent["CPU"], lent["GPU"]))
    return found


def check_node(ray: Any, node: Node, benchmark: Benchmark) -> None:
    """Raise `EngineError` unless a node runs the versions of this machine; a node that is gone passes."""
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    ask = ray.remote(num_cpus=0, scheduling_strategy=place, max_retries=0)(conditions.software)
    try:
        theirs = ray.get(ask.remote(benchmark))
    except ray.exceptions.RayTaskError as error:
        cause = describe(error.cause) if error.cause is not None else str(error).strip().splitlines()[-1]
        raise EngineError(f"node {node.name}: expected this program's code there, got {cause}") from error
    except ray.exceptions.RayError:
        return
    ours = conditions.software(benchmark)
    other = [
        f"{name} {theirs.get(name, 'absent')} (here {ours.get(name, 'absent')})"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if other:
        raise EngineError(f"node {node.name}: expected the versions of this machine, got {', '.join(other)}")


def _knock(address: str) -> None:
    """Raise `ConfigError` unless something listens at HOST:PORT: Ray itself would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and "/" not in address):
        raise ConfigError(f"ray: expected auto, local or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray: nobody answers at {address} ({error})") from error
